// Products on the sm_90a main loop whose output is written once:
//
//   d[m, n] = f(alpha * (sum over (tap, k) of A[m, (tap, k)] * B[(tap, k), n] + added) + beta * c + bias)
//
// with the plain epilogue (sm90_plain.cuh), for each of `instances` (groups, batch entries) and
// `phases`. A is a plain matrix (dense, and one tap) or columns of pixels (convolutions): pixel i
// of an axis reads first + i * step + tap * tap_step. B is (tap, k, n) in any order of memory that
// has k or n fastest. A tile reads its operands once, a stage of (rows + columns) * 128 bytes for
// every 64 k; d and z are written once.
//
// The grid is persistent: tiles are numbered phase by phase, instance by instance, and inside an
// instance in bands of 16 rows of tiles, down each column of a band, so that the tiles that run
// together share both operands in L2.
//
// There are two loops, Sm90StreamedKernel (here) and Sm90ResidentKernel (sm90_resident.cuh). A tile's
// sums go through their Epilogue<Tile>, an object of a consumer warpgroup:
//
//   Args                            what it needs besides Sm90Product: the kernel's second parameter
//   Walk                            streamed: Sm90EveryTile, or Sm90OneColumn for sums of columns
//   Behind(p)                       stages of the ring that it takes behind a tile's products, or 0
//   Produce(p, args, at, ring)      the producer's thread fills them
//   Epilogue(p, args, outbox, group, block0)   outbox: the warpgroup's Tile::kOutboxBytes of shared
//                                   memory; block0: the first of the tile's blocks of 64 rows that it has
//   Begin(p, args, at)              before the products of a tile: starts loads that run meanwhile
//   Finish(p, args, at, ring, acc)  behind them
//   End(p, args, at, part)          behind the last tile. Of a walk down a column, at: the column's first
//                                   place; part: this warpgroup's number among those that share it
//
// Sm90EpilogueDefaults has what an epilogue need not say.
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
#include "cuda/gemm/sm90_split.cuh"

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
  at.steps = phase.taps[0] * phase.taps[1] * phase.taps[2] * (at.k_end - at.k) + p.shortcut_steps;
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

// All tiles of a CTA have the same columns, so that its threads keep what they know of them: tiles are
// numbered along the rows, through all instances, and gridDim.x is a multiple of those of a row. One
// phase, no splits.
template <typename Tile>
__device__ __forceinline__ Sm90Place LocateInColumn(const Sm90Product& p, int tile) {
  const unsigned row = p.by_columns.Div(unsigned(tile));
  const unsigned column = unsigned(tile) - row * p.by_columns.d;
  const unsigned instance = p.by_tiles_n.Div(column);
  const Sm90Phase& phase = p.phase[0];
  Sm90Place at = {};
  at.instance = int(instance);
  at.m = int(row) * Tile::kRows;
  at.n = int(column - instance * p.by_tiles_n.d) * Tile::kColumns;
  at.k_end = p.k_blocks;
  at.steps = phase.taps[0] * phase.taps[1] * phase.taps[2] * p.k_blocks + p.shortcut_steps;
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

// v = f(box, v), element by element of a box of 64 x 64 16-bit elements in shared memory, swizzled;
// v in the order of wgmma's registers. kTransposed: rows of the sums are columns of the box
// (PutTransposed). kPinned: a long f, with which the scheduler would run out of registers.
template <typename T, bool kTransposed, bool kPinned, typename F>
__device__ __forceinline__ void ThroughBox(uint32_t box, F f, float (&v)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns; transposed: 16 of the box's rows
    uint32_t pair[4];
    if constexpr (kTransposed) {
      const int row = (j * 2 + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                   : "r"(box + row * 128 + ((chunk ^ (row % 8)) * 16))
                   : "memory");
    } else {
      const int row = warp * 16 + lane % 16;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                   : "r"(box + row * 128 + (((j * 2 + lane / 16) ^ (row % 8)) * 16))
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      auto& four = reinterpret_cast<float (&)[4]>(v[j * 8 + i * 2]);
      const float2 left = UnpackPair(pair[i], T()), right = UnpackPair(pair[i + 1], T());
      four[0] = f(left.x, four[0]);
      four[1] = f(left.y, four[1]);
      four[2] = f(right.x, four[2]);
      four[3] = f(right.y, four[3]);
      if constexpr (kPinned) Pin(four);
    }
  }
}

