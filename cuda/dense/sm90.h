// Dense on the sm_90a main loop; the formula is in dense.cu, what each kernel can run and its workspace in domain.h.
//
// Float32: with full_float32 as sums of three bfloat16 terms (gemm/sm90_operands.h), which has
// float32's accuracy, otherwise in TF32.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

// For a plan that DenseRefusal has nothing against, arrays that are 16-byte aligned, and at least one output.
Status Sm90Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
                 Workspace workspace);

// The same for DenseGradient.
Status Sm90DenseGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e,
                         const Plan& plan, const void* dy, const void* w, const void* kept,
                         void* dz, void* sums, Workspace workspace);

// The same for DenseGatedGradient.
Status Sm90DenseGatedGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e,
                              bool first, const Plan& plan, const void* dy, const void* w,
                              const void* kept, void* dz, void* sums, Workspace workspace);

// The same for DenseGated.
Status Sm90DenseGated(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                      const Plan& plan, const void* x, const void* w, const void* bias, void* y,
                      void* z);

}  // namespace jaxconv::cuda
