// Grouped convolution, C/G and K/G in [4, 32], 16-bit, channels-last:
//
//   dst[i * out_stride + phase, k] = sum over taps t of the phase, channels c of k's group of
//                                    src[i * in_stride + shift(t), c] * w[t, c, k]
//
// fprop has one phase (out_stride 1, in_stride the stride, shift t * dilation - pad); dgrad has
// stride^2 phases (out_stride the stride, in_stride 1) and its src is dy.
//
// The unit of work is 8 source channels (an octet) at one tap: an 8 x 8 filter block against the 8
// output channels of an octet, zero where the two belong to different groups. mma.m16n8k16 takes
// 16 pixels and two units, so C/G = 4 uses half of the products and C/G >= 8 all of them.
//
// Grid: pixel tiles x channel tiles (fastest). A block of 8 warps holds its source pixels with
// their halo in shared memory, read once from global memory, as planes of 16-byte slots: [octet][pixel],
// so that ldmatrix of 8 neighbouring pixels at any tap is free of conflicts; beside them the filter
// as mma operands and the outputs on their way to 16-byte stores.
//
// wgrad: dw[t, c, k] = sum over i of x[i * in_stride + shift(t), c] * dy[i, k], with pixels on K,
// two units on M and an output octet on N. A warp keeps the sums of up to kSteps pairs of units in
// registers while its block walks over a split's tiles; the blocks between different groups are
// dropped at the end.
#include <algorithm>
#include <limits>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/grouped/domain.h"
#include "cuda/conv/grouped/kernels.h"
#include "cuda/core/device.h"
#include "cuda/core/mma.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxTaps = grouped::kMostTaps * grouped::kMostTaps;
constexpr int kMaxPhases = 4;
constexpr int64_t kBudget = 72 * 1024;  // of shared memory: three blocks an SM
constexpr int64_t kMostSlots = int64_t(1) << 24;

struct Array {
  int images, h, w, channels;
};

// A tap as a phase sees it.
struct Tap {
  int16_t h, w;   // of the tile's source pixels, relative to i * in_stride
  int16_t index;  // in w
};

struct Geometry {
  Array src, dst;            // wgrad: x and dy
  int src_group, dst_group;  // channels
  int in_stride[2], out_stride[2];
  int shift[2];  // the least of all taps
  Tap tap[kMaxTaps];
  int phases, phase_first[kMaxPhases + 1], phase_at[kMaxPhases][2];

  // A channel tile: whole octets of whole groups.
  int tile_groups, src_octets, dst_octets,
      reach;  // reach: source octets that an output octet needs
  int channel_tiles;

  // A pixel tile: images x rows x cols of i, their source pixels, their outputs.
  int images, rows, cols, pixels;
  int src_rows, src_cols, src_pixels, src_plane;  // plane: slots from an octet to the next
  int dst_rows, dst_cols, dst_pixels, dst_plane;
  int tiles_h, tiles_w;
  int64_t tiles;
  FastDiv by_cols, by_rows, by_src_cols, by_src_rows, by_dst_cols, by_dst_rows, by_tiles_w,
      by_tiles_h;
};

// The source octet, of the channel tile, that output octet `octet` starts with.
JAXCONV_HD int FirstOctet(const Geometry& g, int octet) {
  return octet * 8 / g.dst_group * g.src_group / 8;
}

// Where a pixel tile starts: image, and i along H and W.
struct Origin {
  int image, h, w;
};

JAXCONV_HD Origin OriginOf(const Geometry& g, int64_t tile) {
  const QuotRem w = DivMod(tile, g.by_tiles_w);
  const QuotRem h = DivMod(w.quot, g.by_tiles_h);
  return {int(h.quot) * g.images, h.rem * g.rows, w.rem * g.cols};
}

