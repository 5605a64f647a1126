// Convolutions of few channels on both sides, channels last. domain.h says what the kernels can run,
// jaxconv/_plan/narrow.py into how many parts a weight gradient's reduction is cut.
//
// float32 is rounded to TF32. `residual` (like y) and `c` (like dx) may be null.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status NarrowFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace workspace);
Status NarrowDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, const void* c, void* dx, Workspace workspace);
// ConvGradient; `c` may be null.
Status NarrowGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* dy, const void* w, const void* kept, const void* c, void* dz,
                      void* dbias, Workspace workspace);
Status NarrowWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
