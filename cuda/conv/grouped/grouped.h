// Grouped convolution with few channels a group, channels last. domain.h says what its kernels can run,
// jaxconv/_plan/grouped.py which is taken and into how many parts a weight gradient's reduction is cut.
//
// Where C/G or K/G is below 8, zeros between groups meet real inputs in mma and rows: an infinity in the source makes NaN
// in the output channels that share 8 with its group's. float32 products are never rounded.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status GroupedFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* x, const void* w, const void* bias, void* y, void* z,
                    Workspace workspace);
// fprop, and the mean and biased variance of each of y's channels, (K), float32. n * out_size() must not be 0.
Status GroupedStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* w, void* y, void* mean, void* var, Workspace workspace);
Status GroupedDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                    const void* w, void* dx, Workspace workspace);
Status GroupedWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                    const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
