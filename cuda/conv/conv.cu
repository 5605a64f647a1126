// The convolution entry points of common/launch.h: empty sums first, then the plan's algorithm.
// Launches nothing itself but the fill of an output that no product reaches.
#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

#include "common/launch.h"
#include "cuda/conv/common/domain.h"
#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/depthwise/depthwise.h"
#include "cuda/conv/direct/direct.h"
#include "cuda/conv/grouped/grouped.h"
#include "cuda/conv/im2col/im2col.h"
#include "cuda/conv/implicit_gemm/implicit_gemm.h"
#include "cuda/conv/narrow/narrow.h"
#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/eight/eight.h"
#include "cuda/conv/stem/stem.h"
#include "cuda/core/context.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {
namespace {

// The kernel as the plan names it, and nothing else: a plan that does not fit the problem, the device or the buffers is
// refused here, once.
// `n`: the batch-norm of x that the kernel is to read, or null; `e`: the epilogue of kGradient
// and kGradientAdd, and with `q` and `types`, the pooling of fprop's result, fprop's.
Status Confirm(ConvOp op, const char* name, const ConvProblem& p, const Plan& plan,
               Workspace workspace, std::initializer_list<const void*> arrays,
               const BatchNormProblem* n = nullptr, const Epilogue* e = nullptr,
               const PoolProblem* q = nullptr, const PooledTypes& types = {}) {
  const std::string what = Describe(name, p, plan);
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const std::string refusal =
      n != nullptr   ? NormalisedRefusal(op, p, n->activation, plan, device)
      : q != nullptr ? PooledRefusal(p, e->activation, *q, types.x, types.y, plan, device)
      : e != nullptr ? GradientRefusal(op, p, e->activation, plan, device)
                     : ConvRefusal(op, p, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0)
      return Status::Invalid(what + ": arrays must be 16-byte aligned");
  }
  return conv::CheckWorkspace(workspace, ConvWorkspace(op, p, plan), what);
}

// All bits zero is the number zero in every dtype.
Status Zero(const Context& ctx, void* out, int64_t count, DType dtype, const char* op) {
  return CudaStatus(cudaMemsetAsync(out, 0, size_t(count) * SizeOf(dtype), ctx.stream),
                    std::string(op) + " zero fill");
}

Status Copy(const Context& ctx, const void* from, void* to, int64_t count, DType dtype,
            const char* op) {
  if (from == to) return Status::Ok();
  return CudaStatus(cudaMemcpyAsync(to, from, size_t(count) * SizeOf(dtype),
                                    cudaMemcpyDeviceToDevice, ctx.stream),
                    std::string(op) + " copy");
}

int64_t SizeX(const ConvProblem& p) { return p.n * p.c * p.in_size(); }
int64_t SizeW(const ConvProblem& p) {
  return p.groups > 0 ? p.k * p.group_c() * p.filter_size() : 0;
}
int64_t SizeY(const ConvProblem& p) { return p.n * p.k * p.out_size(); }

}  // namespace

Status ConvFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const ConvFpropArrays& a, Workspace workspace) {
  if (SizeY(p) == 0) return Status::Ok();
  // y = f(b + residual) everywhere: direct sums over nothing, whatever the plan says.
  if (SizeX(p) == 0 || SizeW(p) == 0)
    return DirectFprop(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z, workspace);
  const ConvOp op = a.residual == nullptr ? ConvOp::kFprop : ConvOp::kFpropAdd;
  JAXCONV_RETURN_IF_ERROR(
      Confirm(op, "conv_fprop", p, plan, workspace, {a.x, a.w, a.b, a.residual, a.y, a.z}));
  const std::string_view family = FamilyOf(plan.kernel);
  if (family == "depthwise")
    return DepthwiseFprop(ctx, p, e, plan, a.x, a.w, a.b, a.y, a.z, workspace);
  if (family == "grouped") return GroupedFprop(ctx, p, e, plan, a.x, a.w, a.b, a.y, a.z, workspace);
  if (family == "narrow")
    return NarrowFprop(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z, workspace);
  if (family == "stem") return StemFprop(ctx, p, e, plan, a.x, a.w, a.b, a.y, a.z, workspace);
  // The others may add a residual.
  if (family == "im2col")
    return Im2colFprop(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z, workspace);
  if (family == "implicit_gemm") {
    return ImplicitGemmFprop(ctx, conv::FoldPatches(p, false), e, plan, a.x, a.w, a.b, a.residual,
                             a.y, a.z, workspace);
  }
  if (family == "sm90") {
    return Sm90Fprop(ctx, conv::FoldPatches(p, false), e, plan, a.x, a.w, a.b, a.residual, a.y, a.z,
                     workspace);
  }
  return DirectFprop(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z, workspace);
}

