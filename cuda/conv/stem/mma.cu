// Convolution between a narrow image (at most 8 channels) and a wide one; what narrow and wide are in each pass, and the
// shifts, is in geometry.h. Three sums over taps t:
//
//   to wide    wide[i, k]   = sum over t, c of narrow[i * stride + shift(t), c] * w[t, c, k]
//   wgrad      dw[t, c, k]  = sum over i of    narrow[i * stride + shift(t), c] * wide[i, k]
//   to narrow  narrow[u, c] = sum over t, k of wide[(u - shift(t)) / stride, k] * w[t, c, k]
//
// A tile is some rows and columns of wide pixels (to narrow: of narrow ones by the stride) of one image; blocks are
// persistent and walk over them, the filter, or the sums of dw, staying on chip. Each reads a tile's pixels once with
// their halo and writes its outputs once. All three are bound by the wide image's traffic, if shared memory is not read
// too often for it. sm90_narrow_in and sm90_narrow_out are faster where they run; these are for other devices and for
// what is left. Products are mma.sync, 16 rows a warp:
//
//   to wide    rows are wide pixels, gathered from the narrow tile into registers by ldmatrix (each row of a window is
//              a run of pixels); columns are wide channels
//   wgrad      rows are narrow channels of taps, gathered and transposed by ldmatrix, k is 16 pixels; columns are wide
//              channels, as they lie
//   to narrow  rows are wide pixels as they lie, columns are the narrow channels of all phases
#include <algorithm>

#include "cuda/conv/common/reduce.h"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/conv/stem/stem.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

using namespace stem;  // NOLINT: geometry.h's sizes

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / 128;
static_assert(kGroups == kWarpgroups);
// Where the sm90 kernels run, these take what is left, unpaired: fewer kernels to compile.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kLeftOver = true;
#else
constexpr bool kLeftOver = false;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// From narrow to wide: fprop where C is small, dgrad where K is small

template <typename T>
struct ToWideArgs {
  StemGeometry g;
  const T* narrow;
  const T* w;
  T* wide;
  EpilogueArgs<T> epilogue;
  int channel_tiles, slices;  // of 64 channels: of a block, and how many blocks share a pixel
  int chunks, filter_tile;    // filter_tile: bytes of one channel tile's operand
  uint32_t offsets_at, places_at, narrow_at;
  bool vectors;  // 16-byte stores
};

// The channel of a tile that column n of the operand holds: a lane's columns of four neighbouring
// 8-column blocks become 8 neighbouring channels, which it stores at once.
JAXCONV_HD int ChannelOfColumn(int n) {
  return n / 32 * 32 + n % 8 / 2 * 8 + n / 8 % 4 * 2 + n % 2;
}

// Word `word` (of eight) of step `step` of the filter's column for `channel`. A step is 32 bytes of
// k. Paired: two pairs, one after the other. Otherwise four units: lane t of a quad holds unit t,
// its first half in the low k, its second in the high k.
template <typename T, bool kPaired>
__device__ __forceinline__ uint32_t FilterWord(const ToWideArgs<T>& a, int step, int word,
                                               int channel) {
  constexpr int kSize = int(sizeof(T));
  uint32_t bits = 0;
#pragma unroll
  for (int byte = 0; byte < 4; byte += kSize) {
    const StemElement e = kPaired
                              ? PairElement(a.g, step * 2 + word / 4, word % 4 * 4 + byte, kSize)
                              : UnitElement(a.g, step * 4 + word % 4, word / 4 * 4 + byte, kSize);
    if (e.tap >= 0) {
      bits |= NarrowBits(a.w + e.tap * a.g.w_tap + channel * a.g.w_wide + e.channel * a.g.w_narrow)
              << byte * 8;
    }
  }
  return bits;
}

