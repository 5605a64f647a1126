// Convolution between an image of few channels (thin: at most 8) and one of many (fat), on tensor
// cores: the first layer of a network, the last of a decoder. Formulas in stem.cu.
//
// Supports: channels-last; one group; C at most 8, or K at most 8 with strides of 1; filter[0] == 1
// with stride[0] == 1, pad[0] == 0 and in[0] == out[0] (1-D and 2-D, or D as a batch); strides at
// most 16, (filter - 1) * dilation at most 32; N * D below 2^30 (and CheckIndexable); bfloat16,
// float16, and float32 as TF32. Beyond that
//   thin to fat (fprop where C is few, dgrad where K is): R*S * ceil(few / 4) at most 160
//     (ceil(few / 2) in float32)
//   fat to thin (dgrad where C is few, fprop where K is) and wgrad: the other side's channels a
//     multiple of 8 and its array 16-byte aligned
//   fat to thin: strides times channels at most 64, at most 16 taps an axis, and the filter
//     operand, ceil(many / 64) * offsets * 128 * (16 or 64 columns) bytes, at most 80 KiB
//     (float32: many / 32)
// Taps and channels are padded with zeros, and so are rows of pixels for wgrad: an infinity in the
// thin image can make NaN where the sum is infinite, or would be without it.
//
// dgrad with a `plan.tile` is another kernel: where the filter steps by its own extents and the image is
// all patches, dx is a matrix product of dy and w. The tile is one of cuda/dense/sm90.h, whose
// domain the product must be in. Otherwise `plan.tile` must be "". `plan.chunk` is not read.
//
// Workspace, bytes: fprop: 0; dgrad: 0, with a tile that of x, rounded up to 256, and the product's.
// wgrad: plan.splits * K * C * R*S * 4, plan.splits >= 1: the most persistent blocks (at most two fit
// a multiprocessor) for each tile of dw.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status StemFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace);
Status StemDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, void* dx, Workspace workspace);
Status StemWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
