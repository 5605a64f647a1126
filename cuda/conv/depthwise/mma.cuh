// Tiles of a depthwise convolution on the tensor cores, shared by fprop, dgrad and wgrad.
//
// For one channel a row of the convolution is a product with a banded matrix: 8 neighbouring
// outputs are 16 neighbouring inputs times a 16 x 8 matrix that holds the filter row along its
// diagonals. mma.m16n8k16 does that for 16 rows at a time, where a "row" is any 16-byte-aligned run
// of 16 inputs of one channel. So a channels-last tile is transposed in shared memory, in place:
//
//   A slot is 16 bytes. A cell of 8 slots holds 8 pixels along W times 8 channels (an octet), first
//   as pixels x channels, as in global memory, after TransposeCells as channels x pixels: slot i is
//   then channel i of the octet at the cell's 8 pixels. ldmatrix.trans and stmatrix on the same 8
//   addresses do that, so a cell never leaves its 128 bytes and needs one warp only.
//
//   slot i of cell (row, seg, octet) lies at
//     ((row * pitch + seg) * kOctets + octet) * 128 + 16 * (i ^ swizzle(row, seg, octet)) bytes,
//   where the swizzle makes the same channel of 8 neighbouring cells lie in different banks.
//
// A tile's outputs are 16 streams: pairs (strip, seg), seg one of `segs` runs of 8 pixels along W,
// strip one of images * bands parts of `rows` rows along H. A warp walks down all 16 at once, so
// that each of its inputs is read from shared memory once. Strips of one image share their halo.
// A long 1-D line is cut into rows of 16 segs: `line` is set, and a row starts 128 pixels after the
// one above it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/depthwise/domain.h"
#include "cuda/core/device.h"
#include "cuda/core/mma.cuh"

