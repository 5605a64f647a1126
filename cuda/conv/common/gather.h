// Loaders that read an operand of the matrix product out of a convolution's tensors. Host and device,
// as cuda/gemm/tile.h: construct per tile, At(0) ... At(kCount - 1), Advance(), and so on.
//
// All spatial triples are (D H W) or (T R S); digits are (n, o, p, q) or (t, r, s, c), slowest
// first.
#pragma once

#include <cstdint>

#include "cuda/conv/common/dgrad_phases.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/tile.h"

namespace jaxconv::cuda {

// "Row coordinate" walks the grid of the product's pixels, "tap" the filter:
//   source coordinate = row * row_step + origin + tap * tap_step,  read as 0 outside [0, source)
// fprop: row_step = stride, origin = -pad, tap_step = dilation. A phase of dgrad: row_step 1,
// tap_step <= 0.
struct Gather {
  int source[3];  // extents of the tensor that is read
  int rows[3];    // extents of the pixel grid; >= 1
  int row_step[3];
  int origin[3];
  int tap_step[3];
  int taps[3];     // >= 1; a phase without taps has an empty reduction instead
  int channels;    // the reduction's fastest axis: C/G or K/G
  int64_t pitch;   // elements between neighbouring pixels: C or K
  Digits4 tile_k;  // a k-tile in digits (t, r, s, channel): the step of a k-major loader
};

JAXCONV_HD void SetTileK(Gather& g, int tile_k) {
  g.tile_k = SplitDigits(tile_k, g.taps[1], g.taps[2], g.channels);
}

// Any coordinate plus this is negative, whatever the tap: coordinates are below 2^30 (checked on
// the host).
inline constexpr int kFarOutside = -(1 << 30);

// A pixel of the product's rows: where its tap 0 reads.
struct GatherRow {
  int64_t offset;  // elements; the pixel may lie outside, and the offset be negative
  int at[3];
};

JAXCONV_HD int64_t PixelOffset(const Gather& g, int64_t n, int d, int h, int w) {
  return (((n * g.source[0] + d) * g.source[1] + h) * g.source[2] + w) * g.pitch;
}

JAXCONV_HD GatherRow MakeGatherRow(const Gather& g, int m, int m_end) {
  GatherRow row;
  if (m >= m_end) {
    row.offset = 0;
    row.at[0] = kFarOutside;
    row.at[1] = row.at[2] = 0;
    return row;
  }
  const Digits4 pixel = SplitDigits(m, g.rows[0], g.rows[1], g.rows[2]);
  for (int i = 0; i < 3; ++i) row.at[i] = pixel.digit[i + 1] * g.row_step[i] + g.origin[i];
  row.offset = PixelOffset(g, pixel.digit[0], row.at[0], row.at[1], row.at[2]);
  return row;
}

JAXCONV_HD bool InSource(const Gather& g, int d, int h, int w) {
  return unsigned(d) < unsigned(g.source[0]) && unsigned(h) < unsigned(g.source[1]) &&
         unsigned(w) < unsigned(g.source[2]);
}

// A thread's place on the reduction axis (t, r, s, c) of a k-major tile, moving by a k-tile at a
// time. digit[0] >= taps[0]: past the end.
struct TapWalk {
  JAXCONV_HD TapWalk(const Gather& g, int k)
      : at(SplitDigits(k, g.taps[1], g.taps[2], g.channels)) {}
  JAXCONV_HD void Advance(const Gather& g) {
    AddDigits(at, g.tile_k, g.taps[1], g.taps[2], g.channels);
  }
  Digits4 at;
};

// Pixels x (t r s c), k-major: x of fprop, dy of dgrad. `rows` holds MakeGatherRow of the tile's
// kExtent pixels; a thread keeps its own when they are few. channels is a multiple of kVec.
template <typename T, int kExtent, int kVec, int kThreads>
struct PixelTapLoader : TileMap<T, kExtent, true, kVec, kThreads> {
  using Map = TileMap<T, kExtent, true, kVec, kThreads>;
  static constexpr bool kKeep = Map::kCount <= 4;

  JAXCONV_HD PixelTapLoader(const Gather& gather, const GatherRow* rows, int thread)
      : gather(gather), table(rows + Map::Row(thread)), walk(gather, Map::Column(thread)) {
    if constexpr (kKeep) {
      for (int i = 0; i < Map::kCount; ++i) kept[i] = table[i * Map::kStep];
    }
    Place();
  }

  JAXCONV_HD Span At(int i) const {
    GatherRow row;
    if constexpr (kKeep) {
      row = kept[i];
    } else {
      row = table[i * Map::kStep];
    }
    const bool inside =
        walk.at.digit[0] < gather.taps[0] &&
        InSource(gather, row.at[0] + shift[0], row.at[1] + shift[1], row.at[2] + shift[2]);
    return {row.offset + offset, inside ? kVec * int(sizeof(T)) : 0};
  }

