// What im2col can run, and the memory of its columns. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <string>

#include "common/checked.h"
#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::im2col {

// Of the products' rows and columns, ints, so that a tile more than the last does not overflow.
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 1 - 4096;
constexpr int64_t kMaxBytes = (int64_t(1) << 60) - 1;

inline int64_t Chunk(const ConvProblem& p, const Plan& plan) { return std::min(plan.chunk, p.n); }

inline std::string Refusal(const ConvProblem& p, const Plan& plan) {
  if (plan.chunk < 1)
    return "it needs a chunk of at least 1 image, got " + std::to_string(plan.chunk);
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  const Checked chunk = Chunk(p, plan);
  if (!(chunk * p.out_size()).Within(0, kMaxExtent))
    return "it needs fewer than 2^31 output pixels of a chunk of images";
  // Columns of four bytes an element, and wgrad's partial sums
  const Checked columns = chunk * p.c * p.filter_size() * p.out_size() * 4;
  const Checked partials = std::min(plan.splits, chunk.value()) * Checked(FilterCount(p)) * 4;
  const bool fits = columns.Within(0, kMaxBytes) && partials.Within(0, kMaxBytes);
  return fits ? "" : "it needs columns and partial sums of less than 2^60 bytes";
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
