// Products on the sm_90a main loop whose output is 16-bit and written once:
//
//   d[m, n] = f(alpha * (sum over (tap, k) of A[m, (tap, k)] * B[(tap, k), n] + added) + beta * c + bias)
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
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct Sm90Place {
  int phase, instance;
  int m, n;      // first row of the CTA's tile, first column
  int part;      // of the reduction
  int k, k_end;  // its k-blocks of each tap
  int steps;     // k-blocks over all taps
};

inline constexpr int kBand = 16;  // rows of tiles

// The phase and the number of k-blocks of a tile, all that a group needs to know of the other's.
__device__ __forceinline__ void LocateSteps(const Sm90Product& p, int tile, Sm90Place& at) {
  at.phase = 0;
  while (at.phase + 1 < p.phases && tile >= p.phase[at.phase + 1].begin) ++at.phase;
  const Sm90Phase& phase = p.phase[at.phase];
  at.part = 0;
  at.k = 0;
  at.k_end = p.k_blocks;
  if (p.splits > 1) {
    const unsigned number = unsigned(tile - phase.begin);
    at.part = int(number - p.by_splits.Div(number) * unsigned(p.splits));
    at.k = p.k_blocks * at.part / p.splits;
    at.k_end = p.k_blocks * (at.part + 1) / p.splits;
  }
  at.steps = phase.taps[0] * phase.taps[1] * phase.taps[2] * (at.k_end - at.k);
}

// Divisions by multiplication: with short reductions a tile takes a few thousand cycles, and a
// division of the compiler's a hundred.
template <typename Tile>
__device__ __forceinline__ Sm90Place LocateTile(const Sm90Product& p, int tile) {
  Sm90Place at;
  LocateSteps(p, tile, at);
  const Sm90Phase& phase = p.phase[at.phase];
  const unsigned index = p.by_splits.Div(unsigned(tile - phase.begin));
  const unsigned instance = phase.by_instance.Div(index);
  const unsigned rest = index - instance * phase.by_instance.d;
  const unsigned band = p.by_band.Div(rest);
  const unsigned in_band = rest - band * p.by_band.d;
  const bool whole = (band + 1) * kBand <= unsigned(phase.tiles_m);
  const unsigned column = whole ? in_band / kBand : phase.by_last.Div(in_band);
  const unsigned row = band * kBand + in_band - column * (whole ? kBand : phase.by_last.d);
  at.instance = int(instance);
  at.m = int(row) * Tile::kRows;
  at.n = int(column) * Tile::kColumns;
  return at;
}

__device__ __forceinline__ Digits4 PixelOf(const Sm90Phase& phase, int m) {
  return SplitDigits(m, phase.by_extent[2], phase.by_extent[1], phase.by_extent[0]);
}

// An addend comes through the ring as the operands do, behind them: boxes of 64 x 64 in the order of
// d's rows, chunk of columns by chunk, kEach chunks in each of kStages stages. So it is on its way
// while the products run; in the epilogue each thread would wait for memory.
template <typename Tile>
struct Sm90AddendStages {
  static constexpr int kRowBoxes = Tile::kRows / 64, kChunks = Tile::kColumns / 64;
  static constexpr int kMost = Tile::kStageBytes / (kRowBoxes * kBlockBytes);
  static constexpr int kStages = (kChunks + kMost - 1) / kMost;
  static constexpr int kEach = (kChunks + kStages - 1) / kStages;
  static constexpr int kChunkBytes = kRowBoxes * kBlockBytes;
  static_assert(!Tile::kPingPong || kStages == 1, "a turn passes when all stages are there");
};

// v += a box of 64 x 64 16-bit elements in shared memory, swizzled; v in the order of wgmma's
// registers.
template <typename T>
__device__ __forceinline__ void AddBox(uint32_t box, float (&v)[32]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns
    uint32_t pair[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                 : "r"(box + row * 128 + (((j * 2 + lane / 16) ^ (row % 8)) * 16))
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = UnpackPair(pair[i], T());
      v[j * 8 + i * 2] += two.x;
      v[j * 8 + i * 2 + 1] += two.y;
    }
  }
}

