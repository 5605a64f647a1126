// The launchers of common/launch.h for max-pooling.
#include "cuda/pool/pool.h"

#include "common/launch.h"
#include "cuda/core/describe.h"

namespace jaxconv::cuda {

Status MaxPool(const Context& ctx, const PoolProblem& p, const Plan& plan, const void* x, void* y,
               uint8_t* position) {
  const std::string what = Describe("max_pool", p, plan);
  if (p.n * p.c * p.out_size() == 0) return Status::Ok();
  const std::string refusal = PoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::Forward(ctx, p, x, y, position, what);
}

Status MaxPoolBackward(const Context& ctx, const PoolProblem& p, const Plan& plan,
                       const uint8_t* position, const void* dy, void* dx) {
  const std::string what = Describe("max_pool_backward", p, plan);
  if (p.n * p.c * p.in_size() == 0) return Status::Ok();
  const std::string refusal = PoolRefusal(p, plan);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  return pool::Backward(ctx, p, position, dy, dx, what);
}

}  // namespace jaxconv::cuda
