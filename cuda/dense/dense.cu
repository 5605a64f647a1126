// Dense on the GPU:  y = f(z), z = alpha * op(x) @ op(w) + beta * c + bias, for each of `batch`
// instances.
//
// Algorithm "gemm": one product over cuda/gemm. Several instances that share w, x stored (M, K) and
// the epilogue not telling them apart, are one product of batch * M rows. Workspace: splits == 1: 0
// bytes; otherwise splits * batch * M * N * 4.
// Algorithm "wgmma": sm90.h.
#include <string>

#include "common/launch.h"
#include "cuda/dense/sm90.h"
#include "cuda/domain.h"
#include "cuda/gemm/gemm.h"

namespace jaxconv::cuda {

Status Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
             const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
             Workspace workspace) {
  if (FamilyOf(plan.kernel) == "sm90") {
    const std::string_view member = MemberOf(plan.kernel);
    const std::string tile = std::string(plan.tile) + (member == "resident"          ? "r"
                                                       : member == "product_swapped" ? "s"
                                                                                     : "");
    return WgmmaDense(ctx, p, e, {plan.kernel, tile, plan.splits, plan.chunk}, x, w, bias, c, y, z,
                      workspace);
  }
  if (plan.kernel != "gemm") {
    return Status::Invalid("dense: kernel \"" + std::string(plan.kernel) +
                           "\" is unknown; there are \"gemm\" and sm90's");
  }
  GemmArgs g;
  g.m = p.m;
  g.n = p.n;
  g.k = p.k;
  g.batch = p.batch;
  g.trans_a = p.trans_x;
  g.trans_b = p.trans_w;
  g.a = x;
  g.b = w;
  g.lda = p.trans_x ? p.m : p.k;
  g.ldb = p.trans_w ? p.k : p.n;
  g.ldc = g.ldd = p.n;
  g.stride_a = p.x_batched ? p.m * p.k : 0;
  g.stride_b = p.w_batched ? p.k * p.n : 0;
  g.stride_d = p.m * p.n;
  g.d = y;
  g.z = e.save_preactivation ? z : nullptr;
  if (p.addend) {
    g.c = c;
    g.stride_c = p.c_batched ? p.m * p.n : 0;
  }
  if (p.bias != BiasKind::kNone) {
    g.bias = bias;
    g.bias_kind = p.bias;
    const int64_t elements = p.bias == BiasKind::kScalar ? 1 : p.bias == BiasKind::kRow ? p.m : p.n;
    g.stride_bias = p.bias_batched ? elements : 0;
  }
  g.alpha = p.alpha;
  g.beta = p.beta;
  g.activation = e.activation;
  g.slope = e.slope;
  g.dtype = p.dtype;
  g.full_float32 = p.full_float32;
  g.tile = plan.tile;
  g.splits = plan.splits;
  g.workspace = workspace;

  const bool bias_by_column =
      p.bias == BiasKind::kNone ||
      (!p.bias_batched && (p.bias == BiasKind::kScalar || p.bias == BiasKind::kColumn));
  if (p.batch > 1 && p.x_batched && !p.w_batched && !p.trans_x && bias_by_column &&
      (!p.addend || p.c_batched) && p.batch <= (int64_t(1) << 30) / (p.m + 1)) {
    g.m *= p.batch;
    g.batch = 1;
    g.stride_a = g.stride_c = g.stride_d = 0;
  }
  return Gemm(ctx, g, "dense");
}

}  // namespace jaxconv::cuda
