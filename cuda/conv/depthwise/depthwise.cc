// The depthwise family's face: its kernels by the names of plans.
#include "cuda/conv/depthwise/depthwise.h"

#include "cuda/conv/common/launchers.h"
#include "cuda/conv/depthwise/kernels.h"

namespace jaxconv::cuda {
namespace {

using conv::Normalisation;

constexpr conv::Launchers kKernels[] = {
    {"depthwise/fma", conv::DepthwiseFma, conv::DepthwiseFmaWgrad},
    {"depthwise/mma", conv::DepthwiseMma, conv::DepthwiseMmaWgrad},
    {"depthwise/conv1d", conv::DepthwiseConv1d, conv::DepthwiseConv1dWgrad},
    {"depthwise/rows", conv::DepthwiseRows, conv::DepthwiseRowsWgrad},
    {"depthwise/rows_strided", conv::DepthwiseRowsStrided, conv::DepthwiseRowsStridedWgrad},
    {"depthwise/rows_mma", conv::DepthwiseRowsMma, conv::DepthwiseRowsMmaWgrad},
    {"depthwise/few", conv::DepthwiseFew, nullptr},  // its domain refuses weight gradients
};

Normalisation ToNormalisation(const BatchNormProblem& n, const void* scale, const void* bias,
                              const void* mean, const void* var) {
  const auto floats = [](const void* a) { return static_cast<const float*>(a); };
  return {floats(scale), floats(bias), floats(mean), floats(var), float(n.epsilon), n.activation};
}

}  // namespace

Status DepthwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  return conv::Fprop(kKernels, ctx, p, e, plan, x, w, bias, y, z);
}

Status DepthwiseDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                      const void* w, const void* c, void* dx, Workspace) {
  if (c != nullptr) {
    const std::string what = Describe("conv_dgrad_add", p, plan);
    if (plan.kernel != "depthwise/rows_mma") return Status::Internal(what + ": no launcher");
    return conv::DepthwiseRowsMmaDgradAdd(ctx, p, dy, w, c, dx, what);
  }
  return conv::Dgrad(kKernels, ctx, p, plan, dy, w, dx);
}

Status DepthwiseWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* dy, void* dw, Workspace workspace) {
  return conv::Wgrad(kKernels, ctx, p, plan, x, dy, dw, workspace);
}

Status DepthwiseNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const void* x, const void* w, const void* scale,
                           const void* bias, const void* mean, const void* var, void* y) {
  const std::string what = Describe("conv_normalised", p, plan);
  const Normalisation to = ToNormalisation(n, scale, bias, mean, var);
  if (plan.kernel == "depthwise/rows")
    return conv::DepthwiseRowsNormalised(ctx, p, to, x, w, y, what);
  if (plan.kernel == "depthwise/rows_strided")
    return conv::DepthwiseRowsStridedNormalised(ctx, p, to, x, w, y, what);
  return Status::Internal(what + ": no launcher");
}

Status DepthwiseNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                                const Plan& plan, const void* x, const void* dy, const void* scale,
                                const void* bias, const void* mean, const void* var, void* dw,
                                Workspace workspace) {
  const std::string what = Describe("conv_normalised_wgrad", p, plan);
  const Normalisation to = ToNormalisation(n, scale, bias, mean, var);
  const bool strided = plan.kernel == "depthwise/rows_strided";
  if (!strided && plan.kernel != "depthwise/rows") return Status::Internal(what + ": no launcher");
  const auto launcher =
      strided ? conv::DepthwiseRowsStridedNormalisedWgrad : conv::DepthwiseRowsNormalisedWgrad;
  float* partials = plan.splits > 1 ? static_cast<float*>(workspace.data) : nullptr;
  JAXCONV_RETURN_IF_ERROR(launcher(ctx, p, to, plan.splits, x, dy, dw, partials, what));
  if (partials == nullptr) return Status::Ok();
  return conv::SumPartials(ctx, p.dtype, partials, plan.splits, conv::FilterCount(p), {}, dw,
                           what.c_str());
}

Status DepthwiseNormalisedGradient(const Context& ctx, const ConvProblem& p,
                                   const BatchNormProblem& n, const Plan& plan, const void* x,
                                   const void* dy, const void* w, const void* scale,
                                   const void* bias, const void* mean, const void* var, void* dw,
                                   void* dscale, void* dbias, Workspace workspace) {
  return conv::DepthwiseNormalisedSums(
      ctx, p, ToNormalisation(n, scale, bias, mean, var), plan.splits, x, dy, w, dw, dscale, dbias,
      static_cast<float*>(workspace.data), Describe("conv_normalised_gradient", p, plan));
}

Status DepthwiseNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                             const Plan& plan, const void* x, const void* dy, const void* w,
                             const void* scale, const void* bias, const void* mean, const void* var,
                             const void* dscale, const void* dbias, int64_t count, void* dx) {
  return conv::DepthwiseNormalisedDx(ctx, p, ToNormalisation(n, scale, bias, mean, var), count, x,
                                     dy, w, dscale, dbias, dx,
                                     Describe("conv_normalised_dx", p, plan));
}

}  // namespace jaxconv::cuda
