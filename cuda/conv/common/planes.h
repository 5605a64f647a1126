// A filter of several planes (T of them, three axes) and few input channels, a volume's first layer, as a filter of one plane:
//
//   y[n, o, p, q, k]  = sum over t, r, s, c of x[n, o * stride + t * dilation - pad, ..., c] * w[t, r, s, c, k]
//   dw[t, r, s, c, k] = sum over n, o, p, q of x[n, o * stride + t * dilation - pad, ..., c] * dy[n, o, p, q, k]
//
// The planes that an output's window spans become channels: for each plane o of y, x's T planes are written as one of T*C
// channels, filled up with zeros to 4, 8, 16 or 32. What is left is a convolution of images of few channels, whose wgrad reads
// dy once. Reads x T times, writes and reads these channels of each pixel of a plane of x: little beside the K of y. Host
// C++17 without CUDA headers; fold.h has the launches.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/conv/common/domain.h"

namespace jaxconv::cuda::conv {

constexpr int kMostFolded = 32;  // channels

inline ConvProblem PlanesAsChannels(ConvProblem p) {
  const int64_t channels = p.filter[0] * p.c;
  p.c = channels <= 4 ? 4 : channels <= 8 ? 8 : channels <= 16 ? 16 : kMostFolded;
  p.in[0] = p.out[0];
  p.filter[0] = p.stride[0] = p.dilation[0] = 1;
  p.pad[0] = 0;
  return p;
}

// Of the folded problem's x, and of its w or dw.
inline int64_t FoldedBytes(const ConvProblem& q) {
  return Align256(q.n * q.in_size() * q.c * int64_t(SizeOf(q.dtype)));
}
inline int64_t FoldedFilterBytes(const ConvProblem& q) {
  return Align256(FilterCount(q) * int64_t(SizeOf(q.dtype)));
}

// least, most: planes of taps times channels.
inline std::string RefuseFolding(ConvOp op, const ConvProblem& p, int64_t least, int64_t most) {
  const bool few = p.filter[0] >= 2 && p.filter[0] <= most && p.c <= most;
  const int64_t channels = few ? p.filter[0] * p.c : 0;
  if ((op == ConvOp::kFprop || op == ConvOp::kWgrad) && p.groups == 1 && channels >= least &&
      channels <= most) {
    return RefuseCoordinates(p);
  }
  return "it needs fprop or wgrad of a filter of several planes, which times the input channels "
         "are " +
         (least > 1 ? std::to_string(least) + " to " : "at most ") + std::to_string(most);
}

}  // namespace jaxconv::cuda::conv
