// Convolution between a thin image (at most 8 channels) and a fat one; what thin and fat are in
// each pass, and the shifts, is in stem.cuh. Three sums over taps t:
//
//   expand    fat[i, k]  = sum over t, c of thin[i * stride + shift(t), c] * w[t, c, k]
//   cross     dw[t, c, k] = sum over i of   thin[i * stride + shift(t), c] * fat[i, k]
//   contract  thin[u, c] = sum over t, k of fat[(u - shift(t)) / stride, k] * w[t, c, k]
//
// All three are bound by the fat image's traffic, if shared memory is not read too often for it.
// Blocks are persistent: the filter (or the sums of dw) stays on chip, while tiles pass by. On
// sm_90a the kernels of sm90.h take most problems; those here are for other devices and for
// what is left. Products are mma.sync, 16 rows a warp:
//
//   expand    rows are fat pixels, gathered from the thin tile into registers by ldmatrix (each row
//             of a window is a run of pixels); columns are fat channels
//   cross     rows are thin channels of taps, gathered and transposed by ldmatrix, k is 16 pixels;
//             columns are fat channels, as they lie
//   contract  rows are fat pixels as they lie, columns are the thin channels of all phases
#include "cuda/conv/stem/stem.h"

#include <algorithm>
#include <vector>

#include "cuda/conv/common/reduce.h"
#include "cuda/conv/stem/sm90.h"
#include "cuda/conv/stem/stem.cuh"
#include "cuda/dense/sm90.h"

