// Depthwise convolution on the tensor cores by banded matrices, rows streamed through shared memory
// (sm_90): plan.tile "bands". depthwise.h says when; CheckDepthwise has passed before these are
// called.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// Ok, or the sentence that says why not.
Status CheckDepthwiseBands(const ConvProblem& p, bool aligned, const std::string& what);

// dst = y from src = x, or (dgrad) dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop.
Status DepthwiseBands(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                      const void* src, const void* w, const void* bias, void* dst, void* z,
                      const std::string& what);

// dw, or with several splits its partial sums (splits, R*S, K) in float32.
Status DepthwiseBandsWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                           const void* dy, void* dw, float* partials, const std::string& what);

}  // namespace jaxconv::cuda::conv
