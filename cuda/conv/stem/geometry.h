// Where the pixels of a stem's tiles lie in shared memory: what its launchers and its domain both compute. Host C++17
// without CUDA headers; the kernels read the structures.
//
// An image of few channels is called narrow (x or dx where C is small, y or dy where K is), the other wide. Every pass
// sums products of narrow[i * stride + shift(tap), c] and wide[i, k]:
//
//   C is small:  narrow is x or dx, wide is y or dy, shift(tap) = tap * dilation - pad
//   K is small:  narrow is y or dy, wide is x or dx, stride 1, shift(tap) = pad - tap * dilation
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "common/problem.h"
#include "cuda/conv/common/domain.h"
#include "cuda/core/divmod.h"

namespace jaxconv::cuda::conv {

inline constexpr int kFew = 8;  // channels of a narrow image
inline constexpr int kUnitBytes = 8;

struct StemGeometry {
  int images, channels, wide_channels;             // channels: of narrow
  int narrow[2], wide[2];                          // H W
  int64_t narrow_n, narrow_h, narrow_w, narrow_c;  // strides, elements
  int64_t w_tap, w_narrow, w_wide;                 // of w: between taps, narrow and wide channels
  int taps_w, taps, pixel_units, units;  // pixel_units: of one narrow pixel; units: of all taps
  int stride[2], step[2], first[2];      // first: the least shift; step: between taps
  bool flip;

