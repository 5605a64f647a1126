// Convolution as im2col and matrix products (gemm/gemm.h), the textbook's algorithm. A row of the columns is an output
// pixel, its elements the C/G * T*R*S inputs under the filter in the order that w has them, (t, r, s, c) channels last
// and (c, t, r, s) channels first, so that w is a matrix as it lies:
//
//   fprop  y = columns * w, for each group;  dgrad  columns = dy * w', gathered back by tap (col2im, no atomics)
//   wgrad  dw = columns' * dy, summed over images in a fixed order in float32
//
// `plan.chunk` images have their columns held at a time; `plan.splits` (wgrad) partial sums cut a chunk's images. domain.h
// says what it can run and the bytes that this takes.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status Im2colFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace workspace);
Status Im2colDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace);
Status Im2colWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