template <typename T, int kSteps, bool kPaired>
__global__ void __launch_bounds__(kThreads, 2)
    ToWideKernel(const __grid_constant__ ToWideArgs<T> a) {
  if constexpr (kPaired && kLeftOver) return;
  constexpr int kBlocks = (kSteps + 3) / 4;  // of 64 columns by 128 bytes of k, a chunk
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, as the compiler sees it
  const int channel0 = int(blockIdx.x % unsigned(a.slices)) * a.channel_tiles * kTileChannels;

  // The filter, as a k-major operand: [channel tile][chunk][block][column][128 bytes, swizzled].
  const int words = a.channel_tiles * a.filter_tile / 4;
  for (int e = threadIdx.x; e < words; e += kThreads) {
    const int n = e % 64, word = e / 64 % 32, block = e / 2048 % kBlocks;
    const int chunk = e / 2048 / kBlocks % a.chunks, tile = e / 2048 / kBlocks / a.chunks;
    const int step = block * 4 + word / 8, channel = channel0 + tile * 64 + ChannelOfColumn(n);
    uint32_t bits = 0;
    if (step < kSteps && channel < g.wide_channels) {
      bits = FilterWord<T, kPaired>(a, chunk * kSteps + step, word % 8, channel);
    }
    const uint32_t at = e / 2048 * 8192 + n * 128 + ((word / 4) ^ (n % 8)) * 16 + word % 4 * 4;
    *reinterpret_cast<uint32_t*>(cells + at) = bits;
  }
  constexpr int kParts = kPaired ? 2 : 4;  // of a step
  int* offsets = reinterpret_cast<int*>(cells + a.offsets_at);
  for (int e = threadIdx.x; e < a.chunks * kSteps * kParts; e += kThreads) {
    if constexpr (kPaired) {
      offsets[e] = PairOffset(g, e * g.taps_w < g.taps * g.row_pairs ? e : 0);
    } else {
      offsets[e] = UnitOffset(g, e < g.units ? e : 0);
    }
  }
  // Of each pixel of a tile: where its window starts, and its row and column or -1.
  const uint32_t narrow = shared + a.narrow_at, raw = narrow + g.narrow_bytes;
  int2* places = reinterpret_cast<int2*>(cells + a.places_at);
  for (int pixel = threadIdx.x; pixel < (g.pixels + 63) / 64 * 64; pixel += kThreads) {
    const int valid = min(pixel, g.pixels - 1);
    const int row = int(g.by_cols.Div(valid)), col = valid - row * g.cols;
    const int at =
        (row * g.stride[0] * g.narrow_cols + col * g.stride[1] + g.lead - g.skip) * g.pitch;
    places[pixel] = make_int2(int(narrow) + at, pixel < g.pixels ? row << 16 | col : -1);
  }

  const auto stage = [&](int64_t tile) {
    const StemOrigin o = OriginOf(g, tile);
    StageNarrow<T, kThreads>(raw, a.narrow, g, o.image, o.h * g.stride[0] + g.first[0],
                             o.w * g.stride[1] + g.first[1]);
    CopyCommit();
  };
  const int stride = int(gridDim.x) / a.slices;
  const int64_t begin = blockIdx.x / unsigned(a.slices);
  if (g.staged && begin < g.tiles) stage(begin);
  for (int64_t tile = begin; tile < g.tiles; tile += stride) {
    const StemOrigin origin = OriginOf(g, tile);
    CopyWait<0>();
    __syncthreads();
    if (g.staged) {
      UnpackNarrow<T, kThreads>(narrow, raw, g);
    } else {
      LoadNarrow<T, kThreads, 4>(narrow, a.narrow, g, origin.image,
                                 origin.h * g.stride[0] + g.first[0],
                                 origin.w * g.stride[1] + g.first[1]);
    }
    __syncthreads();
    if (g.staged && tile + stride < g.tiles) stage(tile + stride);
    const int64_t base =
        ((int64_t(origin.image) * g.wide[0] + origin.h) * g.wide[1] + origin.w) * g.wide_channels +
        channel0 + lane % 4 * 8;
    const int rows = g.wide[0] - origin.h, cols = g.wide[1] - origin.w;
    for (int m = group; m * 64 < g.pixels; m += kGroups) {
      const int2* place = places + m * 64 + warp * 16;
      const uint32_t source = place[kPaired ? lane % 16 : lane / 4].x;
      const uint32_t source8 = kPaired ? 0 : place[lane / 4 + 8].x;
      int64_t to[2];
      bool inside[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = place[lane / 4 + i * 8].y, row = at >> 16, col = at & 0xffff;
        inside[i] = at >= 0 && row < rows && col < cols;
        to[i] = base + int64_t(row * g.wide[1] + col) * g.wide_channels;
      }
      for (int tile_k = 0; tile_k < a.channel_tiles; ++tile_k) {
        float acc[32];
        for (int chunk = 0; chunk < a.chunks; ++chunk) {
          const uint32_t filter = shared + tile_k * a.filter_tile + chunk * kBlocks * 8192;
          const int* offset = offsets + chunk * kSteps * kParts + (kPaired ? lane / 16 : lane % 4);
          uint32_t in[kSteps][4];
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            if constexpr (kPaired) {
              LoadMatrix(in[s], source + offset[s * kParts]);
            } else {
              const uint2 v0 = LoadShared8(source + offset[s * kParts]);
              const uint2 v1 = LoadShared8(source8 + offset[s * kParts]);
              in[s][0] = v0.x;
              in[s][1] = v1.x;
              in[s][2] = v0.y;
              in[s][3] = v1.y;
            }
          }
          if (chunk == 0) {
#pragma unroll
            for (int i = 0; i < 32; ++i) acc[i] = 0.f;
          }
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
              // Matrices: columns j, low and high k, then columns j + 1.
              const int n = (j + lane / 16) * 8 + lane % 8;
              uint32_t b[4];
              LoadMatrix(
                  b, filter + s / 4 * 8192 + n * 128 + ((s % 4 * 2 + lane / 8 % 2) ^ (n % 8)) * 16);
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[(j + i) * 4]);
                Mma<T>(d, in[s], b[2 * i], b[2 * i + 1]);
              }
            }
          }
        }

        // acc[(half * 4 + c / 2) * 4 + i * 2 + c % 2] is channel half * 32 + c of pixel i.
        const int channel = channel0 + tile_k * kTileChannels + lane % 4 * 8;
        if (a.epilogue.bias != nullptr) {
#pragma unroll
          for (int e = 0; e < 16; ++e) {
            const int c = channel + e / 8 * 32 + e % 8;
            const float bias = c < g.wide_channels ? ToFloat(a.epilogue.bias[c]) : 0.f;
            acc[(e / 2) * 4 + e % 2] += bias;
            acc[(e / 2) * 4 + 2 + e % 2] += bias;
          }
        }
        const auto store = [&](T* out) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int half = e % 2, i = e / 2, c = channel + half * 32;
            if (!inside[i] || c >= g.wide_channels) continue;
            T* p = out + to[i] + tile_k * kTileChannels + half * 32;
            if (a.vectors) {
#pragma unroll
              for (int at = 0; at < 8; at += kVecWidth<T>) {
                float v[kVecWidth<T>];
#pragma unroll
                for (int k = 0; k < kVecWidth<T>; ++k) {
                  v[k] = acc[(half * 4 + (at + k) / 2) * 4 + i * 2 + k % 2];
                }
                StorePacked(p + at, v);
              }
            } else {
#pragma unroll
              for (int k = 0; k < 8; ++k) {
                if (c + k < g.wide_channels) {
                  p[k] = FromFloat<T>(acc[(half * 4 + k / 2) * 4 + i * 2 + k % 2]);
                }
              }
            }
          }
        };
        if (a.epilogue.z != nullptr) store(a.epilogue.z);
        ApplyActivation(a.epilogue.activation, acc, a.epilogue.slope);
        store(a.wide);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// wgrad: dw[unit, k] = sum over wide pixels of the unit's narrow channels times wide[k]

