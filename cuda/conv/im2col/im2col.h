// Convolution as im2col + pack + matrix product. The reduction axis is (ci, t, r, s), s fastest, in
// both orders.
//
//   channels-first, per image and group:  columns (C/G*T*R*S, O*P*Q);  y = W columns
//   channels-last, per group:             columns (images*O*P*Q, C/G*T*R*S);  y = columns W', W'
//   packed (C/G*T*R*S, K)
//
// dgrad: the columns of dx = the product of dy and W, in float32, gathered back by tap (col2im, no
// atomics). wgrad: dW = the product of columns and dy, summed over images in a fixed order in
// float32.
//
// Supports: float32, bfloat16, float16; both memory orders; 1-D to 3-D; any groups, stride,
// dilation, padding; coordinates below 2^30 (CheckIndexable). What the matrix product asks of its
// operands is Gemm()'s to say.
//
// Plan: `chunk` >= 1 images have their columns held at a time (more than N count as N). `splits` >=
// 1, wgrad: the partial sums that one chunk is cut into, at most the chunk's images: parallelism
// where dW has few tiles.
//
// Workspace bytes, with A(b) = b rounded up to 256, chunk = min(plan.chunk, N), item = size of the
// dtype, W = K * C/G * T*R*S and columns = chunk * C * T*R*S * O*P*Q:
//   fprop: A(columns * item) + (channels_last ? A(W * item) : 0)
//   dgrad: A(columns * 4)    + (channels_last ? A(W * item) : 0)
//   wgrad: A(columns * item) + min(splits, chunk) * W * 4
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status Im2colFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, void* y, void* z,
                   Workspace workspace);
Status Im2colDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace);
Status Im2colWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
