// Depthwise convolution: every output channel k sees one input channel c = k / (K/C). domain.h says what its kernels can
// run, docs/kernels/depthwise.md how fast each is; jaxconv/_plan/depthwise.py which is taken and into how many parts a
// weight gradient's reduction is cut.
//
// Padding is read as zeros: an infinity in w makes NaN beside the image's edge, and in wgrad one in x meets the zeros that
// stand for no dy. The zeros of bands (mma, rows_mma) meet real inputs: an infinity in the source makes NaN in outputs of
// its row up to 15 (long filters: 47) columns away. float32 products are never rounded.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status DepthwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* x, const void* w, const void* bias, void* y, void* z,
                      Workspace workspace);
// dx, or with c dx + c, each rounded.
Status DepthwiseDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                      const void* w, const void* c, void* dx, Workspace workspace);
Status DepthwiseWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* dy, void* dw, Workspace workspace);

// y, and dw, of x normalised where it is read: batchnorm_infer's a in the place of x. (C) each. NormalisedRefusal says what can.
Status DepthwiseNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const void* x, const void* w, const void* scale,
                           const void* bias, const void* mean, const void* var, void* y);
Status DepthwiseNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                                const Plan& plan, const void* x, const void* dy, const void* scale,
                                const void* bias, const void* mean, const void* var, void* dw,
                                Workspace workspace);
// Their backward pass: see common/launch.h.
Status DepthwiseNormalisedGradient(const Context& ctx, const ConvProblem& p,
                                   const BatchNormProblem& n, const Plan& plan, const void* x,
                                   const void* dy, const void* w, const void* scale,
                                   const void* bias, const void* mean, const void* var, void* dw,
                                   void* dscale, void* dbias, Workspace workspace);
Status DepthwiseNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                             const Plan& plan, const void* x, const void* dy, const void* w,
                             const void* scale, const void* bias, const void* mean, const void* var,
                             const void* dscale, const void* dbias, int64_t count, void* dx);

}  // namespace jaxconv::cuda
