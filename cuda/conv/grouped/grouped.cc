// The grouped family's face: its kernels by the names of plans.
#include "cuda/conv/grouped/grouped.h"

#include "cuda/conv/common/launchers.h"
#include "cuda/conv/grouped/kernels.h"

namespace jaxconv::cuda {
namespace {

constexpr conv::Launchers kKernels[] = {
    {"grouped/mma", conv::GroupedMma, conv::GroupedMmaWgrad},
    {"grouped/rows", conv::GroupedRows, conv::GroupedRowsWgrad},
    {"grouped/rows_float32", conv::GroupedRowsFloat32, conv::GroupedRowsFloat32Wgrad},
};

}  // namespace

Status GroupedFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  return conv::Fprop(kKernels, ctx, p, e, plan, x, w, bias, y, z);
}

Status GroupedDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                    const void* w, void* dx, Workspace) {
  return conv::Dgrad(kKernels, ctx, p, plan, dy, w, dx);
}

Status GroupedWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                    const void* dy, void* dw, Workspace workspace) {
  return conv::Wgrad(kKernels, ctx, p, plan, x, dy, dw, workspace);
}

}  // namespace jaxconv::cuda
