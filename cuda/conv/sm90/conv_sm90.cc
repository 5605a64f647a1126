// The sm90 family's face: the plan's kernel; and fprop by the products, which read x in place, as columns of pixels that TMA
// gathers (im2col mode), a block of 64 channels at a tap after the other.
#include "cuda/conv/sm90/conv_sm90.h"

#include <string>
#include <string_view>

#include "cuda/conv/common/statistics.h"
#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/conv/sm90/halo_3d/halo_3d.h"
#include "cuda/conv/sm90/halo_stream/halo_stream.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/conv/sm90/wgrad/wgrad.h"
#include "cuda/conv/sm90/wgrad/wgrad_tf32.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda {
namespace {

// A second convolution of one tap, whose sums are added.
struct Shortcut {
  const ConvProblem& p;
  const void *x, *w;
};

// Of a product in 16 bit, with boxes of the tile's rows of pixels.
Status EncodeShortcut(const Shortcut& s, int tile_m, int depth, const std::string& what,
                      Sm90Product* g) {
  const ConvProblem& q = s.p;
  const TmaWalk walk = InputWalk(q);
  for (int i = 0; i < 3; ++i) g->phase[1].step[i] = walk.step[i];
  g->shortcut_steps = int(CeilDiv(q.c, depth));
  g->shortcut_rank = Plain(q) ? 0 : Rank(q);
  if (Plain(q)) {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(q.dtype, MatrixTensor(s.x, q.c, 1, q.n * q.out_size()),
                                        {0, 1, tile_m}, what + " x2", &g->a[1]));
  } else {
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(q.dtype, ImageTensor(s.x, Rank(q), q.c, q.in, q.n), walk,
                                         tile_m, what + " x2", &g->a[1]));
  }
  return EncodeTiled(q.dtype, FilterTensor(q, s.w, 1), {0, 1, depth, 1}, what + " w2", &g->z);
}

// y = f(z), z = sum over taps and c of x * w + bias + residual, which may be null. `statistics`: null unless they are
// wanted, which results without an activation have in 16 bit and TF32. `shortcut`: null, or in 16 bit, without z.
Status Product(const Context& ctx, const ConvProblem& p, const Epilogue& e, Sm90Choice choice,
               int splits, const void* x, const void* w, const void* bias, const void* residual,
               void* y, void* z, Workspace workspace, StatisticsParts* statistics,
               const Shortcut* shortcut, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  const bool cluster = choice.kernel == Sm90Kernel::kCluster;
  const bool transposed = in.tf32 && !cluster;  // the filter, in the workspace
  if (in.terms > 1) {
    JAXCONV_RETURN_IF_ERROR(SplitIntoTerms(ctx, 0, CountW(p), what, &x, &w, &workspace));
  } else if (transposed) {
    JAXCONV_RETURN_IF_ERROR(
        TransposeFloats(ctx, p.filter_size(), p.group_c(), p.k, what, &w, &workspace));
  }

  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  const int64_t pixels = p.n * p.out_size();
  g.term_taps = int(p.filter_size());
  SetFloatOutput(y, z, p.k, p.group_k(), p.out, {1, 1, 1}, &g.out);
  g.out.c = static_cast<const float*>(residual);
  const TmaWalk walk = InputWalk(p);
  phase.m = int(pixels);
  int filter_step = 1;
  for (int i = 0; i < 3; ++i) {
    phase.extent[i] = walk.count[i];
    phase.first[i] = walk.first[i];
    phase.step[i] = walk.step[i];
    phase.taps[i] = int(p.filter[2 - i]);
    phase.tap_step[i] = int(p.dilation[2 - i]);
    phase.filter_step[i] = filter_step;
    filter_step *= phase.taps[i];
  }
  g.phases = 1;
  g.instances = int(p.groups);
  g.n = int(p.group_k());
  g.channels = int(p.group_c());
  g.k_blocks = int(CeilDiv(g.channels, in.depth));
  g.splits = splits;
  g.plain_d = y;
  g.plain_z = z;
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  g.epilogue.save_z = e.save_preactivation;
  if (e.bias) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kColumn;
    g.epilogue.stride_bias = p.group_k();
  }
  if (cluster) {
    g.row_d = p.k;
    g.instance_d = g.n;
    g.box_rows = ClusterBoxRows(choice.tile, pixels);
    if (residual != nullptr) {  // read as it lies
      g.epilogue.c = residual;
      g.epilogue.stride_c = g.n;
      g.epilogue.beta = 1.f;
    }
  }
  const int tile_m = cluster ? g.box_rows : choice.tile.rows;
  if (Plain(p)) {
    // A 1x1 convolution is a matrix product.
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, p.group_c(), p.groups, pixels),
                                        {0, 1, tile_m}, what + " x", &g.a[0], in.tf32));
  } else {
    g.rank_a = Rank(p);
    const TmaTensor image = ImageTensor(x, g.rank_a, p.c, p.in, p.n);
    JAXCONV_RETURN_IF_ERROR(
        EncodeIm2col(p.dtype, image, walk, tile_m, what + " x", &g.a[0], in.tf32));
  }
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(
      in.element, transposed ? TransposedFilterTensor(p, w) : FilterTensor(p, w, in.terms),
      {0, 1, transposed ? FilterBoxRows(choice.tile) : in.depth, 1}, what + " w", &g.b, in.tf32));
  if (shortcut != nullptr)
    JAXCONV_RETURN_IF_ERROR(EncodeShortcut(*shortcut, tile_m, in.depth, what, &g));
  if (statistics != nullptr && in.tf32)
    return LaunchSm90StatisticsTf32(ctx, g, choice.tile, device.multiprocessors, statistics, what);
  if (p.dtype == DType::kF32)
    return LaunchProduct(ctx, in, transposed, g, choice, device.multiprocessors, what);
  const TmaTensor out = MatrixTensor(y, p.group_k(), p.groups, pixels);
  if (residual != nullptr) {
    g.added = Sm90Added::kMatrix;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype,
                                        MatrixTensor(residual, p.group_k(), p.groups, pixels),
                                        {64, 1, tile_m}, what + " residual", &g.c));
  }
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, out, {64, 1, 64}, what + " y", &g.d[0]));
  if (e.save_preactivation) {
    TmaTensor saved = out;
    saved.base = z;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, saved, {64, 1, 64}, what + " z", &g.z));
  }
  if (statistics == nullptr)
    return LaunchProduct(ctx, in, false, g, choice, device.multiprocessors, what);
  return LaunchSm90Statistics(ctx, p.dtype, g, choice.tile, device.multiprocessors, statistics,
                              what);
}

}  // namespace

