// The launchers of the grouped kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// dst = y from src = x, or (dgrad) dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop.
using GroupedForward = Status(const Context& ctx, const ConvProblem& p, bool dgrad,
                              const Epilogue& e, const void* src, const void* w, const void* bias,
                              void* dst, void* z, const std::string& what);
GroupedForward GroupedMma, GroupedRows, GroupedRowsFloat32;

// dw, or with several splits its partial sums (splits, elements of dw) in float32.
using GroupedWgradOf = Status(const Context& ctx, const ConvProblem& p, int64_t splits,
                              const void* x, const void* dy, void* dw, float* partials,
                              const std::string& what);
GroupedWgradOf GroupedMmaWgrad, GroupedRowsWgrad, GroupedRowsFloat32Wgrad;

}  // namespace jaxconv::cuda::conv
