// The launcher of common/launch.h for integer convolutions: y = conv(x, w), wrapping around (problem.h), by CUDA cores.
#include "cuda/conv/integer/integer.h"

#include <string>

#include "common/launch.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {

Status ConvInteger(const Context& ctx, const IntegerConvProblem& p, const Plan& plan,
                   const ConvIntegerArrays& a, Workspace) {
  const std::string what = "conv_integer[" + std::string(plan.kernel) + " " + Name(p.x_type) + " " +
                           Name(p.w_type) + " to " + Name(p.y_type) + "]";
  const std::string refusal = IntegerRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return plan.kernel == "integer/tile" ? conv::integer::Tile(ctx, p, a.x, a.w, a.y, what)
                                       : conv::integer::OneOutput(ctx, p, a.x, a.w, a.y, what);
}

}  // namespace jaxconv::cuda
