// Grouped convolution with few channels per group, on mma.sync tensor cores.
//
// Supports: bfloat16 and float16, channels-last; C/G and K/G multiples of 4 in [4, 32], C and K
// multiples of 8; filter[0] == 1 with stride[0] == 1, pad[0] == 0 and in[0] == out[0] (1-D and 2-D,
// or D as a batch); stride[1], stride[2] in {1, 2}; filter[1], filter[2] <= 7 and (filter - 1) *
// dilation <= 16; N * D below 2^30; 16-byte aligned arrays. `plan.chunk` is not
// read. Where C/G or K/G is below 8, zeros between groups meet real inputs: an infinity in the
// source makes NaN in the output channels that share 8 with its group's.
//
// `plan.tile` is "" or "rows" (rows.h, rows_float32.h): sm_90, C/G == K/G of 4, 8 or 16,
// 3x3, stride 1 or 2, dilation 1, pads of 0 to 2; also float32, by FMAs, and any number of groups.
//
// Workspace: fprop, dgrad: 0. wgrad: plan.splits > 1 ? plan.splits * K * C/G * R*S * 4 bytes : 0.
//
// wgrad cuts its pixel tiles into `plan.splits` >= 1 contiguous parts, each of `channel tiles`
// blocks of 256 threads, two of which fit an SM: ceil(G / m), m = max(1, 32 / max(C/G, K/G)), is
// their number for C/G == K/G in {4, 8, 16, 32} and filters up to 3x3. A tile is about 256 output pixels.
// "rows" cuts the N*D*H rows of x (stride 2: of dy); a part has ceil(K / 64) blocks, of which two (C/G == 16: one) fit
// (stride 2: one is faster), float32: ceil(K / 32), of which one fits.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status GroupedFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* x, const void* w, const void* bias, void* y, void* z,
                    Workspace workspace);
Status GroupedDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                    const void* w, void* dx, Workspace workspace);
Status GroupedWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                    const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
