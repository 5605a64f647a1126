// What the pooling kernels can run. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <string>

#include "cuda/domain.h"

namespace jaxconv::cuda::pool {

// Extents, steps and what a window spans, below which 32-bit coordinates of an axis cannot overflow.
constexpr int64_t kLargestExtent = int64_t{1} << 29;
constexpr int64_t kMaxThreads = (int64_t{1} << 31) - 1;

// Elements in an access: 16 bytes where the channels divide into them.
inline int Vector(const PoolProblem& p) {
  const int vector = 16 / static_cast<int>(SizeOf(p.dtype));
  return p.c % vector == 0 ? vector : 1;
}

// dx is made in blocks of 2 x 2 pixels (of images of one row: of 1 x 2). Where the stride is even they start where a
// window may, so that all pixels at one place of their blocks have the same taps.
inline int BlockRows(const PoolProblem& p) { return p.in[1] > 1 ? 2 : 1; }
// Pixels of the first block that are in front of the image, on axis 1 or 2.
inline int64_t BlockShift(const PoolProblem& p, int axis) {
  const bool even = p.stride[axis] % 2 == 0 && (axis == 2 || BlockRows(p) == 2);
  return even ? p.pad[axis] % 2 : 0;
}
inline int64_t Blocks(const PoolProblem& p, int axis) {
  const int64_t size = axis == 2 ? 2 : BlockRows(p);
  return CeilDivide(p.in[axis] + BlockShift(p, axis), size);
}

// Threads: an access of y each, or of a block of dx.
inline int64_t ForwardThreads(const PoolProblem& p, int vector) {
  return p.n * p.out_size() * (p.c / vector);
}
inline int64_t BackwardThreads(const PoolProblem& p, int vector) {
  return p.n * p.in[0] * Blocks(p, 1) * Blocks(p, 2) * (p.c / vector);
}

// Of averages, and what both have in common.
inline std::string RefusalOfAverages(const PoolProblem& p, const Plan& plan) {
  if (plan.kernel != "gather") return "there is no such kernel";
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  for (int i = 0; i < 3; ++i) {
    const int64_t span = p.window[i] * p.dilation[i];
    const int64_t reach = (p.out[i] - 1) * p.stride[i] + span;
    const int64_t most = std::max({p.in[i], p.out[i], p.stride[i], p.pad[i], span, reach});
    if (most >= kLargestExtent)
      return "it needs extents, strides, pads and dilated windows below 2^29, got " +
             std::to_string(most);
  }
  const int64_t threads = std::max(ForwardThreads(p, Vector(p)), BackwardThreads(p, Vector(p)));
  if (threads > kMaxThreads)
    return "it needs fewer than 2^31 threads, got " + std::to_string(threads);
  return "";
}

inline std::string Refusal(const PoolProblem& p, const Plan& plan) {
  if (p.taps() > kMaxPoolTaps)
    return "positions are bytes: it needs windows of at most " + std::to_string(kMaxPoolTaps) +
           " taps, got " + std::to_string(p.taps());
  return RefusalOfAverages(p, plan);
}

}  // namespace jaxconv::cuda::pool