template <typename T>
constexpr int kGroupUnits = WgradShares::GroupUnits(int(sizeof(T)));

template <typename T>
struct WgradArgs {
  StemGeometry g;
  const T* narrow;
  const T* wide;
  float* partials;  // (parts, elements of dw)
  int64_t dw_count;
  int parts, padded;  // padded: pixels of a tile, to a multiple of 32, or 64 (by_pixel)
  int channel_slices, unit_slices;  // of dw, each with `parts` blocks of its own
  // What the two warpgroups divide: units (32 each), channels (64 each), or pairs of steps.
  int by_unit, by_channel, by_pixel;
  uint32_t wide_at, wide_bytes, plane, narrow_at;  // the table of the pixels' places lies first
};

// Where 16 bytes of a wide pixel's 64 channels lie. 16-bit pixels are rows of 128 bytes, swizzled as
// wgmma and ldmatrix want them; float32 ones of 256, so that every other one of eight pixels by
// eight channels are in different banks.
template <typename T>
__device__ __forceinline__ uint32_t WideSlot(int pixel, int part) {
  return sizeof(T) == 2 ? pixel * 128 + (part ^ (pixel % 8)) * 16
                        : pixel * 256 + (part ^ (pixel / 2 % 4 * 2)) * 16;
}

// The wide pixels of a tile, 64 channels each.
template <typename T>
__device__ __forceinline__ void LoadWide(uint32_t shared, const T* __restrict__ wide,
                                         const StemGeometry& g, const StemOrigin& o, int channel0) {
  constexpr int kParts = kTileChannels / kVecWidth<T>;
  const T* base =
      wide + ((int64_t(o.image) * g.wide[0] + o.h) * g.wide[1] + o.w) * g.wide_channels + channel0;
  const int part = threadIdx.x % kParts, channel = part * kVecWidth<T>;
  const bool any = channel0 + channel < g.wide_channels;
  for (int pixel = threadIdx.x / kParts; pixel < g.pixels; pixel += kThreads / kParts) {
    const int row = int(g.by_cols.Div(pixel)), col = pixel - row * g.cols;
    const bool inside = any && o.h + row < g.wide[0] && o.w + col < g.wide[1];
    const T* from = base + (int64_t(row) * g.wide[1] + col) * g.wide_channels + channel;
    CopyAsync<16>(shared + WideSlot<T>(pixel, part), inside ? from : wide, inside ? 16 : 0);
  }
}

