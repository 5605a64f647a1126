// What the grouped kernels can run. Host C++17 without CUDA headers (cuda/domain.h).
//
//   grouped/mma           16 bit, 4 to 32 channels a group, filters up to 7x7, by mma.sync
//   grouped/rows          sm_90: 16 bit, 3x3 of 4, 8 or 16 channels a group, rows streamed through shared memory by TMA
//   grouped/statistics    rows' fprop with the mean and variance of its results
//   grouped/rows_float32  sm_90: the same as rows in float32, by FMAs
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::grouped {

constexpr int kMostTaps = 7;  // along an axis
constexpr int kMostReach = 16;

inline std::string RefuseMma(const ConvProblem& p) {
  if (!Half(p.dtype)) return std::string("it needs bfloat16 or float16, got ") + Name(p.dtype);
  const auto few = [](int64_t v) { return v >= 4 && v <= 32 && v % 4 == 0; };
  if (!few(p.group_c()) || !few(p.group_k()) || p.c % 8 != 0 || p.k % 8 != 0) {
    return "it needs 4, 8, ... 32 channels a group and a multiple of 8 in all, got " +
           std::to_string(p.group_c()) + " and " + std::to_string(p.group_k()) + " a group";
  }
  for (int d = 1; d < 3; ++d) {
    if (p.stride[d] > 2 || p.filter[d] > kMostTaps ||
        (p.filter[d] - 1) * p.dilation[d] > kMostReach) {
      return "it needs strides up to 2, filters up to 7 and dilated filters up to 17";
    }
  }
  return "";
}

inline std::string RefuseRows(const ConvProblem& p, const Device& device) {
  const int64_t group = p.group_c();
  bool fits = device.sm90() && p.c == p.k && (group == 4 || group == 8 || group == 16) &&
              WholeVectors(p, p.c) && p.stride[1] == p.stride[2] && p.stride[1] <= 2;
  for (int d = 1; d < 3; ++d) {
    fits = fits && p.filter[d] == 3 && p.dilation[d] == 1 && p.padded_below_filter(d);
  }
  if (fits) return "";
  return std::string(p.dtype == DType::kF32 ? "in float32 " : "") +
         "it needs compute capability 9.0, a 3x3 filter of stride 1 or 2, not dilated, with "
         "padding "
         "of 0 to 2, and 4, 8 or 16 channels a group on both sides, whole 16 bytes in all";
}

inline std::string Refusal(std::string_view kernel, ConvOp op, const ConvProblem& p,
                           const Device& device) {
  if (device.shared_memory() < 163 * 1024)
    return "its largest tiles need the shared memory of compute capability 8.0 or 9.0";
  if (p.groups < 1) return "it needs groups of at least 1";
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  if (!p.channels_last) return "it needs channels-last arrays";
  if (!PlanesAreImages(p))
    return "in 3-D it needs one tap, stride 1 and no padding on the first axis";
  if (p.n * p.in[0] >= kCoordLimit) return "it needs fewer than 2^30 planes";
  const bool statistics = kernel == "statistics";
  if (statistics && op != ConvOp::kStatistics) return "it makes statistics only";
  if (!statistics && op == ConvOp::kStatistics) return "it makes no statistics";
  if (kernel == "mma") return RefuseMma(p);
  if (kernel == "rows" || statistics) {
    if (!Half(p.dtype)) return std::string("it needs bfloat16 or float16, got ") + Name(p.dtype);
    return RefuseRows(p, device);
  }
  if (kernel == "rows_float32") {
    if (p.dtype != DType::kF32) return std::string("it needs float32, got ") + Name(p.dtype);
    if (!RunFits(p, 16)) return "it needs fewer than 2^31 elements in a run of 16 columns";
    return RefuseRows(p, device);
  }
  return "there is no such kernel";
}

// Blocks among which statistics share the rows of 64 channels: at most two of each of a chip's 144 multiprocessors.
inline int64_t MostBlocks(int64_t channels) {
  return std::max<int64_t>(2 * 144 / CeilDivide(channels, 64), 1);
}
// Parts that these make: two each. A row may be several, of 32 columns and more.
inline int64_t MostParts(const ConvProblem& p) {
  const int64_t rows = p.n * p.out[0] * p.out[1] * CeilDivide(p.out[2], 32);
  return 2 * std::min(MostBlocks(p.k), rows);
}

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  if (op == ConvOp::kStatistics) return MostParts(p) * (p.k * 8 + 4);
  return op == ConvOp::kWgrad ? PartialsBytes(p, plan.splits) : 0;
}

}  // namespace jaxconv::cuda::conv::grouped