  int rows, cols, pixels;               // a tile of wide pixels
  int narrow_rows, narrow_cols, pitch;  // its narrow pixels; bytes from a pixel to the next
  // Three channels, densely: four neighbouring pixels are three aligned pieces, which are fetched
  // while the tile before is worked on. The tile then starts `lead` pixels early, at a piece.
  bool dense, staged;
  int lead, items;  // items: fours of pixels
  // Where every window starts at a multiple of 16 bytes its rows are read as pairs of units, by
  // ldmatrix: `row_pairs` a filter row, the first `skip` pixels (0 or 1) and the last being
  // padding.
  bool paired;
  int skip, row_pairs;
  uint32_t narrow_bytes, staged_bytes;
  int tiles_h, tiles_w;
  int64_t tiles;
  FastDiv by_cols, by_tiles_h, by_tiles_w, by_quads;
};

inline bool FewInputs(const ConvProblem& p) { return p.c <= kFew; }  // else few outputs

// Everything but the tile.
inline StemGeometry MakeGeometry(const ConvProblem& p) {
  StemGeometry g{};
  const bool few_in = FewInputs(p);
  g.images = int(p.n * p.in[0]);
  g.channels = int(few_in ? p.c : p.k);
  g.wide_channels = int(few_in ? p.k : p.c);
  for (int d = 0; d < 2; ++d) {
    const int span = int((p.filter[d + 1] - 1) * p.dilation[d + 1]);
    g.narrow[d] = int(few_in ? p.in[d + 1] : p.out[d + 1]);
    g.wide[d] = int(few_in ? p.out[d + 1] : p.in[d + 1]);
    g.stride[d] = int(p.stride[d + 1]);
    g.step[d] = int(p.dilation[d + 1]);
    g.first[d] = int(few_in ? -p.pad[d + 1] : p.pad[d + 1] - span);
  }
  g.flip = !few_in;
  g.narrow_c = 1;
  g.narrow_w = g.channels;
  g.narrow_h = g.narrow_w * g.narrow[1];
  g.narrow_n = g.narrow_h * g.narrow[0];
  g.w_tap = p.c * p.k;
  g.w_narrow = few_in ? p.k : 1;
  g.w_wide = few_in ? 1 : p.k;
  g.taps_w = int(p.filter[2]);
  g.taps = int(p.filter_size());
  g.pixel_units = int(CeilDiv(g.channels, kUnitBytes / int(SizeOf(p.dtype))));
  g.units = g.taps * g.pixel_units;
  g.pitch = g.pixel_units * kUnitBytes;
  g.row_pairs = 1;
  g.dense = g.channels == 3 && g.narrow[1] % 4 == 0;
  return g;
}

// ---------------------------------------------------------------------------------------------------------------------
// stem/mma from narrow to wide, and wgrad: tiles of wide pixels and the narrow pixels of their windows

namespace stem {
constexpr int kTileChannels = 64;
constexpr int64_t kOperandBytes = 80 * 1024;  // of a filter in shared memory
constexpr int64_t kHalfShared = 113 * 1024;   // two blocks a multiprocessor
constexpr int64_t kMostShared = 160 * 1024;
constexpr int kWarpgroups = 2;                           // of a block
constexpr int kToWidePixels = 1024, kWgradPixels = 512;  // of a tile, at most
constexpr int kPlaceBytes = 8;                           // of a wide pixel, in a table
}  // namespace stem

// Reads windows as pairs of units where they are so aligned. On sm_90 sm90_narrow_in takes these, and the kernels that
// do it are not compiled.
inline void PairUnits(StemGeometry& g, bool sm90) {
  g.paired = !sm90 && g.step[1] == 1 && g.stride[1] * g.pitch % 16 == 0;
  if (!g.paired) return;
  g.skip = g.dense && (g.first[1] % 4 + 4) % 4 * g.pitch % 16 != 0;
  g.row_pairs = int(CeilDiv((g.taps_w + g.skip) * g.pitch, 16));
}

// Returns the bytes of the narrow pixels. `item`: bytes of an element.
inline int64_t SetTile(StemGeometry& g, int rows, int cols, int item) {
  g.rows = rows;
  g.cols = cols;
  g.pixels = rows * cols;
  g.tiles_h = int(CeilDiv(g.wide[0], rows));
  g.tiles_w = int(CeilDiv(g.wide[1], cols));
  g.tiles = int64_t(g.images) * g.tiles_h * g.tiles_w;
  g.narrow_rows = (rows - 1) * g.stride[0] + (g.taps / g.taps_w - 1) * g.step[0] + 1;
  g.narrow_cols = (cols - 1) * g.stride[1] + (g.taps_w - 1) * g.step[1] + 1;
  g.staged = g.dense && (g.tiles_w == 1 || cols * g.stride[1] % 4 == 0);
  g.lead = g.staged ? (g.first[1] % 4 + 4) % 4 : g.skip;
  if (g.paired) {  // what the last window's pairs reach
    g.narrow_cols = (cols - 1) * g.stride[1] - g.skip + int(CeilDiv(g.row_pairs * 16, g.pitch));
  }
  g.narrow_cols += g.lead;
  if (g.staged || g.paired) g.narrow_cols = int(CeilDiv(g.narrow_cols, 4)) * 4;
  g.items = g.staged ? g.narrow_rows * g.narrow_cols / 4 : 0;
  g.narrow_bytes = uint32_t(CeilDiv(int64_t(g.narrow_rows) * g.narrow_cols * g.pitch, 16) * 16);
  g.staged_bytes = uint32_t(g.items * 12 * item);
  g.by_cols = FastDiv(cols);
  g.by_tiles_h = FastDiv(g.tiles_h);
  g.by_tiles_w = FastDiv(g.tiles_w);
  g.by_quads = FastDiv(std::max(g.narrow_cols / 4, 1));
  return int64_t(g.narrow_bytes) + g.staged_bytes;
}

// What a tile may have: pixels, and bytes for its narrow pixels and `pixel_bytes` for each wide one; wide pixels are
// counted in quanta.
struct TileRoom {
  int item;
  int64_t budget;
  int most, pixel_bytes, quantum;

