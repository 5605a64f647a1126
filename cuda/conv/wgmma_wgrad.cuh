// wgrad on the sm_90a main loop (channels last):
//
//   dw[(tap, c), k] = sum over pixels of x[pixel at tap, c] * dy[pixel, k]    for each group
//
// Rows are blocks of 64 channels of one tap, so that a block of A (64 pixels x 64 channels,
// m-major) is one column of pixels for the copy engine; B is dy as it lies (n-major). The reduction
// is cut into steps of 64 pixels. All tiles' steps, tile after tile, are one line of work, cut into
// `parts` equal runs, one a CTA: a tile that lies inside one run is written to dw at once, a tile
// that is shared leaves float32 sums in the workspace, at most two tiles a run, which a second
// launch adds in the order of the runs. With whole_tiles the runs are of tiles, and nothing is
// shared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/wgmma_sums.cuh"
#include "cuda/conv/wgmma_wgrad.h"
#include "cuda/core/context.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"  // PackHalves
#include "cuda/gemm/sm90_split.cuh"

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

struct WgradPlace {
  int instance, block_m, n;  // block_m: the first block of 64 rows
};

template <typename Tile>
JAXCONV_HD WgradPlace LocateWgradTile(const WgradLaunch& p, int64_t tile) {
  const unsigned index = unsigned(tile);
  const unsigned tiles_m = unsigned(p.tiles_m), tiles_n = unsigned(p.tiles_n);
  const unsigned rest = index % (tiles_m * tiles_n);
  WgradPlace at;
  at.instance = int(index / (tiles_m * tiles_n));
  at.block_m = int(rest % tiles_m) * (Tile::kRows / 64);
  at.n = int(rest / tiles_m) * Tile::kColumns;
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
  const int count = blocks < kCount ? blocks : kCount;
  const int left = (p.n - at.n + 63) / 64;
  const int columns = left < Tile::kColumns / 64 ? left : Tile::kColumns / 64;
  int channel[kCount], offset[kCount][3];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int block = at.block_m + i;
    // Where all blocks are fetched (raw): channels past the last, which read as zeros.
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
    const auto load_x = [&](uint32_t to, uint32_t full, int half, int term) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (Tile::kRaw == 0 && i >= count) continue;
        if (p.rank == 0) {
          LoadTile(to + i * kBlockBytes, p.x, full, (at.block_m + i) * 64, at.instance, step * 64);
        } else {
          LoadColumn(p.rank, to + i * kBlockBytes, p.x, full, channel[i] + half, from,
                     pixel.digit[0] + term * p.images, offset[i]);
        }
      }
    };
    if constexpr (Tile::kRaw > 0) {
      for (int half = 0; half < 64; half += 32) {
        load_x(ring.Unit(), ring.ClaimUnit(), half, 0);
        ring.AdvanceUnit();
      }
      // dy: both halves of 64 columns are a unit of their own.
      for (int half = 0; half < (Tile::kTileN == 64 ? 1 : 64); half += 32) {
        const uint32_t full = ring.ClaimUnit();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          LoadTile(ring.Unit() + i * kBlockBytes, p.dy, full,
                   at.n + half + i * (Tile::kTileN == 64 ? 32 : 64), at.instance, step * 64, 0);
        }
        ring.AdvanceUnit();
      }
    } else {
      const uint32_t full = ring.Claim(Tile::kTerms * (count + columns) * kBlockBytes);
#pragma unroll
      for (int term = 0; term < Tile::kTerms; ++term) {
        load_x(Tile::kSwapped ? ring.B(term) : ring.A(term), full, 0, term);
        const uint32_t dy = Tile::kSwapped ? ring.A(term) : ring.B(term);
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 64; ++i) {
          if (i < columns) {
            LoadTile(dy + i * kBlockBytes, p.dy, full, at.n + i * 64, at.instance, step * 64, term);
          }
        }
      }
      ring.Advance();
    }
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
                                         int first, int steps, int block0, int j0,
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
        p.partials + Slot(part, first > 0) * (int64_t(Tile::kTileM) * Tile::kTileN));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float* v = &acc[block][j * 4];
        sums[((block0 + block) * (Tile::kTileN / 8) + j0 + j) * 128 + thread] =
            make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    WgmmaWgradKernel(const __grid_constant__ WgradLaunch p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int part = blockIdx.x;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      PrefetchMap(p.dy);
      ForRun(p, part, [&](int64_t tile, int first, int steps) {
        ProduceWgrad(p, LocateWgradTile<Tile>(p, tile), first, steps, ring);
      });
    }
  } else if (Tile::kRaw > 0 && group == 2) {
    RegistersDown<kSplitterRegisters>();
    ForRun(p, part, [&](int64_t, int, int steps) {
      for (int step = 0; step < steps; ++step) SplitStage(ring);
    });
  } else {
    RegistersUp<Tile::kRaw == 0 ? kConsumerRegisters : kSplitConsumerRegisters>();
    const int block0 = group * Tile::kBlocks;
    ForRun(p, part, [&](int64_t tile, int first, int steps) {
      const WgradPlace at = LocateWgradTile<Tile>(p, tile);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      if constexpr (Tile::kAlternate) {
        float mine[1][Tile::kTileN / 4];
        Sm90AlternateLoop(ring, group, steps, acc);
        Sm90ShareSums<Tile>(ring.shared + Tile::kUnitOffset, group, acc[0], mine[0]);
        PutWgrad<Tile>(p, at, part, first, steps, 0, group * (Tile::kTileN / 16), mine);
      } else {
        if constexpr (Tile::kTerms > 1) {
          Sm90TermsLoop(ring, group, steps, acc);
        } else {
          Sm90MainLoop(ring, group, steps, acc);
        }
        PutWgrad<Tile>(p, at, part, first, steps, block0, 0, acc);
      }
    });
  }
