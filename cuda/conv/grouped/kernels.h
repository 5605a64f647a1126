// The launchers of the grouped kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda::conv {

ForwardLauncher GroupedMma, GroupedRows, GroupedRowsFloat32;
WgradLauncher GroupedMmaWgrad, GroupedRowsWgrad, GroupedRowsFloat32Wgrad;

// fprop, and the statistics of y in parts, for which `parts` has room.
Status GroupedRowsStatistics(const Context& ctx, const ConvProblem& p, const void* x, const void* w,
                             void* y, StatisticsParts* parts, const std::string& what);

}  // namespace jaxconv::cuda::conv
