// What im2col can run, and the memory of its columns. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::im2col {

// Of the products' rows and columns, ints, so that a tile more than the last does not overflow.
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 1 - 4096;

inline int64_t Chunk(const ConvProblem& p, const Plan& plan) { return std::min(plan.chunk, p.n); }

inline std::string Refusal(const ConvProblem& p, const Plan& plan) {
  if (plan.chunk < 1)
    return "it needs a chunk of at least 1 image, got " + std::to_string(plan.chunk);
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  const bool fits = Chunk(p, plan) * p.out_size() <= kMaxExtent;
  return fits ? "" : "it needs fewer than 2^31 output pixels of a chunk of images";
}

// The columns of a chunk of images, of dgrad in float32.
inline int64_t ColumnBytes(ConvOp op, const ConvProblem& p, const Plan& plan) {
  const int64_t item = op == ConvOp::kDgrad ? 4 : int64_t(SizeOf(p.dtype));
  return Align256(Chunk(p, plan) * p.c * p.filter_size() * p.out_size() * item);
}

// wgrad: partial sums of dw, of a part of every chunk's images each.
inline int64_t Parts(const ConvProblem& p, const Plan& plan) {
  const int64_t chunk = Chunk(p, plan);
  if (chunk == 0) return 0;
  return CeilDivide(chunk, CeilDivide(chunk, std::min(plan.splits, chunk)));
}

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  const int64_t partials = op == ConvOp::kWgrad ? Parts(p, plan) * FilterCount(p) * 4 : 0;
  return ColumnBytes(op, p, plan) + partials;
}

}  // namespace jaxconv::cuda::conv::im2col
