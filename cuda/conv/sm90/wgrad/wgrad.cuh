// wgrad on the sm_90a main loop (channels last):
//
//   dw[(tap, c), k] = sum over pixels of x[pixel at tap, c] * dy[pixel, k]    for each group
//
// Rows are blocks of 64 channels of one tap, so that a block of A (64 pixels x 64 channels,
// m-major) is one column of pixels for TMA; B is dy as it lies (n-major). The reduction
// is cut into steps of 64 pixels. All tiles' steps, tile after tile, are one line of work, cut into
// `parts` equal runs, one a CTA: a tile that lies inside one run is written to dw at once, a tile
// that is shared leaves float32 sums in the workspace, at most two tiles a run, which a second
// launch adds in the order of the runs. With whole_tiles the runs are of tiles, and nothing is
// shared.
//
// A run may be a pair's, two CTAs of a cluster: their tiles lie side by side along one operand, and
// the other, which both need, each fetches half of for both. So 128 x 128 a CTA reads no more than
// 128 x 256 does, and leaves half the sums: a CTA's are written once and read once, 15 us of the 55
// that 256 to 1024 channels of 14^2 take (H200).
//
// The grid has a CTA for each run (two for a pair's), at most one a multiprocessor. A tile is rows x
// columns of dw; a step reads 64 pixels of as many channels of x and of dy, mostly from L2, and the
// products of a step take the tensor cores longer than that. Short runs are bound by their sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/sm90/wgrad/sums.cuh"
#include "cuda/conv/sm90/wgrad/wgrad.h"
#include "cuda/core/context.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"  // PackHalves

