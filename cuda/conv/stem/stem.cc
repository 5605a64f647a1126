// The stem family's face: the plan's kernel.
#include "cuda/conv/stem/stem.h"

#include "cuda/conv/stem/kernels.h"
#include "cuda/core/describe.h"

namespace jaxconv::cuda {
namespace {

struct Kernel {
  const char* name;
  conv::StemForward* forward;
  conv::StemWgradOf* wgrad;
};

constexpr Kernel kKernels[] = {
    {"stem/mma", conv::StemMma, conv::StemMmaWgrad},
    {"stem/sm90_narrow_in", conv::StemNarrowIn, conv::StemNarrowInWgrad},
    {"stem/sm90_narrow_out", conv::StemNarrowOut, nullptr},
};

const Kernel* Find(const Plan& plan) {
  for (const Kernel& kernel : kKernels) {
    if (plan.kernel == kernel.name) return &kernel;
  }
  return nullptr;
}

}  // namespace

Status StemFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace) {
  const std::string what = Describe("conv_fprop", p, plan);
  if (plan.kernel == "stem/planes")
    return conv::StemPlanesFprop(ctx, p, e, x, w, bias, y, z, workspace, what);
  const Kernel* kernel = Find(plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  return kernel->forward(ctx, ConvOp::kFprop, p, e, x, w, bias, y, z, what);
}

Status StemPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e, const PoolProblem& q,
                  const PooledTypes& types, const Plan& plan, const void* x, const void* w,
                  const void* bias, void* y) {
  return conv::StemConvPooled(ctx, p, e, q, types, x, w, bias, y, Describe("conv_pooled", p, plan));
}

Status StemDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, void* dx, Workspace workspace) {
  const std::string what = Describe("conv_dgrad", p, plan);
  if (plan.kernel == "stem/patches")
    return conv::StemPatchesDgrad(ctx, p, plan, dy, w, dx, workspace, what);
  const Kernel* kernel = Find(plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  return kernel->forward(ctx, ConvOp::kDgrad, p, bare, dy, w, nullptr, dx, nullptr, what);
}

Status StemWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  if (plan.kernel == "stem/planes")
    return conv::StemPlanesWgrad(ctx, p, plan.splits, x, dy, dw, workspace, what);
  const Kernel* kernel = Find(plan);
  if (kernel == nullptr || kernel->wgrad == nullptr)
    return Status::Internal(what + ": no launcher");
  return kernel->wgrad(ctx, p, plan.splits, x, dy, dw, static_cast<float*>(workspace.data), what);
}

}  // namespace jaxconv::cuda
