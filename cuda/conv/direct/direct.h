// Direct convolution: the sums of problem.h as they are written, in float32. Every other algorithm is checked against it;
// it is made to be read, not to be fast. domain.h says what it can run: every dtype of the GPU, both memory orders, 1-D
// to 3-D, any groups, stride, dilation and padding. float32 products are never rounded.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

// Also of no input or no filter: y = f(bias).
Status DirectFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace workspace);
Status DirectDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace);
Status DirectWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