namespace jaxconv::cuda {

// The run of part i: [RunBegin(i), RunBegin(i + 1)), in steps.
JAXCONV_HD int64_t RunBegin(const WgradLaunch& p, int part) {
  const int64_t total = p.whole_tiles ? p.tiles : p.tiles * p.steps;
  const int64_t begin = total * part / p.parts;
  return p.whole_tiles ? begin * p.steps : begin;
}

// The part that holds a step, where runs are of steps: the largest i with total * i / parts <
// step + 1.
JAXCONV_HD int PartOf(const WgradLaunch& p, int64_t step) {
  return int(((step + 1) * p.parts - 1) / (p.tiles * p.steps));
}

// Where the sums of `part` for a shared tile lie, in tiles of kTileM x kTileN floats. A run has at
// most one tile that it enters in the middle and one that it leaves in the middle.
JAXCONV_HD int64_t Slot(int part, bool enters) { return 2 * int64_t(part) + (enters ? 0 : 1); }

// A tile as the work is cut: that of a CTA, or of a pair. A pair lies along the operand that it does
// not share.
template <typename Tile>
struct WgradUnit {
  static constexpr int kTiles = 1;
  static constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns;
  static constexpr bool kSharesX = false, kSharesDy = false;
};
template <typename Base, bool kSharesB>
struct WgradUnit<Sm90Pair<Base, kSharesB>> {
  static constexpr int kTiles = 2;
  static constexpr bool kSharesX = Base::kSwapped == kSharesB, kSharesDy = !kSharesX;
  static constexpr int kRows = Base::kRows * (kSharesX ? 1 : 2);
  static constexpr int kColumns = Base::kColumns * (kSharesX ? 2 : 1);
};

struct WgradPlace {
  int instance, block_m, n;  // block_m: the first block of 64 rows
};

template <typename Tile>
JAXCONV_HD WgradPlace LocateWgradTile(const WgradLaunch& p, int64_t tile, int rank = 0) {
  using Unit = WgradUnit<Tile>;
  const unsigned index = unsigned(tile);
  const unsigned tiles_m = unsigned(p.tiles_m), tiles_n = unsigned(p.tiles_n);
  const unsigned rest = index % (tiles_m * tiles_n);
  WgradPlace at;
  at.instance = int(index / (tiles_m * tiles_n));
  at.block_m =
      int(rest % tiles_m) * (Unit::kRows / 64) + (Unit::kSharesX ? 0 : rank) * (Tile::kRows / 64);
  at.n = int(rest / tiles_m) * Unit::kColumns + (Unit::kSharesX ? rank : 0) * Tile::kColumns;
  return at;
}

// The walk over the tiles of a run: body(tile, first step, steps).
template <typename Body>
__device__ __forceinline__ void ForRun(const WgradLaunch& p, int part, Body&& body) {
  int64_t at = RunBegin(p, part);
  const int64_t end = RunBegin(p, part + 1);
  while (at < end) {
    const int64_t tile = at / p.steps;
    const int first = int(at - tile * p.steps);
    const int steps = int(end - at < p.steps - first ? end - at : p.steps - first);
    body(tile, first, steps);
    at += steps;
  }
}

template <typename Tile>
__device__ __forceinline__ void ProduceWgrad(const WgradLaunch& p, const WgradPlace& at, int first,
                                             int steps, Sm90Ring<Tile>& ring) {
  // Blocks past the last row or column are not fetched: what lies in their place reaches only sums
  // that nobody stores.
  constexpr int kCount = Tile::kRows / 64;
  const int blocks = p.taps[0] * p.taps[1] * p.taps[2] * p.channel_blocks - at.block_m;
  const int count = blocks < kCount ? (Tile::kPair && blocks < 0 ? 0 : blocks) : kCount;
  const int left = (p.n - at.n + 63) / 64;  // of a pair's second tile perhaps none
  const int columns =
      left < Tile::kColumns / 64 ? (Tile::kPair && left < 0 ? 0 : left) : Tile::kColumns / 64;
  using Unit = WgradUnit<Tile>;
  // A CTA of a pair fetches half of the blocks that both need, a stage's only one in turns.
  const int rank = Tile::kPair ? int(ClusterRank()) : 0;
  int channel[kCount], offset[kCount][3];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int block = at.block_m + i;
    // Blocks past the last: channels past the last.
    channel[i] = i < count ? at.instance * p.channels + block % p.channel_blocks * 64
                           : p.instances * p.channels;
    const Digits4 digits = SplitDigits(block / p.channel_blocks, p.taps[2], p.taps[1], p.taps[0]);
    for (int axis = 0; axis < 3; ++axis) {
      offset[i][axis] = i < count ? digits.digit[3 - axis] * p.tap_step[axis] : 0;
    }
  }
  const Digits4 stride = SplitDigits(64, p.extent[2], p.extent[1], p.extent[0]);
  Digits4 pixel = SplitDigits(first * 64, p.extent[2], p.extent[1], p.extent[0]);
  for (int step = first; step < first + steps; ++step) {
    int from[3];
    for (int axis = 0; axis < 3; ++axis) {
      from[axis] = pixel.digit[3 - axis] * p.step[axis] + p.first[axis];
    }
    const auto load_x = [&](uint32_t to, uint32_t full, int term) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i >= count) continue;
        if constexpr (Unit::kSharesX) {
          if (kCount == 1 ? ring.stage % 2 == rank : i / (kCount / 2) == rank) {
            LoadTileForBoth(to + i * kBlockBytes, p.x, full, (at.block_m + i) * 64, at.instance,
                            step * 64);
          }
        } else if (p.rank == 0) {
          LoadTile(to + i * kBlockBytes, p.x, full, (at.block_m + i) * 64, at.instance, step * 64);
        } else {
          LoadColumn(p.rank, to + i * kBlockBytes, p.x, full, channel[i], from,
                     pixel.digit[0] + term * p.images, offset[i]);
        }
      }
    };
    const uint32_t full = ring.Claim(Tile::kTerms * (count + columns) * kBlockBytes);
#pragma unroll
    for (int term = 0; term < Tile::kTerms; ++term) {
      load_x(Tile::kSwapped ? ring.B(term) : ring.A(term), full, term);
      const uint32_t dy = Tile::kSwapped ? ring.A(term) : ring.B(term);
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 64; ++i) {
        if (i >= columns) continue;
        if constexpr (Unit::kSharesDy) {
          if (Tile::kColumns == 64 ? ring.stage % 2 == rank : i / (Tile::kColumns / 128) == rank) {
            LoadTileForBoth(dy + i * kBlockBytes, p.dy, full, at.n + i * 64, at.instance, step * 64,
                            term);
          }
        } else {
          LoadTile(dy + i * kBlockBytes, p.dy, full, at.n + i * 64, at.instance, step * 64, term);
        }
      }
    }
    ring.Advance();
    AddDigits(pixel, stride, p.extent[2], p.extent[1], p.extent[0]);
  }
}

template <typename T>
__device__ __forceinline__ void StorePair(T* out, float a, float b) {
  *reinterpret_cast<uint32_t*>(out) = PackHalves(a, b, T());
}
__device__ __forceinline__ void StorePair(float* out, float a, float b) {
  *reinterpret_cast<float2*>(out) = make_float2(a, b);
}

