// What direct convolution can run: every problem whose coordinates are ints. Host C++17 without CUDA headers
// (cuda/domain.h).
#pragma once

#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::direct {

inline std::string Refusal(const ConvProblem& p) { return RefuseCoordinates(p); }

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  return op == ConvOp::kWgrad ? PartialsBytes(p, plan.splits) : 0;
}

}  // namespace jaxconv::cuda::conv::direct