// The same where rows of the sums are columns of the box (PutTransposed).
template <typename T>
__device__ __forceinline__ void AddBoxTransposed(uint32_t box, float (&v)[32]) {
  const int lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;  // of 8 of the box's columns
#pragma unroll
  for (int j = 0; j < 8; j += 2) {  // 8 of the box's rows
    const int row = (j + lane / 16) * 8 + lane % 8;
    uint32_t pair[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                 : "r"(box + row * 128 + ((chunk ^ (row % 8)) * 16))
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = UnpackPair(pair[i], T());
      v[j * 4 + i * 2] += two.x;
      v[j * 4 + i * 2 + 1] += two.y;
    }
  }
}

// acc += a warpgroup's part of the boxes in the next stages.
template <typename Tile>
__device__ __forceinline__ void AddFromRing(Sm90Ring<Tile>& ring, int group, int block0,
                                            float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll
  for (int s = 0; s < Stages::kStages; ++s) {
    ring.Await();
#pragma unroll
    for (int i = 0; i < Stages::kEach; ++i) {
      const int chunk = s * Stages::kEach + i;
      if (chunk >= Stages::kChunks) continue;
      if constexpr (Tile::kSwapped) {  // a group's rows are columns of d
        static_assert(Tile::kBlocks == 1);
        if (chunk != block0) continue;
#pragma unroll
        for (int m = 0; m < Stages::kRowBoxes; ++m) {
          AddBoxTransposed<typename Tile::T>(ring.A() + (i * Stages::kRowBoxes + m) * kBlockBytes,
                                             reinterpret_cast<float (&)[32]>(acc[0][m * 32]));
        }
      } else {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          AddBox<typename Tile::T>(ring.A() + (i * Stages::kRowBoxes + block0 + m) * kBlockBytes,
                                   reinterpret_cast<float (&)[32]>(acc[m][chunk * 32]));
        }
      }
    }
    ReadsFirst();
    NamedBarrier(group + 1, 128);  // all have read
    ring.Release(ring.stage);
    ring.Advance();
  }
}

// What is added to the tile's sums.
template <typename Tile>
__device__ __forceinline__ void ProduceAddend(const Sm90Product& p, const Sm90Place& at,
                                              Sm90Ring<Tile>& ring) {
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll 1
  for (int s = 0; s < Stages::kStages; ++s) {
    const int chunk = s * Stages::kEach, left = Stages::kChunks - chunk;
    const int chunks = left < Stages::kEach ? left : Stages::kEach;
    const uint32_t full = ring.Claim(chunks * Stages::kChunkBytes), to = ring.A();
    for (int i = 0; i < chunks; ++i) {
      const int n = at.n + (chunk + i) * 64;
      if (p.added == Sm90Added::kMatrix) {
        LoadTile(to + i * Stages::kChunkBytes, p.c, full, n, at.instance, at.m);
        continue;
      }
      for (int box = 0; box < Stages::kRowBoxes; ++box) {
        const Digits4 pixel = PixelOf(p.phase[at.phase], at.m + box * 64);
        const int from[3] = {pixel.digit[3], pixel.digit[2], pixel.digit[1]}, none[3] = {};
        LoadColumn(p.rank_d, to + (i * Stages::kRowBoxes + box) * kBlockBytes, p.d[at.phase], full,
                   at.instance * p.n + n, from, pixel.digit[0], none);
      }
    }
    ring.Advance();
  }
}

