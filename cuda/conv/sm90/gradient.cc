// dgrads of stride 1 by sm90/product that go back through what the convolution reads, one walk over dy (dgrad.cc's only phase):
//
//   through an activation:       dz = f'(kept) * sum over taps and k of dy * w, and the sums of dz's channels
//                                (gemm/sm90_gradient.h)
//   and the batch-norm in front: dz = f'(z) * the same, z of x, and the sums of dz and of dz * xhat
//                                (gemm/sm90_norm_gradient.h)
#include <string>

#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90_gradient.h"
#include "cuda/gemm/sm90_norm_gradient.h"

namespace jaxconv::cuda {
namespace {

// What a dgrad has of both: dy by w. `kept`, like dz: what the epilogue reads beside. resident: the filter stays in shared
// memory.
Status MakeProduct(const ConvProblem& p, const Epilogue& e, TileSize tile, bool resident,
                   const void* dy, const void* w, const void* kept, void* dz,
                   const std::string& what, Sm90Product* product) {
  Sm90Product& g = *product;
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  const int64_t rows = p.n * p.in_size();
  Sm90Phase& phase = g.phase[0];
  g.phases = g.instances = g.splits = 1;
  g.n = int(p.c);
  g.channels = int(p.k);
  g.k_blocks = int(CeilDiv(p.k, in.depth));
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  // Axes W, H, D.
  TmaWalk walk;
  int filter_step = 1;
  phase.m = int(rows);
  for (int i = 0; i < 3; ++i) {
    const DgradWalk part = MakeDgradWalk(MakeDgradAxis(p, 2 - i), 0);
    phase.extent[i] = walk.count[i] = part.rows;
    phase.first[i] = walk.first[i] = part.first;
    phase.step[i] = walk.step[i] = 1;
    phase.taps[i] = part.taps;
    phase.tap_step[i] = part.step;
    phase.filter_first += part.tap * filter_step;
    phase.filter_step[i] = part.tap_step * filter_step;
    filter_step *= int(p.filter[2 - i]);
  }
  if (Plain(p)) {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(dy, p.k, 1, rows), {0, 1, tile.rows},
                                        what + " dy", &g.a[0], in.tf32));
  } else {
    g.rank_a = Rank(p);
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, ImageTensor(dy, g.rank_a, p.k, p.out, p.n), walk,
                                         tile.rows, what + " dy", &g.a[0], in.tf32));
  }
  const int box = resident ? tile.columns : FilterBoxRows(tile);
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, FilterTensor(p, w, 1), {0, 1, box, 1}, what + " w", &g.b, in.tf32));
  if (in.tf32) {
    g.out.c = static_cast<const float*>(kept);
    g.out.d = static_cast<float*>(dz);
    return Status::Ok();
  }
  const auto encode = [&](const void* of, const char* name, int box_rows, CUtensorMap* map) {
    return EncodeTiled(p.dtype, MatrixTensor(of, p.c, 1, rows), {0, 1, box_rows}, what + name, map);
  };
  JAXCONV_RETURN_IF_ERROR(encode(kept, " kept", tile.rows, &g.c));
  return encode(dz, " dz", 64, &g.d[0]);
}

}  // namespace

Status Sm90ProductGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                           Sm90Choice choice, const void* dy, const void* w, const void* kept,
                           void* dz, void* dbias, Workspace workspace, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  Sm90Product g = {};
  JAXCONV_RETURN_IF_ERROR(MakeProduct(p, e, choice.tile, false, dy, w, kept, dz, what, &g));
  float* parts = static_cast<float*>(workspace.data);
  if (p.dtype == DType::kF32) {
    return LaunchSm90GradientTf32(ctx, g, choice.tile, device.multiprocessors, parts,
                                  static_cast<float*>(dbias), what);
  }
  return LaunchSm90Gradient(ctx, p.dtype, g, choice.tile, device.multiprocessors, parts, dbias,
                            what);
}

Status Sm90NormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                        const Plan& plan, const ConvNormGradientArrays& a, Workspace workspace) {
  const std::string what = Describe("conv_norm_gradient", p, plan);
  const auto floats = [](const void* from) { return static_cast<const float*>(from); };
  const auto out = [](void* to) { return static_cast<float*>(to); };
  if (MemberOf(plan.kernel) == "halo") {
    const HaloNorm norm = {floats(a.scale), floats(a.bias), floats(a.mean),
                           floats(a.rstd),  out(a.dscale),  out(a.dbias)};
    return HaloNormGradient(ctx, p, e, a.dy, a.w, a.x, norm, a.dz, workspace, what);
  }
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const bool resident = MemberOf(plan.kernel) == "sums";
  const TileSize tile = ReadTile(plan.tile);
  Sm90Product g = {};
  JAXCONV_RETURN_IF_ERROR(MakeProduct(p, e, tile, resident, a.dy, a.w, a.x, a.dz, what, &g));
  const Sm90NormGradientArgs to = {floats(a.scale),
                                   floats(a.bias),
                                   floats(a.mean),
                                   floats(a.rstd),
                                   static_cast<float*>(workspace.data),
                                   out(a.dscale),
                                   out(a.dbias)};
  return p.dtype == DType::kF32
             ? LaunchSm90NormGradientTf32(ctx, g, to, tile, device.multiprocessors, what)
             : LaunchSm90NormGradient(ctx, p.dtype, g, to, tile, resident, device.multiprocessors,
                                      what);
}

}  // namespace jaxconv::cuda
