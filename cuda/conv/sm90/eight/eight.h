// Convolutions of 8-bit numbers on the sm_90a main loop: x in place, as columns of pixels that TMA gathers, 128 channels at a
// tap after the other, and filters (K, T R S, C/G). domain.h says what it can run.
#pragma once

#include <string>

#include "common/launch.h"
#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status Sm90EightFprop(const Context& ctx, const ScaledConvProblem& p, const Plan& plan,
                      const ConvScaledArrays& a, int multiprocessors, const std::string& what);

}  // namespace jaxconv::cuda