namespace jaxconv::cuda {
namespace conv {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / 128;
constexpr int kTileChannels = 64;
constexpr int64_t kOperandBytes = 80 * 1024;  // of a filter in shared memory
constexpr int64_t kHalfShared = 113 * 1024;   // two blocks a multiprocessor
constexpr int64_t kMostShared = 160 * 1024;
// Where sm90.h's kernels run, these take what is left, unpaired: fewer kernels to compile.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kLeftOver = true;
#else
constexpr bool kLeftOver = false;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Thin to fat: fprop where C is small, dgrad where K is small

template <typename T>
struct ExpandArgs {
  StemGeometry g;
  const T* thin;
  const T* w;
  T* fat;
  EpilogueArgs<T> epilogue;
  int channel_tiles, slices;  // of 64 channels: of a block, and how many blocks share a pixel
  int chunks, filter_tile;    // filter_tile: bytes of one channel tile's operand
  uint32_t offsets_at, places_at, thin_at;
  bool wide;  // 16-byte stores
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
__device__ __forceinline__ uint32_t FilterWord(const ExpandArgs<T>& a, int step, int word,
                                               int channel) {
  constexpr int kSize = int(sizeof(T));
  uint32_t bits = 0;
#pragma unroll
  for (int byte = 0; byte < 4; byte += kSize) {
    const StemElement e = kPaired
                              ? PairElement(a.g, step * 2 + word / 4, word % 4 * 4 + byte, kSize)
                              : UnitElement(a.g, step * 4 + word % 4, word / 4 * 4 + byte, kSize);
    if (e.tap >= 0) {
      bits |= ThinBits(a.w + e.tap * a.g.w_tap + channel * a.g.w_fat + e.channel * a.g.w_thin)
              << byte * 8;
    }
  }
  return bits;
}

template <typename T, int kSteps, bool kPaired>
__global__ void __launch_bounds__(kThreads, 2)
    ExpandKernel(const __grid_constant__ ExpandArgs<T> a) {
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
    if (step < kSteps && channel < g.fat_channels) {
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
  const uint32_t thin = shared + a.thin_at, raw = thin + g.thin_bytes;
  int2* places = reinterpret_cast<int2*>(cells + a.places_at);
  for (int pixel = threadIdx.x; pixel < (g.pixels + 63) / 64 * 64; pixel += kThreads) {
    const int valid = min(pixel, g.pixels - 1);
    const int row = int(g.by_cols.Div(valid)), col = valid - row * g.cols;
    const int at =
        (row * g.stride[0] * g.thin_cols + col * g.stride[1] + g.lead - g.skip) * g.pitch;
    places[pixel] = make_int2(int(thin) + at, pixel < g.pixels ? row << 16 | col : -1);
  }

  const auto stage = [&](int64_t tile) {
    const StemOrigin o = OriginOf(g, tile);
    StageThin<T, kThreads>(raw, a.thin, g, o.image, o.h * g.stride[0] + g.first[0],
                           o.w * g.stride[1] + g.first[1]);
    CopyAsyncCommit();
  };
  const int stride = int(gridDim.x) / a.slices;
  const int64_t begin = blockIdx.x / unsigned(a.slices);
  if (g.staged && begin < g.tiles) stage(begin);
  for (int64_t tile = begin; tile < g.tiles; tile += stride) {
    const StemOrigin origin = OriginOf(g, tile);
    CopyAsyncWait<0>();
    __syncthreads();
    if (g.staged) {
      UnpackThin<T, kThreads>(thin, raw, g);
    } else {
      LoadThin<T, kThreads, 4>(thin, a.thin, g, origin.image, origin.h * g.stride[0] + g.first[0],
                               origin.w * g.stride[1] + g.first[1]);
    }
    __syncthreads();
    if (g.staged && tile + stride < g.tiles) stage(tile + stride);
    const int64_t base =
        ((int64_t(origin.image) * g.fat[0] + origin.h) * g.fat[1] + origin.w) * g.fat_channels +
        channel0 + lane % 4 * 8;
    const int rows = g.fat[0] - origin.h, cols = g.fat[1] - origin.w;
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
        to[i] = base + int64_t(row * g.fat[1] + col) * g.fat_channels;
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
            const float bias = c < g.fat_channels ? ToFloat(a.epilogue.bias[c]) : 0.f;
            acc[(e / 2) * 4 + e % 2] += bias;
            acc[(e / 2) * 4 + 2 + e % 2] += bias;
          }
        }
        const auto store = [&](T* out) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int half = e % 2, i = e / 2, c = channel + half * 32;
            if (!inside[i] || c >= g.fat_channels) continue;
            T* p = out + to[i] + tile_k * kTileChannels + half * 32;
            if (a.wide) {
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
                if (c + k < g.fat_channels) {
                  p[k] = FromFloat<T>(acc[(half * 4 + k / 2) * 4 + i * 2 + k % 2]);
                }
              }
            }
          }
        };
        if (a.epilogue.z != nullptr) store(a.epilogue.z);
        ApplyActivation(a.epilogue.activation, acc, a.epilogue.slope);
        store(a.fat);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// wgrad: dw[unit, k] = sum over fat pixels of the unit's thin channels times fat[k]

// Of a warpgroup: two blocks of 64 rows, each a channel of a unit. A lane's row is its unit;
// float32 units have half the channels, so that there are twice as many.
template <typename T>
constexpr int kGroupUnits = 32 * int(sizeof(T)) / 2;

template <typename T>
struct CrossArgs {
  StemGeometry g;
  const T* thin;
  const T* fat;
  float* partials;  // (parts, elements of dw)
  int64_t dw_count;
  int parts, padded;  // padded: pixels of a tile, to a multiple of 32, or 64 (by_pixel)
  int channel_slices, unit_slices;  // of dw, each with `parts` blocks of its own
  // What the two warpgroups divide: units (32 each), channels (64 each), or pairs of steps.
  int by_unit, by_channel, by_pixel;
  uint32_t fat_at, fat_bytes, plane, thin_at;  // the table of the pixels' places lies first
};

// Where 16 bytes of a fat pixel's 64 channels lie. 16-bit pixels are rows of 128 bytes, swizzled as
// wgmma and ldmatrix want them; float32 ones of 256, so that every other one of eight pixels by
// eight channels are in different banks.
template <typename T>
__device__ __forceinline__ uint32_t FatSlot(int pixel, int part) {
  return sizeof(T) == 2 ? pixel * 128 + (part ^ (pixel % 8)) * 16
                        : pixel * 256 + (part ^ (pixel / 2 % 4 * 2)) * 16;
}

// The fat pixels of a tile, 64 channels each.
template <typename T>
__device__ __forceinline__ void LoadFat(uint32_t shared, const T* __restrict__ fat,
                                        const StemGeometry& g, const StemOrigin& o, int channel0) {
  constexpr int kParts = kTileChannels / kVecWidth<T>;
  const T* base =
      fat + ((int64_t(o.image) * g.fat[0] + o.h) * g.fat[1] + o.w) * g.fat_channels + channel0;
  const int part = threadIdx.x % kParts, channel = part * kVecWidth<T>;
  const bool any = channel0 + channel < g.fat_channels;
  for (int pixel = threadIdx.x / kParts; pixel < g.pixels; pixel += kThreads / kParts) {
    const int row = int(g.by_cols.Div(pixel)), col = pixel - row * g.cols;
    const bool inside = any && o.h + row < g.fat[0] && o.w + col < g.fat[1];
    const T* from = base + int64_t(row * g.fat[1] + col) * g.fat_channels + channel;
    CopyAsync<16>(shared + FatSlot<T>(pixel, part), inside ? from : fat, inside ? 16 : 0);
  }
}

template <typename T, bool kPaired>
__global__ void __launch_bounds__(kThreads, 2) CrossKernel(const __grid_constant__ CrossArgs<T> a) {
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
        (row * g.stride[0] * g.thin_cols + col * g.stride[1] + g.lead - g.skip) * g.pitch;
  }
  for (uint32_t at = a.fat_at + threadIdx.x * 16; at < a.thin_at; at += kThreads * 16) {
    StoreShared16(shared + at,
                  make_uint4(0, 0, 0, 0));  // the rows of the pixels that are not there
  }
  __syncthreads();
  const uint32_t thin = shared + a.thin_at, raw = thin + g.thin_bytes;
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
      source[b] = thin + PairOffset(g, pair * g.taps_w < g.taps * g.row_pairs ? pair : 0);
    }
  } else {
    table = shared + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
      const int unit = unit0 + b * 8 + lane / 4;
      source[b] = thin + UnitOffset(g, unit < g.units ? unit : 0);
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
    LoadFat(buffer, a.fat, g, o, channel_slice);
    if (a.by_channel) LoadFat(buffer + a.plane, a.fat, g, o, channel_slice + kTileChannels);
    if (g.staged) {
      StageThin<T, kThreads>(raw, a.thin, g, o.image, o.h * g.stride[0] + g.first[0],
                             o.w * g.stride[1] + g.first[1]);
    }
    CopyAsyncCommit();
  };

  float acc[2][32] = {};
  uint32_t buffer = shared + a.fat_at, other = buffer + a.fat_bytes;
  if (part < g.tiles) fetch(part, buffer);
  for (int64_t tile = part; tile < g.tiles; tile += a.parts) {
    CopyAsyncWait<0>();
    __syncthreads();
    if (g.staged) {
      UnpackThin<T, kThreads>(thin, raw, g);
    } else {
      const StemOrigin o = OriginOf(g, tile);
      LoadThin<T, kThreads, 2>(thin, a.thin, g, o.image, o.h * g.stride[0] + g.first[0],
                               o.w * g.stride[1] + g.first[1]);
    }
    __syncthreads();
    if (tile + a.parts < g.tiles) fetch(tile + a.parts, other);
    const uint32_t fat = buffer + group * a.by_channel * a.plane;
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
                  LoadShared4(fat + FatSlot<T>(pixel + i, channel / 4) + channel % 4 * 4));
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
            LoadMatrixTransposed(b, fat + pixel * 128 + ((j + lane / 16) ^ (pixel % 8)) * 16);
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
      float* to = a.partials + part * a.dw_count + e.tap * g.w_tap + e.channel * g.w_thin;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int channel = k0 + j * 8 + k;
          if (channel < g.fat_channels) to[channel * g.w_fat] = acc[b][j * 4 + half * 2 + k];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Fat to thin: dgrad where C is small, fprop where K is small
