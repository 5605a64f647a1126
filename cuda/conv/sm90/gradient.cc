// dgrad of stride 1 by sm90/product, through the activation of what the convolution reads:  dz = f' * sum over taps and k of
// dy * w, one walk over dy (dgrad.cc's only phase), and the sums of dz's channels (gemm/sm90_gradient.h).
#include <string>

#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90_gradient.h"

namespace jaxconv::cuda {

Status Sm90ProductGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                           Sm90Choice choice, const void* dy, const void* w, const void* kept,
                           void* dz, void* dbias, Workspace workspace, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  const TileSize tile = choice.tile;
  const int64_t rows = p.n * p.in_size();

  Sm90Product g = {};
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
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, FilterTensor(p, w, 1),
                                      {0, 1, FilterBoxRows(tile), 1}, what + " w", &g.b, in.tf32));
  float* parts = static_cast<float*>(workspace.data);
  if (in.tf32) {
    g.out.c = static_cast<const float*>(kept);
    g.out.d = static_cast<float*>(dz);
    return LaunchSm90GradientTf32(ctx, g, tile, device.multiprocessors, parts,
                                  static_cast<float*>(dbias), what);
  }
  const auto encode = [&](const void* of, const char* name, int box_rows, CUtensorMap* map) {
    return EncodeTiled(p.dtype, MatrixTensor(of, p.c, 1, rows), {0, 1, box_rows}, what + name, map);
  };
  JAXCONV_RETURN_IF_ERROR(encode(kept, " kept", tile.rows, &g.c));
  JAXCONV_RETURN_IF_ERROR(encode(dz, " dz", 64, &g.d[0]));
  return LaunchSm90Gradient(ctx, p.dtype, g, tile, device.multiprocessors, parts, dbias, what);
}

}  // namespace jaxconv::cuda