#endif
}

// The shared tiles. A block adds the sums of 1024 / kShares of a tile's outputs, a thread four of them
// over one of kShares shares of the parts, in order; then the shares are added in order. Many parts
// of few tiles want many shares. grid.x counts the blocks of a tile, grid.y the tiles (strided).
template <typename Tile, int kShares>
__global__ void __launch_bounds__(256) WgmmaWgradSumKernel(const __grid_constant__ WgradLaunch p) {
  constexpr int64_t kFours = int64_t(Tile::kTileM) * Tile::kTileN / 4;
  constexpr int kWidth = 256 / kShares;
  __shared__ float4 shares[kShares > 1 ? 256 : 1];
  const int index = int(blockIdx.x) * kWidth + int(threadIdx.x) % kWidth;  // [0, kFours)
  const int share = threadIdx.x / kWidth;
  for (int64_t tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
    const int begin = PartOf(p, tile * p.steps), end = PartOf(p, (tile + 1) * p.steps - 1) + 1;
    if (begin + 1 == end) continue;
    const int first = begin + (end - begin) * share / kShares;
    const int last = begin + (end - begin) * (share + 1) / kShares;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int part = first; part < last; ++part) {
      AddFour(sum, __ldcg(reinterpret_cast<const float4*>(p.partials) +
                          Slot(part, part > begin) * kFours + index));
    }
    if constexpr (kShares > 1) {
      __syncthreads();  // the last tile's shares are read
      if (!AddShares<kShares>(shares, sum)) continue;
    }
    StoreWgrad<Tile>(p, LocateWgradTile<Tile>(p, tile), index / 128 / (Tile::kTileN / 8),
                     index / 128 % (Tile::kTileN / 8), index % 128, sum);
  }
}

