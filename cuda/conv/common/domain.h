// What the families' domains share: limits of coordinates, and questions about a problem. Host C++17 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "common/checked.h"
#include "common/problem.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv {

// Coordinates of every kernel are ints: extents, strides, paddings and dilated filter spans below 2^30, so that the sum of
// two stays an int.
constexpr int64_t kCoordLimit = int64_t(1) << 30;

constexpr int64_t kMostGridRows = 65535;  // CTAs along a grid's second axis

inline bool Half(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// Bytes of an element times so many of them: whether 16-byte accesses fit.
inline bool WholeVectors(const ConvProblem& p, int64_t elements) {
  return elements * int64_t(SizeOf(p.dtype)) % 16 == 0;
}

inline int64_t FilterCount(const ConvProblem& p) { return p.k * p.group_c() * p.filter_size(); }

// Partial sums of dw in float32, where the reduction is cut into several parts; the largest number where they are more bytes
// than that.
inline int64_t PartialsBytes(const ConvProblem& p, int64_t splits) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Checked bytes = Checked(splits) * FilterCount(p) * 4;
  return splits <= 1 ? 0 : bytes.Within(0, kMost) ? bytes.value() : kMost;
}

// Whether the first axis of three is left alone, so that its planes are images.
inline bool PlanesAreImages(const ConvProblem& p) {
  return p.filter[0] == 1 && p.stride[0] == 1 && p.pad[0] == 0 && p.in[0] == p.out[0];
}

// A filter that steps by its own width reads each element of x once, and the S*C elements under a filter row are
// neighbours: a convolution over pixels of S*C channels with a filter of width 1. Where the same holds along H, every
// output row is an image of its own of R rows, which saves the stride; not for dgrad, whose phases (one tap each) the
// stride makes.
inline ConvProblem FoldPatches(ConvProblem p, bool dgrad) {
  const auto patches = [&](int i) { return p.filter[i] > 1 && p.steps_by_filter(i); };
  if (!p.channels_last || p.groups != 1 || !patches(2)) return p;
  p.c *= p.filter[2];
  p.in[2] = p.out[2];
  p.filter[2] = p.stride[2] = 1;
  const bool flat = p.filter[0] == 1 && p.steps_by_filter(0);
  if (!dgrad && flat && patches(1)) {
    p.n *= p.in[0] * p.out[1];
    p.in[0] = p.out[0] = p.out[1] = p.stride[1] = 1;
    p.in[1] = p.filter[1];
  }
  return p;
}

inline std::string RefuseCoordinates(const ConvProblem& p) {
  const auto fits = [](int64_t v) { return v > -kCoordLimit && v < kCoordLimit; };
  const auto magnitude = [](int64_t v) { return v < 0 ? -v : v; };
  bool ok = fits(p.n) && fits(p.c) && fits(p.k) && fits(p.in_size()) && fits(p.out_size()) &&
            fits(p.filter_size()) && fits(p.filter_size() * p.group_c()) &&
            fits(p.filter_size() * p.group_k());
  for (int d = 0; d < 3; ++d) {
    ok = ok && fits(p.stride[d]) && fits(p.pad[d]) && fits(p.dilation[d]) &&
         fits(p.out[d] * p.stride[d] + magnitude(p.pad[d])) &&
         fits(p.in[d] + magnitude(p.pad[d])) &&
         fits(p.filter[d] * p.dilation[d] + magnitude(p.pad[d]));
  }
  return ok ? ""
            : "batch, channels, pixels of an image, taps times channels of a group, and every "
              "coordinate must stay below 2^30";
}

// Whether elements from a thread's first pixel of a row to its last are an int, where `run` pixels `dilation` apart are its own.
inline bool RunFits(const ConvProblem& p, int64_t run) {
  return run * p.dilation[2] * std::max(p.c, p.k) < int64_t(1) << 31;
}

}  // namespace jaxconv::cuda::conv
