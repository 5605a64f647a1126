// The sm_90a dense on the host: a DenseProblem into descriptors.
#include "cuda/dense/sm90.h"

#include <algorithm>
#include <string>

#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/core/tma.h"
#include "cuda/gemm/sm90_gated.h"
#include "cuda/gemm/sm90_gradient.h"
#include "cuda/gemm/sm90_operands.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {
namespace {

// (columns, instance, rows) of row-major matrices, `batched` or one for all.
TmaTensor Matrices(const void* base, int64_t rows, int64_t columns, bool batched, int64_t batch) {
  return {base, 3, {columns, batched ? batch : 1, rows}, {1, rows * columns, columns}};
}

// (columns, half, rows) of a row-major matrix of two halves.
TmaTensor Halves(const void* base, int64_t rows, int64_t columns) {
  return {base, 3, {columns, 2, rows}, {1, columns, 2 * columns}};
}

// A product of one instance into `columns` columns, but for its arrays.
Sm90Product OneProduct(const DenseProblem& p, const Epilogue& e, int64_t columns) {
  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  phase.m = int(p.m);
  for (int i = 0; i < 3; ++i) phase.extent[i] = phase.taps[i] = 1;
  g.phases = g.instances = g.splits = 1;
  g.n = int(columns);
  g.k_blocks = int(CeilDiv(p.k, 64));
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  return g;
}

// The operands of a gradient's product, w stored (N, K).
Status EncodeDyAndW(const DenseProblem& p, TileSize tile, const void* dy, const void* w,
                    const std::string& what, Sm90Product* g) {
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, Matrices(dy, p.m, p.k, false, 1), {64, 1, tile.rows},
                                      what + " dy", &g->a[0]));
  TmaTensor filter = Matrices(w, p.n, p.k, false, 1);
  filter.rank = 4;
  filter.extent[3] = 1;
  filter.stride[3] = filter.stride[1] * filter.extent[1];
  return EncodeTiled(p.dtype, filter, {64, 1, FilterBoxRows(tile), 1}, what + " w", &g->b);
}

}  // namespace

Status Sm90Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
                 Workspace workspace) {
  const std::string what = Describe("dense", p, plan);
  const Sm90Choice choice = ReadSm90Choice(MemberOf(plan.kernel), plan.tile);
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));

  const int64_t instances_x = p.x_batched ? p.batch : 1, instances_w = p.w_batched ? p.batch : 1;
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  if (in.terms > 1) {
    JAXCONV_RETURN_IF_ERROR(
        SplitIntoTerms(ctx, 0, p.k * p.n * instances_w, what, &x, &w, &workspace));
  }
  const bool cluster = choice.kernel == Sm90Kernel::kCluster;
  bool trans_x = p.trans_x, trans_w = p.trans_w;
  if (in.tf32 && trans_x) {
    JAXCONV_RETURN_IF_ERROR(TransposeFloats(ctx, instances_x, p.k, p.m, what, &x, &workspace));
    trans_x = false;
  }
  if (in.tf32 && !trans_w && !cluster) {
    JAXCONV_RETURN_IF_ERROR(TransposeFloats(ctx, instances_w, p.k, p.n, what, &w, &workspace));
    trans_w = true;
  }

  // Instances that share w, and that the epilogue does not tell apart, are more rows.
  int64_t m = p.m, batch = p.batch;
  const bool any_row =
      p.bias == BiasKind::kNone ||
      (!p.bias_batched && (p.bias == BiasKind::kScalar || p.bias == BiasKind::kColumn));
  if (batch > 1 && p.x_batched && !p.w_batched && !trans_x && any_row &&
      (!p.addend || p.c_batched) && batch <= (int64_t(1) << 30) / (m + 1)) {
    m *= batch;
    batch = 1;
  }

  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  phase.m = int(m);
  for (int i = 0; i < 3; ++i) phase.extent[i] = phase.taps[i] = 1;
  g.phases = 1;
  g.shared_a = !p.x_batched;
  g.shared_b = !p.w_batched;
  g.instances = int(batch);
  g.n = int(p.n);
  g.k_blocks = int(CeilDiv(p.k, in.depth));
  g.splits = int(plan.splits);
  g.plain_d = y;
  g.plain_z = z;
  if (choice.kernel == Sm90Kernel::kRows) g.partials = static_cast<float*>(workspace.data);
  g.epilogue.alpha = float(p.alpha);
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  g.epilogue.save_z = e.save_preactivation;
  if (p.bias != BiasKind::kNone) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = p.bias;
    const int64_t elements = p.bias == BiasKind::kScalar ? 1 : p.bias == BiasKind::kRow ? p.m : p.n;
    g.epilogue.stride_bias = p.bias_batched ? elements : 0;
  }
  if (p.addend) {
    g.epilogue.c = c;
    g.epilogue.stride_c = p.c_batched ? p.m * p.n : 0;
    g.epilogue.beta = float(p.beta);
  }
  if (cluster) {
    g.row_d = p.n;
    g.instance_d = m * p.n;
    g.box_rows = ClusterBoxRows(choice.tile, m);
  }
  const int rows = cluster ? g.box_rows : choice.tile.rows, columns = FilterBoxRows(choice.tile);
  TmaTensor matrix =
      trans_x ? Matrices(x, p.k, m, p.x_batched, batch) : Matrices(x, m, p.k, p.x_batched, batch);
  g.term_taps = 1;
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, matrix,
                                      {0, 1,
                                       !trans_x       ? rows
                                       : in.terms > 1 ? 32
                                                      : 64},
                                      what + " x", &g.a[0], in.tf32));
  // w as (fastest axis, instance, slowest axis, term).
  TmaTensor filter = trans_w ? Matrices(w, p.n, p.k, p.w_batched, batch)
                             : Matrices(w, p.k, p.n, p.w_batched, batch);
  filter.rank = 4;
  filter.extent[3] = in.terms;
  filter.stride[3] = filter.stride[1] * filter.extent[1];
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(in.element, filter, {0, 1, trans_w ? columns : in.depth, 1},
                                      what + " w", &g.b, in.tf32));
  if (in.tf32 && cluster) return LaunchSm90ClusterTf32(ctx, g, choice.tile, trans_w, what);
  if (p.dtype == DType::kF32) {
    g.out.d = static_cast<float*>(y);
    g.out.z = static_cast<float*>(z);
    g.out.instance = m * p.n;
    g.out.stride_image = p.n;  // a row is an image of one pixel
    const auto launch = in.tf32   ? LaunchSm90KKTf32
                        : trans_x ? LaunchSm90MNFloat
                        : trans_w ? LaunchSm90KKFloat
                                  : LaunchSm90KNFloat;
    return launch(ctx, g, choice, device.multiprocessors, what);
  }
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, Matrices(y, m, p.n, true, batch), {64, 1, 64}, what + " y", &g.d[0]));
  if (e.save_preactivation) {
    JAXCONV_RETURN_IF_ERROR(
        EncodeTiled(p.dtype, Matrices(z, m, p.n, true, batch), {64, 1, 64}, what + " z", &g.z));
  }
  const auto launch = p.dtype == DType::kBF16 ? (p.trans_x   ? LaunchSm90MNBf16
                                                 : p.trans_w ? LaunchSm90KKBf16
                                                             : LaunchSm90KNBf16)
                                              : (p.trans_x   ? LaunchSm90MNF16
                                                 : p.trans_w ? LaunchSm90KKF16
                                                             : LaunchSm90KNF16);
  return launch(ctx, g, choice, device.multiprocessors, what);
}

