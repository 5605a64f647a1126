// Depthwise convolution: every output channel k sees one input channel c = k / (K/C).
//
// Supports: groups == c, k a multiple of c; float32, bfloat16, float16; both memory orders; 1-D to
// 3-D; any stride, dilation, padding; coordinates below 2^30 (CheckIndexable). float32 products are
// never rounded. `plan.chunk` is not read. `plan.tile` is "rows", "bands", "lines", "planes" or ""
// for what follows.
//
// "rows" (rows.h): sm_90, channels-last, c whole 16 bytes, a filter of 3x3 (float32: or 5x5
// or 7x7) of stride 1 or of 3x3 of stride 2 (over H and W; D as a batch: filter[0] == 1, pad[0] == 0,
// in[0] == out[0]), dilation 1, pads in [0, filter), 16-byte aligned arrays; k == c, and for 3x3 of
// stride 1 also k of 2, 4 or 8 times c. With a dilation along H or W the filter is 3x3, 5x5 or 7x7 in
// every dtype, of stride 1, k == c, pads in [0, (filter - 1) * dilation]; along W the dilation is at most
// 18 (5x5, 7x7: 6). "bands" (rows_mma.h): bfloat16 and float16, 5x5 and 7x7 of stride 1 and
// dilation 1, k == c, otherwise as "rows"; fewer than 2^30 rows in all strips, and pixels in the up to 16
// images of one. "planes" (planes.h): 3x3, 5x5 and 7x7 of dilation 1, otherwise as "rows" of
// stride 1 and k == c, of channels-first arrays of any number of channels, rows of up to 224 pixels,
// on any device; wgrad without D. "lines" (conv1d.h): channels-last, k == c whole 16 bytes,
// 2 to 4 taps along one axis, stride 1, dilation below 2^26, any padding, the other axes left alone,
// 16-byte aligned arrays, on any device. Padding is read as zeros: an infinity in w makes NaN beside
// the image's edge, and in wgrad one in x meets the zeros that stand for no dy.
//
// Tensor cores without a tile ("banded", mma.h) take bfloat16 and float16, channels-last, k == c a
// multiple of 8, stride 1, filter[0] == 1 with pad[0] == 0 and in[0] == out[0], dilation[1] == 1 or
// filter[1] == 1, filter[1] <= 41 and (filter[2] - 1) * dilation[2] <= 40, 16-byte aligned arrays.
// The zeros of bands meet real inputs: an infinity in the source makes NaN in outputs of its row up to 15
// (long filters: 47) columns away.
//
// The rest is fast where filter[2] is 3, 5 or 7 with stride[2] == 1 and dilation[2] up to the row's
// length (2^26 at most; wgrad of 8 channels at a time: 1), or 3 with stride 2 and dilation 1, and,
// channels-last, where k == c is a multiple of 16 / itemsize, or (stride[2] == 1, but for wgrad) of 4: then
// an access is that many channels.
//
// Workspace: fprop, dgrad: 0. wgrad: plan.splits > 1 ? plan.splits * K * T*R*S * 4 bytes : 0.
//
// wgrad cuts its work into `plan.splits` >= 1 contiguous parts.
//   Banded: the work is pixel tiles, of about 500 output pixels, and a part has
//     ceil(R / 7) * ceil(K / 16) blocks [(S - 1) * dilation[2] > 8: ceil(K / 8)]
//   of which 3 (R <= 3), 2, or 1 (the long filter rows) fit an SM: that many an SM keep it busy,
//   more only lengthen the second stage. A part should be one tile at least.
//   "rows": the work is the N*O*H rows of x (stride 2: rows of dy), in strips of several images or
//     columns; a part has ceil(K / 128) blocks [3x3: ceil(K / 256); dilated: ceil(K / 64), and 3x3 of
//     dilation[2] <= 4 ceil(K / 128)], of which one fits an SM.
//   "bands": the same work, in strips of 16 runs of 8 columns; a part has ceil(K / 32) blocks, of which
//     one fits an SM.
//   "lines": the work is the N*O*P*Q pixels; a part has ceil(K / 32 vectors) blocks, of which two fit
//     an SM.
//   "planes": the work is the N images; a part has ceil(K / floor(32 / ceil(Q / 7))) warps, of which
//     12 (7x7), 16 or 20 (3x3) fit an SM.
//   Otherwise: the work is the N*O*P*ceil(Q/4) runs of four output pixels. With V = 16 / itemsize
//   where the 16-byte condition holds, else 1, a part has
//   channel tiles * tap-row tiles blocks of 256 threads: channels-last ceil(ceil(K/V) / 16) [V ==
//   4: / 32; V == 1: / 64], channels-first K; times ceil(T*R / 4) (ceil(T*R*S / 4) where the
//   generic kernel runs);
//   about four blocks an SM in all keep a device busy, and a part should keep each of its threads
//   in work: at least 16 runs for each of the 64 / (channel tile) threads that share a tap row.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status DepthwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* x, const void* w, const void* bias, void* y, void* z,
                      Workspace workspace);
Status DepthwiseDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                      const void* w, void* dx, Workspace workspace);
Status DepthwiseWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
