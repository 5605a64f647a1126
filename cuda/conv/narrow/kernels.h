// The launchers of the narrow kernels, one for each element type. domain.h says what each can run; cuda/conv/conv.cu has
// asked before they are called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"

namespace jaxconv::cuda::conv {

// A ForwardLauncher whose sums an array like dst may be added to: before z, behind the bias. It may be null.
using AddLauncher = Status(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                           const void* src, const void* w, const void* bias, const void* addend,
                           void* dst, void* z, const std::string& what);
// dgrad through e's activation: kept like dz, not read where there is none; *parts parts of its sums (at most
// narrow::kMostParts, p.c each). `addend`, like dz, is added behind the derivative. It may be null.
using BackLauncher = Status(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                            const void* dy, const void* w, const void* kept, const void* addend,
                            void* dz, float* sums, int64_t* parts, const std::string& what);

AddLauncher NarrowRowsF32, NarrowRowsBf16, NarrowRowsF16;
BackLauncher NarrowRowsBackF32, NarrowRowsBackBf16, NarrowRowsBackF16;
WgradLauncher NarrowRowsWgradF32, NarrowRowsWgradBf16, NarrowRowsWgradF16;

}  // namespace jaxconv::cuda::conv
