// dgrad of a 1x1 with the sums of the batch-norm in front:  a matrix product with more to read (gemm/sm90_sums.h).
#include <string>

#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90_sums.h"

namespace jaxconv::cuda {

Status Sm90DgradSums(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                     const void* w, const void* c, const void* signs, const void* x,
                     const void* mean, const void* rstd, void* dz, void* dscale, void* dbias,
                     Workspace workspace) {
  const std::string what = Describe("conv_dgrad_sums", p, plan);
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  const TileSize tile = ReadTile(plan.tile);
  const int64_t rows = p.n * p.in_size();
  Sm90Product g = {};
  g.phases = 1;
  g.phase[0].m = int(rows);
  for (int i = 0; i < 3; ++i) g.phase[0].extent[i] = g.phase[0].taps[i] = 1;
  g.instances = g.splits = 1;
  g.n = int(p.c);
  g.channels = int(p.k);
  g.k_blocks = int(CeilDiv(p.k, in.depth));
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(dy, p.k, 1, rows), {0, 1, tile.rows},
                                      what + " dy", &g.a[0], in.tf32));
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, FilterTensor(p, w, 1), {0, 1, tile.columns, 1},
                                      what + " w", &g.b, in.tf32));
  const auto sums = [&](auto s) {
    s.signs = static_cast<const uint8_t*>(signs);
    s.mean = static_cast<const float*>(mean);
    s.rstd = static_cast<const float*>(rstd);
    s.parts = static_cast<float*>(workspace.data);
    s.dscale = static_cast<float*>(dscale);
    s.dbias = static_cast<float*>(dbias);
    return s;
  };
  if (in.tf32) {
    Sm90FloatSums s = sums(Sm90FloatSums());
    s.x = static_cast<const float*>(x);
    g.out.c = static_cast<const float*>(c);
    g.out.d = static_cast<float*>(dz);
    return LaunchSm90SumsTf32(ctx, g, s, tile, device.multiprocessors, what);
  }
  Sm90Sums s = sums(Sm90Sums());
  const auto boxes = [&](const void* of, const char* name, CUtensorMap* map) {
    return EncodeTiled(p.dtype, MatrixTensor(of, p.c, 1, rows), {64, 1, 64}, what + name, map);
  };
  JAXCONV_RETURN_IF_ERROR(boxes(c, " c", &g.c));
  JAXCONV_RETURN_IF_ERROR(boxes(x, " x", &s.x));
  JAXCONV_RETURN_IF_ERROR(boxes(dz, " dz", &g.d[0]));
  return LaunchSm90Sums(ctx, p.dtype, g, s, tile, device.multiprocessors, what);
}

}  // namespace jaxconv::cuda
