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
// A CTA makes a tile of rows x columns of the product, every group and part of the reduction an instance of its own.
// domain.h says what it can run; jaxconv/_plan/implicit_gemm.py which tile it gets.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status ImplicitGemmFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                         const Plan& plan, const void* x, const void* w, const void* bias,
                         const void* residual, void* y, void* z, Workspace workspace);

Status ImplicitGemmDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                         const void* w, void* dx, Workspace workspace);

Status ImplicitGemmWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