// Slots of `rows` x `cols` pixels of each image from (h0, w0) on, `octets` octets from channel0;
// zero outside the array. Slots [pixels, padded) of each plane are zero as well.
template <typename T>
__device__ __forceinline__ void LoadPixels(uint32_t shared, const T* __restrict__ from,
                                           const Array& a, int image, int h0, int w0, int channel0,
                                           int octets, int pixels, int padded, int plane,
                                           FastDiv by_cols, FastDiv by_rows, FastDiv by_octets) {
  for (int e = threadIdx.x; e < padded * octets; e += kThreads) {
    const int pixel = int(by_octets.Div(e)), octet = e - pixel * octets;
    const int line = int(by_cols.Div(pixel)), w = w0 + pixel - line * int(by_cols.d);
    const int of = int(by_rows.Div(line)), h = h0 + line - of * int(by_rows.d);
    const int channel = channel0 + octet * 8;
    const bool inside = pixel < pixels && image + of < a.images && unsigned(h) < unsigned(a.h) &&
                        unsigned(w) < unsigned(a.w) && channel < a.channels;
    const int64_t at = ((int64_t(image + of) * a.h + h) * a.w + w) * a.channels + channel;
    CopyAsync<16>(shared + uint32_t(octet * plane + pixel) * 16, inside ? from + at : from,
                  inside ? 16 : 0);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// fprop and dgrad

template <typename T>
struct GroupedArgs {
  Geometry g;
  const T* src;
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  bool dgrad;
  FastDiv by_src_octets, by_dst_octets;
  int steps;                                              // pairs of units of all phases
  uint32_t filter_at, offsets_at, dst_at, z_at, dump_at;  // bytes in shared memory
};

// w[t, c, k], c in its group, k of all; zero between groups. Channels are of the tile.
template <typename T>
__device__ __forceinline__ uint32_t FilterBits(const GroupedArgs<T>& a, int tap, int src, int dst,
                                               int group0) {
  const Geometry& g = a.g;
  const int group = src / g.src_group;
  if (group != dst / g.dst_group || group0 + group >= g.src.channels / g.src_group) return 0;
  const int s = src - group * g.src_group, d = dst - group * g.dst_group;
  const int64_t at =
      a.dgrad ? (int64_t(tap) * g.dst_group + d) * g.src.channels + group0 * g.src_group + src
              : (int64_t(tap) * g.src_group + s) * g.dst.channels + group0 * g.dst_group + dst;
  return *reinterpret_cast<const uint16_t*>(a.w + at);
}

// kWide output octets of one group at a time.
template <typename T, int kWide>
__global__ void __launch_bounds__(kThreads, 3)
    GroupedKernel(const __grid_constant__ GroupedArgs<T> a) {
  constexpr int kTiles =
      kWide == 1 ? 4 : 3;  // of 16 pixels, that share a filter operand; 2 x 4 spills
  extern __shared__ __align__(128) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const Geometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel_tile = int(blockIdx.x % unsigned(g.channel_tiles));
  const Origin origin = OriginOf(g, blockIdx.x / unsigned(g.channel_tiles));
  const int group0 = channel_tile * g.tile_groups;

  LoadPixels(shared, a.src, g.src, origin.image, origin.h * g.in_stride[0] + g.shift[0],
             origin.w * g.in_stride[1] + g.shift[1], group0 * g.src_group, g.src_octets,
             g.src_pixels, g.src_pixels, g.src_plane, g.by_src_cols, g.by_src_rows,
             a.by_src_octets);
  CopyCommit();

  // The b operands, [step][octet][lane] of two words, and where the units of a step lie.
  uint2* filter = reinterpret_cast<uint2*>(cells + a.filter_at);
  int* offsets = reinterpret_cast<int*>(cells + a.offsets_at);  // [step][2], bytes
  for (int phase = 0, step0 = 0; phase < g.phases; ++phase) {
    const int first = g.phase_first[phase];
    const int units = (g.phase_first[phase + 1] - first) * g.reach;
    const int steps = (units + 1) / 2;
    for (int e = threadIdx.x; e < steps * g.dst_octets * 32; e += kThreads) {
      const int at = e % 32, rest = e / 32;
      const int step = rest / g.dst_octets, octet = rest - step * g.dst_octets;
      uint32_t word[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = step * 2 + half;
        const int tap = unit / g.reach, source = FirstOctet(g, octet) + unit - tap * g.reach;
        word[half] = 0;
        if (unit < units && source < g.src_octets) {
          const int index = g.tap[first + tap].index;
          const int src = source * 8 + at % 4 * 2, dst = octet * 8 + at / 4;
          word[half] = FilterBits(a, index, src, dst, group0) |
                       FilterBits(a, index, src + 1, dst, group0) << 16;
        }
      }
      filter[(step0 + step) * g.dst_octets * 32 + octet * 32 + at] = make_uint2(word[0], word[1]);
    }
    for (int unit = threadIdx.x; unit < steps * 2; unit += kThreads) {
      const int tap = unit < units ? unit / g.reach : 0;
      const int octet = unit < units ? unit - tap * g.reach : 0;
      const Tap t = g.tap[first + tap];
      offsets[step0 * 2 + unit] = (octet * g.src_plane + t.h * g.src_cols + t.w) * 16;
    }
    step0 += steps;
  }
  CopyWait<0>();
  __syncthreads();

  const int sets = g.dst_octets / kWide;
  const int runs = (g.pixels + 16 * kTiles - 1) / (16 * kTiles);
  int phase = 0, step0 = 0, steps = 0, phase_task = 0;
  steps = ((g.phase_first[1] - g.phase_first[0]) * g.reach + 1) / 2;
  for (int task = warp; task < g.phases * sets * runs; task += kWarps) {
    while (task - phase_task >= sets * runs) {
      ++phase;
      phase_task += sets * runs;
      step0 += steps;
      steps = ((g.phase_first[phase + 1] - g.phase_first[phase]) * g.reach + 1) / 2;
    }
    const int set = (task - phase_task) / runs, run = (task - phase_task) - set * runs;
    const int octet = set * kWide;
    // An output octet near the end may reach for a source octet that is not there: its filter is
    // zero, and its address must still be one.
    const int first = FirstOctet(g, octet);
    const int spare = g.src_octets - 1 - first;  // source octets behind the first

    uint32_t source[kTiles], store[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int pixel = (run * kTiles + m) * 16 + lane % 16;
      const int valid = min(pixel, g.pixels - 1);
      const int line = int(g.by_cols.Div(valid)), j = valid - line * g.cols;
      const int of = int(g.by_rows.Div(line)), i = line - of * g.rows;
      source[m] = shared + uint32_t(first * g.src_plane +
                                    (of * g.src_rows + i * g.in_stride[0]) * g.src_cols +
                                    j * g.in_stride[1]) *
                               16;
      const int to = (of * g.dst_rows + i * g.out_stride[0] + g.phase_at[phase][0]) * g.dst_cols +
                     j * g.out_stride[1] + g.phase_at[phase][1];
      store[m] = pixel < g.pixels ? uint32_t(octet * g.dst_plane + to) * 16 : ~0u;
    }

    float acc[kTiles][kWide][4] = {};
    const uint2* operand = filter + (step0 * g.dst_octets + octet) * 32 + lane;
    for (int step = 0; step < steps; ++step) {
      int offset = offsets[(step0 + step) * 2 + lane / 16];
      if (spare < g.reach - 1 && offset >= (spare + 1) * g.src_plane * 16) offset = 0;
      uint2 b[kWide];
#pragma unroll
      for (int k = 0; k < kWide; ++k) b[k] = operand[(step * g.dst_octets + k) * 32];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t in[4];
        LoadMatrix(in, source[m] + offset);
#pragma unroll
        for (int k = 0; k < kWide; ++k) Mma<T>(acc[m][k], in, b[k].x, b[k].y);
      }
    }

#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      const int channel = group0 * g.dst_group + (octet + k) * 8 + lane % 4 * 2;
      float bias[2] = {0.f, 0.f};
      if (a.epilogue.bias != nullptr && channel < g.dst.channels) {
        bias[0] = ToFloat(a.epilogue.bias[channel]);
        bias[1] = ToFloat(a.epilogue.bias[channel + 1]);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const auto keep = [&](uint32_t at) {
          const uint32_t to =
              store[m] == ~0u ? shared + a.dump_at : shared + at + store[m] + k * g.dst_plane * 16;
          StoreMatrix2(to, PackPair(acc[m][k][0], acc[m][k][1], T()),
                       PackPair(acc[m][k][2], acc[m][k][3], T()));
        };
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][k][e] += bias[e % 2];
        if (a.epilogue.z != nullptr) keep(a.z_at);
        ApplyActivation(a.epilogue.activation, acc[m][k], a.epilogue.slope);
        keep(a.dst_at);
      }
    }
  }
  __syncthreads();

  for (int e = threadIdx.x; e < g.dst_pixels * g.dst_octets; e += kThreads) {
    const int pixel = int(a.by_dst_octets.Div(e)), octet = e - pixel * g.dst_octets;
    const int line = int(g.by_dst_cols.Div(pixel));
    const int w = origin.w * g.out_stride[1] + pixel - line * g.dst_cols;
    const int of = int(g.by_dst_rows.Div(line));
    const int h = origin.h * g.out_stride[0] + line - of * g.dst_rows;
    const int channel = group0 * g.dst_group + octet * 8;
    if (origin.image + of >= g.dst.images || h >= g.dst.h || w >= g.dst.w ||
        channel >= g.dst.channels) {
      continue;
    }
    const int64_t at =
        ((int64_t(origin.image + of) * g.dst.h + h) * g.dst.w + w) * g.dst.channels + channel;
    const uint32_t slot = shared + uint32_t(octet * g.dst_plane + pixel) * 16;
    if (a.epilogue.z != nullptr) {
      *reinterpret_cast<uint4*>(a.epilogue.z + at) = LoadShared16(slot + a.z_at);
    }
    *reinterpret_cast<uint4*>(a.dst + at) = LoadShared16(slot + a.dst_at);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// wgrad

template <typename T>
struct GroupedWgradArgs {
  Geometry g;
  const T* x;
  const T* dy;
  T* dw;            // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  FastDiv by_src_octets, by_dst_octets;
  int64_t split_tiles, dw_count;
  int parts;       // warps that share an output octet, each with a part of the steps
  int step_tiles;  // blocks that share the steps of an output octet
  uint32_t dy_at, buffer_bytes;
};

template <typename T, int kSteps>
__global__ void __launch_bounds__(kThreads, 2)
    GroupedWgradKernel(const __grid_constant__ GroupedWgradArgs<T> a) {
  extern __shared__ __align__(128) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const Geometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t block = blockIdx.x;
  const int channel_tile = int(block % g.channel_tiles);
  block /= g.channel_tiles;
  const int step_tile = int(block % a.step_tiles);
  const int64_t split = block / a.step_tiles;
  const int group0 = channel_tile * g.tile_groups;

  const int units = g.phase_first[1] * g.reach;
  const int octet = warp / a.parts;  // of the outputs
  const int step0 = (step_tile * a.parts + warp % a.parts) * kSteps;
  const bool live = octet < g.dst_octets && step0 * 2 < units;  // of the whole warp
  const int first = FirstOctet(g, live ? octet : 0);

  // ldmatrix.trans: matrices (unit, pixels 0 to 7), (next unit, the same), then pixels 8 to 15.
  uint32_t offset[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int unit = (step0 + s) * 2 + lane / 8 % 2;
    const int tap = unit < units ? unit / g.reach : 0;
    const int source = min(first + (unit < units ? unit - tap * g.reach : 0), g.src_octets - 1);
    const Tap t = g.tap[tap];
    offset[s] = uint32_t(source * g.src_plane + t.h * g.src_cols + t.w) * 16;
  }

  const auto load = [&](int64_t tile, uint32_t buffer) {
    const Origin o = OriginOf(g, tile);
    LoadPixels(buffer, a.x, g.src, o.image, o.h * g.in_stride[0] + g.shift[0],
               o.w * g.in_stride[1] + g.shift[1], group0 * g.src_group, g.src_octets, g.src_pixels,
               g.src_pixels, g.src_plane, g.by_src_cols, g.by_src_rows, a.by_src_octets);
    LoadPixels(buffer + a.dy_at, a.dy, g.dst, o.image, o.h, o.w, group0 * g.dst_group, g.dst_octets,
               g.dst_pixels, (g.dst_pixels + 15) / 16 * 16, g.dst_plane, g.by_dst_cols,
               g.by_dst_rows, a.by_dst_octets);
    CopyCommit();
  };

  float acc[kSteps][4] = {};
  const int64_t begin = split * a.split_tiles;
  const int64_t end = min(g.tiles, begin + a.split_tiles);
  uint32_t buffer = shared, other = shared + a.buffer_bytes;
  if (begin < end) load(begin, buffer);
  for (int64_t tile = begin; tile < end; ++tile) {
    CopyWait<0>();
    __syncthreads();  // and every warp is done with `other`
    if (tile + 1 < end) load(tile + 1, other);
    if (live) {
      for (int base = 0; base < g.pixels; base += 16) {
        const int pixel = min(base + lane / 16 * 8 + lane % 8, g.pixels - 1);
        const int line = int(g.by_cols.Div(pixel)), j = pixel - line * g.cols;
        const int of = int(g.by_rows.Div(line)), i = line - of * g.rows;
        const uint32_t source =
            buffer +
            uint32_t((of * g.src_rows + i * g.in_stride[0]) * g.src_cols + j * g.in_stride[1]) * 16;
        uint32_t b0, b1;
        LoadMatrix2Transposed(
            b0, b1, buffer + a.dy_at + uint32_t(octet * g.dst_plane + base + lane % 16) * 16);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if ((step0 + s) * 2 < units) {
            uint32_t in[4];
            LoadMatrixTransposed(in, source + offset[s]);
            Mma<T>(acc[s], in, b0, b1);
          }
        }
      }
    }
    const uint32_t swap = buffer;
    buffer = other;
    other = swap;
  }
  if (!live) return;

#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int unit = (step0 + s) * 2 + e / 2;
      if (unit >= units) continue;
      const int tap = unit / g.reach;
      const int src = (first + unit - tap * g.reach) * 8 + lane / 4;  // of the channel tile
      const int dst = octet * 8 + lane % 4 * 2 + e % 2;
      const int group = dst / g.dst_group;
      const int k = group0 * g.dst_group + dst;
      if (src / g.src_group != group || k >= g.dst.channels) continue;
      const int64_t at =
          (int64_t(g.tap[tap].index) * g.src_group + src - group * g.src_group) * g.dst.channels +
          k;
      if (a.partials != nullptr) {
        a.partials[split * a.dw_count + at] = acc[s][e];
      } else {
        a.dw[at] = FromFloat<T>(acc[s][e]);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

enum class Pass { kFprop, kDgrad, kWgrad };

// Everything but the pixel tile.
Geometry MakeGeometry(const ConvProblem& p, Pass pass) {
  Geometry g{};
  const bool dgrad = pass == Pass::kDgrad;
  const Array x = {int(p.n * p.in[0]), int(p.in[1]), int(p.in[2]), int(p.c)};
  const Array y = {x.images, int(p.out[1]), int(p.out[2]), int(p.k)};
  g.src = dgrad ? y : x;
  g.dst = dgrad ? x : y;
  g.src_group = int(dgrad ? p.group_k() : p.group_c());
  g.dst_group = int(dgrad ? p.group_c() : p.group_k());
  int most[2] = {INT32_MIN, INT32_MIN};
  int at[kMaxTaps][2], index[kMaxTaps], count = 0;
  g.shift[0] = g.shift[1] = INT32_MAX;
  const int stride[2] = {int(p.stride[1]), int(p.stride[2])};
  const int pad[2] = {int(p.pad[1]), int(p.pad[2])};
  const int dilation[2] = {int(p.dilation[1]), int(p.dilation[2])};
  for (int d = 0; d < 2; ++d) {
    g.in_stride[d] = dgrad ? 1 : stride[d];
    g.out_stride[d] = dgrad ? stride[d] : 1;
  }
  for (int ph = 0; ph < g.out_stride[0]; ++ph) {
    for (int pw = 0; pw < g.out_stride[1]; ++pw) {
      g.phase_at[g.phases][0] = ph;
      g.phase_at[g.phases][1] = pw;
      g.phase_first[g.phases++] = count;
      for (int r = 0; r < p.filter[1]; ++r) {
        for (int s = 0; s < p.filter[2]; ++s) {
          int to[2] = {r * dilation[0] - pad[0], s * dilation[1] - pad[1]};
          if (dgrad) {
            to[0] = ph - to[0];
            to[1] = pw - to[1];
            if (to[0] % stride[0] != 0 || to[1] % stride[1] != 0) continue;
            to[0] /= stride[0];
            to[1] /= stride[1];
          }
          for (int d = 0; d < 2; ++d) {
            at[count][d] = to[d];
            g.shift[d] = std::min(g.shift[d], to[d]);
            most[d] = std::max(most[d], to[d]);
          }
          index[count++] = r * int(p.filter[2]) + s;
        }
      }
    }
  }
  g.phase_first[g.phases] = count;
  for (int t = 0; t < count; ++t) {
    g.tap[t] = {int16_t(at[t][0] - g.shift[0]), int16_t(at[t][1] - g.shift[1]), int16_t(index[t])};
  }
  g.src_rows = most[0] - g.shift[0] + 1;  // of one pixel; ChoosePixels adds the others
  g.src_cols = most[1] - g.shift[1] + 1;

  const auto whole = [&](int groups) {
    return groups * g.src_group % 8 == 0 && groups * g.dst_group % 8 == 0;
  };
  g.tile_groups = 1;
  while (!whole(g.tile_groups)) ++g.tile_groups;  // at most 2
  const int least = g.tile_groups;
  while (std::max(g.src_group, g.dst_group) * (g.tile_groups + least) <= 32) {
    g.tile_groups += least;
  }
  g.src_octets = g.tile_groups * g.src_group / 8;
  g.dst_octets = g.tile_groups * g.dst_group / 8;
  g.channel_tiles = int(CeilDiv(p.groups, g.tile_groups));
  for (int octet = 0; octet < g.dst_octets; ++octet) {
    const int last = ((octet * 8 + 7) / g.dst_group + 1) * g.src_group - 1;  // source channel
    g.reach = std::max(g.reach, last / 8 - FirstOctet(g, octet) + 1);
  }
  return g;
}

// Slots from one plane to the next, so that the octets of 8 / octets pixels lie in different banks.
int PlaneOf(int pixels, int octets) {
  const int want = octets >= 8 ? 1 : octets == 1 ? 0 : 8 / octets;
  return (pixels + 7 - want) / 8 * 8 + want;
}

// Bytes of source and output slots for (images, rows, cols); the largest number where the tile is so large that an int does
// not hold its pixels.
int64_t SetPixels(Geometry& g, int span_h, int span_w, int images, int rows, int cols, int copies) {
  const int64_t src_rows = int64_t(rows - 1) * g.in_stride[0] + span_h;
  const int64_t src_cols = int64_t(cols - 1) * g.in_stride[1] + span_w;
  const int64_t dst_rows = int64_t(rows) * g.out_stride[0];
  const int64_t dst_cols = int64_t(cols) * g.out_stride[1];
  if (std::max(images * src_rows * src_cols, images * dst_rows * dst_cols) > kMostSlots)
    return std::numeric_limits<int64_t>::max();
  g.images = images;
  g.rows = rows;
  g.cols = cols;
  g.pixels = images * rows * cols;
  g.src_rows = int(src_rows);
  g.src_cols = int(src_cols);
  g.src_pixels = images * g.src_rows * g.src_cols;
  g.src_plane = PlaneOf(g.src_pixels, g.src_octets);
  g.dst_rows = int(dst_rows);
  g.dst_cols = int(dst_cols);
  g.dst_pixels = images * g.dst_rows * g.dst_cols;
  g.dst_plane = PlaneOf(int(CeilDiv(g.dst_pixels, 16)) * 16, g.dst_octets);
  return (int64_t(g.src_plane) * g.src_octets + int64_t(g.dst_plane) * g.dst_octets * copies) * 16;
}

// The largest tile within `budget`: whole rows up to 64 pixels, as many rows as fit, then images.
void ChoosePixels(Geometry& g, int64_t budget, int copies) {
  const int span_h = g.src_rows, span_w = g.src_cols;
  const int h = int(CeilDiv(g.dst.h, g.out_stride[0])), w = int(CeilDiv(g.dst.w, g.out_stride[1]));
  const auto fits = [&](int images, int rows, int cols) {
    return SetPixels(g, span_h, span_w, images, rows, cols, copies) <= budget;
  };
  int cols = int(CeilDiv(w, CeilDiv(w, 64)));
  while (cols > 16 && !fits(1, std::min(h, 4), cols)) cols = (cols + 1) / 2;
  while (cols > 4 && !fits(1, 1, cols)) cols = (cols + 1) / 2;
  // No tile of more pixels fits: each has a slot of 16 bytes.
  int parts = int(CeilDiv(h, std::max<int64_t>(budget / 16 / cols, 1)));
  while (parts < h && !fits(1, int(CeilDiv(h, parts)), cols)) ++parts;
  const int rows = int(CeilDiv(h, parts));
  int images = 1;
  while (rows == h && cols == w && images < g.dst.images && images * rows * cols < 256 &&
         fits(images + 1, rows, cols)) {
    ++images;
  }
  SetPixels(g, span_h, span_w, images, rows, cols, copies);
  g.tiles_h = int(CeilDiv(h, rows));
  g.tiles_w = int(CeilDiv(w, cols));
  g.tiles = CeilDiv(g.dst.images, images) * g.tiles_h * g.tiles_w;
  g.by_cols = FastDiv(cols);
  g.by_rows = FastDiv(rows);
  g.by_src_cols = FastDiv(g.src_cols);
  g.by_src_rows = FastDiv(g.src_rows);
  g.by_dst_cols = FastDiv(g.dst_cols);
  g.by_dst_rows = FastDiv(g.dst_rows);
  g.by_tiles_w = FastDiv(g.tiles_w);
  g.by_tiles_h = FastDiv(g.tiles_h);
}

template <typename T, int kWide>
Status Launch(const Context& ctx, const GroupedArgs<T>& a, int64_t bytes, const std::string& what) {
  const int64_t blocks = a.g.tiles * a.g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const auto kernel = GroupedKernel<T, kWide>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T, int kSteps>
Status LaunchWgrad(const Context& ctx, GroupedWgradArgs<T> a, int64_t splits,
                   const std::string& what) {
  const int steps = int(CeilDiv(a.g.phase_first[1] * a.g.reach, 2));
  a.step_tiles = int(CeilDiv(steps, a.parts * kSteps));
  const int64_t blocks = splits * a.step_tiles * a.g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int64_t bytes = 2 * int64_t(a.buffer_bytes);
  const auto kernel = GroupedWgradKernel<T, kSteps>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kThreads, size_t(bytes), ctx.stream>>>(a);
  return LaunchStatus(what);
}

}  // namespace

Status GroupedMma(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                  const void* src, const void* w, const void* bias, void* dst, void* z,
                  const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    GroupedArgs<T> a{};
    a.g = MakeGeometry(p, dgrad ? Pass::kDgrad : Pass::kFprop);
    Geometry& g = a.g;
    a.src = static_cast<const T*>(src);
    a.w = static_cast<const T*>(w);
    a.dst = static_cast<T*>(dst);
    a.epilogue = MakeEpilogue<T>(e, bias, z);
    a.dgrad = dgrad;
    a.by_src_octets = FastDiv(g.src_octets);
    a.by_dst_octets = FastDiv(g.dst_octets);
    for (int phase = 0; phase < g.phases; ++phase) {
      a.steps += int(CeilDiv((g.phase_first[phase + 1] - g.phase_first[phase]) * g.reach, 2));
    }
    const int64_t filter_bytes = int64_t(a.steps) * g.dst_octets * 32 * 8;
    const int64_t offset_bytes = CeilDiv(a.steps * 8, 16) * 16;
    const int copies = a.epilogue.z != nullptr ? 2 : 1;
    ChoosePixels(g, std::max<int64_t>(kBudget - filter_bytes - offset_bytes, kBudget / 2), copies);
    const int64_t plane_bytes = int64_t(g.dst_plane) * g.dst_octets * 16;
    a.dst_at = uint32_t(g.src_plane * g.src_octets * 16);
    a.z_at = a.dst_at + uint32_t(copies > 1 ? plane_bytes : 0);
    a.filter_at = a.z_at + uint32_t(plane_bytes);
    a.offsets_at = a.filter_at + uint32_t(filter_bytes);
    a.dump_at = a.offsets_at + uint32_t(offset_bytes);
    const int64_t bytes = a.dump_at + 16;
    // Two output octets share their source where both lie in one group.
    return g.dst_group % 16 == 0 ? Launch<T, 2>(ctx, a, bytes, what)
                                 : Launch<T, 1>(ctx, a, bytes, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

Status GroupedMmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                       const void* dy, void* dw, float* partials, const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    GroupedWgradArgs<T> a{};
    a.g = MakeGeometry(p, Pass::kWgrad);
    Geometry& g = a.g;
    a.x = static_cast<const T*>(x);
    a.dy = static_cast<const T*>(dy);
    a.dw = static_cast<T*>(dw);
    a.partials = partials;
    a.by_src_octets = FastDiv(g.src_octets);
    a.by_dst_octets = FastDiv(g.dst_octets);
    a.dw_count = FilterCount(p);
    ChoosePixels(g, 48 * 1024, 1);  // two buffers, two blocks an SM
    a.split_tiles = CeilDiv(g.tiles, splits);
    a.parts = std::max(1, kWarps / g.dst_octets);
    a.dy_at = uint32_t(g.src_plane * g.src_octets * 16);
    a.buffer_bytes = a.dy_at + uint32_t(g.dst_plane * g.dst_octets * 16);
    const int64_t steps = CeilDiv(g.phase_first[1] * g.reach, 2);
    return steps <= 3 * a.parts ? LaunchWgrad<T, 3>(ctx, a, splits, what)
                                : LaunchWgrad<T, 9>(ctx, a, splits, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