struct PlusAdded {
  __device__ __forceinline__ float operator()(float c, float v) const { return v + c; }
};

// acc = f(box, acc) with a warpgroup's part of the boxes in the next stages.
template <typename Tile, bool kPinned, typename Ring, typename F>
__device__ __forceinline__ void ThroughRing(Ring& ring, int group, int block0, F f,
                                            float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  using T = typename Tile::T;
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll
  for (int s = 0; s < Stages::kStages; ++s) {
    ring.Await();
#pragma unroll
    for (int i = 0; i < Stages::kEach; ++i) {
      const int chunk = s * Stages::kEach + i;
      if (chunk >= Stages::kChunks) continue;
      const uint32_t boxes = ring.A() + i * Stages::kChunkBytes;
      if constexpr (Tile::kSwapped) {  // a group's rows are columns of d
        static_assert(Tile::kBlocks == 1);
        if (chunk != block0) continue;
#pragma unroll
        for (int m = 0; m < Stages::kRowBoxes; ++m) {
          ThroughBox<T, true, kPinned>(boxes + m * kBlockBytes, f,
                                       reinterpret_cast<float (&)[32]>(acc[0][m * 32]));
        }
      } else {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          ThroughBox<T, false, kPinned>(boxes + (block0 + m) * kBlockBytes, f,
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

// The producer's side of it: load(shared memory, barrier, chunk) loads a chunk's boxes.
template <typename Tile, typename Ring, typename Load>
__device__ __forceinline__ void ProduceBoxes(Ring& ring, Load&& load) {
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll 1
  for (int s = 0; s < Stages::kStages; ++s) {
    const int chunk = s * Stages::kEach, left = Stages::kChunks - chunk;
    const int chunks = left < Stages::kEach ? left : Stages::kEach;
    const uint32_t full = ring.Claim(chunks * Stages::kChunkBytes), to = ring.A();
    for (int i = 0; i < chunks; ++i) load(to + i * Stages::kChunkBytes, full, chunk + i);
    ring.Advance();
  }
}

// Where a shortcut's pixels lie that a tile from row m on reads.
struct Sm90ShortcutPlace {
  __device__ __forceinline__ Sm90ShortcutPlace(const Sm90Product& p, int m) : m(m) {
    if (p.shortcut_rank == 0) return;
    const Digits4 pixel = PixelOf(p.phase[0], m);
    image = pixel.digit[0];
    for (int i = 0; i < 3; ++i) first[i] = pixel.digit[3 - i] * p.phase[1].step[i];
  }
  __device__ __forceinline__ void Load(const Sm90Product& p, uint32_t to, uint32_t full,
                                       int k) const {
    const int nowhere[3] = {};
    if (p.shortcut_rank != 0) {
      LoadColumn(p.shortcut_rank, to, p.a[1], full, k, first, image, nowhere);
    } else {
      LoadTile(to, p.a[1], full, k, 0, m);
    }
  }
  int m, image = 0, first[3] = {};
};

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
  if constexpr (Tile::kShortcuts) {
    if (p.shortcut_steps == 0) return;
    const Sm90ShortcutPlace shortcut(p, at.m);
    for (int step = 0; step < p.shortcut_steps; ++step) {
      const uint32_t full = ring.Claim();
      shortcut.Load(p, ring.A(), full, step * Tile::kTileK);
      LoadB(ring, p.z, full, step * Tile::kTileK, at.n, 0, 0, 0);
      ring.Advance();
    }
  }
}

// A group's boxes of 64 x 64 outputs, `acc` rounded, to d or z, two at a time. then(i, pair): boxes i
// and i + 1 lie at `pair` while TMA stores them.
template <typename Tile, typename Then>
__device__ __forceinline__ void PutTile(const Sm90Product& p, const Sm90Place& at, int block0,
                                        const CUtensorMap& map, int rank,
                                        Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
                                        float (&acc)[Tile::kBlocks][Tile::kTileN / 2],
                                        Then&& then) {
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
      const uint32_t pair = outbox.Pair();
      outbox.Close([&](uint32_t boxes) {
        store(i / 2 * 2, boxes);
        if (i % 2 == 1) store(i, boxes + kBlockBytes);
      });
      then(i / 2 * 2, pair);
    }
  }
}

// CTA c makes tiles c, c + gridDim.x, ... A count of rounds tells whose turn it is too: of these
// kernels a register more may be one too many.
struct Sm90EveryTile {
  __device__ __forceinline__ int Number() const { return int(blockIdx.x + round * gridDim.x); }
  __device__ __forceinline__ bool More(const Sm90Product& p) const { return Number() < p.tiles; }
  template <typename Tile>
  __device__ __forceinline__ Sm90Place Locate(const Sm90Product& p) const {
    return LocateTile<Tile>(p, Number());
  }
  __device__ __forceinline__ int Steps(const Sm90Product& p) const {
    Sm90Place at;
    LocateSteps(p, Number(), at);
    return at.steps;
  }
  int round = 0;
};

// Of LocateInColumn.
struct Sm90OneColumn : Sm90EveryTile {
  template <typename Tile>
  __device__ __forceinline__ Sm90Place Locate(const Sm90Product& p) const {
    return LocateInColumn<Tile>(p, Number());
  }
  __device__ __forceinline__ int Steps(const Sm90Product& p) const {
    const Sm90Phase& phase = p.phase[0];
    return phase.taps[0] * phase.taps[1] * phase.taps[2] * p.k_blocks + p.shortcut_steps;
  }
};

struct Sm90EpilogueDefaults {
  struct Args {};
  using Walk = Sm90EveryTile;
  // Registers of a thread in the streamed loop: one warpgroup's and two's are 504 together.
  static constexpr int kProducer = kProducerRegisters, kConsumer = kConsumerRegisters;
  static __device__ __forceinline__ int Behind(const Sm90Product&) { return 0; }
  template <typename Args, typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product&, const Args&, const Sm90Place&,
                                                 Ring&) {}
  template <typename Args>
  __device__ __forceinline__ void Begin(const Sm90Product&, const Args&, const Sm90Place&) {}
};

// The streamed loop: both operands of every tile come through the ring.
template <typename Tile, typename Epilogue>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90StreamedKernel(const __grid_constant__ Sm90Product p,
                       const __grid_constant__ typename Epilogue::Args args) {
#ifdef JAXCONV_SM90A
  using Walk = typename Epilogue::Walk;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  const int behind = Epilogue::Behind(p);
  if (group < 0) {
    RegistersDown<Epilogue::kProducer>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.phases; ++i) PrefetchMap(p.a[i]);
      PrefetchMap(p.b);
      for (Walk walk; walk.More(p); ++walk.round) {
        const Sm90Place at = walk.template Locate<Tile>(p);
        ProduceTile(p, at, ring);
        if (behind > 0) Epilogue::Produce(p, args, at, ring);
      }
    }
  } else {
    RegistersUp<Epilogue::kConsumer>();
    Epilogue epilogue(p, args,
                      ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes,
                      group, Tile::kPingPong ? 0 : group * Tile::kBlocks);
    for (Walk walk; walk.More(p); ++walk.round) {
      if (Tile::kPingPong && walk.round % 2 != group) {
        ring.Skip(walk.Steps(p) + behind);
        continue;
      }
      const Sm90Place at = walk.template Locate<Tile>(p);
      epilogue.Begin(p, args, at);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      if constexpr (Tile::kRowTerms) {
        Sm90TermRowsLoop(ring, group, at.steps, acc);
      } else {
        Sm90MainLoop(ring, group, at.steps, acc, [&] {
          if (Tile::kPingPong && behind > 0) ring.Await();
        });
      }
      epilogue.Finish(p, args, at, ring, acc);
    }
    epilogue.End(p, args, Walk().template Locate<Tile>(p),
                 int(p.by_columns.Div(blockIdx.x)) * 2 + group);
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
  p.by_tiles_n = FastDiv(std::max(p.tiles_n, 1));
  p.by_columns = FastDiv(std::max(int64_t(p.tiles_n) * p.instances, int64_t(1)));
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

// A kernel over `p`, a CTA per multiprocessor, fewer where there are fewer tiles.
template <typename Tile, typename... Args>
Status LaunchSm90Product(const Context& ctx, void (*kernel)(Sm90Product, Args...), Sm90Product& p,
                         int multiprocessors, const std::string& what, const Args&... args) {
  // Bias by column of d is bias by row of the sums.
  if (Tile::kSwapped && p.epilogue.bias_kind == BiasKind::kColumn) {
    p.epilogue.bias_kind = BiasKind::kRow;
  }
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(std::min(p.tiles, multiprocessors)), Tile::kThreads, Tile::kSharedBytes,
           ctx.stream>>>(p, args...);
  return LaunchStatus(what);
}

template <typename Tile, typename Epilogue>
Status LaunchSm90Streamed(const Context& ctx, Sm90Product& p, int multiprocessors,
                          const std::string& what) {
  return LaunchSm90Product<Tile>(ctx, Sm90StreamedKernel<Tile, Epilogue>, p, multiprocessors, what,
                                 typename Epilogue::Args());
}

// CTAs that share a column of tiles, at most `most`, each `groups` tiles of it at a time. There are at
// least as many multiprocessors as columns.
inline int CtasOfColumn(const Sm90Product& p, int groups, int64_t most, int multiprocessors) {
  const int64_t columns = int64_t(p.tiles_n) * p.instances;
  return int(
      std::min<int64_t>({CeilDiv(p.phase[0].tiles_m, groups), multiprocessors / columns, most}));
}

// A streamed loop down columns (Sm90OneColumn); *parts: of a column's sums, two of each CTA.
template <typename Tile, typename Epilogue>
Status LaunchSm90Columns(const Context& ctx, Sm90Product& p, const typename Epilogue::Args& args,
                         int multiprocessors, const std::string& what, int* parts) {
  CountTiles<Tile>(p);
  const int ctas = CtasOfColumn(p, 1, MostColumnParts(p.phase[0].m) / 2, multiprocessors);
  *parts = 2 * ctas;
  const auto kernel = Sm90StreamedKernel<Tile, Epilogue>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(ctas * p.tiles_n * p.instances), kSm90Threads, Tile::kSharedBytes,
           ctx.stream>>>(p, args);
  return LaunchStatus(what);
}

// f(rows, columns), integral constants, of the one of kTiles that is `tile`.
template <const auto& kTiles, size_t i = 0, typename F>
Status WithTile(TileSize tile, const std::string& what, F&& f) {
  if constexpr (i < sizeof(kTiles) / sizeof(TileSize)) {
    if (tile == kTiles[i]) {
      return f(std::integral_constant<int, kTiles[i].rows>(),
               std::integral_constant<int, kTiles[i].columns>());
    }
    return WithTile<kTiles, i + 1>(tile, what, f);
  } else {
    return Status::Internal(what + ": no launcher");
  }
}

// 16 bit: 128x128 in turns, the others by both warpgroups.
template <typename T, bool kMajorA, bool kMajorB, int kRows, int kColumns>
using Sm90TileOf = Sm90Tile<T, kMajorA, kMajorB, kRows == kColumns ? 2 : kRows / 128, kColumns,
                            kRows == kColumns, true>;

}  // namespace jaxconv::cuda
