// fprop and wgrad of a 1x1 convolution that normalises x on its way: matrix products (gemm/sm90_normalised.h, wgrad/normalised.cu).
#include <string>

#include "cuda/conv/common/statistics.h"
#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/conv/sm90/wgrad/wgrad.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90_normalised.h"

namespace jaxconv::cuda {
namespace {

Sm90Normalisation ToNormalisation(const ConvProblem& p, const BatchNormProblem& n,
                                  const void* scale, const void* bias, const void* mean,
                                  const void* var) {
  const auto floats = [](const void* a) { return static_cast<const float*>(a); };
  Sm90Normalisation to = {};
  to.scale = floats(scale);
  to.bias = floats(bias);
  to.mean = floats(mean);
  to.var = floats(var);
  to.channels = int(p.c);
  to.epsilon = float(n.epsilon);
  to.activation = n.activation;
  return to;
}

}  // namespace

Status Sm90Normalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const void* x, const void* w, const void* scale,
                      const void* bias, const void* mean, const void* var, void* y, void* y_mean,
                      void* y_var, Workspace workspace) {
  const bool statistics = y_mean != nullptr;
  const std::string what =
      Describe(statistics ? "conv_normalised_statistics" : "conv_normalised", p, plan);
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const TileSize tile = ReadTile(plan.tile);
  const int64_t pixels = p.n * p.out_size();
  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  phase.m = int(pixels);
  for (int i = 0; i < 3; ++i) phase.taps[i] = 1;
  g.phases = g.instances = g.splits = 1;
  g.n = int(p.k);
  g.channels = int(p.c);
  g.k_blocks = int(CeilDiv(g.channels, 64));
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, p.c, 1, pixels), {0, 1, tile.rows},
                                      what + " x", &g.a[0]));
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, FilterTensor(p, w, 1), {0, 1, 64, 1}, what + " w", &g.b));
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, MatrixTensor(y, p.k, 1, pixels), {64, 1, 64}, what + " y", &g.d[0]));
  StatisticsParts parts = {};
  if (statistics) {
    parts.moments = static_cast<float2*>(workspace.data);
    parts.counts =
        reinterpret_cast<float*>(parts.moments + MostGradientParts(p.dtype, pixels) * p.k);
  }
  JAXCONV_RETURN_IF_ERROR(
      LaunchSm90Normalised(ctx, p.dtype, g, ToNormalisation(p, n, scale, bias, mean, var), tile,
                           device.multiprocessors, statistics ? &parts : nullptr, what));
  return statistics ? CombineStatistics(ctx, parts, pixels, p.k, y_mean, y_var, what)
                    : Status::Ok();
}

Status Sm90NormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const void* x, const void* dy, const void* scale,
                           const void* bias, const void* mean, const void* var, void* dw,
                           Workspace workspace) {
  const Sm90Normalisation to = ToNormalisation(p, n, scale, bias, mean, var);
  return Sm90WgradOf(ctx, p, WgradKernel::kNone, plan, x, dy, dw, workspace,
                     Describe("conv_normalised_wgrad", p, plan), &to);
}

}  // namespace jaxconv::cuda