//
//   thin[j * stride + phase, c] = sum over offsets d, channels k of fat[j + d, k] * w[tap(phase - stride * d), c, k]
//
// A column of the product is a (phase, c), so that all phases share the reads of fat. The fat
// pixels of a tile with their halo are rows of 128 bytes one after another, and a product's 64 rows
// are 64 of them from any place on: an offset in the image is an offset in the rows. Rows in the
// halo's columns are computed and dropped.

constexpr int kMaxColumns = 64;

template <typename T>
struct ContractArgs : ContractOffsets {
  StemGeometry g;
  const T* fat;
  const T* w;
  T* thin;
  EpilogueArgs<T> epilogue;
  int channel_blocks;  // of 128 bytes
  int plane;           // bytes of the fat pixels of a channel block
  int buffers;         // 2: a tile is fetched while the one before is worked on
  int rows, cols;      // a tile of j
  int fat_rows, fat_cols, m_tiles;
  int tiles_h, tiles_w;
  int64_t tiles;
  FastDiv by_fat_cols, by_tiles_h, by_tiles_w, by_parts;  // parts: of a pixel, 16 bytes each
  uint32_t offsets_at, columns_at, fat_at;
};

template <typename T>
__device__ __forceinline__ StemOrigin OriginOf(const ContractArgs<T>& a, int64_t tile) {
  const QuotRem w = DivMod(tile, a.by_tiles_w);
  const QuotRem h = DivMod(w.quot, a.by_tiles_h);
  return {int(h.quot), h.rem * a.rows, w.rem * a.cols};
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    ContractKernel(const __grid_constant__ ContractArgs<T> a) {
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
      const bool inside = from >= 0 && channel < g.fat_channels;
      const uint32_t bits = inside ? ThinBits(a.w + from + channel * g.w_fat) : 0;
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
    offsets[e] = block * a.plane +
                 ((a.offset[0][ih] - a.least[0]) * a.fat_cols + a.offset[1][iw] - a.least[1]) * 128;
  }
  // What column n adds to a pixel's place in thin, and to its h and w (or -1), and its channel.
  int4* columns = reinterpret_cast<int4*>(cells + a.columns_at);
  for (int n = threadIdx.x; n < kColumns; n += kThreads) {
    const int phase = n / g.channels, c = n - phase * g.channels;
    const int ph = phase / g.stride[1], pw = phase - ph * g.stride[1];
    columns[n] = make_int4(int(ph * g.thin_h + pw * g.thin_w + c * g.thin_c),
                           n < a.columns ? ph : -1, pw, c);
  }

  const int slots = a.fat_rows * a.fat_cols * a.channel_blocks * 8;  // of 16 bytes
  const auto slot = [&](uint32_t buffer, int pixel, int part) {
    return buffer + uint32_t(part / 8 * a.plane + pixel * 128 + ((part ^ pixel) % 8) * 16);
  };
  const auto fetch = [&](int64_t tile, uint32_t buffer) {
    const StemOrigin o = OriginOf(a, tile);
    const int h0 = o.h + a.least[0], w0 = o.w + a.least[1];
    const T* base = a.fat + ((int64_t(o.image) * g.fat[0] + h0) * g.fat[1] + w0) * g.fat_channels;
    for (int e = threadIdx.x; e < slots; e += kThreads) {
      const int pixel = int(a.by_parts.Div(e)), part = e - pixel * int(a.by_parts.d);
      const int row = int(a.by_fat_cols.Div(pixel)), col = pixel - row * a.fat_cols;
      const int channel = part * kVecWidth<T>;
      const bool inside = unsigned(h0 + row) < unsigned(g.fat[0]) &&
                          unsigned(w0 + col) < unsigned(g.fat[1]) && channel < g.fat_channels;
      const T* from = base + int64_t(row * g.fat[1] + col) * g.fat_channels + channel;
      CopyAsync<16>(slot(buffer, pixel, part), inside ? from : a.fat, inside ? 16 : 0);
    }
    CopyAsyncCommit();
  };
  uint32_t fat = shared + a.fat_at, other = fat + (a.buffers - 1) * a.channel_blocks * a.plane;
  if (blockIdx.x < a.tiles) fetch(blockIdx.x, fat);
  for (int64_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const StemOrigin origin = OriginOf(a, tile);
    CopyAsyncWait<0>();
    if constexpr (sizeof(T) == 4) {
      for (int e = threadIdx.x; e < slots; e += kThreads) {  // what this thread has copied
        const int pixel = int(a.by_parts.Div(e)), part = e - pixel * int(a.by_parts.d);
        const uint32_t at = slot(fat, pixel, part);
        const uint4 v = LoadShared16(at);
        StoreShared16(
            at, make_uint4(RoundToTf32(v.x), RoundToTf32(v.y), RoundToTf32(v.z), RoundToTf32(v.w)));
      }
    }
    __syncthreads();
    const bool more = tile + gridDim.x < a.tiles;
    if (more && a.buffers == 2) fetch(tile + gridDim.x, other);
    for (int m = group; m < a.m_tiles; m += kGroups) {
      // Narrow products are so short that one after another on the same sums would wait: a chain of
      // its own for each step of 32 bytes.
      constexpr int kChains = kColumns <= 16 ? 4 : 1;
      float sums[kChains][kColumns / 2] = {};
#pragma unroll 1
      for (int e = 0; e < blocks; ++e) {
        const uint32_t row = fat + (m * 64 + warp * 16 + lane % 16) * 128 + offsets[e];
        const uint32_t filter = shared + e * kColumns * 128;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t in[4];
          LoadMatrix(in, row + ((step * 2 + lane / 16) ^ ((row - fat) / 128 % 8)) * 16);
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
        const int row = int(a.by_fat_cols.Div(pixel)), col = pixel - row * a.fat_cols;
        if (row >= a.rows || col >= a.cols) continue;
        const int h = (origin.h + row) * g.stride[0], w = (origin.w + col) * g.stride[1];
        const int64_t base = origin.image * g.thin_n + h * g.thin_h + w * g.thin_w;
#pragma unroll
        for (int e = 0; e < kColumns / 4; ++e) {
          const int4 at = columns[e / 2 * 8 + lane % 4 * 2 + e % 2];
          if (at.y < 0 || h + at.y >= g.thin[0] || w + at.z >= g.thin[1]) continue;
          float v = acc[e / 2 * 4 + half * 2 + e % 2];
          if (a.epilogue.bias != nullptr) v += ToFloat(a.epilogue.bias[at.w]);
          if (a.epilogue.z != nullptr) a.epilogue.z[base + at.x] = FromFloat<T>(v);
          a.thin[base + at.x] =
              FromFloat<T>(ApplyActivation(a.epilogue.activation, v, a.epilogue.slope));
        }
      }
    }
    if (more && a.buffers == 1) {
      __syncthreads();
      fetch(tile + gridDim.x, fat);
    }
    const uint32_t swap = fat;
    fat = other;
    other = swap;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

// Everything but the tile.
template <typename T>
StemGeometry MakeGeometry(const ConvProblem& p, const void* thin) {
  StemGeometry g{};
  const bool few_in = p.c <= kFew;  // else K is small
  g.images = int(p.n * p.in[0]);
  g.channels = int(few_in ? p.c : p.k);
  g.fat_channels = int(few_in ? p.k : p.c);
  for (int d = 0; d < 2; ++d) {
    const int span = int((p.filter[d + 1] - 1) * p.dilation[d + 1]);
    g.thin[d] = int(few_in ? p.in[d + 1] : p.out[d + 1]);
    g.fat[d] = int(few_in ? p.out[d + 1] : p.in[d + 1]);
    g.stride[d] = int(p.stride[d + 1]);
    g.step[d] = int(p.dilation[d + 1]);
    g.first[d] = int(few_in ? -p.pad[d + 1] : p.pad[d + 1] - span);
  }
  g.flip = !few_in;
  g.thin_c = 1;
  g.thin_w = g.channels;
  g.thin_h = g.thin_w * g.thin[1];
  g.thin_n = g.thin_h * g.thin[0];
  g.w_tap = p.c * p.k;
  g.w_thin = few_in ? p.k : 1;
  g.w_fat = few_in ? 1 : p.k;
  g.taps_w = int(p.filter[2]);
  g.taps = int(p.filter_size());
  g.pixel_units = int(CeilDiv(g.channels, kUnit<T>));
  g.units = g.taps * g.pixel_units;
  g.pitch = g.pixel_units * kUnitBytes;
  g.row_pairs = 1;
  g.dense = g.channels == 3 && g.thin[1] % 4 == 0 && reinterpret_cast<uintptr_t>(thin) % 16 == 0;
  return g;
}

// Reads windows as pairs of units where they are so aligned.
Status Pair(StemGeometry& g, const std::string& what) {
  cudaFuncAttributes attributes;
  const auto kernel = ExpandKernel<float, 4, false>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaFuncGetAttributes(&attributes, kernel), what));
  g.paired = attributes.binaryVersion != 90 && g.step[1] == 1 && g.stride[1] * g.pitch % 16 == 0;
  if (!g.paired) return Status::Ok();
  g.skip = g.dense && (g.first[1] % 4 + 4) % 4 * g.pitch % 16 != 0;
  g.row_pairs = int(CeilDiv((g.taps_w + g.skip) * g.pitch, 16));
  return Status::Ok();
}

