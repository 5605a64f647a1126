// The custom calls of one platform. handlers.cc is compiled once for each.
#pragma once

#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxconv::JAXCONV_BACKEND {

struct Row {
  std::string target;
  XLA_FFI_Handler* handler;
  // Roles in the order of the wire, "x w b?"; "?" marks those that a call may lack. The workspace, always the last result, is
  // not among them. Null of a target of an older version, which is refused.
  const char* operands = nullptr;
  const char* results = nullptr;
};

const std::vector<Row>& Rows();

}  // namespace jaxconv::JAXCONV_BACKEND
