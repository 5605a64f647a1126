// What the faces of families whose kernels have one signature share: the plan's kernel by its name, and the sum of a
// weight gradient's parts.
#pragma once

#include <cstddef>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/common/domain.h"
#include "cuda/conv/common/reduce.h"
#include "cuda/core/context.h"
#include "cuda/core/describe.h"

namespace jaxconv::cuda::conv {

// dst = y from src = x, or (dgrad) dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop. `what` names the call.
using ForwardLauncher = Status(const Context& ctx, const ConvProblem& p, bool dgrad,
                               const Epilogue& e, const void* src, const void* w, const void* bias,
                               void* dst, void* z, const std::string& what);
// dw, or with several splits its partial sums (splits, elements of dw) in float32, in dw's order.
using WgradLauncher = Status(const Context& ctx, const ConvProblem& p, int64_t splits,
                             const void* x, const void* dy, void* dw, float* partials,
                             const std::string& what);

struct Launchers {
  const char* name;  // Plan::kernel
  ForwardLauncher* forward;
  WgradLauncher* wgrad;
};

template <size_t N>
const Launchers* Find(const Launchers (&kernels)[N], const Plan& plan) {
  for (const Launchers& kernel : kernels) {
    if (plan.kernel == kernel.name) return &kernel;
  }
  return nullptr;
}

template <size_t N>
Status Fprop(const Launchers (&kernels)[N], const Context& ctx, const ConvProblem& p,
             const Epilogue& e, const Plan& plan, const void* x, const void* w, const void* bias,
             void* y, void* z) {
  const std::string what = Describe("conv_fprop", p, plan);
  const Launchers* kernel = Find(kernels, plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  return kernel->forward(ctx, p, false, e, x, w, bias, y, z, what);
}

template <size_t N>
Status Dgrad(const Launchers (&kernels)[N], const Context& ctx, const ConvProblem& p,
             const Plan& plan, const void* dy, const void* w, void* dx) {
  const std::string what = Describe("conv_dgrad", p, plan);
  const Launchers* kernel = Find(kernels, plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  return kernel->forward(ctx, p, true, bare, dy, w, nullptr, dx, nullptr, what);
}

template <size_t N>
Status Wgrad(const Launchers (&kernels)[N], const Context& ctx, const ConvProblem& p,
             const Plan& plan, const void* x, const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  const Launchers* kernel = Find(kernels, plan);
  if (kernel == nullptr) return Status::Internal(what + ": no launcher");
  float* partials = plan.splits > 1 ? static_cast<float*>(workspace.data) : nullptr;
  JAXCONV_RETURN_IF_ERROR(kernel->wgrad(ctx, p, plan.splits, x, dy, dw, partials, what));
  if (partials == nullptr) return Status::Ok();
  return SumPartials(ctx, p.dtype, partials, plan.splits, FilterCount(p), {}, dw, what.c_str());
}

}  // namespace jaxconv::cuda::conv