// Returns the bytes of the thin pixels.
int64_t SetTile(StemGeometry& g, int rows, int cols, int item) {
  g.rows = rows;
  g.cols = cols;
  g.pixels = rows * cols;
  g.tiles_h = int(CeilDiv(g.fat[0], rows));
  g.tiles_w = int(CeilDiv(g.fat[1], cols));
  g.tiles = int64_t(g.images) * g.tiles_h * g.tiles_w;
  g.thin_rows = (rows - 1) * g.stride[0] + (g.taps / g.taps_w - 1) * g.step[0] + 1;
  g.thin_cols = (cols - 1) * g.stride[1] + (g.taps_w - 1) * g.step[1] + 1;
  g.staged = g.dense && (g.tiles_w == 1 || cols * g.stride[1] % 4 == 0);
  g.lead = g.staged ? (g.first[1] % 4 + 4) % 4 : g.skip;
  if (g.paired) {  // what the last window's pairs reach
    g.thin_cols = (cols - 1) * g.stride[1] - g.skip + int(CeilDiv(g.row_pairs * 16, g.pitch));
  }
  g.thin_cols += g.lead;
  if (g.staged || g.paired) g.thin_cols = int(CeilDiv(g.thin_cols, 4)) * 4;
  g.items = g.staged ? g.thin_rows * g.thin_cols / 4 : 0;
  g.thin_bytes = uint32_t(CeilDiv(int64_t(g.thin_rows) * g.thin_cols * g.pitch, 16) * 16);
  g.staged_bytes = uint32_t(g.items * 12 * item);
  g.by_cols = FastDiv(cols);
  g.by_tiles_h = FastDiv(g.tiles_h);
  g.by_tiles_w = FastDiv(g.tiles_w);
  g.by_quads = FastDiv(std::max(g.thin_cols / 4, 1));
  return int64_t(g.thin_bytes) + g.staged_bytes;
}