template <typename T, bool kPaired>
__global__ void __launch_bounds__(kThreads, 2) WgradKernel(const __grid_constant__ WgradArgs<T> a) {
  if constexpr (kPaired && kLeftOver) return;
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int part = int(blockIdx.x % unsigned(a.parts));
  const int slice = int(blockIdx.x / unsigned(a.parts));
  const int channel_slice = slice % a.channel_slices * (1 + a.by_channel) * kTileChannels;
  const int channel0 = channel_slice + group * a.by_channel * kTileChannels;
  const int group0 =
      (slice / a.channel_slices * (1 + a.by_unit) + group * a.by_unit) * kGroupUnits<T>;

  int* places = reinterpret_cast<int*>(cells);
  for (int pixel = threadIdx.x; pixel < a.padded; pixel += kThreads) {
    const int valid = min(pixel, g.pixels - 1);
    const int row = int(g.by_cols.Div(valid)), col = valid - row * g.cols;
    places[pixel] =
        (row * g.stride[0] * g.narrow_cols + col * g.stride[1] + g.lead - g.skip) * g.pitch;
  }
  for (uint32_t at = a.wide_at + threadIdx.x * 16; at < a.narrow_at; at += kThreads * 16) {
    StoreShared16(shared + at,
                  make_uint4(0, 0, 0, 0));  // the rows of the pixels that are not there
  }
  __syncthreads();
  const uint32_t narrow = shared + a.narrow_at, raw = narrow + g.narrow_bytes;
  // Rows of A are channels of units. Paired: block b of the warp has pairs 2b (rows g) and 2b + 1
  // (rows g + 8), a row being 2 bytes of a pair. Otherwise, 16-bit: both blocks have a unit a row,
  // of which block b has channels 2b (rows g) and 2b + 1 (rows g + 8); float32: block b has a unit
  // a row, its channels 0 (rows g) and 1 (rows g + 8).
  constexpr int kUnits = kPaired || sizeof(T) == 4 ? 2 : 1;
  const int unit0 = group0 + warp * (sizeof(T) == 4 ? 16 : 8);
  uint32_t table, source[kUnits];
  if constexpr (kPaired) {
    table = shared + (lane / 16 * 8 + lane % 8) * 4;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int pair = unit0 / 2 + b * 2 + lane / 8 % 2;
      source[b] = narrow + PairOffset(g, pair * g.taps_w < g.taps * g.row_pairs ? pair : 0);
    }
  } else {
    table = shared + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
      const int unit = unit0 + b * 8 + lane / 4;
      source[b] = narrow + UnitOffset(g, unit < g.units ? unit : 0);
    }
  }

  // The rows by the 16 pixels of a step; in float32 by the eight of its half `half`.
  const auto load = [&](uint32_t (&in)[2][4], int step, int half) {
    if constexpr (kPaired) {
      const uint32_t at = LoadShared4(table + step * 64);
      LoadMatrixTransposed(in[0], source[0] + at);
      LoadMatrixTransposed(in[1], source[1] + at);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 at = LoadShared8(table + (step * 16 + h * 8) * 4);
        const uint2 v0 = LoadShared8(source[0] + at.x), v1 = LoadShared8(source[0] + at.y);
        in[0][h * 2] = __byte_perm(v0.x, v1.x, 0x5410);
        in[0][h * 2 + 1] = __byte_perm(v0.x, v1.x, 0x7632);
        in[1][h * 2] = __byte_perm(v0.y, v1.y, 0x5410);
        in[1][h * 2 + 1] = __byte_perm(v0.y, v1.y, 0x7632);
      }
    } else {
      // k = t is pixel 2t of the eight, k = t + 4 pixel 2t + 1.
      const uint2 at = LoadShared8(table + (step * 16 + half * 8) * 4);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint2 v0 = LoadShared8(source[b] + at.x), v1 = LoadShared8(source[b] + at.y);
        in[b][0] = v0.x;
        in[b][1] = v0.y;
        in[b][2] = v1.x;
        in[b][3] = v1.y;
      }
    }
  };
  const auto fetch = [&](int64_t tile, uint32_t buffer) {
    const StemOrigin o = OriginOf(g, tile);
    LoadWide(buffer, a.wide, g, o, channel_slice);
    if (a.by_channel) LoadWide(buffer + a.plane, a.wide, g, o, channel_slice + kTileChannels);
    if (g.staged) {
      StageNarrow<T, kThreads>(raw, a.narrow, g, o.image, o.h * g.stride[0] + g.first[0],
                               o.w * g.stride[1] + g.first[1]);
    }
    CopyCommit();
  };

  float acc[2][32] = {};
  uint32_t buffer = shared + a.wide_at, other = buffer + a.wide_bytes;
  if (part < g.tiles) fetch(part, buffer);
  for (int64_t tile = part; tile < g.tiles; tile += a.parts) {
    CopyWait<0>();
    __syncthreads();
    if (g.staged) {
      UnpackNarrow<T, kThreads>(narrow, raw, g);
    } else {
      const StemOrigin o = OriginOf(g, tile);
      LoadNarrow<T, kThreads, 2>(narrow, a.narrow, g, o.image, o.h * g.stride[0] + g.first[0],
                                 o.w * g.stride[1] + g.first[1]);
    }
    __syncthreads();
    if (tile + a.parts < g.tiles) fetch(tile + a.parts, other);
    const uint32_t wide = buffer + group * a.by_channel * a.plane;
#pragma unroll 1
    for (int pair = group * a.by_pixel; pair * 32 < a.padded; pair += 1 + a.by_pixel) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll 2
        for (int eight = 0; eight < 4; ++eight) {
          uint32_t in[2][4];
          load(in, pair * 2 + eight / 2, eight % 2);
          const int pixel = pair * 32 + eight * 8 + lane % 4 * 2;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int channel = j * 8 + lane / 4;
            uint32_t b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              b[i] = RoundToTf32(
                  LoadShared4(wide + WideSlot<T>(pixel + i, channel / 4) + channel % 4 * 4));
            }
#pragma unroll
            for (int block = 0; block < 2; ++block) {
              float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[block][j * 4]);
              Mma<T>(d, in[block], b[0], b[1]);
            }
          }
        }
        continue;
      } else {
        uint32_t in[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load(in[i], pair * 2 + i, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            // Matrices: pixels 0 to 7 and 8 to 15 of columns j, then of columns j + 1.
            const int pixel = (pair * 2 + i) * 16 + lane % 16;
            uint32_t b[4];
            LoadMatrixTransposed(b, wide + pixel * 128 + ((j + lane / 16) ^ (pixel % 8)) * 16);
#pragma unroll
            for (int block = 0; block < 2; ++block) {
#pragma unroll
              for (int k = 0; k < 2; ++k) {
                float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[block][(j + k) * 4]);
                Mma<T>(d, in[i][block], b[2 * k], b[2 * k + 1]);
              }
            }
          }
        }
      }
    }
    const uint32_t swap = buffer;
    buffer = other;
    other = swap;
  }

  if (a.by_pixel) {
    __syncthreads();
    float* sums = reinterpret_cast<float*>(cells) + threadIdx.x % 128;
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i * 128] = acc[i / 32][i % 32];
    }
    __syncthreads();
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i / 32][i % 32] += sums[i * 128];
  }
  // acc[b][j * 4 + half * 2 + k]: row g or g + 8 of block b, column j * 8 + 2t + k.
  const int k0 = channel0 + lane % 4 * 2, row = lane / 4;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const StemElement e = kPaired          ? PairElement(g, unit0 / 2 + b * 2 + half, row * 2, 2)
                            : sizeof(T) == 2 ? UnitElement(g, unit0 + row, b * 4 + half * 2, 2)
                                             : UnitElement(g, unit0 + b * 8 + row, half * 4, 4);
      if (e.tap < 0) continue;
      float* to = a.partials + part * a.dw_count + e.tap * g.w_tap + e.channel * g.w_narrow;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int channel = k0 + j * 8 + k;
          if (channel < g.wide_channels) to[channel * g.w_wide] = acc[b][j * 4 + half * 2 + k];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Wide to narrow: dgrad where C is small, fprop where K is small
