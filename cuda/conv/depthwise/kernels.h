// The launchers of the depthwise kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"

namespace jaxconv::cuda::conv {

ForwardLauncher DepthwiseFma, DepthwiseMma, DepthwiseConv1d, DepthwiseRows, DepthwiseRowsStrided,
    DepthwiseRowsMma, DepthwiseFew;
WgradLauncher DepthwiseFmaWgrad, DepthwiseMmaWgrad, DepthwiseConv1dWgrad, DepthwiseRowsWgrad,
    DepthwiseRowsStridedWgrad, DepthwiseRowsMmaWgrad;

// dx = dgrad + c, each rounded.
Status DepthwiseRowsMmaDgradAdd(const Context& ctx, const ConvProblem& p, const void* dy,
                                const void* w, const void* c, void* dx, const std::string& what);

// A batch-norm of x by known statistics, and what follows it: (C) each.
struct Normalisation {
  const float *scale, *bias, *mean, *var;
  float epsilon;
  Activation activation;
};

// y, or dw as a WgradLauncher's, of x normalised where it is read.
using NormalisedLauncher = Status(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                                  const void* x, const void* w, void* y, const std::string& what);
using NormalisedWgradLauncher = Status(const Context& ctx, const ConvProblem& p,
                                       const Normalisation& n, int64_t splits, const void* x,
                                       const void* dy, void* dw, float* partials,
                                       const std::string& what);
NormalisedLauncher DepthwiseRowsNormalised, DepthwiseRowsStridedNormalised;
NormalisedWgradLauncher DepthwiseRowsNormalisedWgrad, DepthwiseRowsStridedNormalisedWgrad;

// dw and the batch-norm's dscale and dbias, and dx by these of `count` elements a channel. `partials`: (splits, kSums, C).
Status DepthwiseNormalisedSums(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                               int64_t splits, const void* x, const void* dy, const void* w,
                               void* dw, void* dscale, void* dbias, float* partials,
                               const std::string& what);
Status DepthwiseNormalisedDx(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                             int64_t count, const void* x, const void* dy, const void* w,
                             const void* dscale, const void* dbias, void* dx,
                             const std::string& what);

}  // namespace jaxconv::cuda::conv
