// What im2col can run, and the memory of its columns. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::im2col {

inline std::string Refusal(const ConvProblem& p, const Plan& plan) {
  if (plan.chunk < 1)
    return "it needs a chunk of at least 1 image, got " + std::to_string(plan.chunk);
  return RefuseCoordinates(p);
}

// The columns of a chunk of images (of dgrad in float32) and beside them the packed filter, which channels-first arrays do
// not need, or dw's partial sums.
inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  const int64_t chunk = std::min(plan.chunk, p.n), item = int64_t(SizeOf(p.dtype));
  const int64_t columns = chunk * p.c * p.filter_size() * p.out_size();
  if (op == ConvOp::kWgrad)
    return Align256(columns * item) + std::min(plan.splits, chunk) * FilterCount(p) * 4;
  const int64_t packed = p.channels_last ? Align256(FilterCount(p) * item) : 0;
  return Align256(columns * (op == ConvOp::kDgrad ? 4 : item)) + packed;
}

}  // namespace jaxconv::cuda::conv::im2col
