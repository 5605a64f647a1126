// A convolution as TMA sees it: what the domain asks and the launchers encode. Host C++17 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/problem.h"
#include "cuda/conv/common/dgrad_phases.h"
#include "cuda/core/tma_walk.h"

namespace jaxconv::cuda {

inline constexpr int kSm90Phases = 8;  // of a strided dgrad, the most

// Of the descriptors of images: 3 to 5, by the first spatial axis that does anything.
inline int Rank(const ConvProblem& p) {
  const auto trivial = [&](int i) {
    return p.in[i] == 1 && p.out[i] == 1 && p.filter[i] == 1 && p.pad[i] == 0;
  };
  return !trivial(0) ? 5 : !trivial(1) ? 4 : 3;
}

// A 1x1 convolution that is a matrix product.
inline bool Plain(const ConvProblem& p) {
  for (int i = 0; i < 3; ++i) {
    if (p.filter[i] != 1 || p.stride[i] != 1 || p.pad[i] != 0 || p.in[i] != p.out[i]) return false;
  }
  return true;
}

// The walk of fprop and wgrad over x. Axes are W, H, D, here and below.
inline TmaWalk InputWalk(const ConvProblem& p) {
  TmaWalk walk;
  for (int i = 0; i < 3; ++i) {
    walk.first[i] = int(-p.pad[2 - i]);
    walk.step[i] = int(std::min<int64_t>(p.stride[2 - i], 1 << 30));
    walk.count[i] = int(p.out[2 - i]);
  }
  return walk;
}

// One axis of a phase of dgrad as a walk of stride 1 over dy, taps in descending order: pixel h reads h + first + j * step, j
// < taps, which meets filter element tap + j * tap_step.
struct DgradWalk {
  int rows, taps, first, step;
  int tap, tap_step;
};

inline DgradWalk MakeDgradWalk(const DgradAxis& a, int residue) {
  const DgradPhase part = MakeDgradPhase(a, residue);
  const int last = std::max(part.taps - 1, 0), between = a.stride / a.gcd;
  const int step = a.dilation / a.gcd;
  return {part.rows, part.taps, part.origin - last * step, step, part.first + last * between,
          -between};
}

// A walk and the largest offsets of `taps` taps `step` apart against the images `extent` (D H W).
inline std::string RefuseImages(int rank, const int64_t (&extent)[3], const TmaWalk& walk,
                                const int64_t (&taps)[3], const int64_t (&step)[3]) {
  const int64_t reversed[3] = {extent[2], extent[1], extent[0]};
  int64_t offset[3];
  for (int i = 0; i < 3; ++i) {
    offset[i] = std::min<int64_t>(std::max<int64_t>(taps[i] - 1, 0) * step[i], int64_t(1) << 30);
  }
  return RefuseWalk(rank - 2, reversed, walk, offset);
}

inline std::string RefuseImages(int rank, const int64_t (&extent)[3], const TmaWalk& walk) {
  return RefuseImages(rank, extent, walk, {1, 1, 1}, {0, 0, 0});
}

}  // namespace jaxconv::cuda