  JAXCONV_HD void Advance() {
    walk.Advance(gather);
    Place();
  }

  JAXCONV_HD void Place() {
    for (int i = 0; i < 3; ++i) shift[i] = walk.at.digit[i] * gather.tap_step[i];
    offset = PixelOffset(gather, 0, shift[0], shift[1], shift[2]) + walk.at.digit[3];
  }

  const Gather& gather;
  const GatherRow* table;
  TapWalk walk;
  int shift[3];    // of the current tap, in pixels
  int64_t offset;  // of the current tap and channel, in elements
  GatherRow kept[kKeep ? Map::kCount : 1];
};

// Where the taps of a dgrad phase lie in w (T, R, S, C/G, K): tap (t, r, s) of the phase at base +
// t*step[0] + ...
struct FilterTaps {
  int64_t base, step[3];  // elements
  int64_t pitch;          // between input channels: K
};

// Input channels x (t r s k), k-major: w of dgrad.
template <typename T, int kExtent, int kVec, int kThreads>
struct FilterTapLoader : TileMap<T, kExtent, true, kVec, kThreads> {
  using Map = TileMap<T, kExtent, true, kVec, kThreads>;

  JAXCONV_HD FilterTapLoader(const Gather& gather, const FilterTaps& taps, int c0, int c_end,
                             int thread)
      : gather(gather),
        taps(taps),
        walk(gather, Map::Column(thread)),
        first(taps.base + (c0 + Map::Row(thread)) * taps.pitch),
        rows_left(c_end - c0 - Map::Row(thread)) {
    Place();
  }

  JAXCONV_HD Span At(int i) const {
    const bool inside = walk.at.digit[0] < gather.taps[0] && i * Map::kStep < rows_left;
    return {offset + i * Map::kStep * taps.pitch, inside ? kVec * int(sizeof(T)) : 0};
  }

  JAXCONV_HD void Advance() {
    walk.Advance(gather);
    Place();
  }

  JAXCONV_HD void Place() {
    offset = first + walk.at.digit[3];
    for (int i = 0; i < 3; ++i) offset += walk.at.digit[i] * taps.step[i];
  }

  const Gather& gather;
  const FilterTaps& taps;
  TapWalk walk;
  int64_t first, offset;  // elements
  int rows_left;
};

// (t r s c) x pixels, mn-major: x of wgrad. A thread stays at its tap and channels and walks the
// pixels; the last row of one k-tile is kStep pixels before the first of the next, so one running
// coordinate serves all its rows.
template <typename T, int kExtent, int kVec, int kThreads>
struct TapPixelLoader : TileMap<T, kExtent, false, kVec, kThreads> {
  using Map = TileMap<T, kExtent, false, kVec, kThreads>;

  // m0: the tile's first (t r s c); k_begin, k_end: this part's pixels, k_begin a multiple of the
  // k-tile.
  JAXCONV_HD TapPixelLoader(const Gather& gather, int m0, int m_end, int k_begin, int k_end,
                            int thread)
      : gather(gather),
        pixel(SplitDigits(k_begin + Map::Row(thread), gather.rows[0], gather.rows[1],
                          gather.rows[2])),
        step(SplitDigits(Map::kStep, gather.rows[0], gather.rows[1], gather.rows[2])),
        left(k_end - k_begin - Map::Row(thread)) {
    const int m = m0 + Map::Column(thread);
    const Digits4 tap = SplitDigits(m, gather.taps[1], gather.taps[2], gather.channels);
    for (int i = 0; i < 3; ++i) shift[i] = tap.digit[i] * gather.tap_step[i] + gather.origin[i];
    channel = tap.digit[3];
    if (m >= m_end) left = 0;
  }

  JAXCONV_HD Span At(int) {
    const int d = pixel.digit[1] * gather.row_step[0] + shift[0];
    const int h = pixel.digit[2] * gather.row_step[1] + shift[1];
    const int w = pixel.digit[3] * gather.row_step[2] + shift[2];
    const bool inside = left > 0 && InSource(gather, d, h, w);
    const int64_t offset = PixelOffset(gather, pixel.digit[0], d, h, w) + channel;
    AddDigits(pixel, step, gather.rows[0], gather.rows[1], gather.rows[2]);
    left -= Map::kStep;
    return {offset, inside ? kVec * int(sizeof(T)) : 0};
  }

  JAXCONV_HD void Advance() {}

  const Gather& gather;
  Digits4 pixel, step;
  int shift[3];
  int channel;
  int left;  // pixels of this part from the current one on
};

}  // namespace jaxconv::cuda
