// The grouped family's face: its kernels by the names of plans.
#include "cuda/conv/grouped/grouped.h"

#include "cuda/conv/common/launchers.h"
#include "cuda/conv/common/statistics.h"
#include "cuda/conv/grouped/domain.h"
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

Status GroupedStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* w, void* y, void* mean, void* var, Workspace workspace) {
  const std::string what = Describe("conv_statistics", p, plan);
  StatisticsParts parts = {};
  parts.moments = static_cast<float2*>(workspace.data);
  parts.counts = reinterpret_cast<float*>(parts.moments + conv::grouped::MostParts(p) * p.k);
  JAXCONV_RETURN_IF_ERROR(conv::GroupedRowsStatistics(ctx, p, x, w, y, &parts, what));
  return CombineStatistics(ctx, parts, p.n * p.out_size(), p.k, mean, var, what);
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
