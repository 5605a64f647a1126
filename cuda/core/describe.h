// How a call is named in errors: "conv_fprop[depthwise/rows bfloat16]".
#pragma once

#include <string>

#include "common/plan.h"
#include "common/problem.h"

namespace jaxconv::cuda {

template <typename Problem>
std::string Describe(const char* op, const Problem& p, const Plan& plan) {
  std::string text = std::string(op) + "[" + std::string(plan.kernel) + " " + Name(p.dtype);
  if (!plan.tile.empty()) text += " " + std::string(plan.tile);
  if (plan.splits > 1) text += " splits=" + std::to_string(plan.splits);
  if (plan.chunk > 0) text += " chunk=" + std::to_string(plan.chunk);
  return text + "]";
}

}  // namespace jaxconv::cuda
