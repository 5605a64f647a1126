// The narrow family's face: its kernel by the name of the plan, and the element type.
#include "cuda/conv/narrow/narrow.h"

#include "cuda/conv/common/fold.h"
#include "cuda/conv/common/launchers.h"
#include "cuda/conv/common/planes.h"
#include "cuda/conv/narrow/kernels.h"

namespace jaxconv::cuda {
namespace {

Status Forward(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
               const void* src, const void* w, const void* bias, const void* addend, void* dst,
               void* z, const std::string& what) {
  const auto launch = p.dtype == DType::kF32    ? conv::NarrowRowsF32
                      : p.dtype == DType::kBF16 ? conv::NarrowRowsBf16
                                                : conv::NarrowRowsF16;
  return launch(ctx, p, dgrad, e, src, w, bias, addend, dst, z, what);
}

Status Wgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
             const void* dy, void* dw, float* partials, const std::string& what) {
  const auto launch = p.dtype == DType::kF32    ? conv::NarrowRowsWgradF32
                      : p.dtype == DType::kBF16 ? conv::NarrowRowsWgradBf16
                                                : conv::NarrowRowsWgradF16;
  return launch(ctx, p, splits, x, dy, dw, partials, what);
}

// Forward has an operand more than others' launchers, and stands alone.
constexpr conv::Launchers kKernels[] = {{"narrow/rows", nullptr, Wgrad}};

}  // namespace

Status NarrowFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace workspace) {
  const std::string what = Describe(residual == nullptr ? "conv_fprop" : "conv_add", p, plan);
  if (plan.kernel == "narrow/planes") {
    const ConvProblem q = conv::PlanesAsChannels(p);
    char* folded = static_cast<char*>(workspace.data);
    char* filter = folded + conv::FoldedBytes(q);
    JAXCONV_RETURN_IF_ERROR(conv::FoldPlanes(ctx, p, q, x, folded, what));
    JAXCONV_RETURN_IF_ERROR(conv::FoldFilter(ctx, p, q, w, filter, what));
    return Forward(ctx, q, false, e, folded, filter, bias, nullptr, y, z, what);
  }
  return Forward(ctx, p, false, e, x, w, bias, residual, y, z, what);
}

Status NarrowDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, const void* c, void* dx, Workspace) {
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  const std::string what = Describe(c == nullptr ? "conv_dgrad" : "conv_dgrad_add", p, plan);
  return Forward(ctx, p, true, bare, dy, w, nullptr, c, dx, nullptr, what);
}

Status NarrowGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* dy, const void* w, const void* kept, const void* c, void* dz,
                      void* dbias, Workspace workspace) {
  const std::string what = Describe(c == nullptr ? "conv_gradient" : "conv_gradient_add", p, plan);
  const auto launch = p.dtype == DType::kF32    ? conv::NarrowRowsBackF32
                      : p.dtype == DType::kBF16 ? conv::NarrowRowsBackBf16
                                                : conv::NarrowRowsBackF16;
  float* const sums = static_cast<float*>(workspace.data);
  int64_t parts = 0;
  JAXCONV_RETURN_IF_ERROR(launch(ctx, p, e, dy, w, kept, c, dz, sums, &parts, what));
  return conv::SumPartials(ctx, p.dtype, sums, parts, p.c, {}, dbias, what.c_str());
}

Status NarrowWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace) {
  if (plan.kernel == "narrow/planes") {
    const std::string what = Describe("conv_wgrad", p, plan);
    const ConvProblem q = conv::PlanesAsChannels(p);
    char* folded = static_cast<char*>(workspace.data);
    char* sums = folded + conv::FoldedBytes(q);
    char* partials = sums + conv::FoldedFilterBytes(q);
    JAXCONV_RETURN_IF_ERROR(conv::FoldPlanes(ctx, p, q, x, folded, what));
    const Plan rows = {"narrow/rows", "", plan.splits, 0};
    JAXCONV_RETURN_IF_ERROR(conv::Wgrad(kKernels, ctx, q, rows, folded, dy, sums,
                                        {partials, conv::PartialsBytes(q, plan.splits)}));
    return conv::UnfoldFilter(ctx, p, q, sums, dw, what);
  }
  return conv::Wgrad(kKernels, ctx, p, plan, x, dy, dw, workspace);
}

}  // namespace jaxconv::cuda