// Fills in the tile counts and launches both passes.
template <typename Tile>
Status LaunchWgmmaWgradTile(const Context& ctx, WgradLaunch& p, int multiprocessors,
                            int64_t workspace_bytes, const std::string& what) {
  const int64_t rows = int64_t(p.taps[0]) * p.taps[1] * p.taps[2] * p.channel_blocks * 64;
  p.tiles_m = int((rows + Tile::kRows - 1) / Tile::kRows);
  p.tiles_n = (p.n + Tile::kColumns - 1) / Tile::kColumns;
  p.tiles = int64_t(p.tiles_m) * p.tiles_n * p.instances;
  if (p.tiles > (int64_t(1) << 30)) return Status::Unimplemented(what + ": more than 2^30 tiles");
  p.whole_tiles = p.parts == 1;
  if (p.whole_tiles) {
    p.parts = int(std::min<int64_t>(p.tiles, multiprocessors));
  } else {
    p.parts = int(std::min(int64_t(p.parts), p.tiles * p.steps));  // no run is empty
  }
  if (double(p.tiles) * double(p.steps) * double(p.parts) > 4e18) {
    return Status::Unimplemented(what + ": tiles * steps * splits overflows 64 bits");
  }
  const int64_t needed =
      p.whole_tiles ? 0
                    : 2 * int64_t(p.parts) * Tile::kTileM * Tile::kTileN * int64_t(sizeof(float));
  if (workspace_bytes < needed) {
    return Status::Invalid(what + ": needs a workspace of " + std::to_string(needed) +
                           " bytes (2 * splits * tile rows * tile columns * 4), given " +
                           std::to_string(workspace_bytes));
  }
  auto kernel = WgmmaWgradKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
      what));
  kernel<<<p.parts, Tile::kThreads, Tile::kSharedBytes, ctx.stream>>>(p);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  if (p.whole_tiles || p.tiles % p.parts == 0) return Status::Ok();
  const int blocks = Tile::kTileM * Tile::kTileN / 1024;
  const unsigned tiles = unsigned(std::min<int64_t>(p.tiles, 65535));
  if (p.parts > 8 * p.tiles) {
    WgmmaWgradSumKernel<Tile, 8><<<dim3(blocks * 8, tiles), 256, 0, ctx.stream>>>(p);
  } else {
    WgmmaWgradSumKernel<Tile, 1><<<dim3(blocks, tiles), 256, 0, ctx.stream>>>(p);
  }
  return LaunchStatus(what + " (sum of parts)");
}

template <typename T>
Status LaunchWgmmaWgradByTile(const Context& ctx, WgradLaunch& p, Sm90TileName tile,
                              int multiprocessors, int64_t workspace_bytes,
                              const std::string& what) {
#define JAXCONV_SM90_CASE(name, blocks, tile_n)                                           \
  case Sm90TileName::name:                                                                \
    return LaunchWgmmaWgradTile<Sm90Tile<T, false, false, blocks, tile_n, false, false>>( \
        ctx, p, multiprocessors, workspace_bytes, what);
  switch (tile) {
    JAXCONV_SM90_CASE(k128x256, 1, 256)
    JAXCONV_SM90_CASE(k256x128, 2, 128)
    JAXCONV_SM90_CASE(k128x128, 1, 128)
    JAXCONV_SM90_CASE(k256x64, 2, 64)
    JAXCONV_SM90_CASE(k128x320, 1, 320)
    case Sm90TileName::k64x256:
      return LaunchWgmmaWgradTile<Sm90Alternate<T, false, false, 256>>(ctx, p, multiprocessors,
                                                                       workspace_bytes, what);
    case Sm90TileName::k256x128s:
      return LaunchWgmmaWgradTile<Sm90Tile<T, false, false, 1, 256, false, false, 1, 0, true>>(
          ctx, p, multiprocessors, workspace_bytes, what);
    default:
      break;
  }
#undef JAXCONV_SM90_CASE
  return Status::Unimplemented(what + ": no such tile");
}

}  // namespace jaxconv::cuda