//
//   narrow[j * stride + phase, c] = sum over offsets d, channels k of wide[j + d, k] * w[tap(phase - stride * d), c, k]
//
// A column of the product is a (phase, c), so that all phases share the reads of wide. The wide
// pixels of a tile with their halo are rows of 128 bytes one after another, and a product's 64 rows
// are 64 of them from any place on: an offset in the image is an offset in the rows. Rows in the
// halo's columns are computed and dropped.

template <typename T>
struct ToNarrowArgs : NarrowOffsets {
  StemGeometry g;
  const T* wide;
  const T* w;
  T* narrow;
  EpilogueArgs<T> epilogue;
  int channel_blocks;  // of 128 bytes
  int plane;           // bytes of the wide pixels of a channel block
  int buffers;         // 2: a tile is fetched while the one before is worked on
  int rows, cols;      // a tile of j
  int wide_rows, wide_cols, m_tiles;
  int tiles_h, tiles_w;
  int64_t tiles;
  FastDiv by_wide_cols, by_tiles_h, by_tiles_w, by_parts;  // parts: of a pixel, 16 bytes each
  uint32_t offsets_at, columns_at, wide_at;
};

template <typename T>
__device__ __forceinline__ StemOrigin OriginOf(const ToNarrowArgs<T>& a, int64_t tile) {
  const QuotRem w = DivMod(tile, a.by_tiles_w);
  const QuotRem h = DivMod(w.quot, a.by_tiles_h);
  return {int(h.quot), h.rem * a.rows, w.rem * a.cols};
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    ToNarrowKernel(const __grid_constant__ ToNarrowArgs<T> a) {
  constexpr int kRow = 128 / int(sizeof(T));  // channels
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, as the compiler sees it
  const int places = a.count[0] * a.count[1], blocks = a.channel_blocks * places;

  // The filter, k-major: [channel block][offset][column][128 bytes of channels, swizzled]. A warp
  // takes a column at an offset.
  for (int e = threadIdx.x / 32; e < blocks * kColumns; e += kThreads / 32) {
    const int n = e % kColumns, block = e / kColumns / places,
              place = e / kColumns - block * places;
    const int ih = place / a.count[1], iw = place - ih * a.count[1];
    const int64_t from = FilterAt(a, n, a.offset[0][ih], a.offset[1][iw]);
#pragma unroll
    for (int k = lane; k < kRow; k += 32) {
      const int channel = block * kRow + k;
      const bool inside = from >= 0 && channel < g.wide_channels;
      const uint32_t bits = inside ? NarrowBits(a.w + from + channel * g.w_wide) : 0;
      unsigned char* to =
          cells + e * 128 + ((k / kVecWidth<T>)^(n % 8)) * 16 + k % kVecWidth<T> * int(sizeof(T));
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(bits);
      } else {
        *reinterpret_cast<uint32_t*>(to) = bits;
      }
    }
  }
  int* offsets = reinterpret_cast<int*>(cells + a.offsets_at);
  for (int e = threadIdx.x; e < blocks; e += kThreads) {
    const int block = e / places, place = e - block * places;
    const int ih = place / a.count[1], iw = place - ih * a.count[1];
    offsets[e] =
        block * a.plane +
        ((a.offset[0][ih] - a.least[0]) * a.wide_cols + a.offset[1][iw] - a.least[1]) * 128;
  }
  // What column n adds to a pixel's place in narrow, and to its h and w (or -1), and its channel.
  int4* columns = reinterpret_cast<int4*>(cells + a.columns_at);
  for (int n = threadIdx.x; n < kColumns; n += kThreads) {
    const int phase = n / g.channels, c = n - phase * g.channels;
    const int ph = phase / g.stride[1], pw = phase - ph * g.stride[1];
    columns[n] = make_int4(int(ph * g.narrow_h + pw * g.narrow_w + c * g.narrow_c),
                           n < a.columns ? ph : -1, pw, c);
  }

  const int slots = a.wide_rows * a.wide_cols * a.channel_blocks * 8;  // of 16 bytes
  const auto slot = [&](uint32_t buffer, int pixel, int part) {
    return buffer + uint32_t(part / 8 * a.plane + pixel * 128 + ((part ^ pixel) % 8) * 16);
  };
  const auto fetch = [&](int64_t tile, uint32_t buffer) {
    const StemOrigin o = OriginOf(a, tile);
    const int h0 = o.h + a.least[0], w0 = o.w + a.least[1];
    const T* base =
        a.wide + ((int64_t(o.image) * g.wide[0] + h0) * g.wide[1] + w0) * g.wide_channels;
    for (int e = threadIdx.x; e < slots; e += kThreads) {
      const int pixel = int(a.by_parts.Div(e)), part = e - pixel * int(a.by_parts.d);
      const int row = int(a.by_wide_cols.Div(pixel)), col = pixel - row * a.wide_cols;
      const int channel = part * kVecWidth<T>;
      const bool inside = unsigned(h0 + row) < unsigned(g.wide[0]) &&
                          unsigned(w0 + col) < unsigned(g.wide[1]) && channel < g.wide_channels;
      const T* from = base + int64_t(row * g.wide[1] + col) * g.wide_channels + channel;
      CopyAsync<16>(slot(buffer, pixel, part), inside ? from : a.wide, inside ? 16 : 0);
    }
    CopyCommit();
  };
  uint32_t wide = shared + a.wide_at, other = wide + (a.buffers - 1) * a.channel_blocks * a.plane;
  if (blockIdx.x < a.tiles) fetch(blockIdx.x, wide);
  for (int64_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const StemOrigin origin = OriginOf(a, tile);
    CopyWait<0>();
    if constexpr (sizeof(T) == 4) {
      for (int e = threadIdx.x; e < slots; e += kThreads) {  // what this thread has copied
        const int pixel = int(a.by_parts.Div(e)), part = e - pixel * int(a.by_parts.d);
        const uint32_t at = slot(wide, pixel, part);
        const uint4 v = LoadShared16(at);
        StoreShared16(
            at, make_uint4(RoundToTf32(v.x), RoundToTf32(v.y), RoundToTf32(v.z), RoundToTf32(v.w)));
      }
    }
    __syncthreads();
    const bool more = tile + gridDim.x < a.tiles;
    if (more && a.buffers == 2) fetch(tile + gridDim.x, other);
    for (int m = group; m < a.m_tiles; m += kGroups) {
      // Products of few columns are so short that one after another on the same sums would wait: a chain of
      // its own for each step of 32 bytes.
      constexpr int kChains = kColumns <= 16 ? 4 : 1;
      float sums[kChains][kColumns / 2] = {};
#pragma unroll 1
      for (int e = 0; e < blocks; ++e) {
        const uint32_t row = wide + (m * 64 + warp * 16 + lane % 16) * 128 + offsets[e];
        const uint32_t filter = shared + e * kColumns * 128;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t in[4];
          LoadMatrix(in, row + ((step * 2 + lane / 16) ^ ((row - wide) / 128 % 8)) * 16);
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const int n = j * 8 + lane % 8;
            uint32_t b0, b1;
            LoadMatrix2(b0, b1, filter + n * 128 + ((step * 2 + lane / 8 % 2) ^ (n % 8)) * 16);
            float (&d)[4] = *reinterpret_cast<float (*)[4]>(&sums[step % kChains][j * 4]);
            Mma<T>(d, in, b0, b1);
          }
        }
      }
      float (&acc)[kColumns / 2] = sums[0];
#pragma unroll
      for (int i = 1; i < kChains; ++i) {
#pragma unroll
        for (int k = 0; k < kColumns / 2; ++k) acc[k] += sums[i][k];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = m * 64 + warp * 16 + lane / 4 + half * 8;
        const int row = int(a.by_wide_cols.Div(pixel)), col = pixel - row * a.wide_cols;
        if (row >= a.rows || col >= a.cols) continue;
        const int h = (origin.h + row) * g.stride[0], w = (origin.w + col) * g.stride[1];
        const int64_t base = origin.image * g.narrow_n + h * g.narrow_h + w * g.narrow_w;
#pragma unroll
        for (int e = 0; e < kColumns / 4; ++e) {
          const int4 at = columns[e / 2 * 8 + lane % 4 * 2 + e % 2];
          if (at.y < 0 || h + at.y >= g.narrow[0] || w + at.z >= g.narrow[1]) continue;
          float v = acc[e / 2 * 4 + half * 2 + e % 2];
          if (a.epilogue.bias != nullptr) v += ToFloat(a.epilogue.bias[at.w]);
          if (a.epilogue.z != nullptr) a.epilogue.z[base + at.x] = FromFloat<T>(v);
          a.narrow[base + at.x] =
              FromFloat<T>(ApplyActivation(a.epilogue.activation, v, a.epilogue.slope));
        }
      }
    }
    if (more && a.buffers == 1) {
      __syncthreads();
      fetch(tile + gridDim.x, wide);
    }
    const uint32_t swap = wide;
    wide = other;
    other = swap;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

