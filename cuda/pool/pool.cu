// The launchers of common/launch.h for poolings.
#include "cuda/pool/pool.h"

#include "common/launch.h"
#include "cuda/core/describe.h"

namespace jaxconv::cuda {

Status MaxPool(const Context& ctx, const PoolProblem& p, const Plan& plan, const MaxPoolArrays& a,
               Workspace) {
  const std::string what = Describe("max_pool", p, plan);
  if (p.n * p.c * p.out_size() == 0) return Status::Ok();
  const std::string refusal = PoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::Forward(ctx, p, a.x, a.y, a.position.as<uint8_t>(), what);
}

Status MaxPoolBackward(const Context& ctx, const PoolProblem& p, const Plan& plan,
                       const MaxPoolBackwardArrays& a, Workspace) {
  const std::string what = Describe("max_pool_backward", p, plan);
  if (p.n * p.c * p.in_size() == 0) return Status::Ok();
  const std::string refusal = PoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::Backward(ctx, p, a.position.as<uint8_t>(), a.dy, a.dx, what);
}

Status AvgPool(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
               const AvgPoolArrays& a, Workspace) {
  const std::string what = Describe("avg_pool", p, plan);
  if (p.n * p.c * p.out_size() == 0) return Status::Ok();
  const std::string refusal = AvgPoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::Average(ctx, p, a.x, a.y, what);
}

Status AvgPoolBackward(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
                       const AvgPoolBackwardArrays& a, Workspace) {
  const std::string what = Describe("avg_pool_backward", p, plan);
  if (p.n * p.c * p.in_size() == 0) return Status::Ok();
  const std::string refusal = AvgPoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::AverageBackward(ctx, p, a.dy, a.dx, what);
}

}  // namespace jaxconv::cuda
