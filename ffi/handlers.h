// The custom-call targets of one platform. handlers.cc is compiled once for each.
#pragma once

#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxconv::JAXCONV_BACKEND {

// (target name, handler)
std::vector<std::pair<const char*, XLA_FFI_Handler*>> Handlers();

}  // namespace jaxconv::JAXCONV_BACKEND