namespace jaxconv::cuda::conv {

using namespace depthwise;  // the limits in domain.h

// Shared memory of a block, in bytes.
struct DepthwiseMmaTile {
  int64_t budget = 72 * 1024;
};

constexpr int kTileThreads = 256;

// The inputs (or, halo 0, the outputs) of a tile in shared memory.
struct Cells {
  int pitch;       // segs of a row
  int image_rows;  // rows of one image
  int units;       // (row, seg) pairs, all images
  int turn;        // of the swizzle, per row
  FastDiv by_image_rows;
};

// An array (images, H, W, channels) seen by tiles.
struct Plane {
  int images, h, w, channels;
};

struct TileShape {
  int images, bands, rows, segs;  // images * bands * segs <= 16 streams of `rows` rows
  int strips;                     // images * bands
  bool line;
  Cells in, out;
  int tiles_w, tiles_h;  // tiles along W and H of an image
  int64_t tiles;         // of one channel tile
  FastDiv by_tiles_w, by_tiles_h;
};

// Where a tile starts.
struct TileOrigin {
  int image, p, q;
};

JAXCONV_HD TileOrigin OriginOf(const TileShape& t, int64_t tile) {
  const QuotRem w = DivMod(tile, t.by_tiles_w);
  const QuotRem h = DivMod(w.quot, t.by_tiles_h);
  return {int(h.quot) * t.images, h.rem * t.bands * t.rows,
          w.rem * (t.line ? t.rows : 1) * t.segs * 8};
}

inline Cells MakeCells(int pitch, int image_rows, int units, int turn) {
  return {pitch, image_rows, units, turn, FastDiv(image_rows)};
}

template <int kOctets>
JAXCONV_HD constexpr int CellBytes() {
  return kOctets * 128;  // of one (row, seg)
}

// Shared memory for cells, in bytes.
template <int kOctets>
int64_t CellsBytes(const Cells& c) {
  return int64_t(c.units) * CellBytes<kOctets>();
}

// The shape that moves and computes least for (images, p, q) outputs and `filter_rows`, where a
// run of 8 outputs reaches `reach` cells to its right (at most kStreams), with at
// most `budget` bytes of input (and output, if `both`) cells. Always finds one: a single row of one
// image fits.
template <int kOctets>
TileShape ChooseTile(int64_t images, int64_t p, int64_t q, int filter_rows, int reach,
                     int64_t budget, bool both) {
  TileShape best{};
  const int halo = filter_rows - 1;
  const int64_t all_segs = CeilDiv(q, 8);
  if (p == 1 && halo == 0 && all_segs > kStreams) {
    best.images = best.bands = best.strips = 1;
    best.segs = kStreams;
    best.line = true;
    const int64_t row_bytes = kStreams * CellBytes<kOctets>() * (both ? 2 : 1);
    best.rows =
        int(std::max<int64_t>(1, std::min(CeilDiv(all_segs, kStreams),
                                          (budget - reach * CellBytes<kOctets>()) / row_bytes)));
    best.in = MakeCells(kStreams, best.rows + 1, kStreams * best.rows + reach, 0);
    best.out = MakeCells(kStreams, best.rows, kStreams * best.rows, 0);
    best.tiles_h = 1;
    best.tiles_w = int(CeilDiv(all_segs, int64_t(kStreams) * best.rows));
    best.tiles = images * best.tiles_w;
  } else {
    const int64_t tiles_w = CeilDiv(all_segs, kStreams);
    const int segs = int(CeilDiv(all_segs, tiles_w));
    int64_t least = INT64_MAX;
    const int64_t row_units = segs + reach + (both ? segs : 0);
    for (int bands = 1; bands <= kStreams / segs && bands <= p; ++bands) {
      const int64_t fit =
          (budget / CellBytes<kOctets>() - halo * (segs + reach)) / (bands * row_units);
      const int64_t first = CeilDiv(p, bands * std::max<int64_t>(fit, 1));
      for (int64_t tiles_h = first; tiles_h < first + 6; ++tiles_h) {
        const int64_t rows = CeilDiv(p, bands * tiles_h);
        for (int of = int(std::min<int64_t>(kStreams / (segs * bands), images)); of >= 1;
             of = of > 1 ? of / 2 : 0) {
          const int64_t in_units = of * (bands * rows + halo) * (segs + reach);
          const int64_t out_units = of * bands * rows * segs;
          const int64_t bytes = (in_units + (both ? out_units : 0)) * CellBytes<kOctets>();
          if (bytes > budget && (rows > 1 || of > 1)) continue;
          const int64_t tiles = CeilDiv(images, of) * CeilDiv(p, bands * rows) * tiles_w;
          // In units of a cell moved; a stream step of 16 rows costs about as much as 8 cells, and
          // a tile's barriers as much as 100.
          const int64_t cost = tiles * (in_units + out_units + 8 * (rows + halo) + 100);
          if (cost >= least) continue;
          least = cost;
          best.images = of;
          best.bands = bands;
          best.rows = int(rows);
          best.tiles_h = int(CeilDiv(p, bands * rows));
          best.tiles = tiles;
        }
        if (rows == 1) break;
      }
    }
    best.segs = segs;
    best.strips = best.images * best.bands;
    best.tiles_w = int(tiles_w);
    const int rows_out = best.bands * best.rows;
    // Two strips of 4 segs share a phase of ldmatrix: `turn` puts the lower one 4 banks further.
    int turn = 0;
    for (int t = 1; t < 8 && best.strips > 1 && segs < 8; ++t) {
      if ((t * best.rows - segs) % 8 == 0) turn = t;
    }
    best.in = MakeCells(segs + reach, rows_out + halo,
                        best.images * (rows_out + halo) * (segs + reach), turn);
    best.out = MakeCells(segs, rows_out, best.images * rows_out * segs, turn);
  }
  best.by_tiles_w = FastDiv(best.tiles_w);
  best.by_tiles_h = FastDiv(best.tiles_h);
  return best;
}

// ---------------------------------------------------------------------------------------------------------------------
// On the device. Addresses are in bytes of the shared window.

// A warp takes every eighth row, and of a row kUnits = 4 / kOctets units, which are 4 cells, at a
// time: addresses are worked out once a row and then only advance.

// What lies outside the array is zero. The octets of a pixel are read by neighbouring lanes. Of an
// element type T of 16 bits.
template <int kOctets, typename T>
__device__ __forceinline__ void LoadCells(const Cells& c, bool line, uint32_t shared,
                                          const T* __restrict__ from, const Plane& plane, int image,
                                          int h0, int w0, int channel0) {
  constexpr int kUnits = 4 / kOctets;
  const int lane = threadIdx.x % 32;
  const int octet = lane % kOctets, i = lane / kOctets % 8, seg0 = lane / (8 * kOctets);
  const int channel = channel0 + octet * 8;
  const int64_t step = int64_t(8 * kUnits) * plane.channels;
  for (int row = threadIdx.x / 32; row * c.pitch < c.units; row += kTileThreads / 32) {
    const int of = line ? 0 : int(c.by_image_rows.Div(row));
    const int h = line ? h0 : h0 + row - of * c.image_rows;
    const int segs = min(c.pitch, c.units - row * c.pitch);
    const bool live =
        channel < plane.channels && image + of < plane.images && unsigned(h) < unsigned(plane.h);
    const unsigned width = live ? plane.w : 0;
    int w = w0 + ((line ? row * c.pitch : 0) + seg0) * 8 + i;
    const T* at =
        from + ((int64_t(image + of) * plane.h + h) * plane.w + w) * plane.channels + channel;
    uint32_t cell = shared + uint32_t((row * c.pitch + seg0) * kOctets + octet) * 128;
    int phase = seg0 + c.turn * row + octet * (8 / kOctets);
    for (int seg = seg0; seg < segs; seg += kUnits) {
      const bool inside = unsigned(w) < width;
      CopyAsync<16>(cell + uint32_t((i ^ (phase & 7)) << 4), inside ? at : from, inside ? 16 : 0);
      w += 8 * kUnits;
      at += step;
      cell += 512;
      phase += kUnits;
    }
  }
}

// In place, the cells that this warp has loaded. A lane past the end repeats the last cell: equal
// values to equal addresses.
template <int kOctets>
__device__ __forceinline__ void TransposeCells(const Cells& c, uint32_t shared) {
  constexpr int kUnits = 4 / kOctets;
  const int lane = threadIdx.x % 32;
  const int octet = lane / 8 % kOctets, seg0 = lane / (8 * kOctets);
  for (int row = threadIdx.x / 32; row * c.pitch < c.units; row += kTileThreads / 32) {
    const int segs = min(c.pitch, c.units - row * c.pitch);
    const uint32_t cell = shared + uint32_t(row * c.pitch * kOctets + octet) * 128;
    const int phase = c.turn * row + octet * (8 / kOctets);
#pragma unroll 2
    for (int first = 0; first < segs; first += kUnits) {
      const int seg = min(first + seg0, segs - 1);
      const uint32_t slot =
          cell + uint32_t(seg * (kOctets * 128) + ((lane % 8 ^ ((phase + seg) & 7)) << 4));
      uint32_t r[4];
      LoadMatrixTransposed(r, slot);
      StoreMatrix4(slot, r);
    }
  }
}

}  // namespace jaxconv::cuda::conv
