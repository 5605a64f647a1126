// The launchers of the stem kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv {

// `op` is fprop, dst = y from src = x, or dgrad, dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop.
using StemForward = Status(const Context& ctx, ConvOp op, const ConvProblem& p, const Epilogue& e,
                           const void* src, const void* w, const void* bias, void* dst, void* z,
                           const std::string& what);
StemForward StemMma, StemNarrowIn, StemNarrowOut;

// y = the max-pooling `q` of f(fprop + bias), x and y of `types`.
Status StemConvPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                      const PoolProblem& q, const PooledTypes& types, const void* x, const void* w,
                      const void* bias, void* y, const std::string& what);

// dw; `partials` holds `splits` arrays like it in float32.
using StemWgradOf = Status(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                           const void* dy, void* dw, float* partials, const std::string& what);
StemWgradOf StemMmaWgrad, StemNarrowInWgrad;

// fprop and wgrad over several planes; `workspace` as the domain says.
Status StemPlanesFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                       const void* w, const void* bias, void* y, void* z, Workspace workspace,
                       const std::string& what);
Status StemPlanesWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                       const void* dy, void* dw, Workspace workspace, const std::string& what);

// plan.tile is the dense product's.
Status StemPatchesDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                        const void* w, void* dx, Workspace workspace, const std::string& what);

}  // namespace jaxconv::cuda::conv
