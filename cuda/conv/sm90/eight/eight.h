// Convolutions of 8-bit numbers on the sm_90a main loop: x in place, as columns of pixels that TMA gathers, 128 channels at a
// tap after the other, or once for all taps (eight_halo), and filters (K, T R S, C/G). domain.h says what they can run.
#pragma once

#include <string>

#include "common/launch.h"
#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/gemm/sm90_eight.h"

namespace jaxconv::cuda {

// The kernel that the plan names.
Status Sm90EightFprop(const Context& ctx, const ScaledConvProblem& p, const Plan& plan,
                      const ConvScaledArrays& a, int multiprocessors, const std::string& what);

Status EightHaloFprop(const Context& ctx, const ScaledConvProblem& p, const ConvScaledArrays& a,
                      int multiprocessors, const std::string& what);

// What follows the sums, in memory.
Sm90EightEpilogue EightEpilogue(const ScaledConvProblem& p, const ConvScaledArrays& a);

}  // namespace jaxconv::cuda