template <typename Tile>
__device__ __forceinline__ void ProduceTile(const Sm90Product& p, const Sm90Place& at,
                                            Sm90Ring<Tile>& ring) {
  const Sm90Phase& phase = p.phase[at.phase];
  const int instance_a = p.shared_a ? 0 : at.instance, instance_b = p.shared_b ? 0 : at.instance;
  int first[3] = {}, image = 0;
  if (p.rank_a != 0) {
    const Digits4 pixel = PixelOf(phase, at.m);
    image = pixel.digit[0];
    for (int i = 0; i < 3; ++i) first[i] = pixel.digit[3 - i] * phase.step[i] + phase.first[i];
  }
  // The rows' operand's tile, or the half of its k from `half` on.
  const auto load_a = [&](uint32_t to, uint32_t full, int k, int half, const int (&offset)[3]) {
    if (p.rank_a != 0) {
      LoadColumn(p.rank_a, to, p.a[at.phase], full, at.instance * p.channels + k + half, first,
                 image, offset);
    } else if constexpr (Tile::kSwapped ? Tile::kMajorB : Tile::kMajorA) {
      LoadTile(to, p.a[at.phase], full, k + half, instance_a, at.m);
    } else {
      constexpr int kBox = Tile::kRowTerms ? 32 : 64;  // rows of a box, and k
#pragma unroll
      for (int i = 0; i < Tile::kRows; i += kBox) {
        LoadTile(to + i * 128, p.a[at.phase], full, at.m + i, instance_a, k + half);
      }
    }
  };
  for (int t = 0; t < phase.taps[2]; ++t) {
    for (int r = 0; r < phase.taps[1]; ++r) {
      for (int s = 0; s < phase.taps[0]; ++s) {
        const int offset[3] = {s * phase.tap_step[0], r * phase.tap_step[1], t * phase.tap_step[2]};
        const int tap = phase.filter_first + s * phase.filter_step[0] + r * phase.filter_step[1] +
                        t * phase.filter_step[2];
        for (int block = at.k; block < at.k_end; ++block) {
          const int k = block * Tile::kTileK;
          if constexpr (Tile::kRowTerms) {
            for (int half = 0; half < 64; half += 32) {
              load_a(ring.Unit(), ring.ClaimUnit(), k, half, offset);
              ring.AdvanceUnit();
            }
          }
          const uint32_t full = ring.Claim();
#pragma unroll
          for (int term = 0; term < Tile::kTerms; ++term) {
            if constexpr (!Tile::kRowTerms) {
              load_a(Tile::kSwapped ? ring.B(term) : ring.A(term), full, k, 0, offset);
            }
            LoadB(ring, p.b, full, k, at.n, instance_b, tap + term * p.term_taps, term);
          }
          ring.Advance();
        }
      }
    }
  }
}

// A group's boxes of 64 x 64 outputs, `acc` rounded, to d or z.
template <typename Tile>
__device__ __forceinline__ void PutTile(const Sm90Product& p, const Sm90Place& at, int block0,
                                        const CUtensorMap& map, int rank,
                                        Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
                                        float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  constexpr int kChunks = Tile::kTileN / 64, kBoxes = Tile::kBlocks * kChunks;
  const int m_end = p.phase[at.phase].m;
  const auto store = [&](int i, uint32_t box) {
    const int m = at.m + (Tile::kSwapped ? i % kChunks : block0 + i / kChunks) * 64;
    const int n = at.n + (Tile::kSwapped ? block0 + i / kChunks : i % kChunks) * 64;
    if (m >= m_end || n >= p.n) return;
    if (rank == 0) {
      StoreTile(map, box, n, at.instance, m);
      return;
    }
    const Digits4 pixel = PixelOf(p.phase[at.phase], m);
    const int to[3] = {pixel.digit[3], pixel.digit[2], pixel.digit[1]};
    StoreColumn(rank, map, box, at.instance * p.n + n, to, pixel.digit[0]);
  };
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const auto& v = reinterpret_cast<float (&)[32]>(acc[i / kChunks][i % kChunks * 32]);
    if (i % 2 == 0) outbox.Open();
    if constexpr (Tile::kSwapped) {
      outbox.PutTransposed(i % 2, v);
    } else {
      outbox.Put(i % 2, v);
    }
    if (i % 2 == 1 || i + 1 == kBoxes) {
      outbox.Close([&](uint32_t boxes) {
        store(i / 2 * 2, boxes);
        if (i % 2 == 1) store(i, boxes + kBlockBytes);
      });
    }
  }
}