  bool Fits(StemGeometry& g, int rows, int cols) const {
    const int64_t narrow = SetTile(g, rows, cols, item);
    return rows * cols <= most &&
           narrow + CeilDiv(rows * cols, quantum) * quantum * pixel_bytes <= budget;
  }
};

// The columns of a tile, or 0: a whole row up to 128 pixels, less where one row does not fit.
inline int TileColumns(StemGeometry& g, const TileRoom& room) {
  int cols = int(CeilDiv(g.wide[1], CeilDiv(g.wide[1], 128)));
  while (cols > 8 && !room.Fits(g, 1, cols)) cols = (cols + 1) / 2;
  return room.Fits(g, 1, cols) ? cols : 0;
}

// The tile with the number of rows that wastes the least, by pixels of partial tiles (of `quantum`) and by halo. False
// where none fits.
inline bool ChooseTile(StemGeometry& g, const TileRoom& room) {
  const int cols = TileColumns(g, room);
  if (cols == 0) return false;
  int best = 1;
  double cost = 1e30;
  for (int rows = 1; rows <= g.wide[0] && room.Fits(g, rows, cols); ++rows) {
    const int tiles = int(CeilDiv(g.wide[0], rows));
    const double padded = double(tiles) * double(CeilDiv(rows * cols, room.quantum)) * room.quantum;
    const double loaded = double(tiles) * g.narrow_rows * g.narrow_cols;
    const double now = padded + 0.15 * loaded + 32 * tiles;  // a tile's barriers
    if (now < cost) {
      cost = now;
      best = rows;
    }
  }
  SetTile(g, best, cols, room.item);
  return true;
}

// Narrow to wide: the filter as the kernel with `most_steps` steps a chunk (4, or 14 in pairs) holds it.
struct ToWideFilter {
  int chunks, filter_tile;    // filter_tile: bytes of one channel tile's operand
  int channel_tiles, slices;  // of 64 channels: of a block, and how many blocks share a pixel
  uint32_t offsets_at, places_at;

  ToWideFilter(const StemGeometry& g, int steps, int most_steps) {
    chunks = int(CeilDiv(steps, most_steps));
    filter_tile = chunks * int(CeilDiv(most_steps, 4)) * 8192;
    const int tiles = int(CeilDiv(g.wide_channels, stem::kTileChannels));
    slices = int(CeilDiv(tiles, std::max<int64_t>(1, stem::kOperandBytes / filter_tile)));
    channel_tiles = int(CeilDiv(tiles, slices));
    offsets_at = uint32_t(channel_tiles * filter_tile);
    places_at = offsets_at + uint32_t(CeilDiv(chunks * most_steps * 16, 16) * 16);
  }
  TileRoom Room(int item, int64_t shared) const {
    return {item, shared - places_at, stem::kToWidePixels, stem::kPlaceBytes,
            stem::kWarpgroups * 64};
  }
};

// Steps of 32 bytes of k, after PairUnits.
inline int ToWideSteps(const StemGeometry& g) {
  return int(g.paired ? CeilDiv(g.taps / g.taps_w * g.row_pairs, 2) : CeilDiv(g.units, 4));
}
// Whether the steps go in chunks of 14.
inline bool LongChunks(const StemGeometry& g) {
  const int64_t steps = ToWideSteps(g);
  return g.paired && CeilDiv(steps, 14) * 14 <= CeilDiv(steps, 4) * 4;
}

// wgrad: what the two warpgroups of a block divide, units, channels (64 each), or pairs of steps.
struct WgradShares {
  int by_unit, by_channel, by_pixel;
  int channel_slices, unit_slices;  // of dw, each with blocks of its own
  int quantum;                      // pixels of a tile are padded to a multiple of it

  // Units of a warpgroup: two blocks of 64 rows, each a channel of a unit. A lane's row is its unit; float32 units have
  // half the channels, so that there are twice as many.
  static constexpr int GroupUnits(int item) { return 32 * item / 2; }

  WgradShares(const StemGeometry& g, int item) {
    const int tiles = int(CeilDiv(g.wide_channels, stem::kTileChannels));
    const int units = g.paired ? g.taps / g.taps_w * g.row_pairs * 2 : g.units;
    by_unit = units > GroupUnits(item);
    by_channel = !by_unit && tiles > 1;
    by_pixel = !by_unit && !by_channel;
    channel_slices = int(CeilDiv(tiles, 1 + by_channel));
    unit_slices = int(CeilDiv(units, GroupUnits(item) * (1 + by_unit)));
    quantum = 32 * (1 + by_pixel);
  }
  TileRoom Room(int item) const {
    return {item, stem::kHalfShared - stem::kWgradPixels * 4 - 1024, stem::kWgradPixels,
            2 * (1 + by_channel) * stem::kTileChannels * item, quantum};
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// From wide to narrow
//
//   narrow[j * stride + phase, c] = sum over offsets d, channels k of
//                                   wide[j + d, k] * w[tap(phase - stride * d), c, k]
//
// A column of the product is a (phase, c), so that all phases share the reads of wide.

constexpr int kMaxOffsets = 16;  // along an axis
constexpr int kMaxColumns = 64;

// The offsets between a narrow pixel's place j and the wide pixels that it sums over: j + offset.
struct NarrowOffsets {
  int pad[2];
  int count[2], least[2];  // offsets, and the least of them
  int offset[2][kMaxOffsets];
  int columns;  // stride[0] * stride[1] * channels
};

// False where an axis has more than kMaxOffsets.
inline bool SetOffsets(NarrowOffsets& o, const StemGeometry& g, const ConvProblem& p) {
  for (int d = 0; d < 2; ++d) {
    o.pad[d] = int(p.pad[d + 1]);
    const int taps = int(p.filter[d + 1]);
    // narrow = wide * stride + shift: d = (phase - shift) / stride, where that is whole.
    std::vector<int> found;
    for (int phase = 0; phase < g.stride[d]; ++phase) {
      for (int tap = 0; tap < taps; ++tap) {
        const int at = tap * g.step[d] - o.pad[d];
        const int from = phase - (g.flip ? -at : at);
        if (from % g.stride[d] == 0) found.push_back(from / g.stride[d]);
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found.empty() || int(found.size()) > kMaxOffsets) return false;
    o.count[d] = int(found.size());
    o.least[d] = found[0];
    std::copy(found.begin(), found.end(), o.offset[d]);
  }
  o.columns = g.stride[0] * g.stride[1] * g.channels;
  return true;
}

// stem/mma: a tile of narrow places, whose wide pixels with their halo are rows of 128 bytes one after another.
struct ToNarrowTile {
  int channel_blocks;                        // of 128 bytes
  uint32_t offsets_at, columns_at, wide_at;  // offsets_at: bytes of the filter
  int span_h, span_w;
  int rows, cols;  // of places j
  int wide_rows, wide_cols, m_tiles;
  int plane;  // bytes of the wide pixels of a channel block

  // kernel_columns: 16 or 64.
  ToNarrowTile(const StemGeometry& g, const NarrowOffsets& o, int kernel_columns, int item) {
    const int places = o.count[0] * o.count[1];
    channel_blocks = int(CeilDiv(g.wide_channels * int64_t(item), 128));
    offsets_at = uint32_t(channel_blocks * places * kernel_columns * 128);
    columns_at = uint32_t(CeilDiv(offsets_at + channel_blocks * places * 4, 16) * 16);
    wide_at = uint32_t(CeilDiv(columns_at + kernel_columns * 16, 1024) * 1024);
    span_h = o.offset[0][o.count[0] - 1] - o.least[0];
    span_w = o.offset[1][o.count[1] - 1] - o.least[1];
  }
  static int KernelColumns(const NarrowOffsets& o) { return o.columns <= 16 ? 16 : kMaxColumns; }

  int64_t Set(int of_rows, int of_cols, int buffers) {  // bytes
    rows = of_rows;
    cols = of_cols;
    wide_rows = rows + span_h;
    wide_cols = cols + span_w;
    m_tiles = int(CeilDiv((rows - 1) * wide_cols + cols, 64));
    plane = int(CeilDiv(m_tiles * 64 + span_h * wide_cols + span_w, 8) * 1024);
    return wide_at + buffers * int64_t(channel_blocks) * plane;
  }
  // Rows that `budget` bytes have room for, with these columns; below 1: none.
  int MostRows(int64_t budget, int of_cols, int buffers) const {
    const int64_t room = (budget - wide_at) / (buffers * channel_blocks * 128) - 64;
    return int(room / (of_cols + span_w)) - span_h;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// sm_90: rows of 64 or 112 pixels

constexpr int kSm90Shared = 227 * 1024;  // bytes of a block

// Pixels of a row that a product takes, at most 112, so that padding to 64 or 112 costs the least.
inline int RowColumns(int width) {
  const int64_t by64 = CeilDiv(width, 64), by112 = CeilDiv(width, 112);
  return int(CeilDiv(width, by64 * 64 <= by112 * 112 ? by64 : by112));
}

// stem/sm90_narrow_in: how the rows of narrow pixels that a row of wide ones needs are dealt to planes of chunks of 16
// bytes (sm90_narrow_in.cu).
struct NarrowWindows {
  int chunk_pixel, planes;  // bytes of a narrow pixel; planes of a row
  int plane_bytes, row_bytes;
  int cols;               // wide pixels
  int narrow_cols, lead;  // narrow pixels; lead: what lies left of the first window
  int first, row_chunks,
      skip;  // a window's first chunk, chunks of a row; the first `skip` pixels are padding

  NarrowWindows(const StemGeometry& g, int item) : NarrowWindows(g, item, Columns(g)) {}
  NarrowWindows(const StemGeometry& g, int item, int columns) : cols(columns) {
    chunk_pixel = g.channels * item <= 8 && g.step[1] == 1 && g.stride[1] % 2 == 0 ? 8 : 16;
    const int of_chunk = 16 / chunk_pixel;  // pixels
    planes = g.stride[1] / of_chunk;
    lead = g.dense ? (g.first[1] % 4 + 4) % 4 : 0;
    skip = lead % of_chunk;
    first = (lead - skip) / of_chunk;
    row_chunks = chunk_pixel == 8 ? int(CeilDiv(g.taps_w + skip, 2)) : g.taps_w;
    const int last = first + (cols - 1) * planes +
                     (chunk_pixel == 8 ? row_chunks - 1 : (g.taps_w - 1) * g.step[1]);
    narrow_cols = int(CeilDiv((last + 1) * of_chunk, 4)) * 4;
    plane_bytes = int(CeilDiv(narrow_cols / of_chunk, planes)) * 16;
    row_bytes = planes * plane_bytes;
  }
  static int Columns(const StemGeometry& g) {
    const int columns = RowColumns(g.wide[1]);
    return g.dense && columns < g.wide[1] ? int(CeilDiv(columns, 4)) * 4 : columns;
  }
  // Where chunk s of row r of the first window lies in a slot.
  int ChunkAt(const StemGeometry& g, int r, int s) const {
    const int at = first + (chunk_pixel == 8 ? s : s * g.step[1]);
    return r * g.step[0] * row_bytes + at % planes * plane_bytes + at / planes * 16;
  }
  // Bytes from one half of a step's 32 bytes of k to the other; the last half may be missing.
  int StepDistance(const StemGeometry& g, int step) const {
    const int chunks = g.taps / g.taps_w * row_chunks;
    const int low = step * 2, high = low + 1 == chunks ? low : low + 1;
    return std::abs(ChunkAt(g, high / row_chunks, high % row_chunks) -
                    ChunkAt(g, low / row_chunks, low % row_chunks));
  }
  // Of one of the two slots for tiles of `rows` rows of wide pixels.
  int SlotBytes(const StemGeometry& g, int rows) const {
    return ((rows - 1) * g.stride[0] + (g.taps / g.taps_w - 1) * g.step[0] + 1) * row_bytes;
  }
};

// Bytes for each of the blocks of a multiprocessor.
constexpr int RoomOf(int resident) { return (kSm90Shared + 1024) / resident - 2048; }

constexpr int kMostSteps = 32;          // of 32 bytes of k, narrow to wide
constexpr int kConsumers = 2;           // warpgroups
constexpr int kMostDistance = 1 << 18;  // of a descriptor's field, bytes

// Of RoomOf, what the two slots leave: narrow to wide with rows of kernel_columns = 64 or 112 pixels.
inline int NarrowInFilterTile(int steps) { return int(CeilDiv(steps, 4)) * 64 * 128; }
inline int NarrowInRoom(const StemGeometry& g, int steps, int kernel_columns, int resident) {
  const int boxes = kConsumers * 2 * kernel_columns * 128;
  const int64_t filter = CeilDiv(g.wide_channels, 64) * NarrowInFilterTile(steps);
  return int(std::max<int64_t>(RoomOf(resident) - filter - boxes - kernel_columns * 16 - 64, -1));
}

// stem/sm90_pooled: warpgroups that multiply, by the bytes of an element. A warpgroup's own work on a row takes twice as long
// as the row's products. float32 has no room for a third one.
constexpr int PooledGroups(int item) { return item == 2 ? 3 : 2; }

// stem/sm90_pooled: y, behind a max-pooling of windows of 2 or 3 rows and columns that step by 2. A tile's columns are pairs
// of wide pixels, a pair for each column of y. With several tiles a row, the pooling's window may reach into the pair
// before: a tile then begins `before` wide pixels early.
struct PooledTile {
  int window[2], low[2], out[2];  // rows and columns: the window, padding in front, y's extents
  int kernel_columns;             // wide pixels of a product, 64 or 112
  int cols, before;               // wide pixels of a tile that exist
  int pooled, tiles_w;            // columns of y of a tile
  int groups, boxes;              // warpgroups that multiply; boxes of each

  PooledTile() = default;
  PooledTile(const StemGeometry& g, const PoolProblem& q, int item) {
    groups = PooledGroups(item);
    boxes = item == 2 ? 1 : 2;
    for (int d = 0; d < 2; ++d) {
      window[d] = int(q.window[d + 1]);
      low[d] = int(q.pad[d + 1]);
      out[d] = int(q.out[d + 1]);
    }
    before = 0;
    tiles_w = 1;
    pooled = out[1];
    cols = g.wide[1];
    for (int columns : {64, 112}) {
      kernel_columns = columns;
      if (cols <= columns && pooled <= columns / 2) return;
    }
    before = low[1] == 0 ? 0 : 4;  // fours of pixels of three channels begin at fours
    const int behind = window[1] == 3 && low[1] == 0 ? 1 : 0;
    const auto tiles = [&](int columns) {
      return CeilDiv(out[1], (columns - before - behind) / 4 * 2);
    };
    kernel_columns = tiles(64) * 64 <= tiles(112) * 112 ? 64 : 112;
    tiles_w = int(tiles(kernel_columns));
    pooled = int(CeilDiv(CeilDiv(out[1], tiles_w), 2)) * 2;
    cols = before + 2 * pooled + behind;
  }
  // Rows of wide that the warpgroups need, of `rows` rows of y each.
  int WideRows(int rows) const { return 2 * groups * rows + window[0] - 2; }
  // Of a row of y, 128 bytes a pixel; behind them what a tile that begins early does not store.
  int BoxBytes() const { return (kernel_columns / 2 + 8) * 128; }
  int Room(const StemGeometry& g, int steps) const {
    const int64_t filter = CeilDiv(g.wide_channels, 64) * NarrowInFilterTile(steps);
    const int64_t rest = filter + groups * boxes * BoxBytes() + kernel_columns * 16 + 64;
    return int(std::max<int64_t>(RoomOf(1) - rest, -1));
  }
};

// wgrad with `stages` rows of wide pixels in flight, kernel_rows = 4 or 7 rows of taps.
constexpr int kWgradParts = 4;  // of a window's row, chunks
constexpr int kWgradRows = 7;
constexpr int kLeastWgradStages = 3;
inline int WgradKernelRows(const StemGeometry& g) { return g.taps / g.taps_w > 4 ? 7 : 4; }
inline int WindowsPast(const StemGeometry& g, const NarrowWindows& windows, int kernel_rows) {
  // What windows of no pixels, and rows of no taps, reach past a slot.
  return 16 * 16 + kernel_rows * g.step[0] * windows.row_bytes;
}
inline int WgradStageBytes(const NarrowWindows& windows) {
  return int(CeilDiv(windows.cols, 16)) * 2048;
}
inline int WgradRoom(const StemGeometry& g, const NarrowWindows& windows, int kernel_rows,
                     int stages, int resident) {
  return RoomOf(resident) - WindowsPast(g, windows, kernel_rows) - 256 -
         2 * stages * WgradStageBytes(windows);
}

// stem/sm90_narrow_out: the product's 64 rows are blocks of (phase, c), its columns a row of kernel_columns = 64 or 112
// wide pixels.
constexpr int kMostGroups = 3;  // warpgroups of a block, each on rows of its own
constexpr int kBoxes = 3;       // of a warpgroup

struct NarrowOutSizes {
  int blocks, block_rows, row_shift;  // of the 64 rows; row_shift: log2 of block_rows
  int channel_blocks;                 // of 128 bytes
  int span_w;
  bool pairs;  // narrow is written in pairs of 16-bit elements
  uint32_t tile_bytes;
  int operand, box_bytes, stage_bytes, units_bytes;

  static int KernelColumns(const StemGeometry& g) {
    return RowColumns(int(CeilDiv(g.narrow[1], g.stride[1]))) <= 64 ? 64 : 112;
  }

  NarrowOutSizes(const StemGeometry& g, const NarrowOffsets& o, int kernel_columns, int item) {
    block_rows = 8;
    row_shift = 3;
    while (block_rows < o.columns) {
      block_rows *= 2;
      ++row_shift;
    }
    blocks = 64 / block_rows;
    channel_blocks = int(CeilDiv(g.wide_channels, 128 / item));
    span_w = o.offset[1][o.count[1] - 1] - o.least[1];
    const int line = g.stride[1] * g.channels;
    pairs = item == 2 && line % 2 == 0 && int64_t(g.narrow[1]) * g.channels % 2 == 0;
    tile_bytes = uint32_t((2 * blocks - 1) * block_rows * 128);
    operand = channel_blocks * o.count[1] * int(tile_bytes);
    box_bytes = item == 2 ? kernel_columns * block_rows * 2 : block_rows * (kernel_columns + 8) * 4;
    stage_bytes = int(CeilDiv(kernel_columns + span_w, 8) * 1024);
    units_bytes =
        int(CeilDiv(g.stride[0] * kernel_columns * (pairs ? line / 2 : line) * 2, 16) * 16);
  }
  // Rows of wide pixels in flight for each of so many warpgroups.
  int Stages(int groups) const {
    const int room = kSm90Shared - 1024 - units_bytes - operand - groups * kBoxes * box_bytes;
    return room < 0 ? 0 : std::min(room / groups / stage_bytes, 6);
  }
  // Every block of rows meets its offsets one after another.
  bool BlocksReach(const NarrowOffsets& o) const {
    return block_rows <= 64 && o.offset[0][o.count[0] - 1] - o.least[0] < blocks;
  }
};

}  // namespace jaxconv::cuda::conv
