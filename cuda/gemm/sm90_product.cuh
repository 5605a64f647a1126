// Products on the sm_90a main loop whose output is 16-bit and written once:
//
//   d[m, n] = f(alpha * sum over (tap, k) of A[m, (tap, k)] * B[(tap, k), n] + bias)
//
// for each of `instances` (groups, batch entries) and `phases`. A is a plain matrix (dense, and one
// tap) or columns of pixels (convolutions): pixel i of an axis reads first + i * step + tap *
// tap_step. B is (tap, k, n) in any order of memory that has k or n fastest. A tile reads its
// operands once, a stage of (rows + columns) * 128 bytes for every 64 k; d and z are written once.
//
// The grid is persistent: tiles are numbered phase by phase, instance by instance, and inside an
// instance in bands of 16 rows of tiles, down each column of a band, so that the tiles that run
// together share both operands in L2. CTA c makes tiles c, c + gridDim.x, ...
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct Sm90Place {
  int phase, instance;
  int m, n;   // first row of the CTA's tile, first column
  int steps;  // k-blocks over all taps
};

inline constexpr int kBand = 16;

template <typename Tile>
__device__ __forceinline__ Sm90Place LocateTile(const Sm90Product& p, int tile) {
  Sm90Place at;
  at.phase = 0;
  while (at.phase + 1 < p.phases && tile >= p.phase[at.phase + 1].begin) ++at.phase;
  const Sm90Phase& phase = p.phase[at.phase];
  const unsigned index = unsigned(tile - phase.begin);
  const unsigned tiles_n = unsigned(p.tiles_n), tiles_m = unsigned(phase.tiles_m);
  at.instance = int(index / (tiles_m * tiles_n));
  const unsigned rest = index % (tiles_m * tiles_n);
  const unsigned band = rest / (kBand * tiles_n);
  const unsigned height = tiles_m - band * kBand < kBand ? tiles_m - band * kBand : kBand;
  const unsigned in_band = rest - band * (kBand * tiles_n);
  const unsigned row = band * kBand + in_band % height;
  at.m = int(row) * Tile::kTileM;
  at.n = int(in_band / height) * Tile::kTileN;
  at.steps = phase.taps[0] * phase.taps[1] * phase.taps[2] * p.k_blocks;
  return at;
}

