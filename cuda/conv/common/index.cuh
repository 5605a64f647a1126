// Where the elements of x, y and w lie, and which of them meet: for the kernels that are written to be read (direct,
// im2col). Everything is 64-bit, so no extent overflows.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace jaxconv::cuda::conv {

struct Position {
  int64_t n, c, at[3];  // at: D H W
};

// x or y: (N, D, H, W, C) or (N, C, D, H, W).
struct ImageArray {
  int64_t channels, extent[3];
  bool channels_last;

  __host__ __device__ int64_t pixels() const { return extent[0] * extent[1] * extent[2]; }
  __host__ __device__ int64_t channel_step() const { return channels_last ? 1 : pixels(); }

  __device__ int64_t At(const Position& p) const {
    const int64_t pixel = (p.at[0] * extent[1] + p.at[1]) * extent[2] + p.at[2];
    return channels_last ? (p.n * pixels() + pixel) * channels + p.c
                         : (p.n * channels + p.c) * pixels() + pixel;
  }
  // The inverse of At.
  __device__ Position Split(int64_t i) const {
    Position p;
    if (channels_last) p.c = i % channels, i /= channels;
    for (int d = 2; d >= 0; --d) p.at[d] = i % extent[d], i /= extent[d];
    if (!channels_last) p.c = i % channels, i /= channels;
    p.n = i;
    return p;
  }
  // To the next pixel of one channel, images one after another.
  __device__ void Advance(Position& p) const {
    for (int d = 2; d >= 0; --d) {
      if (++p.at[d] < extent[d]) return;
      p.at[d] = 0;
    }
    ++p.n;
  }
};

struct FilterPosition {
  int64_t tap, c, k;  // tap: (t * R + r) * S + s; c: of its group
};

// w: (T, R, S, C/G, K) or (K, C/G, T, R, S).
struct FilterArray {
  int64_t taps, c, k;  // c: of a group
  bool channels_last;

  __host__ __device__ int64_t channel_step() const { return channels_last ? k : taps; }
  __host__ __device__ int64_t output_step() const { return channels_last ? 1 : c * taps; }

  __device__ int64_t At(const FilterPosition& p) const {
    return channels_last ? (p.tap * c + p.c) * k + p.k : (p.k * c + p.c) * taps + p.tap;
  }
  // The inverse of At.
  __device__ FilterPosition Split(int64_t i) const {
    if (channels_last) return {i / k / c, i / k % c, i % k};
    return {i % taps, i / taps % c, i / taps / c};
  }
};

// Pixel o of y and tap t meet at pixel o * stride - pad + t * dilation of x.
struct Meeting {
  ImageArray x, y;
  FilterArray w;
  int64_t groups, group_c, group_k;
  int64_t filter[3], stride[3], pad[3], dilation[3];

  explicit Meeting(const ConvProblem& p)
      : x{p.c, {p.in[0], p.in[1], p.in[2]}, p.channels_last},
        y{p.k, {p.out[0], p.out[1], p.out[2]}, p.channels_last},
        w{p.filter_size(), p.group_c(), p.k, p.channels_last},
        groups(p.groups),
        group_c(p.group_c()),
        group_k(p.group_k()) {
    for (int d = 0; d < 3; ++d) {
      filter[d] = p.filter[d];
      stride[d] = p.stride[d];
      pad[d] = p.pad[d];
      dilation[d] = p.dilation[d];
    }
  }

  __device__ void SplitTap(int64_t tap, int64_t (&t)[3]) const {
    for (int d = 2; d >= 0; --d) t[d] = tap % filter[d], tap /= filter[d];
  }
  // The pixel of x that pixel `o` of y meets through `tap`; false where it lies in the padding.
  __device__ bool InputAt(const int64_t (&o)[3], int64_t tap, int64_t (&at)[3]) const {
    int64_t t[3];
    SplitTap(tap, t);
    for (int d = 0; d < 3; ++d) {
      at[d] = o[d] * stride[d] - pad[d] + t[d] * dilation[d];
      if (at[d] < 0 || at[d] >= x.extent[d]) return false;
    }
    return true;
  }
  // The pixel of y that meets pixel `at` of x through `tap`; false where there is none.
  __device__ bool OutputAt(const int64_t (&at)[3], int64_t tap, int64_t (&o)[3]) const {
    int64_t t[3];
    SplitTap(tap, t);
    for (int d = 0; d < 3; ++d) {
      const int64_t scaled = at[d] + pad[d] - t[d] * dilation[d];
      if (scaled < 0 || scaled % stride[d] != 0) return false;
      o[d] = scaled / stride[d];
      if (o[d] >= y.extent[d]) return false;
    }
    return true;
  }
};

// A kernel takes a thread for each of `count` elements, in a loop where they are more than a grid has.
constexpr int kElementThreads = 256;
inline unsigned ElementBlocks(int64_t count) {
  const int64_t blocks = (count + kElementThreads - 1) / kElementThreads;
  return unsigned(blocks < (int64_t(1) << 30) ? blocks : int64_t(1) << 30);
}
__device__ inline int64_t FirstElement() {
  return int64_t(blockIdx.x) * kElementThreads + threadIdx.x;
}
__device__ inline int64_t ElementStride() { return int64_t(gridDim.x) * kElementThreads; }

}  // namespace jaxconv::cuda::conv
