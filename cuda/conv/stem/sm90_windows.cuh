// What the kernels over windows of the narrow image share on sm_90a: its tiles in shared memory, which a warpgroup fills,
// and the filter beside them. sm90_narrow_in.cu says how windows lie there.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/sm90.cuh"
#include "cuda/conv/stem/stem.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {

// Tiles of narrow pixels in shared memory.
template <typename T>
struct NarrowSlots {
  StemGeometry g;
  const T* narrow;
  int chunk_pixel, planes;  // bytes of a narrow pixel; planes of a row
  int plane_bytes, row_bytes, slot_bytes;
  int rows, cols;  // a tile of wide pixels
  int narrow_rows, narrow_cols,
      lead;  // its narrow pixels; lead: narrow pixels to the left of the first window
  int first, row_chunks,
      skip;    // a window's first chunk, chunks of a row; the first `skip` pixels are padding
  bool fours;  // narrow is read in fours of pixels of three channels
  int64_t tiles;
  FastDiv by_tiles_h, by_tiles_w, by_items, by_planes;  // items of a row: fours, or pixels
  uint32_t narrow_at;
  // Where tile (i, j) of an image begins, in wide pixels: i * tile_step[0] - tile_before[0], and likewise.
  int tile_step[2], tile_before[2];

  // The tap and channel of `byte` of chunk s of row r of a window, or -1.
  JAXCONV_HD StemElement Element(int r, int s, int byte) const {
    const int pixel = byte / chunk_pixel, c = (byte - pixel * chunk_pixel) / int(sizeof(T));
    const int tap = chunk_pixel == 8 ? s * 2 + pixel - skip : s;
    const bool inside =
        r < g.taps / g.taps_w && s < row_chunks && tap >= 0 && tap < g.taps_w && c < g.channels;
    return inside ? StemElement{TapAt(g, r, tap), c} : StemElement{-1, 0};
  }
};

