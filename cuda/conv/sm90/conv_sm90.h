// Convolution on the sm_90a main loop: the copy engine walks x and dy in place (im2col mode), the
// tensor cores read both operands as they lie. Formulas as in implicit_gemm/implicit_gemm.h.
//
// Float32: with full_float32 as sums of three bfloat16 terms (gemm/sm90_operands.h), which has
// float32's accuracy; without it in TF32.
//
// Domain: compute capability 9.0; channels_last; float32, bfloat16, float16; x, w, y, dy, dx, dw, z
// and the workspace 16-byte aligned;
//   C/G and K/G multiples of 8; with more than one group also C/G (fprop, wgrad) or K/G (dgrad) a
//   multiple of 64, and both for a strided dgrad;
//   N*D*H*W, N*O*P*Q, T*R*S*C, T*R*S*K, in float32 thrice that, at most 2^31 - 4097; coordinates
//   below 2^30;
//   what a descriptor can say, which depends on the number of axes from the first one that is not
//   trivial (in = out = filter = 1, pad = 0) on, 1, 2 or 3. On each of these axes
//     fprop, wgrad: stride in [1, 8]; -pad and (out - 1)*stride - pad + 1 - in in [-e, e),
//     dgrad: the same of the stride-1 walks over dy of its phases (common/gather.h), which
//       |pad| + (filter - 1)*dilation < e implies for filters that fit their padded images,
//     (filter - 1)*dilation < f;  e = 32768, 128, 16;  f = 65535, 255, 31;
//   dgrad: the product of the strides at most 8. A 1x1 of stride 1 needs none of this.
// Outside, a launcher returns a Status.
//
// Padding is read as zeros: an infinity in w or dy makes NaN where a tap reads it. In wgrad's tile
// "halo" dy is zero between rows and images, where an infinity in x makes NaN. As terms, a product
// beyond float32's range may be NaN instead of infinite.
//
// Plan: algorithm "wgmma"; tile "128x256", "256x128", "128x128" or "256x64"; in TF32 fprop and dgrad
// have no "256x128", wgrad no "128x128", in 16 bit wgrad neither; where float32 is terms "128x128" or
// "128x64", and wgrad also "256x128", "256x64" and "256x64s" (1x1, rows are channels of dy), which split
// x and dy on their way and not in memory before (sm90/wgrad/wgrad_tf32.cu). On part of
// the domain (jaxconv/_plan.py, wgmma_tile_refusal) also, in TF32 "halo" (sm90/halo/halo_tf32.cu,
// sm90/wgrad/wgrad_tf32.cu) and in 16 bit "halo" (sm90/halo/halo.cuh), "128x128h" (sm90/halo_stream/halo_stream.cuh; not wgrad),
// "planes" (sm90/halo_3d/halo_3d.cuh), "64x256" (wgrad; for few channels), "128x64r" and "64x256r"
// (gemm/sm90_resident.cuh; not wgrad), "256x256p", "256x128p", "128x256p", "256x64p" and "64x256p"
// (wgrad; pairs of CTAs, which splits then counts). splits 1, except wgrad's: the number of CTAs over which the
// reduction of all tiles together is spread evenly (a multiple of the number of tiles keeps them at
// the same pixels at the same time, which matters where x and dy are larger than L2), or 1 for whole
// tiles; in the 16-bit tiles "halo" and "planes" the CTAs that share the sums of 64 of K/G, or of 32 of
// C and 32 of K.
// Workspace, bytes: float32 as terms: 6 an element of w, wgrad in "128x128" and "128x64" of x and dy;
// fprop in TF32: 4 an element of w; each operand's rounded up to 256. And wgrad with splits > 1: 2 *
// splits * tile rows * tile columns * 4 (TF32's halo tile is 576 x 64); in the 16-bit tiles "halo" and
// "planes" splits * 147,456 for every 64 of K/G, or splits * 122,880 for every 32 of C and 32 of K.
// Otherwise 0.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status Sm90Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace);
// fprop, and the mean and biased variance of each of y's channels, (K), float32. n * out_size() must
// not be 0. Workspace, bytes: min(2 * ceil(N*O*P*Q / 128), 512) *
// (8 K + 4). At most as many columns of tiles, ceil(K/G / tile columns) * G, as multiprocessors.
Status Sm90Statistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, void* y, void* mean, void* var, Workspace workspace);
// c is null, or like dx and added to it: 16 bit, and the tiles "128x256", "256x128", "128x128",
// "256x64", "128x320", "128x64r" and "64x256r"; where a stride is above 1, c must be dx itself.
Status Sm90Dgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace);
Status Sm90Wgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