// Whether the tile at `at` has rows and columns that are stored in its block of 64 rows `block`, from
// column 8 j on.
template <typename Tile>
JAXCONV_HD bool WgradStored(const WgradLaunch& p, const WgradPlace& at, int block, int j) {
  const int rows = at.block_m + (Tile::kSwapped ? j / 8 : block);
  const int column = at.n + (Tile::kSwapped ? block * 64 : j * 8);
  return rows < p.taps[0] * p.taps[1] * p.taps[2] * p.channel_blocks && column < p.n;
}

// Four sums of a thread of the tile at `at`: two neighbouring columns (8 j + ...) of rows r and r + 8
// of the tile's block of 64 rows `block`, rows and columns as wgmma has them.
template <typename Tile>
__device__ __forceinline__ void StoreWgrad(const WgradLaunch& p, const WgradPlace& at, int block,
                                           int j, int thread, const float4& v) {
  using T = typename Tile::Out;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = j * 8 + thread % 4 * 2;
  const int taps = p.taps[0] * p.taps[1] * p.taps[2];
  const int from = at.block_m + (Tile::kSwapped ? column / 64 : block);
  const int c = from % p.channel_blocks * 64 + (Tile::kSwapped ? column % 64 : row);
  const int n = at.n + (Tile::kSwapped ? block * 64 + row : column);
  if (from >= taps * p.channel_blocks || n >= p.n) return;
  T* out = static_cast<T*>(p.dw) + (int64_t(from / p.channel_blocks) * p.channels + c) * p.pitch +
           at.instance * p.n + n;
  if constexpr (Tile::kSwapped) {
    if (c >= p.channels) return;  // channels are even, and so is c
    out[0] = FromFloat<T>(v.x);
    out[p.pitch] = FromFloat<T>(v.y);
    if (n + 8 < p.n) {
      out[8] = FromFloat<T>(v.z);
      out[p.pitch + 8] = FromFloat<T>(v.w);
    }
  } else {
    if (c < p.channels) StorePair(out, v.x, v.y);
    if (c + 8 < p.channels) StorePair(out + 8 * p.pitch, v.z, v.w);
  }
}

// A thread's sums of columns [8 * j0, ...) of the blocks from block0 on, over `steps` steps from `first`
// on: to dw, or to the workspace in the order of the registers, [block][j][thread], 16 bytes each.
template <typename Tile, int kBlocks, int kCount>
__device__ __forceinline__ void PutWgrad(const WgradLaunch& p, const WgradPlace& at, int part,
                                         int rank, int first, int steps, int block0, int j0,
                                         const float (&acc)[kBlocks][kCount]) {
  const int thread = threadIdx.x % 128;
  if (steps == p.steps) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float* v = &acc[block][j * 4];
        StoreWgrad<Tile>(p, at, block0 + block, j0 + j, thread,
                         make_float4(v[0], v[1], v[2], v[3]));
      }
    }
  } else {
    float4* sums = reinterpret_cast<float4*>(
        p.partials + (Slot(part, first > 0) * WgradUnit<Tile>::kTiles + rank) *
                         (int64_t(Tile::kTileM) * Tile::kTileN));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (Tile::kPair && !WgradStored<Tile>(p, at, block0 + block, j0 + j)) continue;
        const float* v = &acc[block][j * 4];
        sums[((block0 + block) * (Tile::kTileN / 8) + j0 + j) * 128 + thread] =
            make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90WgradKernel(const __grid_constant__ WgradLaunch p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int rank = Tile::kPair ? int(blockIdx.x) % 2 : 0;
  const int part = int(blockIdx.x) / WgradUnit<Tile>::kTiles;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      PrefetchMap(p.dy);
      ForRun(p, part, [&](int64_t tile, int first, int steps) {
        ProduceWgrad(p, LocateWgradTile<Tile>(p, tile, rank), first, steps, ring);
      });
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const int block0 = group * Tile::kBlocks;
    ForRun(p, part, [&](int64_t tile, int first, int steps) {
      const WgradPlace at = LocateWgradTile<Tile>(p, tile, rank);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      if constexpr (Tile::kAlternate) {
        float mine[1][Tile::kTileN / 4];
        Sm90AlternateLoop(ring, group, steps, acc);
        Sm90ShareSums<Tile>(ring.shared + Tile::kUnitOffset, group, acc[0], mine[0]);
        PutWgrad<Tile>(p, at, part, rank, first, steps, 0, group * (Tile::kTileN / 16), mine);
      } else {
        if constexpr (Tile::kTerms > 1) {
          Sm90TermsLoop(ring, group, steps, acc);
        } else {
          Sm90MainLoop(ring, group, steps, acc);
        }
        PutWgrad<Tile>(p, at, part, rank, first, steps, block0, 0, acc);
      }
    });
    if constexpr (Tile::kPair) AllowLaunchAfter();
  }
  if constexpr (Tile::kPair) {  // nobody leaves before the other's last arrival
    __syncwarp();
    ClusterSync();
  }
#endif
}