Status ConvStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan,
                      const ConvStatisticsArrays& a, Workspace workspace) {
  const bool adds = a.b != nullptr || a.residual != nullptr;
  JAXCONV_RETURN_IF_ERROR(Confirm(adds ? ConvOp::kAddStatistics : ConvOp::kStatistics,
                                  "conv_statistics", p, plan, workspace,
                                  {a.x, a.w, a.b, a.residual, a.y}));
  if (FamilyOf(plan.kernel) == "grouped")
    return GroupedStatistics(ctx, p, plan, a.x, a.w, a.y, a.mean, a.var, workspace);
  return Sm90Statistics(ctx, conv::FoldPatches(p, false), plan, a.x, a.w, a.b, a.residual, a.y,
                        a.mean, a.var, workspace);
}

Status ConvDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvDgradArrays& a, Workspace workspace) {
  if (SizeX(p) == 0) return Status::Ok();
  if (SizeY(p) == 0 || SizeW(p) == 0) {
    return a.c == nullptr ? Zero(ctx, a.dx, SizeX(p), p.dtype, "conv_dgrad")
                          : Copy(ctx, a.c, a.dx, SizeX(p), p.dtype, "conv_dgrad");
  }
  const ConvOp op = a.c == nullptr ? ConvOp::kDgrad : ConvOp::kDgradAdd;
  JAXCONV_RETURN_IF_ERROR(Confirm(op, "conv_dgrad", p, plan, workspace, {a.dy, a.w, a.c, a.dx}));
  const std::string_view family = FamilyOf(plan.kernel);
  if (family == "depthwise") return DepthwiseDgrad(ctx, p, plan, a.dy, a.w, a.c, a.dx, workspace);
  if (family == "grouped") return GroupedDgrad(ctx, p, plan, a.dy, a.w, a.dx, workspace);
  if (family == "narrow") return NarrowDgrad(ctx, p, plan, a.dy, a.w, a.c, a.dx, workspace);
  if (family == "im2col") return Im2colDgrad(ctx, p, plan, a.dy, a.w, a.dx, workspace);
  if (family == "implicit_gemm")
    return ImplicitGemmDgrad(ctx, conv::FoldPatches(p, true), plan, a.dy, a.w, a.dx, workspace);
  if (family == "stem") return StemDgrad(ctx, p, plan, a.dy, a.w, a.dx, workspace);
  if (family == "sm90") {
    const void* c = a.c;
    if (c != nullptr && p.stride[0] * p.stride[1] * p.stride[2] > 1) {  // it adds to what is there
      JAXCONV_RETURN_IF_ERROR(Copy(ctx, a.c, a.dx, SizeX(p), p.dtype, "conv_dgrad"));
      c = a.dx;
    }
    return Sm90Dgrad(ctx, conv::FoldPatches(p, true), plan, a.dy, a.w, c, a.dx, workspace);
  }
  return DirectDgrad(ctx, p, plan, a.dy, a.w, a.dx, workspace);
}

Status ConvScaled(const Context& ctx, const ScaledConvProblem& p, const Plan& plan,
                  const ConvScaledArrays& a, Workspace) {
  const std::string what = "conv_scaled[" + std::string(plan.kernel) + " " + Name(p.x_type) + " " +
                           Name(p.w_type) + " to " + Name(p.y_type) + "]";
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const std::string refusal = ScaledRefusal(p, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  for (const void* array :
       std::initializer_list<const void*>{a.x, a.w, a.scale, a.b, a.residual, a.x2, a.w2, a.y}) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0)
      return Status::Invalid(what + ": arrays must be 16-byte aligned");
  }
  return Sm90EightFprop(ctx, p, plan, a, device.multiprocessors, what);
}

Status ConvShortcut(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                    const ConvProblem& q, const Plan& plan, const ConvShortcutArrays& a,
                    Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kFprop, "conv_shortcut", p, plan, workspace, {a.x, a.w, a.b, a.y}));
  Device device;
  const std::string what = Describe("conv_shortcut", p, plan);
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const std::string refusal = ShortcutRefusal(p, q, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  for (const void* array : std::initializer_list<const void*>{a.x2, a.w2}) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0)
      return Status::Invalid(what + ": arrays must be 16-byte aligned");
  }
  return Sm90Shortcut(ctx, p, e, q, plan, a, workspace);
}

Status ConvPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e, const PoolProblem& q,
                  const PooledTypes& types, const Plan& plan, const ConvPooledArrays& a,
                  Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm(ConvOp::kFprop, "conv_pooled", p, plan, workspace,
                                  {a.x, a.w, a.b, a.y}, nullptr, &e, &q, types));
  return StemPooled(ctx, p, e, q, types, plan, a.x, a.w, a.b, a.y);
}

Status ConvDgradSums(const Context& ctx, const ConvProblem& p, const Plan& plan,
                     const ConvDgradSumsArrays& a, Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kDgradSums, "conv_dgrad_sums", p, plan, workspace,
              {a.dy, a.w, a.c, a.signs, a.x, a.mean, a.rstd, a.dz, a.dscale, a.dbias}));
  return Sm90DgradSums(ctx, p, plan, a.dy, a.w, a.c, a.signs, a.x, a.mean, a.rstd, a.dz, a.dscale,
                       a.dbias, workspace);
}