// Each step goes over all sums before the next begins, so that what a problem does not ask for is
// skipped once, and the code that runs lies together: box by box, jumping over formulas that were
// not wanted cost more than half of the epilogue in instruction cache misses.
template <typename Tile>
__device__ __forceinline__ void FinishProductTile(
    const Sm90Product& p, const Sm90Place& at, int block0,
    Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
    const ColumnBias<typename Tile::T, Tile::kTileN>& bias,
    float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  const int m_end = p.phase[at.phase].m;
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
    const int first = (Tile::kSwapped ? at.n : at.m) + (block0 + block) * 64 +
                      threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // row of the sums
    ScaleAndBias(p.epilogue, at.instance, first, Tile::kSwapped ? p.n : m_end, bias, acc[block]);
    if constexpr (!Tile::kSwapped) {
      AddAddend<typename Tile::T>(p.epilogue, at.instance, first, m_end, at.n, p.n, acc[block]);
    }
  }
  if (p.epilogue.save_z) PutTile<Tile>(p, at, block0, p.z, 0, outbox, acc);
  ActivateFast<typename Tile::T>(
      p.epilogue.activation, p.epilogue.slope,
      reinterpret_cast<float (&)[Tile::kBlocks * Tile::kTileN / 2]>(acc[0][0]));
  PutTile<Tile>(p, at, block0, p.d[at.phase], p.rank_d, outbox, acc);
}

// Convolutions have addends; their rows' operand is k-major.
template <typename Tile>
inline constexpr bool kAdds = Tile::kSwapped ? Tile::kMajorB : Tile::kMajorA;

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
        const Sm90Place at = LocateTile<Tile>(p, tile);
        ProduceTile(p, at, ring);
        if constexpr (kAdds<Tile>) {
          if (p.added != Sm90Added::kNothing) ProduceAddend(p, at, ring);
        }
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(
        ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes, group + 1);
    const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
    const bool added = kAdds<Tile> && p.added != Sm90Added::kNothing;
    int turn = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      if (Tile::kPingPong) {
        turn ^= 1;
        if (turn == group) {
          Sm90Place other;
          LocateSteps(p, tile, other);
          ring.Skip(other.steps + (added ? Sm90AddendStages<Tile>::kStages : 0));
          continue;
        }
      }
      const Sm90Place at = LocateTile<Tile>(p, tile);
      ColumnBias<typename Tile::T, Tile::kTileN> bias;
      bias.Load(p.epilogue, at.instance, at.n, p.n);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90MainLoop(ring, group, at.steps, acc, [&] {
        if (Tile::kPingPong && added) ring.Await();
      });
      if constexpr (kAdds<Tile>) {
        if (added) AddFromRing(ring, group, block0, acc);
      }
      FinishProductTile<Tile>(p, at, block0, outbox, bias, acc);
    }
    outbox.Drain();
  }
#endif
}

// Fills in what LocateTile reads of `p`, whose phases have m, and n, instances and splits are set. Tiles times k_blocks are
// at most 2^30 (RefuseSm90Tiles).
template <typename Tile>
void CountTiles(Sm90Product& p) {
  p.tiles_n = (p.n + Tile::kColumns - 1) / Tile::kColumns;
  p.by_band = FastDiv(int64_t(kBand) * p.tiles_n);
  p.by_splits = FastDiv(p.splits);
  p.tiles = 0;
  for (int i = 0; i < p.phases; ++i) {
    Sm90Phase& phase = p.phase[i];
    phase.tiles_m = (phase.m + Tile::kRows - 1) / Tile::kRows;
    phase.begin = p.tiles;
    const int64_t each = int64_t(phase.tiles_m) * p.tiles_n;
    p.tiles += int(each * p.instances * p.splits);
    phase.by_instance = FastDiv(std::max(each, int64_t(1)));
    phase.by_last = FastDiv(std::max(phase.tiles_m % kBand, 1));
    for (int axis = 0; axis < 3; ++axis) {
      phase.by_extent[axis] = FastDiv(std::max(phase.extent[axis], 1));
    }
  }
}

// A CTA per multiprocessor, fewer where there are fewer tiles.
template <typename Tile>
Status LaunchSm90Product(const Context& ctx, void (*kernel)(Sm90Product), Sm90Product& p,
                         int multiprocessors, const std::string& what) {
  // Bias by column of d is bias by row of the sums.
  if (Tile::kSwapped && p.epilogue.bias_kind == BiasKind::kColumn) {
    p.epilogue.bias_kind = BiasKind::kRow;
  }
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(std::min(p.tiles, multiprocessors)), Tile::kThreads, Tile::kSharedBytes,
           ctx.stream>>>(p);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda
