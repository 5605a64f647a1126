// Where a channel's elements lie. Index arithmetic only, for host and device.
//
// The array (batch, outer, channels, inner) is read in vectors of V elements. A block owns one tile
// of channels of one instance and a range of its positions; a position is one vector per lane:
//
//   channels-last  (inner == 1): V divides channels; tile = lanes * V neighbouring channels,
//   positions = outer.
//                                A thread keeps its V channels and walks down the rows.
//   channels-first (inner > 1):  V divides inner; tile = one channel, lanes = 1, positions = outer
//   * inner / V.
//                                All of a vector belongs to the channel.
//
// With V = 1 either always applies. Where V does not divide inner but is smaller, an image's first and last vector hold
// elements of its neighbours too: there are kernels that choose among a vector's elements (PieceOf).
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace jaxconv::cuda::batchnorm {

constexpr int64_t kMaxPositions = int64_t{1} << 31;  // per channel; exclusive
constexpr int64_t kMaxImage =
    int64_t{1} << 30;  // elements read in vectors, channels-first; exclusive: flat.cuh's offsets

// Offsets and extents in vectors, unless they say channels.
struct Layout {
  int64_t batch;
  int64_t channels;
  int64_t row;         // from one outer index to the next: channels * inner / V
  int64_t instance;    // from one instance to the next: outer * row
  uint32_t positions;  // [0, 2^31)
  uint32_t inner;      // vectors that an image's elements lie in, at most; 1 in channels-last
  uint32_t image;      // inner, elements
  bool pieces;         // V does not divide inner
  int64_t images;      // channels-first: from one image of a channel to the next, elements
  int64_t elements;    // of the array
  uint32_t multiplier,
      shift;  // position / inner == (position * multiplier >> 32) >> shift, where inner > 1
  int lanes;  // threads side by side across channels, in [1, 32]; MakeLayout's are a power of two
  int64_t tiles;  // channel tiles of an instance
};

// One axis less to walk where there is one channel only: all its elements are neighbours.
inline BatchNormProblem Canonical(BatchNormProblem p) {
  if (p.channels == 1) {
    p.inner *= p.outer;
    p.outer = 1;
  }
  return p;
}

// The most lanes that `tile_bytes` of neighbouring channels allow: 8 (a 128-byte line of 16-byte
// vectors) rather than 16 where that leaves fewer lanes idle, and less where there are fewer
// vectors of channels.
inline int Lanes(int64_t channel_vectors, int vector_bytes, int tile_bytes) {
  int lanes = tile_bytes / vector_bytes < 32 ? tile_bytes / vector_bytes : 32;
  while (lanes > 1 && lanes / 2 >= channel_vectors) lanes /= 2;
  const auto idle = [&](int64_t l) { return (channel_vectors + l - 1) / l * l - channel_vectors; };
  while (lanes > 8 && idle(lanes / 2) < idle(lanes)) lanes /= 2;
  return lanes;
}

// Lanes for blocks that do not need a power of two, up to 32: `lanes`, which are one, unless these leave more than a
// sixteenth of the threads idle (beyond the row's end, or too few for another row of lanes) and others, no narrower, fewer:
// 18 where a row is of 18 vectors, which is then read whole.
inline int BusyLanes(int64_t channel_vectors, int lanes, int threads) {
  const auto busy = [&](int l) {
    const int64_t tiles = (channel_vectors + l - 1) / l;
    return static_cast<double>(channel_vectors) * (threads / l) /
           static_cast<double>(tiles * threads);
  };
  if (busy(lanes) >= 15. / 16) return lanes;
  const int64_t narrowest = lanes < channel_vectors ? lanes : channel_vectors;
  int best = lanes;
  for (int l = 32; l >= narrowest; --l) {
    if (l <= channel_vectors && busy(l) > busy(best) + .04) best = l;
  }
  return best;
}

// p is canonical and has fewer than kMaxPositions elements per channel; `vec` divides channels or
// inner as said above.
inline Layout MakeLayout(const BatchNormProblem& p, bool channels_last, int vec, int tile_bytes) {
  Layout a{};
  a.batch = p.batch;
  a.channels = p.channels;
  a.row = p.channels * p.inner / vec;
  a.instance = p.outer * a.row;
  a.inner = static_cast<uint32_t>(channels_last ? 1 : p.inner / vec);
  a.pieces = !channels_last && p.inner % vec != 0;
  if (a.pieces) a.inner = static_cast<uint32_t>((p.inner + vec - 2) / vec + 1);
  a.images = p.channels * p.inner;
  a.image = static_cast<uint32_t>(p.inner);
  a.elements = p.batch * p.outer * p.channels * p.inner;
  a.positions = static_cast<uint32_t>(p.outer * a.inner);
  // ceil(2^(31 + s) / d), s = ceil(log2 d): exact for every position below 2^31.
  while ((uint64_t{1} << a.shift) < a.inner) ++a.shift;
  if (a.inner > 1) {
    a.multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + a.shift)) + a.inner - 1) / a.inner);
    --a.shift;
  }
  a.lanes = 1;
  a.tiles = p.channels;
  if (channels_last) {
    a.lanes = Lanes(a.row, vec * static_cast<int>(SizeOf(p.dtype)), tile_bytes);
    a.tiles = (a.row + a.lanes - 1) / a.lanes;
  }
  return a;
}

// The first vector of a tile column in one instance: add Step(a, position).
template <bool kLast>
JAXCONV_HD int64_t Base(const Layout& a, int64_t instance, int64_t tile, int lane) {
  return instance * a.instance + (kLast ? tile * a.lanes + lane : tile * a.inner);
}

// position / a.inner; a.inner > 1.
JAXCONV_HD uint32_t OuterOf(const Layout& a, uint32_t position) {
#ifdef __CUDA_ARCH__
  return __umulhi(position, a.multiplier) >> a.shift;
#else
  return static_cast<uint32_t>(uint64_t{position} * a.multiplier >> 32) >> a.shift;
#endif
}

template <bool kLast>
JAXCONV_HD int64_t Step(const Layout& a, uint32_t position) {
  if (kLast) return position * a.row;
  if (a.inner == 1) return position * a.row;
  const uint32_t outer = OuterOf(a, position);
  return outer * a.row + (position - outer * a.inner);
}

// Channels-first: the first element of a channel.
JAXCONV_HD int64_t FirstElement(const Layout& a, int64_t instance, int64_t channel) {
  const int64_t first = channel * a.image;
  return a.batch > 1 ? first + instance * (a.elements / a.batch) : first;
}

// The vector at a position, and, where a.pieces, the place in its image of the vector's first element, below zero (it
// wraps) where that is another image's: element j is the image's where first + j < a.image.
struct Piece {
  int64_t at;
  uint32_t first;
};
// Channels-first. `channel`: its first element.
template <int V>
JAXCONV_HD Piece PieceOf(const Layout& a, int64_t channel, uint32_t position) {
  const uint32_t outer = a.inner == 1 ? position : OuterOf(a, position);
  const uint32_t vector = position - outer * a.inner;
  if (!a.pieces) return {channel / V + outer * a.row + vector, 0};
  const uint64_t first = channel + outer * a.images;
  return {static_cast<int64_t>(first / V) + vector, vector * V - static_cast<uint32_t>(first % V)};
}

// Part i of n takes positions [Cut(i), Cut(i + 1)): any n >= 1, parts differ by at most one
// position and may be empty.
JAXCONV_HD uint32_t Cut(uint32_t positions, int64_t part, int64_t parts) {
  return static_cast<uint32_t>(positions * part / parts);
}

// Part i of n takes positions [first, first + each), then those `jump` further, and so on: all parts read in one moving
// window, as DRAM likes it, and the end of the array is what the L2 cache keeps.
struct Turns {
  uint32_t first, jump;
  JAXCONV_HD Turns(int64_t part, int64_t parts, uint32_t each)
      : first(Bounded(part * each)), jump(Bounded(parts * each)) {}

 private:
  JAXCONV_HD static uint32_t Bounded(int64_t positions) {
    return static_cast<uint32_t>(positions < kMaxPositions ? positions : kMaxPositions);
  }
};

// A linear block index, channel tiles fastest.
struct Place {
  int64_t tile, part, instance;
};
JAXCONV_HD Place Locate(const Layout& a, int64_t block, int64_t parts) {
  const int64_t rest = block / a.tiles;
  return {block - rest * a.tiles, rest % parts, rest / parts};
}

}  // namespace jaxconv::cuda::batchnorm
