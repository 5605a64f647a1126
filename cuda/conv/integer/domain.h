// What the integer kernels can run: every integer convolution whose coordinates are ints. Host C++17 without CUDA headers
// (cuda/domain.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::integer {

// Outputs of a block of "integer/tile": rows are pixels, columns are channels of a group.
constexpr int64_t kRows = 64, kColumns = 64;
// Of "integer/output".
constexpr int64_t kThreads = 256;
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

inline int64_t Tiles(const IntegerConvProblem& p) {
  return CeilDivide(p.n * p.out_size(), kRows) * CeilDivide(p.group_k(), kColumns) * p.all_groups();
}

inline std::string Refusal(const IntegerConvProblem& p, const Plan& plan) {
  const bool tile = plan.kernel == "integer/tile";
  if (!tile && plan.kernel != "integer/output") return "there is no such kernel";
  for (int d = 0; d < 3; ++d) {
    const int64_t reach = (p.out[d] - 1) * p.stride[d] + p.w_size(d);
    const int64_t most = std::max({p.x_size(d), reach, p.pad[d], -p.pad[d], p.stride[d]});
    if (most >= kCoordLimit)
      return "it needs extents, dilated, and pads below 2^30, got " + std::to_string(most);
  }
  const int64_t reduced = p.c * p.filter_size();
  if (reduced >= kCoordLimit)
    return "it needs sums of fewer than 2^30 products, got " + std::to_string(reduced);
  const int64_t blocks = tile ? Tiles(p) : CeilDivide(p.n * p.out_size() * p.k, kThreads);
  if (blocks > kMaxBlocks) return "it needs fewer than 2^31 blocks, got " + std::to_string(blocks);
  return "";
}

}  // namespace jaxconv::cuda::conv::integer
