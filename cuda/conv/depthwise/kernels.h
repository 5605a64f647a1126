// The launchers of the depthwise kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// dst = y from src = x, or (dgrad) dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop. `what` names the call.
using DepthwiseForward = Status(const Context& ctx, const ConvProblem& p, bool dgrad,
                                const Epilogue& e, const void* src, const void* w, const void* bias,
                                void* dst, void* z, const std::string& what);
DepthwiseForward DepthwiseFma, DepthwiseMma, DepthwiseConv1d, DepthwiseRows, DepthwiseRowsStrided,
    DepthwiseRowsMma;

// dw, or with several splits its partial sums (splits, R*S, K) in float32; DepthwiseFmaWgrad's in dw's order.
using DepthwiseWgradOf = Status(const Context& ctx, const ConvProblem& p, int64_t splits,
                                const void* x, const void* dy, void* dw, float* partials,
                                const std::string& what);
DepthwiseWgradOf DepthwiseFmaWgrad, DepthwiseMmaWgrad, DepthwiseConv1dWgrad, DepthwiseRowsWgrad,
    DepthwiseRowsStridedWgrad, DepthwiseRowsMmaWgrad;

}  // namespace jaxconv::cuda::conv