// A tile's pixels of any number of channels, kPixels of a thread under way at once. `place`: where a chunk of the tile's first
// row lies.
template <typename T, typename Place>
__device__ __forceinline__ void LoadPixels(const NarrowSlots<T>& a, const T* base, int h0, int w0,
                                           const Place& place) {
  constexpr int kPixels = 3, kInWord = 4 / int(sizeof(T));  // channels
  const StemGeometry& g = a.g;
  const int items = a.narrow_rows * int(a.by_items.d);
  for (int item0 = threadIdx.x; item0 < items; item0 += 128 * kPixels) {
    uint32_t word[kPixels][4];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int item = item0 + i * 128;
      const int row = int(a.by_items.Div(item)), col = item - row * int(a.by_items.d);
      const int h = h0 + row, w = w0 + col;
      const bool inside = item < items && unsigned(h) < unsigned(g.narrow[0]) &&
                          unsigned(w) < unsigned(g.narrow[1]);
      const T* from = base + (inside ? int64_t(h * g.narrow[1] + w) * g.channels : 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[i][k] = 0;
#pragma unroll
        for (int e = 0; e < kInWord; ++e) {
          const int c = k * kInWord + e;
          if (inside && c < g.channels) word[i][k] |= NarrowBits(from + c) << (e * 16);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int item = item0 + i * 128;
      if (item >= items) break;
      const int row = int(a.by_items.Div(item)), col = item - row * int(a.by_items.d);
      const uint32_t (&v)[4] = word[i];
      if (a.chunk_pixel == 8) {
        StoreShared8(place(col / 2) + row * a.row_bytes + col % 2 * 8, make_uint2(v[0], v[1]));
      } else {
        StoreShared16(place(col) + row * a.row_bytes, make_uint4(v[0], v[1], v[2], v[3]));
      }
    }
  }
}

// The narrow pixels of a tile, from (h0, w0) on, zero outside the array. Threads 0..127, which have kBatch fours of pixels
// under way each. The array is of S: T, or where pixels are read in fours float32, which is rounded to T.
template <int kBatch, typename S, typename T>
__device__ __forceinline__ void LoadSlot(const NarrowSlots<T>& a, uint32_t slot, int image, int h0,
                                         int w0) {
  const StemGeometry& g = a.g;
  const S* base = reinterpret_cast<const S*>(a.narrow) + image * g.narrow_n;
  const auto place = [&](int chunk) {
    const int pos = int(a.by_planes.Div(chunk));
    return slot + uint32_t((chunk - pos * a.planes) * a.plane_bytes + pos * 16);
  };
  if (a.fours) {
    constexpr int kWords = 3 * int(sizeof(T));  // of four pixels
    // A thread has a four of every row, or of every second, ...: it finds its places once.
    const int per_row = int(a.by_items.d), at_once = max(128 / per_row, 1);
    const int first = int(a.by_items.Div(threadIdx.x));
    const int64_t next = int64_t(at_once) * g.narrow[1] * 3;
    for (int four = threadIdx.x - first * per_row; four < per_row && first < at_once; four += 128) {
      const int w = w0 + four * 4;
      const bool in_row = unsigned(w) < unsigned(g.narrow[1]);
      constexpr int kChunks = 4;
      uint32_t to[kChunks];  // of two pixels, or of one
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (a.chunk_pixel == 16 || k < 2)
          to[k] = place(a.chunk_pixel == 8 ? four * 2 + k : four * 4 + k) + first * a.row_bytes;
      }
      const S* from = base + (int64_t(h0 + first) * g.narrow[1] + w) * 3;
      for (int row0 = first; row0 < a.narrow_rows; row0 += at_once * kBatch) {
        uint32_t v[kBatch][kWords];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = row0 + i * at_once;
          const bool inside =
              in_row && row < a.narrow_rows && unsigned(h0 + row) < unsigned(g.narrow[0]);
#pragma unroll
          for (int k = 0; k < 3; ++k) {
            if constexpr (sizeof(S) == 2) {
              const uint2 u = inside ? __ldg(reinterpret_cast<const uint2*>(from) + k) : uint2{};
              v[i][k * 2] = u.x;
              v[i][k * 2 + 1] = u.y;
            } else if constexpr (sizeof(T) == 2) {
              const float4 u = inside ? __ldg(reinterpret_cast<const float4*>(from) + k) : float4{};
              v[i][k * 2] = PackPair(u.x, u.y, T());
              v[i][k * 2 + 1] = PackPair(u.z, u.w, T());
            } else {
              const uint4 u = inside ? __ldg(reinterpret_cast<const uint4*>(from) + k) : uint4{};
              v[i][k * 4] = u.x;
              v[i][k * 4 + 1] = u.y;
              v[i][k * 4 + 2] = u.z;
              v[i][k * 4 + 3] = u.w;
            }
          }
          from += next;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row0 + i * at_once >= a.narrow_rows) break;
          if constexpr (sizeof(T) == 2) {
            const uint32_t (&u)[kWords] = v[i];
            const uint2 pixel[4] = {{u[0], u[1] & 0xffff},
                                    {__byte_perm(u[1], u[2], 0x5432), u[2] >> 16},
                                    {u[3], u[4] & 0xffff},
                                    {__byte_perm(u[4], u[5], 0x5432), u[5] >> 16}};
            if (a.chunk_pixel == 8) {
#pragma unroll
              for (int k = 0; k < 2; ++k) {
                StoreShared16(to[k], make_uint4(pixel[k * 2].x, pixel[k * 2].y, pixel[k * 2 + 1].x,
                                                pixel[k * 2 + 1].y));
              }
            } else {
#pragma unroll
              for (int k = 0; k < 4; ++k)
                StoreShared16(to[k], make_uint4(pixel[k].x, pixel[k].y, 0, 0));
            }
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              StoreShared16(to[k],
                            make_uint4(RoundToTf32(v[i][k * 3]), RoundToTf32(v[i][k * 3 + 1]),
                                       RoundToTf32(v[i][k * 3 + 2]), 0));
            }
          }
#pragma unroll
          for (int k = 0; k < kChunks; ++k) to[k] += at_once * a.row_bytes;
        }
      }
    }
    return;
  }
  if constexpr (sizeof(S) == sizeof(T)) LoadPixels(a, base, h0, w0, place);
}

// The producers' part: the tiles of a block, one after another.
template <int kBatch, typename S, typename T>
__device__ __forceinline__ void FillSlots(const NarrowSlots<T>& a, uint32_t shared,
                                          uint32_t barriers, int64_t begin, int64_t stride) {
  const StemGeometry& g = a.g;
  int slot = 0;
  uint32_t parity = 0;
  for (int64_t tile = begin; tile < a.tiles; tile += stride) {
    const QuotRem w = DivMod(tile, a.by_tiles_w), h = DivMod(w.quot, a.by_tiles_h);
    BarrierWait(barriers + slot * 16 + 8, parity ^ 1);
    LoadSlot<kBatch, S>(
        a, shared + a.narrow_at + slot * a.slot_bytes, int(h.quot),
        (h.rem * a.tile_step[0] - a.tile_before[0]) * g.stride[0] + g.first[0],
        (w.rem * a.tile_step[1] - a.tile_before[1]) * g.stride[1] + g.first[1] - a.lead);
    FenceForTma();
    BarrierArrive(barriers + slot * 16);
    slot ^= 1;
    parity ^= slot == 0;
  }
}