// The tile of at most `most` pixels whose thin pixels, and `pixel_bytes` for each fat pixel, fit
// into `budget`. Whole rows up to 128 pixels; the number of rows that wastes the least, by pixels
// of partial tiles (of `quantum`) and by halo.
bool ChooseTile(StemGeometry& g, int item, int64_t budget, int most, int pixel_bytes, int quantum) {
  int cols = int(CeilDiv(g.fat[1], CeilDiv(g.fat[1], 128)));
  const auto fits = [&](int rows, int cols) {
    const int64_t thin = SetTile(g, rows, cols, item);
    return rows * cols <= most &&
           thin + CeilDiv(rows * cols, quantum) * quantum * pixel_bytes <= budget;
  };
  while (cols > 8 && !fits(1, cols)) cols = (cols + 1) / 2;
  if (!fits(1, cols)) return false;
  int best = 1;
  double cost = 1e30;
  for (int rows = 1; rows <= g.fat[0] && fits(rows, cols); ++rows) {
    const int tiles = int(CeilDiv(g.fat[0], rows));
    const double padded = double(tiles) * double(CeilDiv(rows * cols, quantum)) * quantum;
    const double loaded = double(tiles) * g.thin_rows * g.thin_cols;
    const double now = padded + 0.15 * loaded + 32 * tiles;  // a tile's barriers
    if (now < cost) {
      cost = now;
      best = rows;
    }
  }
  SetTile(g, best, cols, item);
  return true;
}

Status Multiprocessors(int* count, const std::string& what) {
  int device = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), what));
  return CudaStatus(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), what);
}

template <typename T, int kSteps, bool kPaired>
Status LaunchExpand(const Context& ctx, ExpandArgs<T> a, int steps, const std::string& what) {
  a.chunks = int(CeilDiv(steps, kSteps));
  a.filter_tile = a.chunks * int(CeilDiv(kSteps, 4)) * 8192;
  const int tiles = int(CeilDiv(a.g.fat_channels, kTileChannels));
  a.slices = int(CeilDiv(tiles, std::max<int64_t>(1, kOperandBytes / a.filter_tile)));
  a.channel_tiles = int(CeilDiv(tiles, a.slices));
  a.offsets_at = uint32_t(a.channel_tiles * a.filter_tile);
  a.places_at = a.offsets_at + uint32_t(CeilDiv(a.chunks * kSteps * 16, 16) * 16);
  constexpr int kPlace = int(sizeof(int2)), kQuantum = kGroups * 64;
  if (!ChooseTile(a.g, sizeof(T), kHalfShared - a.places_at, 1024, kPlace, kQuantum) &&
      !ChooseTile(a.g, sizeof(T), kMostShared - a.places_at, 1024, kPlace, kQuantum)) {
    return Status::Unimplemented(what + ": its filter is too large for shared memory");
  }
  a.thin_at = a.places_at + uint32_t(CeilDiv(a.g.pixels, 64) * 64 * kPlace);
  const int64_t bytes = a.thin_at + a.g.thin_bytes + a.g.staged_bytes;
  int multiprocessors = 0;
  JAXCONV_RETURN_IF_ERROR(Multiprocessors(&multiprocessors, what));
  const auto kernel = ExpandKernel<T, kSteps, kPaired>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), what));
  const int64_t blocks =
      std::min<int64_t>(a.g.tiles, std::max(1, 2 * multiprocessors / a.slices)) * a.slices;
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T>
Status RunExpand(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* thin,
                 const void* w, const void* bias, void* fat, void* z, const std::string& what) {
  ExpandArgs<T> a{};
  a.g = MakeGeometry<T>(p, thin);
  bool taken = false;
  JAXCONV_RETURN_IF_ERROR(ExpandRows(ctx, p.dtype, a.g, e, thin, w, bias, fat, z, what, &taken));
  if (taken) return Status::Ok();
  a.thin = static_cast<const T*>(thin);
  a.w = static_cast<const T*>(w);
  a.fat = static_cast<T*>(fat);
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  a.wide = a.g.fat_channels % 8 == 0 && Aligned16(fat) && Aligned16(z);
  JAXCONV_RETURN_IF_ERROR(Pair(a.g, what));
  if (!a.g.paired) return LaunchExpand<T, 4, false>(ctx, a, int(CeilDiv(a.g.units, 4)), what);
  const int steps = int(CeilDiv(a.g.taps / a.g.taps_w * a.g.row_pairs, 2));
  return CeilDiv(steps, 14) * 14 <= CeilDiv(steps, 4) * 4
             ? LaunchExpand<T, 14, true>(ctx, a, steps, what)
             : LaunchExpand<T, 4, true>(ctx, a, steps, what);
}

