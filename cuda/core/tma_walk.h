// The walk of an im2col copy of TMA (sm_90), and what a descriptor can say of it. Host C++17 without CUDA headers, so that
// domains can ask (cuda/domain.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace jaxconv::cuda {

// Columns of pixels of a tensor (channels, W, [H, [D,]] N). Along a spatial dimension i the walk visits first[i], first[i] +
// step[i], ..., count[i] positions in all, fastest dimension first; index 0 is W. A copy adds its own offset to every position.
struct TmaWalk {
  int first[3];
  int step[3];  // in [1, 8]
  int count[3];
};

// The last position of a walk, counted from the last element of an extent.
inline int64_t UpperCorner(int64_t extent, const TmaWalk& walk, int i) {
  return walk.first[i] + int64_t(walk.count[i] - 1) * walk.step[i] + 1 - extent;
}

// The corners of the walk's box must fit the descriptor of a tensor of `axes` spatial axes (W H D), and so must the largest
// offset: the sentence that says why not, or "".
inline std::string RefuseWalk(int axes, const int64_t (&extent)[3], const TmaWalk& walk,
                              const int64_t (&largest_offset)[3]) {
  const int64_t corner = axes == 1 ? 32768 : axes == 2 ? 128 : 16;
  const int64_t offset = axes == 1 ? 65535 : axes == 2 ? 255 : 31;
  for (int i = 0; i < axes; ++i) {
    const int64_t first = walk.first[i], upper = UpperCorner(extent[i], walk, i);
    if (std::min(first, upper) < -corner || std::max(first, upper) >= corner) {
      return "its padding may reach " + std::to_string(corner) + " pixels past " +
             std::to_string(axes) + "-dimensional images, which is as far as TMA walks";
    }
    if (largest_offset[i] >= offset) {
      return "its (filter - 1) * dilation must be below " + std::to_string(offset) + " in " +
             std::to_string(axes) + " dimensions, got " + std::to_string(largest_offset[i]);
    }
    if (walk.step[i] < 1 || walk.step[i] > 8)
      return "its strides must be at most 8, got " + std::to_string(walk.step[i]);
  }
  return "";
}

}  // namespace jaxconv::cuda
