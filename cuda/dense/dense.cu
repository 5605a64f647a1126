// Dense on the GPU:  y = f(z), z = alpha * op(x) @ op(w) + beta * c + bias, for each of `batch`
// instances.
//
// The plan is confirmed here, once (domain.h). Kernel "gemm": one product over cuda/gemm. Several
// instances that share w, x stored (M, K) and the epilogue not telling them apart, are one product of
// batch * M rows. Kernels of sm90: sm90.h.
// DenseGradient, DenseGated, DenseGatedGradient: of sm90 only.
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "common/launch.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/dense/sm90.h"
#include "cuda/domain.h"
#include "cuda/gemm/gemm.h"

namespace jaxconv::cuda {

namespace {

constexpr std::string_view kGradientKernel = "sm90/gradient", kGatedKernel = "sm90/gated",
                           kGatedGradientKernel = "sm90/gated_gradient";

// Whether the plan can be carried out, with this workspace and these arrays.
Status Confirm(const std::string& what, const DenseProblem& p, const Plan& plan,
               std::initializer_list<const void*> arrays, Workspace workspace) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const std::string refusal = DenseRefusal(p, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  const int64_t needed = DenseWorkspace(p, plan);
  if (workspace.bytes < needed) {
    return Status::Invalid(what + ": needs a workspace of " + std::to_string(needed) +
                           " bytes, given " + std::to_string(workspace.bytes));
  }
  if (FamilyOf(plan.kernel) != "sm90") return Status::Ok();
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0)
      return Status::Invalid(what + ": arrays must be 16-byte aligned");
  }
  return Status::Ok();
}

}  // namespace

Status DenseGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                     const DenseGradientArrays& a, Workspace workspace) {
  const std::string what = Describe("dense_gradient", p, plan);
  if (p.m == 0 || p.n == 0) return Status::Unimplemented(what + ": it has no elements");
  JAXCONV_RETURN_IF_ERROR(
      Confirm(what, p, plan, {a.dy, a.w, a.kept, a.dz, a.db, workspace.data}, workspace));
  if (plan.kernel != kGradientKernel || p.alpha != 1.0)
    return Status::Unimplemented(what + ": only sm90/gradient, with alpha 1, makes gradients");
  return Sm90DenseGradient(ctx, p, e, plan, a.dy, a.w, a.kept, a.dz, a.db, workspace);
}

Status DenseGated(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                  const Plan& plan, const DenseGatedArrays& a, Workspace workspace) {
  const std::string what = Describe("dense_gated", p, plan);
  if (p.m == 0 || p.n == 0) return Status::Unimplemented(what + ": it has no elements");
  JAXCONV_RETURN_IF_ERROR(Confirm(what, p, plan, {a.x, a.w, a.y, a.z, workspace.data}, workspace));
  if (plan.kernel != kGatedKernel || p.alpha != 1.0)
    return Status::Unimplemented(what + ": only sm90/gated, with alpha 1, has a gate");
  return Sm90DenseGated(ctx, p, e, first, plan, a.x, a.w, a.b, a.y, a.z);
}

Status DenseGatedGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                          const Plan& plan, const DenseGatedGradientArrays& a,
                          Workspace workspace) {
  const std::string what = Describe("dense_gated_gradient", p, plan);
  if (p.m == 0 || p.n == 0) return Status::Unimplemented(what + ": it has no elements");
  JAXCONV_RETURN_IF_ERROR(
      Confirm(what, p, plan, {a.dy, a.w, a.kept, a.dz, a.db, workspace.data}, workspace));
  if (plan.kernel != kGatedGradientKernel || p.alpha != 1.0) {
    return Status::Unimplemented(what +
                                 ": only sm90/gated_gradient, with alpha 1, makes gradients");
  }
  return Sm90DenseGatedGradient(ctx, p, e, first, plan, a.dy, a.w, a.kept, a.dz, a.db, workspace);
}

Status Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
             const DenseArrays& a, Workspace workspace) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return Status::Ok();
  const std::string what = Describe("dense", p, plan);
  // sm90/cluster reads a bias by column in vectors.
  const void* vectors =
      plan.kernel == "sm90/cluster" && p.bias == BiasKind::kColumn ? a.b.as<void>() : nullptr;
  JAXCONV_RETURN_IF_ERROR(
      Confirm(what, p, plan, {a.x, a.w, vectors, a.c, a.y, a.z, workspace.data}, workspace));
  if (plan.kernel == kGradientKernel)
    return Status::Unimplemented(what + ": sm90/gradient makes gradients only");
  if (plan.kernel == kGatedKernel)
    return Status::Unimplemented(what + ": sm90/gated makes gated products only");
  if (plan.kernel == kGatedGradientKernel)
    return Status::Unimplemented(what + ": sm90/gated_gradient makes gradients only");
  if (FamilyOf(plan.kernel) == "sm90")
    return Sm90Dense(ctx, p, e, plan, a.x, a.w, a.b, a.c, a.y, a.z, workspace);
  GemmArgs g;
  g.m = p.m;
  g.n = p.n;
  g.k = p.k;
  g.batch = p.batch;
  g.trans_a = p.trans_x;
  g.trans_b = p.trans_w;
  g.a = a.x;
  g.b = a.w;
  g.lda = p.trans_x ? p.m : p.k;
  g.ldb = p.trans_w ? p.k : p.n;
  g.ldc = g.ldd = p.n;
  g.stride_a = p.x_batched ? p.m * p.k : 0;
  g.stride_b = p.w_batched ? p.k * p.n : 0;
  g.stride_d = p.m * p.n;
  g.d = a.y;
  g.z = e.save_preactivation ? a.z.as<void>() : nullptr;
  if (p.addend) {
    g.c = a.c;
    g.stride_c = p.c_batched ? p.m * p.n : 0;
  }
  if (p.bias != BiasKind::kNone) {
    g.bias = a.b;
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