template <typename Tile>
__device__ __forceinline__ void ProduceTile(const Sm90Product& p, const Sm90Place& at,
                                            Sm90Ring<Tile>& ring) {
  const Sm90Phase& phase = p.phase[at.phase];
  const int instance_a = p.shared_a ? 0 : at.instance, instance_b = p.shared_b ? 0 : at.instance;
  int first[3] = {}, image = 0;
  if (p.rank_a != 0) {
    const Digits4 pixel = SplitDigits(at.m, phase.extent[2], phase.extent[1], phase.extent[0]);
    image = pixel.digit[0];
    for (int i = 0; i < 3; ++i) first[i] = pixel.digit[3 - i] * phase.step[i] + phase.first[i];
  }
  // A's tile, or from `half` on half of its rows' elements.
  const auto load_a = [&](uint32_t to, uint32_t full, int k, int half, int term,
                          const int (&offset)[3]) {
    const int instance = instance_a + term * p.terms.instances;
    if (p.rank_a != 0) {
      LoadColumn(p.rank_a, to, p.a[at.phase], full, at.instance * p.channels + k + half, first,
                 image + term * p.terms.images, offset);
    } else if constexpr (Tile::kMajorA) {
      LoadTile(to, p.a[at.phase], full, k + half, instance, at.m + term * p.terms.rows);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kTileM; i += 64) {
        LoadTile(to + i * 128, p.a[at.phase], full, at.m + i + half, instance, k);
      }
    }
  };
  for (int t = 0; t < phase.taps[2]; ++t) {
    for (int r = 0; r < phase.taps[1]; ++r) {
      for (int s = 0; s < phase.taps[0]; ++s) {
        const int offset[3] = {s * phase.tap_step[0], r * phase.tap_step[1], t * phase.tap_step[2]};
        const int tap = phase.filter_first + s * phase.filter_step[0] + r * phase.filter_step[1] +
                        t * phase.filter_step[2];
        for (int block = 0; block < p.k_blocks; ++block) {
          const int k = block * Tile::kTileK;
          if constexpr (Tile::kRaw > 0) {
            for (int half = 0; half < 64; half += 32) {
              load_a(ring.Unit(), ring.ClaimUnit(), k, half, 0, offset);
              ring.AdvanceUnit();
            }
          }
          const uint32_t full = ring.Claim();
#pragma unroll
          for (int term = 0; term < Tile::kTerms; ++term) {
            if constexpr (Tile::kRaw == 0) load_a(ring.A(term), full, k, 0, term, offset);
            LoadB(ring, p.b, full, k, at.n, instance_b, tap + term * p.terms.taps, term);
          }
          ring.Advance();
        }
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void FinishProductTile(
    const Sm90Product& p, const Sm90Place& at, int block0,
    Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
    const ColumnBias<typename Tile::T, Tile::kTileN>& bias,
    const float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  constexpr int kChunks = Tile::kTileN / 64;
  const Sm90Phase& phase = p.phase[at.phase];
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  // Box i of the tile: 64 rows of a block, 64 columns.
  const auto store = [&](int i, uint32_t box) {
    const int m = at.m + (block0 + i / kChunks) * 64, n = at.n + i % kChunks * 64;
    if (m >= phase.m || n >= p.n) return;
    if (p.rank_d == 0) {
      StoreTile(p.d[at.phase], box, n, at.instance, m);
      return;
    }
    const Digits4 pixel = SplitDigits(m, phase.extent[2], phase.extent[1], phase.extent[0]);
    const int to[3] = {pixel.digit[3], pixel.digit[2], pixel.digit[1]};
    StoreColumn(p.rank_d, p.d[at.phase], box, at.instance * p.n + n, to, pixel.digit[0]);
  };
  const bool save_z = p.epilogue.save_z;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks * kChunks; ++i) {
    const int block = i / kChunks, chunk = i % kChunks;
    const int m = at.m + (block0 + block) * 64, n = at.n + chunk * 64;
    float v[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) v[j] = acc[block][chunk * 32 + j];
    ScaleAndBias(p.epilogue, at.instance, m + warp * 16 + lane / 4, phase.m, bias, chunk, v);
    // A pair is two boxes of d, or z and d of one box.
    if (save_z || i % 2 == 0) outbox.Open();
    if (save_z) outbox.Put(0, v);
    ActivateFast(p.epilogue.activation, p.epilogue.slope, v);
    outbox.Put(save_z || i % 2 == 1 ? 1 : 0, v);
    if (save_z || i % 2 == 1) {
      outbox.Close([&](uint32_t boxes) {
        if (!save_z) {
          store(i - 1, boxes);
        } else if (m < phase.m && n < p.n) {
          StoreTile(p.z, boxes, n, at.instance, m);
        }
        store(i, boxes + kBlockBytes);
      });
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90ProductKernel(const __grid_constant__ Sm90Product p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.phases; ++i) PrefetchMap(p.a[i]);
      PrefetchMap(p.b);
      for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        ProduceTile(p, LocateTile<Tile>(p, tile), ring);
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(
        ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes, group + 1);
    const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
    int turn = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      const Sm90Place at = LocateTile<Tile>(p, tile);
      if (Tile::kPingPong) {
        turn ^= 1;
        if (turn == group) {
          ring.Skip(at.steps);
          continue;
        }
      }
      ColumnBias<typename Tile::T, Tile::kTileN> bias;
      bias.Load(p.epilogue, at.instance, at.n, p.n);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90MainLoop(ring, group, at.steps, acc);
      FinishProductTile<Tile>(p, at, block0, outbox, bias, acc);
    }
    outbox.Drain();
  }
#endif
}

// Fills in what LocateTile reads of `p`, whose phases have m, and n, instances are set.
template <typename Tile>
Status CountTiles(Sm90Product& p, const std::string& what) {
  p.tiles_n = (p.n + Tile::kTileN - 1) / Tile::kTileN;
  int64_t tiles = 0;
  for (int i = 0; i < p.phases; ++i) {
    p.phase[i].tiles_m = (p.phase[i].m + Tile::kTileM - 1) / Tile::kTileM;
    p.phase[i].begin = int(tiles);
    tiles += int64_t(p.phase[i].tiles_m) * p.tiles_n * p.instances;
    if (tiles > (int64_t(1) << 30)) {
      return Status::Unimplemented(what + ": more than 2^30 tiles");
    }
  }
  p.tiles = int(tiles);
  return Status::Ok();
}

// A CTA per multiprocessor, fewer where there are fewer tiles.
template <typename Tile>
Status LaunchSm90Product(const Context& ctx, void (*kernel)(Sm90Product), Sm90Product& p,
                         int multiprocessors, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CountTiles<Tile>(p, what));
  if (p.tiles == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
      what));
  kernel<<<unsigned(std::min(p.tiles, multiprocessors)), Tile::kThreads, Tile::kSharedBytes,
           ctx.stream>>>(p);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda
