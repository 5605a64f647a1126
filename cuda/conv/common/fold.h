// The launches of planes.h: x and w to the folded problem's, and its dw back.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// q is PlanesAsChannels(p). Arrays are 16-byte aligned.
Status FoldPlanes(const Context& ctx, const ConvProblem& p, const ConvProblem& q, const void* x,
                  void* to, const std::string& what);
Status FoldFilter(const Context& ctx, const ConvProblem& p, const ConvProblem& q, const void* w,
                  void* to, const std::string& what);
Status UnfoldFilter(const Context& ctx, const ConvProblem& p, const ConvProblem& q,
                    const void* from, void* dw, const std::string& what);

}  // namespace jaxconv::cuda::conv