// The shared tiles. A block makes 1024 / kShares of a tile's outputs (SumParts). Many parts of few tiles want
// many shares. grid.x counts the blocks of a tile, grid.y the tiles (strided).
template <typename Tile, int kShares>
__global__ void __launch_bounds__(256) Sm90WgradSumKernel(const __grid_constant__ WgradLaunch p) {
  constexpr int64_t kFours = int64_t(Tile::kTileM) * Tile::kTileN / 4;
  constexpr int kWidth = 256 / kShares;
  const int index = int(blockIdx.x) * kWidth + int(threadIdx.x) % kWidth;  // [0, kFours)
  const float4* from = reinterpret_cast<const float4*>(p.partials) + index;
  for (int64_t tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
    const int begin = PartOf(p, tile * p.steps), end = PartOf(p, (tile + 1) * p.steps - 1) + 1;
    if (begin + 1 == end) continue;
    float4 sum;
    if (!SumParts<kShares>(
            begin, end, [&](int part) { return from + Slot(part, part > begin) * kFours; }, &sum)) {
      continue;
    }
    StoreWgrad<Tile>(p, LocateWgradTile<Tile>(p, tile), index / 128 / (Tile::kTileN / 8),
                     index / 128 % (Tile::kTileN / 8), index % 128, sum);
  }
}

// The same of pairs, in p.shares shares, a thread's parts eight at a time. Its blocks are sent while the
// pairs write their last sums, which hides 2 to 3 us between the launches.
template <typename Tile>
__global__ void __launch_bounds__(256)
    Sm90WgradPairSumKernel(const __grid_constant__ WgradLaunch p) {
  constexpr int64_t kFours = int64_t(Tile::kTileM) * Tile::kTileN / 4;
  constexpr unsigned kTiles = 2;
  __shared__ float4 shares[256];
  const int width = 256 / p.shares;
  const int index = int(blockIdx.x) * width + int(threadIdx.x) % width;  // [0, kFours)
  const int share = int(threadIdx.x) / width;
  const unsigned tiles = unsigned(p.tiles) * kTiles;
  AwaitLaunchBefore();
  for (unsigned at = blockIdx.y; at < tiles; at += gridDim.y) {
    const int tile = int(at / kTiles), rank = int(at % kTiles);
    const int begin = PartOf(p, int64_t(tile) * p.steps);
    const int end = PartOf(p, int64_t(tile + 1) * p.steps - 1) + 1;
    if (begin + 1 == end) continue;
    const WgradPlace place = LocateWgradTile<Tile>(p, tile, rank);
    const int block = index / 128 / (Tile::kTileN / 8), j = index / 128 % (Tile::kTileN / 8);
    if (!WgradStored<Tile>(p, place, block, j)) continue;
    const int first = begin + (end - begin) * share / p.shares;
    const int last = begin + (end - begin) * (share + 1) / p.shares;
    const float4* from = reinterpret_cast<const float4*>(p.partials) + rank * kFours + index;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int part = first; part < last; part += 8) {
      float4 v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (part + i >= last) continue;
        v[i] = __ldcg(from + Slot(part + i, part + i > begin) * kTiles * kFours);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) AddFour(sum, v[i]);
    }
    if (p.shares > 1) {
      __syncthreads();  // the last tile's shares are read
      shares[threadIdx.x] = sum;
      __syncthreads();
      if (share > 0) continue;
      for (int i = 1; i < p.shares; ++i) AddFour(sum, shares[i * width + int(threadIdx.x)]);
    }
    StoreWgrad<Tile>(p, place, block, j, index % 128, sum);
  }
}

template <typename T, int kBlocks, int kTileN, bool kSwapped = false>
using WgradTile = Sm90Tile<T, false, false, kBlocks, kTileN, false, false, 1, false, kSwapped>;