template <typename T>
Status RunCross(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* thin,
                const void* fat, void* dw, Workspace workspace, const std::string& what) {
  CrossArgs<T> a{};
  a.g = MakeGeometry<T>(p, thin);
  StemGeometry& g = a.g;
  a.thin = static_cast<const T*>(thin);
  a.fat = static_cast<const T*>(fat);
  a.dw_count = p.c * p.k * p.filter_size();
  JAXCONV_RETURN_IF_ERROR(CheckWorkspace(workspace, plan.splits * a.dw_count * 4, what));
  a.partials = static_cast<float*>(workspace.data);
  bool taken = false;
  JAXCONV_RETURN_IF_ERROR(
      CrossRows(ctx, p.dtype, g, plan.splits, thin, fat, dw, a.partials, a.dw_count, what, &taken));
  if (taken) return Status::Ok();
  const int tiles = int(CeilDiv(g.fat_channels, kTileChannels));
  if (sizeof(T) == 2) JAXCONV_RETURN_IF_ERROR(Pair(g, what));
  const int units = g.paired ? g.taps / g.taps_w * g.row_pairs * 2 : g.units;
  a.by_unit = units > kGroupUnits<T>;
  a.by_channel = !a.by_unit && tiles > 1;
  a.by_pixel = !a.by_unit && !a.by_channel;
  a.channel_slices = int(CeilDiv(tiles, 1 + a.by_channel));
  a.unit_slices = int(CeilDiv(units, kGroupUnits<T> * (1 + a.by_unit)));
  const int quantum = 32 * (1 + a.by_pixel), planes = 1 + a.by_channel;
  constexpr int kMost = 512;
  const int row_bytes = kTileChannels * int(sizeof(T));
  if (!ChooseTile(g, sizeof(T), kHalfShared - kMost * 4 - 1024, kMost, 2 * planes * row_bytes,
                  quantum)) {
    return Status::Unimplemented(what + ": its filter is too large for shared memory");
  }
  a.padded = int(CeilDiv(g.pixels, quantum)) * quantum;
  a.parts = int(std::min<int64_t>(plan.splits, g.tiles));
  a.fat_at = uint32_t(CeilDiv(a.padded * 4, 1024) * 1024);
  a.plane = uint32_t(a.padded * row_bytes);
  a.fat_bytes = a.plane * planes;
  a.thin_at = a.fat_at + 2 * a.fat_bytes;
  int64_t bytes = a.thin_at + g.thin_bytes + g.staged_bytes;
  if (a.by_pixel) bytes = std::max<int64_t>(bytes, 64 * 128 * 4);
  const int64_t blocks = int64_t(a.parts) * a.channel_slices * a.unit_slices;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const auto kernel = g.paired ? CrossKernel<T, sizeof(T) == 2> : CrossKernel<T, false>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), what));
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  return SumPartials(ctx, p.dtype, a.partials, a.parts, a.dw_count, {}, dw, what.c_str());
}

