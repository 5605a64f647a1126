// What the group-norm kernels can run, how a block's threads lie on a pixel, and the workspaces. Host C++17 without CUDA
// headers (cuda/domain.h).
//
//   two_read     the sums in one launch, then what is written
//   interleaved  both in one launch: blocks that write follow blocks that sum up at a distance of `chunk` items, so that
//                what they read again is still in the L2 cache; 16-byte vectors only
//
// An item is one of the `splits` runs of pixels of an image.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/domain.h"

namespace jaxconv::cuda::groupnorm {

constexpr int kThreads = 256;
// Bytes of shared memory that any block of any device has without asking.
constexpr int64_t kShared = 48 * 1024;

// Elements in an access: 16 bytes where they divide the channels.
inline int Vector(const GroupNormProblem& p) {
  const int vector = 16 / static_cast<int>(SizeOf(p.dtype));
  return p.channels % vector != 0 ? 1 : vector;
}

// A pixel is `row` vectors, cut into `tiles` of `lanes` vectors, a thread each; a block takes `rows` pixels in a step.
struct Lanes {
  int64_t row, tiles, lanes, rows;
};

inline Lanes LanesOf(int64_t channels, int64_t vector) {
  const int64_t row = channels / vector, tiles = CeilDivide(row, kThreads);
  const int64_t lanes = CeilDivide(row, tiles);
  return {row, tiles, lanes, kThreads / lanes};
}

// Shared memory of a block, bytes: the threads' two sums of each channel of a vector, the channels' two sums and a number
// for each group; or, of a block that writes, four numbers for each group.
inline int64_t SharedBytes(const GroupNormProblem& p, int64_t vector) {
  return 4 * std::max(2 * kThreads * vector + 2 * p.channels + p.groups, 4 * p.groups);
}

inline std::string Refusal(const GroupNormProblem& p, const Plan& plan) {
  if (plan.kernel != "two_read" && plan.kernel != "interleaved") return "there is no such kernel";
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  if (plan.splits < 1 || plan.splits > 65535)
    return "it needs splits of 1 to 65535, got " + std::to_string(plan.splits);
  constexpr int64_t kMost = (int64_t{1} << 30) - 1;
  if (p.channels > kMost || p.pixels > kMost || p.pixels > kMost / std::max<int64_t>(p.channels, 1))
    return "it needs images of fewer than 2^30 elements";
  if (p.batch > kMost || p.images > kMost || p.batch * p.images > kMost / plan.splits)
    return "it needs fewer than 2^30 images times splits";
  const int64_t shared = SharedBytes(p, Vector(p));
  if (shared > kShared)
    return "its channels and groups need " + std::to_string(shared) +
           " bytes of shared memory of " + std::to_string(kShared);
  if (plan.kernel == "two_read") return "";
  if (Vector(p) == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(16 / SizeOf(p.dtype));
  if (plan.chunk < plan.splits)
    return "it needs a distance (chunk) of no fewer items than an image has, " +
           std::to_string(plan.splits) + ", got " + std::to_string(plan.chunk);
  return "";
}

// Where in the workspace what lies, bytes from its start.
struct Scratch {
  int64_t
      parts;  // (batch * images, groups, splits) pairs of float32: an item's two sums for each group
  int64_t
      sums;  // (batch * images * splits, 2, channels) float32: an item's share of dbias and dscale
  int64_t counters;  // (1 + batch * images) uint32: the items taken; of each image those summed up
  int64_t end;
};

inline Scratch ScratchOf(GroupNormOp op, const GroupNormProblem& p, const Plan& plan) {
  const int64_t images = p.batch * p.images;
  Scratch s = {};
  s.sums = Align256(images * p.groups * plan.splits * 8);
  s.counters =
      s.sums +
      (op == GroupNormOp::kBackward ? Align256(images * plan.splits * 2 * p.channels * 4) : 0);
  s.end = s.counters + (plan.kernel == "interleaved" ? Align256((1 + images) * 4) : 0);
  return s;
}

}  // namespace jaxconv::cuda::groupnorm