Status ConvGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const ConvGradientArrays& a, Workspace workspace) {
  const bool adds = a.c != nullptr;
  JAXCONV_RETURN_IF_ERROR(Confirm(adds ? ConvOp::kGradientAdd : ConvOp::kGradient,
                                  adds ? "conv_gradient_add" : "conv_gradient", p, plan, workspace,
                                  {a.dy, a.w, a.kept, a.c, a.dz, a.dbias}, nullptr, &e));
  if (FamilyOf(plan.kernel) == "narrow")
    return NarrowGradient(ctx, p, e, plan, a.dy, a.w, a.kept, a.c, a.dz, a.dbias, workspace);
  return Sm90Gradient(ctx, p, e, plan, a.dy, a.w, a.kept, a.dz, a.dbias, workspace);
}

Status ConvNormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                        const Plan& plan, const ConvNormGradientArrays& a, Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm(
      ConvOp::kNormGradient, "conv_norm_gradient", p, plan, workspace,
      {a.dy, a.w, a.x, a.scale, a.bias, a.mean, a.rstd, a.dz, a.dscale, a.dbias}, nullptr, &e));
  return Sm90NormGradient(ctx, p, e, plan, a, workspace);
}

Status ConvWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvWgradArrays& a, Workspace workspace) {
  if (SizeW(p) == 0) return Status::Ok();
  if (SizeX(p) == 0 || SizeY(p) == 0) return Zero(ctx, a.dw, SizeW(p), p.dtype, "conv_wgrad");
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kWgrad, "conv_wgrad", p, plan, workspace, {a.x, a.dy, a.dw}));
  const std::string_view family = FamilyOf(plan.kernel);
  if (family == "depthwise") return DepthwiseWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
  if (family == "grouped") return GroupedWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
  if (family == "narrow") return NarrowWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
  if (family == "im2col") return Im2colWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
  if (family == "implicit_gemm")
    return ImplicitGemmWgrad(ctx, conv::FoldPatches(p, false), plan, a.x, a.dy, a.dw, workspace);
  if (family == "sm90")
    return Sm90Wgrad(ctx, conv::FoldPatches(p, false), plan, a.x, a.dy, a.dw, workspace);
  if (family == "stem") return StemWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
  return DirectWgrad(ctx, p, plan, a.x, a.dy, a.dw, workspace);
}

Status ConvNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const ConvNormalisedArrays& a, Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kFprop, "conv_normalised", p, plan, workspace, {a.x, a.w, a.y}, &n));
  if (FamilyOf(plan.kernel) == "sm90")
    return Sm90Normalised(ctx, p, n, plan, a.x, a.w, a.scale, a.bias, a.mean, a.var, a.y, nullptr,
                          nullptr, workspace);
  return DepthwiseNormalised(ctx, p, n, plan, a.x, a.w, a.scale, a.bias, a.mean, a.var, a.y);
}

Status ConvNormalisedStatistics(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                                const Plan& plan, const ConvNormalisedStatisticsArrays& a,
                                Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm(ConvOp::kStatistics, "conv_normalised_statistics", p, plan,
                                  workspace, {a.x, a.w, a.y, a.new_mean, a.new_var}, &n));
  return Sm90Normalised(ctx, p, n, plan, a.x, a.w, a.scale, a.bias, a.mean, a.var, a.y, a.new_mean,
                        a.new_var, workspace);
}

Status ConvNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const ConvNormalisedWgradArrays& a,
                           Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kWgrad, "conv_normalised_wgrad", p, plan, workspace, {a.x, a.dy, a.dw}, &n));
  if (FamilyOf(plan.kernel) == "sm90")
    return Sm90NormalisedWgrad(ctx, p, n, plan, a.x, a.dy, a.scale, a.bias, a.mean, a.var, a.dw,
                               workspace);
  return DepthwiseNormalisedWgrad(ctx, p, n, plan, a.x, a.dy, a.scale, a.bias, a.mean, a.var, a.dw,
                                  workspace);
}

Status ConvNormalisedGradient(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                              const Plan& plan, const ConvNormalisedGradientArrays& a,
                              Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm(ConvOp::kSums, "conv_normalised_gradient", p, plan, workspace,
                                  {a.x, a.dy, a.w, a.dw}, &n));
  return DepthwiseNormalisedGradient(ctx, p, n, plan, a.x, a.dy, a.w, a.scale, a.bias, a.mean,
                                     a.var, a.dw, a.dscale, a.dbias, workspace);
}

Status ConvNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                        int64_t count, const Plan& plan, const ConvNormalisedDxArrays& a,
                        Workspace) {
  JAXCONV_RETURN_IF_ERROR(
      Confirm(ConvOp::kDgrad, "conv_normalised_dx", p, plan, {}, {a.x, a.dy, a.w, a.dx}, &n));
  return DepthwiseNormalisedDx(ctx, p, n, plan, a.x, a.dy, a.w, a.scale, a.bias, a.mean, a.var,
                               a.dscale, a.dbias, count, a.dx);
}

}  // namespace jaxconv::cuda