template <typename T, int kSteps, bool kPaired>
Status LaunchToWide(const Context& ctx, ToWideArgs<T> a, const Device& device,
                    const std::string& what) {
  const ToWideFilter filter(a.g, ToWideSteps(a.g), kSteps);
  a.chunks = filter.chunks;
  a.filter_tile = filter.filter_tile;
  a.slices = filter.slices;
  a.channel_tiles = filter.channel_tiles;
  a.offsets_at = filter.offsets_at;
  a.places_at = filter.places_at;
  static_assert(kPlaceBytes == sizeof(int2));
  if (!ChooseTile(a.g, filter.Room(sizeof(T), kHalfShared)))
    ChooseTile(a.g, filter.Room(sizeof(T), kMostShared));
  a.narrow_at = a.places_at + uint32_t(CeilDiv(a.g.pixels, 64) * 64 * kPlaceBytes);
  const int64_t bytes = a.narrow_at + a.g.narrow_bytes + a.g.staged_bytes;
  const auto kernel = ToWideKernel<T, kSteps, kPaired>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  const int64_t blocks =
      std::min<int64_t>(a.g.tiles, std::max(1, 2 * device.multiprocessors / a.slices)) * a.slices;
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T>
Status RunToWide(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* narrow,
                 const void* w, const void* bias, void* wide, void* z, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  ToWideArgs<T> a{};
  a.g = MakeGeometry(p);
  a.narrow = static_cast<const T*>(narrow);
  a.w = static_cast<const T*>(w);
  a.wide = static_cast<T*>(wide);
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  a.vectors = a.g.wide_channels % 8 == 0;
  PairUnits(a.g, device.sm90());
  if (!a.g.paired) return LaunchToWide<T, 4, false>(ctx, a, device, what);
  return LongChunks(a.g) ? LaunchToWide<T, 14, true>(ctx, a, device, what)
                         : LaunchToWide<T, 4, true>(ctx, a, device, what);
}

template <typename T>
Status RunWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* narrow,
                const void* wide, void* dw, float* partials, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  WgradArgs<T> a{};
  a.g = MakeGeometry(p);
  StemGeometry& g = a.g;
  a.narrow = static_cast<const T*>(narrow);
  a.wide = static_cast<const T*>(wide);
  a.dw_count = FilterCount(p);
  a.partials = partials;
  if (sizeof(T) == 2) PairUnits(g, device.sm90());
  const WgradShares shares(g, sizeof(T));
  a.by_unit = shares.by_unit;
  a.by_channel = shares.by_channel;
  a.by_pixel = shares.by_pixel;
  a.channel_slices = shares.channel_slices;
  a.unit_slices = shares.unit_slices;
  ChooseTile(g, shares.Room(sizeof(T)));
  a.padded = int(CeilDiv(g.pixels, shares.quantum)) * shares.quantum;
  a.parts = int(std::min<int64_t>(splits, g.tiles));
  a.wide_at = uint32_t(CeilDiv(a.padded * 4, 1024) * 1024);
  a.plane = uint32_t(a.padded * kTileChannels * int(sizeof(T)));
  a.wide_bytes = a.plane * (1 + a.by_channel);
  a.narrow_at = a.wide_at + 2 * a.wide_bytes;
  int64_t bytes = a.narrow_at + g.narrow_bytes + g.staged_bytes;
  if (a.by_pixel) bytes = std::max<int64_t>(bytes, 64 * 128 * 4);
  const int64_t blocks = int64_t(a.parts) * a.channel_slices * a.unit_slices;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const auto kernel = g.paired ? WgradKernel<T, sizeof(T) == 2> : WgradKernel<T, false>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  return SumPartials(ctx, p.dtype, a.partials, a.parts, a.dw_count, {}, dw, what.c_str());
}