// `groups`: warpgroups that multiply.
[[maybe_unused]] __device__ inline void InitSlots(uint32_t barriers, int groups) {
  for (int slot = 0; slot < 2; ++slot) {
    BarrierInit(barriers + slot * 16, 128);
    BarrierInit(barriers + slot * 16 + 8, groups * 4);
  }
  BarrierInitFence();
}

// ---------------------------------------------------------------------------------------------------------------------
// From narrow to wide: the filter in shared memory, and a row's products

template <typename T>
struct NarrowToWide : NarrowSlots<T> {
  const T* w;
  // Channels 2 i and 2 i + 1 of sixteen lie at rows i and i + 8 of the filter, which are one thread's of wgmma.
  bool pairs;
  int channel_tiles, steps, filter_tile;
  uint32_t step_at[kMostSteps];  // added to a descriptor: the first chunk, the other's distance
  uint8_t chunk_row[2 * kMostSteps], chunk[2 * kMostSteps];  // of a step's halves
  uint32_t boxes_at, barriers_at;
};

// All threads of the block. The boxes' memory holds a table meanwhile.
template <typename T>
__device__ __forceinline__ void StageFilter(const NarrowToWide<T>& a, unsigned char* cells) {
  const StemGeometry& g = a.g;
  // Where each element of k begins in w, or -1.
  constexpr int kElements = 16 / int(sizeof(T));  // of a chunk
  int* table = reinterpret_cast<int*>(cells + a.boxes_at);
  const int elements = a.filter_tile / kBlockBytes * 8 * kElements;
  for (int e = threadIdx.x; e < elements; e += blockDim.x) {
    const int chunk = e / kElements;
    int from = -1;
    if (chunk < a.steps * 2) {
      const StemElement at =
          a.Element(a.chunk_row[chunk], a.chunk[chunk], e % kElements * int(sizeof(T)));
      if (at.tap >= 0) from = int(at.tap * g.w_tap + at.channel * g.w_narrow);
    }
    table[e] = from;
  }
  __syncthreads();
  // The filter, k-major: [channel tile][four steps][channel][128 bytes, swizzled]. Neighbouring
  // threads take neighbouring channels, which neighbour in w where C is small.
  const int n = threadIdx.x % 64, in_tile = a.pairs ? n / 16 * 16 + n % 8 * 2 + n / 8 % 2 : n;
  for (int tile = 0; tile < a.channel_tiles; ++tile) {
    const int channel = tile * 64 + in_tile;
    const T* w = a.w + channel * g.w_wide;
#pragma unroll 8
    for (int e = threadIdx.x / 64; e < elements; e += blockDim.x / 64) {
      const int from = table[e], chunk = e / kElements;
      const uint32_t bits = from >= 0 && channel < g.wide_channels ? NarrowBits(w + from) : 0;
      unsigned char* to = cells + tile * a.filter_tile + chunk / 8 * kBlockBytes + n * 128 +
                          ((chunk ^ n) % 8) * 16 + e % kElements * int(sizeof(T));
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(bits);
      } else {
        *reinterpret_cast<uint32_t*>(to) = bits;
      }
    }
  }
  FenceForTma();
  __syncthreads();
}

// The steps of a filter of 7x7 taps and at most four channels. Where they are known the tensor cores wait for none of them;
// finding a step's operands takes about as long as 112 columns' products.
template <typename T>
constexpr int kStepsOf7x7 = sizeof(T) == 2 ? 14 : 25;

// The sums of a row of kN wide pixels: 64 channels, whose filter is `filter`, of the windows that begin at `narrow`.
// kSteps: a.steps, or 0 for any.
template <typename T, int kN, int kSteps>
__device__ __forceinline__ void SumRow(const NarrowToWide<T>& a, uint32_t filter_at,
                                       uint32_t narrow, float (&acc)[kN / 2]) {
  // Not swizzled: eight pixels are 128 bytes, the next eight follow.
  const uint64_t from = uint64_t(128 / 16) << 32 | uint64_t(narrow >> 4);
  const uint64_t filter = OperandDescriptor<true>(filter_at);
  const auto multiply = [&](int step) {
    WgmmaRow<T>(acc, filter + step / 4 * (kBlockBytes / 16) + step % 4 * 2, from + a.step_at[step],
                step > 0);
  };
  if constexpr (kSteps > 0) {
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) multiply(step);
    WgmmaCommit();
  } else {
    int step = 0;
#pragma unroll 1
    do {
      WgmmaFence();
      multiply(step);
      WgmmaCommit();
    } while (++step < a.steps);
  }
  WgmmaWait<0>();
  Pin(acc);
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