// Fills in the tile counts and the parts.
template <typename Tile>
void CountWgradTiles(WgradLaunch& p, int multiprocessors) {
  using Unit = WgradUnit<Tile>;
  const int64_t rows = int64_t(p.taps[0]) * p.taps[1] * p.taps[2] * p.channel_blocks * 64;
  p.tiles_m = int((rows + Unit::kRows - 1) / Unit::kRows);
  p.tiles_n = (p.n + Unit::kColumns - 1) / Unit::kColumns;
  p.tiles = int64_t(p.tiles_m) * p.tiles_n * p.instances;
  p.whole_tiles = p.parts == 1;
  if (p.whole_tiles) {
    p.parts = int(std::min<int64_t>(p.tiles, multiprocessors / Unit::kTiles));
  } else {
    p.parts = int(std::min(int64_t(p.parts), p.tiles * p.steps));  // no run is empty
  }
}

// Both passes, the first by `kernel`, whose arguments behind p are `args`.
template <typename Tile, typename... Args>
Status LaunchWgradPasses(const Context& ctx, void (*kernel)(WgradLaunch, Args...), WgradLaunch& p,
                         int multiprocessors, const std::string& what, const Args&... args) {
  using Unit = WgradUnit<Tile>;
  CountWgradTiles<Tile>(p, multiprocessors);
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  const bool shared = !p.whole_tiles && p.tiles % p.parts != 0;
  const int blocks = Tile::kTileM * Tile::kTileN / 1024;
  const unsigned tiles = unsigned(std::min<int64_t>(p.tiles * Unit::kTiles, 65535));
  if constexpr (Tile::kPair) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    config.gridDim = dim3(unsigned(p.parts * Unit::kTiles));
    config.blockDim = dim3(Tile::kThreads);
    config.dynamicSmemBytes = Tile::kSharedBytes;
    config.stream = ctx.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaLaunchKernelEx(&config, kernel, p, args...), what));
    if (!shared) return Status::Ok();
    p.shares = 1;
    while (p.shares < 8 && 8 * p.shares * p.tiles < p.parts) p.shares *= 2;
    config.gridDim = dim3(unsigned(blocks * p.shares), tiles);
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = 0;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return CudaStatus(cudaLaunchKernelEx(&config, Sm90WgradPairSumKernel<Tile>, p),
                      what + " (sum of parts)");
  } else {
    kernel<<<p.parts, Tile::kThreads, Tile::kSharedBytes, ctx.stream>>>(p, args...);
    JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
    if (!shared) return Status::Ok();
    if (p.parts > 8 * p.tiles) {
      Sm90WgradSumKernel<Tile, 8><<<dim3(blocks * 8, tiles), 256, 0, ctx.stream>>>(p);
    } else {
      Sm90WgradSumKernel<Tile, 1><<<dim3(blocks, tiles), 256, 0, ctx.stream>>>(p);
    }
    return LaunchStatus(what + " (sum of parts)");
  }
}

template <typename Tile>
Status LaunchSm90WgradTile(const Context& ctx, WgradLaunch& p, int multiprocessors,
                           const std::string& what) {
  return LaunchWgradPasses<Tile>(ctx, Sm90WgradKernel<Tile>, p, multiprocessors, what);
}

template <typename T>
Status LaunchSm90WgradByTile(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                             int multiprocessors, const std::string& what) {
#define JAXCONV_WGRAD_CASE(rows, columns, ...) \
  if (tile == TileSize{rows, columns})         \
    return LaunchSm90WgradTile<__VA_ARGS__>(ctx, p, multiprocessors, what);
  if (kernel == WgradKernel::kWgrad) {
    JAXCONV_WGRAD_CASE(128, 256, WgradTile<T, 1, 256>)
    JAXCONV_WGRAD_CASE(256, 64, WgradTile<T, 2, 64>)
    JAXCONV_WGRAD_CASE(128, 320, WgradTile<T, 1, 320>)
    JAXCONV_WGRAD_CASE(64, 256, Sm90Alternate<T, false, false, 256>)
  }
  if (kernel == WgradKernel::kSwapped) {
    JAXCONV_WGRAD_CASE(256, 128, WgradTile<T, 1, 256, true>)
  }
  if (kernel == WgradKernel::kPair) {
    JAXCONV_WGRAD_CASE(256, 256, Sm90Pair<WgradTile<T, 1, 256>, true>)
    JAXCONV_WGRAD_CASE(256, 128, Sm90Pair<WgradTile<T, 1, 128>, true>)
    JAXCONV_WGRAD_CASE(128, 256, Sm90Pair<WgradTile<T, 1, 128>, false>)
    JAXCONV_WGRAD_CASE(256, 64, Sm90Pair<WgradTile<T, 1, 64>, true>)
    JAXCONV_WGRAD_CASE(64, 256, Sm90Pair<Sm90Alternate<T, false, false, 128>, false>)
  }
#undef JAXCONV_WGRAD_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