template <typename T, int kColumns>
Status LaunchContract(const Context& ctx, ContractArgs<T> a, const std::string& what) {
  const StemGeometry& g = a.g;
  a.channel_blocks = int(CeilDiv(g.fat_channels * int(sizeof(T)), 128));
  a.by_parts = FastDiv(a.channel_blocks * 8);
  const int places = a.count[0] * a.count[1];
  a.offsets_at = uint32_t(a.channel_blocks * places * kColumns * 128);
  a.columns_at = uint32_t(CeilDiv(a.offsets_at + a.channel_blocks * places * 4, 16) * 16);
  a.fat_at = uint32_t(CeilDiv(a.columns_at + kColumns * 16, 1024) * 1024);
  const int span_h = a.offset[0][a.count[0] - 1] - a.least[0];
  const int span_w = a.offset[1][a.count[1] - 1] - a.least[1];
  const int h = int(CeilDiv(g.thin[0], g.stride[0])), w = int(CeilDiv(g.thin[1], g.stride[1]));
  const auto set = [&](int rows, int cols) {  // bytes
    a.rows = rows;
    a.cols = cols;
    a.fat_rows = rows + span_h;
    a.fat_cols = cols + span_w;
    a.m_tiles = int(CeilDiv((rows - 1) * a.fat_cols + cols, 64));
    a.plane = int(CeilDiv(a.m_tiles * 64 + span_h * a.fat_cols + span_w, 8) * 1024);
    return a.fat_at + a.buffers * int64_t(a.channel_blocks) * a.plane;
  };
  // The tile that costs the least: products of 64 rows, and loads. As many rows as fit, evenly.
  double least = 1e30;
  int best[3] = {0, 0, 1};
  for (int64_t budget : {kHalfShared, kMostShared}) {
    for (int parts = 1; best[0] == 0 || budget != kMostShared; parts += (parts + 3) / 4) {
      const int cols = int(CeilDiv(w, parts));
      for (a.buffers = 1; a.buffers <= 2; ++a.buffers) {
        const int64_t room = (budget - a.fat_at) / (a.buffers * a.channel_blocks * 128) - 64;
        const int most = int(room / (cols + span_w)) - span_h;  // rows
        if (most < 1) continue;
        int rows = int(CeilDiv(h, CeilDiv(h, std::min(most, h))));
        while (rows > 1 && set(rows, cols) > budget) --rows;
        if (set(rows, cols) > budget) continue;
        const double tiles = double(CeilDiv(h, rows)) * double(CeilDiv(w, cols));
        const double products = CeilDiv(a.m_tiles, kGroups) * kGroups * 64.0 * places;
        const double loads = 8.0 * a.fat_rows * a.fat_cols;
        const double cost = tiles * (a.buffers == 2 ? products + 0.5 * loads : products + loads);
        if (cost < least) {
          least = cost;
          best[0] = rows;
          best[1] = cols;
          best[2] = a.buffers;
        }
      }
      if (cols == 1) break;
    }
  }
  a.buffers = best[2];
  if (a.offsets_at > kOperandBytes || best[0] == 0) {
    return Status::Unimplemented(what + ": its filter is too large for shared memory");
  }
  const int64_t bytes = set(best[0], best[1]);
  a.tiles_h = int(CeilDiv(h, a.rows));
  a.tiles_w = int(CeilDiv(w, a.cols));
  a.tiles = int64_t(g.images) * a.tiles_h * a.tiles_w;
  a.by_fat_cols = FastDiv(a.fat_cols);
  a.by_tiles_h = FastDiv(a.tiles_h);
  a.by_tiles_w = FastDiv(a.tiles_w);
  int multiprocessors = 0;
  JAXCONV_RETURN_IF_ERROR(Multiprocessors(&multiprocessors, what));
  const auto kernel = ContractKernel<T, kColumns>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), what));
  const int64_t resident = std::clamp<int64_t>(227 * 1024 / (bytes + 1024), 1, 3);
  const int64_t blocks = std::min<int64_t>(a.tiles, resident * multiprocessors);
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T>
Status RunContract(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* fat,
                   const void* w, const void* bias, void* thin, void* z, const std::string& what) {
  ContractArgs<T> a{};
  a.g = MakeGeometry<T>(p, thin);
  const StemGeometry& g = a.g;
  a.fat = static_cast<const T*>(fat);
  a.w = static_cast<const T*>(w);
  a.thin = static_cast<T*>(thin);
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  for (int d = 0; d < 2; ++d) {
    a.pad[d] = int(p.pad[d + 1]);
    const int taps = int(p.filter[d + 1]);
    // thin = fat * stride + shift: d = (phase - shift) / stride, where that is whole.
    std::vector<int> found;
    for (int phase = 0; phase < g.stride[d]; ++phase) {
      for (int tap = 0; tap < taps; ++tap) {
        const int at = tap * g.step[d] - a.pad[d];
        const int from = phase - (g.flip ? -at : at);
        if (from % g.stride[d] == 0) found.push_back(from / g.stride[d]);
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found.empty() || int(found.size()) > kMaxOffsets) {
      return Status::Unimplemented(what + ": expected filters of at most 16 taps an axis");
    }
    a.count[d] = int(found.size());
    a.least[d] = found[0];
    std::copy(found.begin(), found.end(), a.offset[d]);
  }
  a.columns = g.stride[0] * g.stride[1] * g.channels;
  bool taken = false;
  JAXCONV_RETURN_IF_ERROR(ContractRows(ctx, p.dtype, g, a, e, fat, w, bias, thin, z, what, &taken));
  if (taken) return Status::Ok();
  if (a.columns <= 16) return LaunchContract<T, 16>(ctx, a, what);
  if (a.columns <= kMaxColumns) return LaunchContract<T, 64>(ctx, a, what);
  return Status::Unimplemented(what + ": expected strides times channels of at most 64");
}

// dx of patches from the product's rows, a row the R*S*C elements of a patch: x is (images, P, R, Q,
// S*C). `item` is a vector of S*C's elements.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    UnpatchKernel(const V* __restrict__ rows, V* __restrict__ dx, int64_t count, FastDiv by_item,
                  FastDiv by_q, FastDiv by_r) {
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kThreads) {
    const QuotRem item = DivMod(at, by_item), q = DivMod(item.quot, by_q), r = DivMod(q.quot, by_r);
    dx[at] = rows[((r.quot * by_q.d + q.rem) * by_r.d + r.rem) * by_item.d + item.rem];
  }
}

template <typename V>
Status Unpatch(const Context& ctx, const ConvProblem& p, const void* rows, void* dx, int64_t item,
               const std::string& what) {
  const int64_t count = p.n * p.in_size() * p.c * int64_t(SizeOf(p.dtype)) / int64_t(sizeof(V));
  const int64_t blocks = std::min<int64_t>(CeilDiv(count, kThreads), 132 * 16);
  UnpatchKernel<V><<<unsigned(blocks), kThreads, 0, ctx.stream>>>(
      static_cast<const V*>(rows), static_cast<V*>(dx), count, FastDiv(item), FastDiv(p.out[2]),
      FastDiv(p.filter[1]));
  return LaunchStatus(what);
}