Status Sm90DenseGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e,
                         const Plan& plan, const void* dy, const void* w, const void* kept,
                         void* dz, void* sums, Workspace workspace) {
  const std::string what = Describe("dense_gradient", p, plan);
  const TileSize tile = ReadSm90Choice(MemberOf(plan.kernel), plan.tile).tile;
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  Sm90Product g = OneProduct(p, e, p.n);
  const auto encode = [&](const char* name, const void* base, int box_rows, CUtensorMap* map) {
    return EncodeTiled(p.dtype, Matrices(base, p.m, p.n, false, 1), {64, 1, box_rows}, what + name,
                       map);
  };
  JAXCONV_RETURN_IF_ERROR(EncodeDyAndW(p, tile, dy, w, what, &g));
  JAXCONV_RETURN_IF_ERROR(encode(" kept", kept, tile.rows, &g.c));
  JAXCONV_RETURN_IF_ERROR(encode(" dz", dz, 64, &g.d[0]));
  return LaunchSm90Gradient(ctx, p.dtype, g, tile, device.multiprocessors,
                            static_cast<float*>(workspace.data), sums, what);
}

Status Sm90DenseGatedGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e,
                              bool first, const Plan& plan, const void* dy, const void* w,
                              const void* kept, void* dz, void* sums, Workspace workspace) {
  const std::string what = Describe("dense_gated_gradient", p, plan);
  const TileSize tile = ReadSm90Choice(MemberOf(plan.kernel), plan.tile).tile;
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  Sm90Product g = OneProduct(p, e, p.n);
  JAXCONV_RETURN_IF_ERROR(EncodeDyAndW(p, tile, dy, w, what, &g));
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, Halves(kept, p.m, p.n), {64, 1, 64}, what + " kept", &g.c));
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, Halves(dz, p.m, p.n), {64, 1, 64}, what + " dz", &g.z));
  return LaunchSm90GatedGradient(ctx, p.dtype, g, tile, first, device.multiprocessors,
                                 static_cast<float*>(workspace.data), sums, what);
}

Status Sm90DenseGated(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                      const Plan& plan, const void* x, const void* w, const void* bias, void* y,
                      void* z) {
  const std::string what = Describe("dense_gated", p, plan);
  const TileSize tile = ReadSm90Choice(MemberOf(plan.kernel), plan.tile).tile;
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const int64_t half = p.n / 2;
  Sm90Product g = OneProduct(p, e, half);
  g.phase[0].filter_first = first ? 1 : 0;
  g.epilogue.alpha = 1.f;
  g.epilogue.save_z = e.save_preactivation;
  if (p.bias == BiasKind::kColumn) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kColumn;
    g.epilogue.stride_bias = half;
  }
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, Matrices(x, p.m, p.k, false, 1), {64, 1, tile.rows},
                                      what + " x", &g.a[0]));
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, Matrices(y, p.m, half, false, 1), {64, 1, 64}, what + " y", &g.d[0]));
  // (columns, instance, k, half)
  const TmaTensor filter = {w, 4, {half, 1, p.k, 2}, {1, p.n, p.n, half}};
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, filter, {64, 1, 64, 1}, what + " w", &g.b));
  if (e.save_preactivation) {
    JAXCONV_RETURN_IF_ERROR(
        EncodeTiled(p.dtype, Halves(z, p.m, half), {64, 1, 64}, what + " z", &g.z));
  }
  return LaunchSm90Gated(ctx, p.dtype, g, tile, device.multiprocessors, what);
}

}  // namespace jaxconv::cuda
