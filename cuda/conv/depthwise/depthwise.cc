// The depthwise family's face: its kernels by the names of plans.
#include "cuda/conv/depthwise/depthwise.h"

#include "cuda/conv/common/launchers.h"
#include "cuda/conv/depthwise/kernels.h"

namespace jaxconv::cuda {
namespace {

constexpr conv::Launchers kKernels[] = {
    {"depthwise/fma", conv::DepthwiseFma, conv::DepthwiseFmaWgrad},
    {"depthwise/mma", conv::DepthwiseMma, conv::DepthwiseMmaWgrad},
    {"depthwise/conv1d", conv::DepthwiseConv1d, conv::DepthwiseConv1dWgrad},
    {"depthwise/rows", conv::DepthwiseRows, conv::DepthwiseRowsWgrad},
    {"depthwise/rows_strided", conv::DepthwiseRowsStrided, conv::DepthwiseRowsStridedWgrad},
    {"depthwise/rows_mma", conv::DepthwiseRowsMma, conv::DepthwiseRowsMmaWgrad},
    {"depthwise/few", conv::DepthwiseFew, nullptr},  // its domain refuses weight gradients
};

}  // namespace

Status DepthwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                      const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  return conv::Fprop(kKernels, ctx, p, e, plan, x, w, bias, y, z);
}

Status DepthwiseDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                      const void* w, void* dx, Workspace) {
  return conv::Dgrad(kKernels, ctx, p, plan, dy, w, dx);
}

Status DepthwiseWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* dy, void* dw, Workspace workspace) {
  return conv::Wgrad(kKernels, ctx, p, plan, x, dy, dw, workspace);
}

}  // namespace jaxconv::cuda
