// The sm_90a dense on the host: a DenseProblem into descriptors.
#include "cuda/dense/sm90.h"

#include <algorithm>
#include <string>

#include "cuda/core/divmod.h"
#include "cuda/core/tma.h"
#include "cuda/gemm/sm90_operands.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {
namespace {

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status Check(const DenseProblem& p, const Plan& plan, const std::string& what) {
  const auto no = [&](const std::string& why) { return Status::Unimplemented(what + ": " + why); };
  if (p.dtype == DType::kF64) {
    return no("wgmma needs float32, bfloat16 or float16, given float64");
  }
  if (p.addend && p.dtype == DType::kF32) return no("float32 takes no addend c");
  if (p.trans_x && p.trans_w) return no("x and w may not both be transposed");
  if (p.k == 0) return no("K must be at least 1");
  const int64_t x_axis = p.trans_x ? p.m : p.k, w_axis = p.trans_w ? p.k : p.n;
  if (x_axis % 8 != 0 || w_axis % 8 != 0 || p.n % 8 != 0) {
    return no("the fastest axes of x, w and y must be multiples of 8, given " +
              std::to_string(x_axis) + ", " + std::to_string(w_axis) + ", " + std::to_string(p.n));
  }
  if (p.dtype == DType::kF32 && !p.full_float32 && p.k % 8 != 0) {
    return no("K must be a multiple of 8 in TF32, given " + std::to_string(p.k));
  }
  // A coordinate counts the instances of all terms.
  const int64_t most = ((int64_t(1) << 31) - 1 - 4096) / (p.dtype == DType::kF32 ? 3 : 1);
  if (std::max({p.m, p.n, p.k, p.batch}) > most) {
    return no("M, N, K and batch must be at most " + std::to_string(most));
  }
  const int64_t most_splits = plan.tile == "64x128" ? (p.k + 63) / 64 : 1;
  if (plan.splits < 1 || plan.splits > most_splits) {
    return Status::Invalid(what + ": splits=" + std::to_string(plan.splits) + " must be in [1, " +
                           std::to_string(most_splits) + "] with this tile");
  }
  return Status::Ok();
}

// (columns, instance, rows) of row-major matrices, `batched` or one for all.
TmaTensor Matrices(const void* base, int64_t rows, int64_t columns, bool batched, int64_t batch) {
  return {base, 3, {columns, batched ? batch : 1, rows}, {1, rows * columns, columns}};
}

}  // namespace

Status WgmmaDense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                  const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
                  Workspace workspace) {
  const std::string what = std::string("dense[wgmma ") + Name(p.dtype) + " " +
                           std::string(plan.tile) +
                           (plan.splits > 1 ? " splits=" + std::to_string(plan.splits) : "") + "]";
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, what));
  if (!Aligned(x) || !Aligned(w) || !Aligned(y) || (e.save_preactivation && !Aligned(z)) ||
      (p.addend && !Aligned(c)) || !Aligned(workspace.data)) {
    return Status::Invalid(what + ": x, w, c, y, z and the workspace must be 16-byte aligned");
  }
  Sm90TileName tile;
  JAXCONV_RETURN_IF_ERROR(FindSm90Tile(plan.tile, what, &tile));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  if (p.m == 0 || p.n == 0 || p.batch == 0) return Status::Ok();

  const int64_t instances_x = p.x_batched ? p.batch : 1, instances_w = p.w_batched ? p.batch : 1;
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  if (in.terms > 1) {
    JAXCONV_RETURN_IF_ERROR(
        SplitIntoTerms(ctx, 0, p.k * p.n * instances_w, what, &x, &w, &workspace));
  }
  bool trans_x = p.trans_x, trans_w = p.trans_w;
  if (in.tf32 && trans_x) {
    JAXCONV_RETURN_IF_ERROR(TransposeFloats(ctx, instances_x, p.k, p.m, what, &x, &workspace));
    trans_x = false;
  }
  if (in.tf32 && !trans_w) {
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
  if (tile == Sm90TileName::k64x128 && p.dtype != DType::kF32) {
    const double needed = double(plan.splits) * double(batch) * double(m) * double(p.n) * 4;
    if (double(workspace.bytes) < needed) {
      return Status::Invalid(what + ": needs a workspace of " + std::to_string(int64_t(needed)) +
                             " bytes (splits * batch * M * N * 4), given " +
                             std::to_string(workspace.bytes));
    }
    g.partials = static_cast<float*>(workspace.data);
  }
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
  const int rows = TileRows(tile), columns = FilterBoxRows(tile);
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
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(in.element, filter, {0, 1, trans_w ? columns : 64, 1},
                                      what + " w", &g.b, in.tf32));
  if (p.dtype == DType::kF32) {
    g.out.d = static_cast<float*>(y);
    g.out.z = static_cast<float*>(z);
    g.out.instance = m * p.n;
    g.out.stride_image = p.n;  // a row is an image of one pixel
    const auto launch = in.tf32   ? LaunchSm90KKTf32
                        : trans_x ? LaunchSm90MNFloat
                        : trans_w ? LaunchSm90KKFloat
                                  : LaunchSm90KNFloat;
    return launch(ctx, g, tile, multiprocessors, what);
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
  return launch(ctx, g, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