// dgrad of a filter that steps by its own extents: each element of dx is one element of the product
// of dy's pixels and w, whose rows only have to be dealt to the rows of patches.
Status PatchesDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                    const void* w, void* dx, Workspace workspace, const std::string& what) {
  const int64_t size = int64_t(SizeOf(p.dtype)), pixels = p.n * p.out_size();
  const int64_t columns = p.filter_size() * p.c, line = p.filter[2] * p.c;
  const int64_t bytes = CeilDiv(pixels * columns * size, 256) * 256;
  JAXCONV_RETURN_IF_ERROR(CheckWorkspace(workspace, bytes, what));
  DenseProblem q = {};
  q.batch = 1;
  q.m = pixels;
  q.k = p.k;
  q.n = columns;
  q.trans_w = true;
  q.alpha = 1;
  q.dtype = p.dtype;
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  const Workspace rest = {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
  const std::string_view kernel = plan.tile == "64x128"                            ? "sm90/rows"
                                  : plan.tile == "128x64" || plan.tile == "64x256" ? "sm90/resident"
                                                                                   : "sm90/product";
  JAXCONV_RETURN_IF_ERROR(Sm90Dense(ctx, q, bare, {kernel, plan.tile, 1, 0}, dy, w, nullptr,
                                    nullptr, workspace.data, nullptr, rest));
  if (line * size % 16 == 0 && Aligned16(dx)) {
    return Unpatch<uint4>(ctx, p, workspace.data, dx, line * size / 16, what);
  }
  return size == 2 ? Unpatch<uint16_t>(ctx, p, workspace.data, dx, line, what)
                   : Unpatch<uint32_t>(ctx, p, workspace.data, dx, line, what);
}

// The domain of stem.h, but for what the sizes in shared memory say.
Status Check(const ConvProblem& p, bool expands, const void* thin, const void* fat,
             const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckIndexable(p, what.c_str()));
  const bool few_in = p.c <= kFew;
  bool ok = p.channels_last && p.groups == 1 && std::min(p.c, p.k) <= kFew && p.filter[0] == 1 &&
            p.stride[0] == 1 && p.pad[0] == 0 && p.in[0] == p.out[0] && p.n * p.in[0] < kCoordLimit;
  for (int d = 1; d < 3; ++d) {
    ok = ok && p.stride[d] <= (few_in ? 16 : 1) && (p.filter[d] - 1) * p.dilation[d] <= 32;
  }
  const bool float32 = p.dtype == DType::kF32;
  ok = ok && (!float32 || !p.full_float32);
  ok = ok && (expands || ((few_in ? p.k : p.c) % 8 == 0 && Aligned16(fat)));
  ok = ok && reinterpret_cast<uintptr_t>(thin) % SizeOf(p.dtype) == 0;
  if (expands) ok = ok && p.filter_size() * CeilDiv(few_in ? p.c : p.k, float32 ? 2 : 4) <= 160;
  if (ok) return Status::Ok();
  return Status::Unimplemented(
      what +
      ": expected channels-last arrays of one group with at most 8 input or output channels "
      "and what else cuda/conv/stem/stem.h says; got groups=" +
      std::to_string(p.groups) + " c=" + std::to_string(p.c) + " k=" + std::to_string(p.k) +
      " filter=" + std::to_string(p.filter[1]) + "x" + std::to_string(p.filter[2]));
}

}  // namespace
}  // namespace conv

Status StemFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan&,
                 const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  const std::string what = std::string("conv_fprop[stem ") + Name(p.dtype) + "]";
  const bool few_in = p.c <= conv::kFew;
  JAXCONV_RETURN_IF_ERROR(conv::Check(p, few_in, few_in ? x : y, few_in ? y : x, what));
  if (few_in) {
    return conv::ForElement(p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      return conv::RunExpand<T>(ctx, p, e, x, w, bias, y, z, what);
    });
  }
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::RunContract<T>(ctx, p, e, x, w, bias, y, z, what);
  });
}

Status StemDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, void* dx, Workspace workspace) {
  const std::string what = std::string("conv_dgrad[stem ") + Name(p.dtype) + "]";
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  const bool few_in = p.c <= conv::kFew;
  JAXCONV_RETURN_IF_ERROR(conv::Check(p, !few_in, few_in ? dx : dy, few_in ? dy : dx, what));
  if (!plan.tile.empty()) {
    if (!few_in || !p.steps_by_filter(1) || !p.steps_by_filter(2))
      return Status::Invalid(what + ": a tile is for filters that step by their extents");
    return conv::PatchesDgrad(ctx, p, plan, dy, w, dx, workspace, what);
  }
  if (!few_in) {
    return conv::ForElement(p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      return conv::RunExpand<T>(ctx, p, bare, dy, w, nullptr, dx, nullptr, what);
    });
  }
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::RunContract<T>(ctx, p, bare, dy, w, nullptr, dx, nullptr, what);
  });
}

Status StemWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace) {
  const std::string what = std::string("conv_wgrad[stem ") + Name(p.dtype) +
                           " splits=" + std::to_string(plan.splits) + "]";
  const bool few_in = p.c <= conv::kFew;
  const void* thin = few_in ? x : dy;
  const void* fat = few_in ? dy : x;
  JAXCONV_RETURN_IF_ERROR(conv::Check(p, false, thin, fat, what));
  if (plan.splits < 1) return Status::Invalid(what + ": expected splits of at least 1");
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::RunCross<T>(ctx, p, plan, thin, fat, dw, workspace, what);
  });
}

}  // namespace jaxconv::cuda