// All fields but the rows of a tile.
template <typename T>
void SetSlots(NarrowSlots<T>& a, const StemGeometry& g, const NarrowWindows& windows,
              const void* narrow) {
  a.g = g;
  a.narrow = static_cast<const T*>(narrow);
  a.chunk_pixel = windows.chunk_pixel;
  a.planes = windows.planes;
  a.cols = windows.cols;
  a.fours = g.dense;
  a.lead = windows.lead;
  a.skip = windows.skip;
  a.first = windows.first;
  a.row_chunks = windows.row_chunks;
  a.narrow_cols = windows.narrow_cols;
  a.by_items = FastDiv(a.fours ? a.narrow_cols / 4 : a.narrow_cols);
  a.by_planes = FastDiv(a.planes);
  a.plane_bytes = windows.plane_bytes;
  a.row_bytes = windows.row_bytes;
}

// Of a tile whose narrow pixels are those of `wide_rows` rows of wide ones.
template <typename T>
void SetRows(NarrowSlots<T>& a, const NarrowWindows& windows, int rows, int wide_rows) {
  a.rows = rows;
  a.slot_bytes = windows.SlotBytes(a.g, wide_rows);
  a.narrow_rows = a.slot_bytes / a.row_bytes;
}

// The rows of a tile, up to 16 of `all`, so that two slots fit into `room` and `blocks` blocks have done the earliest, with
// which `set` was called last; 0 where none fit. `set` fills in what follows from rows; `multiplied`: cycles of a tile's
// products and stores.
template <typename T, typename Set, typename Multiplied>
int BestRows(NarrowSlots<T>& a, int all, int room, int blocks, const Set& set,
             const Multiplied& multiplied) {
  double least = 1e30;
  int best = 0;
  for (int rows = 1; rows <= std::min(16, all); ++rows) {
    set(rows);
    if (2 * a.slot_bytes > room) break;
    const double produced = double(a.narrow_rows) * a.by_items.d / 128 * (a.fours ? 90 : 110) + 800;
    const double cost =
        double(CeilDiv(a.tiles, blocks)) * (std::max<double>(multiplied(rows), produced) + 200);
    if (cost < least) {
      least = cost;
      best = rows;
    }
  }
  if (best > 0) set(best);
  return best;
}

// The order in which a window's chunks are multiplied.
template <typename T>
void SetFilter(NarrowToWide<T>& a, const NarrowWindows& windows, const void* w) {
  const StemGeometry& g = a.g;
  a.w = static_cast<const T*>(w);
  const int chunks = g.taps / g.taps_w * a.row_chunks;
  a.steps = int(CeilDiv(chunks, 2));
  for (int step = 0; step < a.steps; ++step) {
    int chunk[2] = {step * 2, step * 2 + 1}, at[2];
    const bool odd = chunk[1] == chunks;  // the second half, for which the filter has zeros
    if (odd) chunk[1] = chunk[0];
    for (int i = 0; i < 2; ++i) {
      at[i] = windows.ChunkAt(g, chunk[i] / a.row_chunks, chunk[i] % a.row_chunks);
    }
    if (at[1] < at[0]) {
      std::swap(at[0], at[1]);
      std::swap(chunk[0], chunk[1]);
    }
    a.step_at[step] = uint32_t((at[1] - at[0]) / 16) << 16 | uint32_t(at[0] / 16);
    for (int i = 0; i < 2; ++i) {
      a.chunk_row[step * 2 + i] = uint8_t(odd && i == 1 ? 255 : chunk[i] / a.row_chunks);
      a.chunk[step * 2 + i] = uint8_t(chunk[i] % a.row_chunks);
    }
  }
  a.channel_tiles = int(CeilDiv(g.wide_channels, 64));
  a.filter_tile = NarrowInFilterTile(a.steps);
}

template <typename Kernel, typename Args>
Status Launch(const Context& ctx, Kernel kernel, const Args& a, int64_t blocks, int threads,
              int bytes, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), threads, bytes, ctx.stream>>>(a);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda::conv
