// cuda/domain.h for poolings.
#include "cuda/pool/domain.h"

namespace jaxconv::cuda {

std::string PoolRefusal(const PoolProblem& p, const Plan& plan) { return pool::Refusal(p, plan); }

std::string AvgPoolRefusal(const PoolProblem& p, const Plan& plan) {
  return pool::RefusalOfAverages(p, plan);
}

int64_t PoolVector(const PoolProblem& p) { return pool::Vector(p); }

}  // namespace jaxconv::cuda
