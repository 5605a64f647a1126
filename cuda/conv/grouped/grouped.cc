// The grouped family's face: the plan's kernel, and the sum of a weight gradient's parts.
#include "cuda/conv/grouped/grouped.h"

#include "cuda/conv/common/describe.h"
#include "cuda/conv/common/domain.h"
#include "cuda/conv/common/reduce.h"
#include "cuda/conv/grouped/kernels.h"

namespace jaxconv::cuda {
namespace {

struct Kernel {
  const char* name;
  conv::GroupedForward* forward;
  conv::GroupedWgradOf* wgrad;
};

constexpr Kernel kKernels[] = {
    {"grouped/mma", conv::GroupedMma, conv::GroupedMmaWgrad},
    {"grouped/rows", conv::GroupedRows, conv::GroupedRowsWgrad},
    {"grouped/rows_float32", conv::GroupedRowsFloat32, conv::GroupedRowsFloat32Wgrad},
};

const Kernel* Find(const Plan& plan) {
  for (const Kernel& kernel : kKernels) {
    if (plan.kernel == kernel.name) return &kernel;
  }
  return nullptr;
}

Status Forward(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
               const Plan& plan, const void* src, const void* w, const void* bias, void* dst,
               void* z) {
  const std::string what = Describe(dgrad ? "conv_dgrad" : "conv_fprop", p, plan);
  const Kernel* kernel = Find(plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  return kernel->forward(ctx, p, dgrad, e, src, w, bias, dst, z, what);
}

}  // namespace

Status GroupedFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  return Forward(ctx, p, false, e, plan, x, w, bias, y, z);
}

Status GroupedDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                    const void* w, void* dx, Workspace) {
  return Forward(ctx, p, true, {false, Activation::kNone, 0.0, false}, plan, dy, w, nullptr, dx,
                 nullptr);
}

Status GroupedWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                    const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  const Kernel* kernel = Find(plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  float* partials = plan.splits > 1 ? static_cast<float*>(workspace.data) : nullptr;
  JAXCONV_RETURN_IF_ERROR(kernel->wgrad(ctx, p, plan.splits, x, dy, dw, partials, what));
  if (partials == nullptr) return Status::Ok();
  return conv::SumPartials(ctx, p.dtype, partials, plan.splits, conv::FilterCount(p), {}, dw,
                           what.c_str());
}

}  // namespace jaxconv::cuda
