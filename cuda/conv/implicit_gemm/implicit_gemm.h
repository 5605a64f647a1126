// Convolution as a matrix product whose operands are views of x, w and dy: nothing is copied out
// first. Channels-last, 1-D to 3-D, any groups, strides, paddings (also negative), dilations and
// channel counts. Instances of the product are the groups.
//
//   fprop   y[(n o p q), k]   sum over (t r s c) of x[at(o, t), c] * w[(t r s c), k]
//   dgrad   dx[(n d h w), c]  sum over (t r s k) of dy[...] * w[t r s, c, k], by phases (common/gather.h)
//   wgrad   dw[(t r s c), k]  sum over (n o p q) of x[at(o, t), c] * dy[(n o p q), k]
//
// at(o, t) = o*stride - pad + t*dilation on each axis.
//
// Domain: channels_last; float32 (TF32, or full where full_float32), bfloat16, float16;
//   N*D*H*W, N*O*P*Q, T*R*S*max(C, K)/G, C and K at most 2^31 - 1 - 4096;
//   per axis out*stride + filter*dilation + |pad| and in + stride below 2^30.
// Tensors may have more than 2^31 elements.
//
// Plan: algorithm "implicit_gemm"; tile "128x128", "128x64", "64x64" or "" (chosen from the shape);
// splits 1, except wgrad's in [1, 65535].
// Workspace, bytes: wgrad with splits > 1: splits * T*R*S * C/G * K * 4; otherwise 0.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status ImplicitGemmFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                         const Plan& plan, const void* x, const void* w, const void* bias, void* y,
                         void* z, Workspace workspace);

Status ImplicitGemmDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                         const void* w, void* dx, Workspace workspace);

Status ImplicitGemmWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
