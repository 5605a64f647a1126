// The weight gradients of sm90 on the host, but for 16-bit halo's: a ConvProblem into a WgradLaunch or a Tf32Wgrad.
#include <string>
#include <utility>

#include "cuda/conv/sm90/tensors.h"
#include "cuda/conv/sm90/wgrad/wgrad.h"
#include "cuda/conv/sm90/wgrad/wgrad_tf32.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda {

// wgrad_tf32, wgrad_terms and wgrad_terms_swapped, and halo in TF32.
Status Sm90WgradTf32(const Context& ctx, const ConvProblem& p, WgradKernel kernel, const Plan& plan,
                     const void* x, const void* dy, void* dw, Workspace workspace,
                     const std::string& what) {
  Tf32Wgrad g = {};
  g.terms = p.full_float32;
  const bool tf32 = !p.full_float32;
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  for (int i = 0; i < 3; ++i) {
    g.taps[i] = int(p.filter[2 - i]);
    g.tap_step[i] = int(p.dilation[2 - i]);
  }
  g.instances = int(p.groups);
  g.channels = int(p.group_c());
  g.channel_blocks = (g.channels + 63) / 64;
  g.n = int(p.group_k());
  g.pitch = p.k;
  g.parts = int(plan.splits);
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  const int64_t pixels = p.n * p.out_size();
  const int rank = Rank(p);
  TmaWalk read = InputWalk(p), made;
  TileSize tile = ReadTile(plan.tile);
  if (kernel == WgradKernel::kNone) {  // sm90/halo: the line with gaps (sm90/halo/halo.cuh)
    const HaloWalk walk(p, false);
    tile = kTf32HaloTile;
    g.halo = true;
    g.rank_dy = rank;
    for (int i = 0; i < 3; ++i) {
      g.extent[i] = walk.line.extent[i];
      g.first[i] = walk.line.first[i];
      g.step[i] = 1;
    }
    g.row_shift = int(walk.shift[1]);
    g.plane_shift = p.filter[0] > 1 ? int(walk.shift[2]) : 0;
    g.steps = int((walk.line.places + kTf32Step - 1) / kTf32Step);
    read = walk.read;
    made = walk.made;
  } else {
    for (int i = 0; i < 3; ++i) {
      g.extent[i] = read.count[i];
      g.first[i] = read.first[i];
      g.step[i] = read.step[i];
    }
    g.steps = int((pixels + kTf32Step - 1) / kTf32Step);
  }
  if (kernel == WgradKernel::kTermsSwapped) {
    g.swapped = true;
    std::swap(x, dy);
    g.channels = int(p.group_k());
    g.channel_blocks = (g.channels + 63) / 64;
    g.n = int(p.group_c());
  }
  JAXCONV_RETURN_IF_ERROR(PrepareTf32Wgrad(g, tile, what));
  if (g.halo) {
    const TmaTensor out = ImageTensor(dy, rank, p.k, p.out, p.n);
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, out, made, g.slot, what + " dy", &g.dy, tf32));
  } else {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(dy, g.n, p.groups, pixels),
                                        {0, 1, g.slot}, what + " dy", &g.dy, tf32));
  }
  if (Plain(p) && !g.halo) {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, g.channels, p.groups, pixels),
                                        {0, 1, g.slot}, what + " x", &g.x, tf32));
  } else {
    g.rank_x = rank;
    const TmaTensor image = ImageTensor(x, rank, p.c, p.in, p.n);
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, image, read, g.slot, what + " x", &g.x, tf32));
  }
  return LaunchTf32Wgrad(ctx, g, tile, device.multiprocessors, what);
}

// wgrad, wgrad_swapped, wgrad_pair and normalised.
Status Sm90WgradOf(const Context& ctx, const ConvProblem& p, WgradKernel kernel, const Plan& plan,
                   const void* x, const void* dy, void* dw, Workspace workspace,
                   const std::string& what, const Sm90Normalisation* n) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));

  const int terms = p.dtype == DType::kF32 ? 3 : 1;
  if (terms > 1) {
    JAXCONV_RETURN_IF_ERROR(SplitIntoTerms(ctx, CountX(p), CountY(p), what, &x, &dy, &workspace));
  }
  const DType dtype = terms > 1 ? DType::kBF16 : p.dtype;

  WgradLaunch g = {};
  g.images = int(p.n);
  const int64_t pixels = p.n * p.out_size();
  const TmaWalk walk = InputWalk(p);
  for (int i = 0; i < 3; ++i) {
    g.extent[i] = walk.count[i];
    g.first[i] = walk.first[i];
    g.step[i] = walk.step[i];
    g.taps[i] = int(p.filter[2 - i]);
    g.tap_step[i] = int(p.dilation[2 - i]);
  }
  g.rank = Rank(p);
  g.instances = int(p.groups);
  g.channels = int(p.group_c());
  g.channel_blocks = (g.channels + 63) / 64;
  g.n = int(p.group_k());
  g.steps = int((pixels + 63) / 64);
  g.parts = int(plan.splits);
  g.pitch = p.k;
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  if (Plain(p) && p.dtype != DType::kF32) {
    g.rank = 0;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, p.group_c(), p.groups, pixels),
                                        {0, 1, 64}, what + " x", &g.x));
  } else {
    const TmaTensor image = ImageTensor(x, g.rank, p.c, p.in, p.n * terms);
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(dtype, image, walk, 64, what + " x", &g.x));
  }
  const TmaTensor out = {
      dy, 4, {p.group_k(), p.groups, pixels, terms}, {1, p.group_k(), p.k, p.k * pixels}};
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(dtype, out, {0, 1, 64, 1}, what + " dy", &g.dy));
  const TileSize tile = ReadTile(plan.tile);
  if (n != nullptr) {
    return LaunchSm90NormalisedWgrad(ctx, p.dtype, g, *n, tile, device.multiprocessors, what);
  }
  if (terms > 1) {
    return LaunchSm90WgradFloat(ctx, g, kernel, tile, device.multiprocessors, what);
  }
  return p.dtype == DType::kBF16
             ? LaunchSm90WgradBf16(ctx, g, kernel, tile, device.multiprocessors, what)
             : LaunchSm90WgradF16(ctx, g, kernel, tile, device.multiprocessors, what);
}

}  // namespace jaxconv::cuda