Status Sm90Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, const void* residual, void* y,
                 void* z, Workspace workspace) {
  const std::string what = Describe("conv_fprop", p, plan);
  const std::string_view member = MemberOf(plan.kernel);
  if (member == "halo") return HaloFprop(ctx, p, e, x, w, bias, residual, y, z, workspace, what);
  if (member == "halo_stream") return HaloStreamFprop(ctx, p, e, x, w, bias, y, z, what);
  if (member == "halo_3d") return Halo3dFprop(ctx, p, e, x, w, bias, y, z, what);
  return Product(ctx, p, e, ReadSm90Choice(member, plan.tile), plan.splits, x, w, bias, residual, y,
                 z, workspace, nullptr, nullptr, what);
}

Status Sm90Shortcut(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                    const ConvProblem& q, const Plan& plan, const ConvShortcutArrays& a,
                    Workspace workspace) {
  const Shortcut shortcut = {q, a.x2, a.w2};
  return Product(ctx, p, e, ReadSm90Choice(MemberOf(plan.kernel), plan.tile), 1, a.x, a.w, a.b,
                 nullptr, a.y, nullptr, workspace, nullptr, &shortcut,
                 Describe("conv_shortcut", p, plan));
}

Status Sm90Statistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, const void* bias, const void* residual, void* y, void* mean,
                      void* var, Workspace workspace) {
  const std::string what = Describe("conv_statistics", p, plan);
  const int64_t rows = p.n * p.out_size(), most = MostGradientParts(p.dtype, rows);
  // The transposed filter lies in front of the parts.
  const int64_t filter = p.dtype == DType::kF32 ? Align256(4 * CountW(p)) : 0;
  StatisticsParts parts = {};
  parts.moments = reinterpret_cast<float2*>(static_cast<char*>(workspace.data) + filter);
  parts.counts = reinterpret_cast<float*>(parts.moments + most * p.k);
  const Epilogue e = {bias != nullptr, Activation::kNone, 0.0, false};
  const Sm90Choice choice = {Sm90Kernel::kProduct, ReadTile(plan.tile)};
  JAXCONV_RETURN_IF_ERROR(Product(ctx, p, e, choice, 1, x, w, bias, residual, y, nullptr, workspace,
                                  &parts, nullptr, what));
  return CombineStatistics(ctx, parts, rows, p.k, mean, var, what);
}

Status Sm90Dgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace) {
  const std::string what = Describe("conv_dgrad", p, plan);
  const std::string_view member = MemberOf(plan.kernel);
  if (member == "halo") return HaloDgrad(ctx, p, dy, w, c, dx, what);
  if (member == "halo_stream") return HaloStreamDgrad(ctx, p, dy, w, dx, what);
  if (member == "halo_3d") return Halo3dDgrad(ctx, p, dy, w, dx, what);
  return Sm90ProductDgrad(ctx, p, ReadSm90Choice(member, plan.tile), dy, w, c, dx, workspace, what);
}

Status Sm90Gradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* dy, const void* w, const void* kept, void* dz, void* dbias,
                    Workspace workspace) {
  const std::string what = Describe("conv_gradient", p, plan);
  const std::string_view member = MemberOf(plan.kernel);
  if (member == "halo") return HaloGradient(ctx, p, e, dy, w, kept, dz, dbias, workspace, what);
  return Sm90ProductGradient(ctx, p, e, ReadSm90Choice(member, plan.tile), dy, w, kept, dz, dbias,
                             workspace, what);
}

Status Sm90Wgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  const std::string_view member = MemberOf(plan.kernel);
  const WgradKernel kernel = ReadWgradKernel(member);
  if (member == "halo" && p.dtype != DType::kF32)
    return HaloWgradOf(ctx, p, plan.splits, x, dy, dw, workspace, what);
  if (member == "halo_3d") return Halo3dWgradOf(ctx, p, plan.splits, x, dy, dw, workspace, what);
  if (member == "halo" || kernel == WgradKernel::kTf32 || kernel == WgradKernel::kTerms ||
      kernel == WgradKernel::kTermsSwapped) {
    return Sm90WgradTf32(ctx, p, kernel, plan, x, dy, dw, workspace, what);
  }
  return Sm90WgradOf(ctx, p, kernel, plan, x, dy, dw, workspace, what);
}

}  // namespace jaxconv::cuda