template <typename T, int kColumns>
Status LaunchToNarrow(const Context& ctx, ToNarrowArgs<T> a, const std::string& what) {
  const StemGeometry& g = a.g;
  ToNarrowTile tile(g, a, kColumns, sizeof(T));
  a.channel_blocks = tile.channel_blocks;
  a.by_parts = FastDiv(a.channel_blocks * 8);
  a.offsets_at = tile.offsets_at;
  a.columns_at = tile.columns_at;
  a.wide_at = tile.wide_at;
  const int places = a.count[0] * a.count[1];
  const int h = int(CeilDiv(g.narrow[0], g.stride[0])), w = int(CeilDiv(g.narrow[1], g.stride[1]));
  // The tile that costs the least: products of 64 rows, and loads. As many rows as fit, evenly.
  double least = 1e30;
  int best[3] = {0, 0, 1};
  for (int64_t budget : {kHalfShared, kMostShared}) {
    for (int parts = 1; best[0] == 0 || budget != kMostShared; parts += (parts + 3) / 4) {
      const int cols = int(CeilDiv(w, parts));
      for (int buffers = 1; buffers <= 2; ++buffers) {
        const int most = tile.MostRows(budget, cols, buffers);
        if (most < 1) continue;
        int rows = int(CeilDiv(h, CeilDiv(h, std::min(most, h))));
        while (rows > 1 && tile.Set(rows, cols, buffers) > budget) --rows;
        if (tile.Set(rows, cols, buffers) > budget) continue;
        const double tiles = double(CeilDiv(h, rows)) * double(CeilDiv(w, cols));
        const double products = CeilDiv(tile.m_tiles, kGroups) * kGroups * 64.0 * places;
        const double loads = 8.0 * tile.wide_rows * tile.wide_cols;
        const double cost = tiles * (buffers == 2 ? products + 0.5 * loads : products + loads);
        if (cost < least) {
          least = cost;
          best[0] = rows;
          best[1] = cols;
          best[2] = buffers;
        }
      }
      if (cols == 1) break;
    }
  }
  a.buffers = best[2];
  const int64_t bytes = tile.Set(best[0], best[1], a.buffers);
  a.rows = tile.rows;
  a.cols = tile.cols;
  a.wide_rows = tile.wide_rows;
  a.wide_cols = tile.wide_cols;
  a.m_tiles = tile.m_tiles;
  a.plane = tile.plane;
  a.tiles_h = int(CeilDiv(h, a.rows));
  a.tiles_w = int(CeilDiv(w, a.cols));
  a.tiles = int64_t(g.images) * a.tiles_h * a.tiles_w;
  a.by_wide_cols = FastDiv(a.wide_cols);
  a.by_tiles_h = FastDiv(a.tiles_h);
  a.by_tiles_w = FastDiv(a.tiles_w);
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const auto kernel = ToNarrowKernel<T, kColumns>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  const int64_t resident = std::clamp<int64_t>(227 * 1024 / (bytes + 1024), 1, 3);
  const int64_t blocks = std::min<int64_t>(a.tiles, resident * device.multiprocessors);
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T>
Status RunToNarrow(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* wide,
                   const void* w, const void* bias, void* narrow, void* z,
                   const std::string& what) {
  ToNarrowArgs<T> a{};
  a.g = MakeGeometry(p);
  a.wide = static_cast<const T*>(wide);
  a.w = static_cast<const T*>(w);
  a.narrow = static_cast<T*>(narrow);
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  SetOffsets(a, a.g, p);
  return ToNarrowTile::KernelColumns(a) == 16 ? LaunchToNarrow<T, 16>(ctx, a, what)
                                              : LaunchToNarrow<T, kMaxColumns>(ctx, a, what);
}

}  // namespace

Status StemMma(const Context& ctx, ConvOp op, const ConvProblem& p, const Epilogue& e,
               const void* src, const void* w, const void* bias, void* dst, void* z,
               const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return ToWide(op, p) ? RunToWide<T>(ctx, p, e, src, w, bias, dst, z, what)
                         : RunToNarrow<T>(ctx, p, e, src, w, bias, dst, z, what);
  });
}

Status StemMmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                    const void* dy, void* dw, float* partials, const std::string& what) {
  const bool few_in = FewInputs(p);
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return RunWgrad<T>(ctx, p, splits, few_in ? x : dy, few_in ? dy : x, dw, partials, what);
  });
}

}  // namespace jaxconv::cuda::conv
