// Products of many rows whose reduction is so short that B's columns stay in shared memory:
//
//   d[m, n] = f(sum over k of A[m, k] * B[k, n] + added + bias)    A a matrix, k at most a few hundred
//
// 16 bit, sm_90a; the fields of Sm90Product as in sm90_product.cuh, one phase, one tap, a plain A.
// Such a product moves bytes: A once, d once. A CTA keeps to one column of tiles and fetches B's
// part once; each of its consumer warpgroups makes tiles of its own, fed by a producer warp and a
// ring of its own, so nothing but memory couples them and one's epilogue hides behind the others'
// loads.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// A warpgroup's tile is kBlocks * 64 rows x kTileN columns.
template <typename T_, bool kMajorB_, int kGroups_, int kBlocks_, int kTileN_>
struct Sm90Resident {
  using T = T_;
  static constexpr bool kMajorB = kMajorB_, kSwapped = false;
  static constexpr int kGroups = kGroups_, kBlocks = kBlocks_, kTileN = kTileN_;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kTileK = 64;
  static constexpr int kRows = kBlocks * 64, kColumns = kTileN;
  static constexpr int kStageBytes = kRows * 128;
  static constexpr int kPairs = 1;
  static constexpr int kPairBytes = 2 * kBlockBytes;
  static constexpr int kOutboxes = kGroups * kPairs * kPairBytes;
  static constexpr int kMostStages = 8;
  static constexpr int kBarrierBytes = (2 * kGroups * kMostStages + 1) * 8;
  static constexpr int kConsumerRegisters = kGroups > 2 ? 112 : 224;  // of those at the launch
  static constexpr int kProducerRegisters = kGroups > 2 ? 24 : 56;

  static int Stages(int k_blocks) {
    const int left = kSm90SharedBytes - kBarrierBytes - kOutboxes - k_blocks * kTileN * 128;
    return std::min(left / (kGroups * kStageBytes), kMostStages);
  }
};

// A group's ring of stages of A.
template <typename Tile>
struct ResidentRing {
  __device__ __forceinline__ uint32_t Full() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t Empty() const { return Full() + Tile::kMostStages * 8; }
  __device__ __forceinline__ uint32_t A() const { return shared + stage * Tile::kStageBytes; }
  __device__ __forceinline__ void Advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  uint32_t shared, barriers;
  int stages, stage = 0;
  uint32_t parity = 0;
};

// Where a CTA's shared memory has what, behind B; its barriers are ready when this returns.
template <typename Tile>
struct ResidentParts {
  __device__ __forceinline__ ResidentParts(uint32_t shared, int k_blocks, int stages)
      : outboxes(shared + k_blocks * Tile::kTileN * 128),
        rings(outboxes + Tile::kOutboxes),
        barriers(rings + Tile::kGroups * stages * Tile::kStageBytes),
        b_full(barriers + 2 * Tile::kGroups * Tile::kMostStages * 8),
        stages(stages) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * Tile::kGroups * Tile::kMostStages; ++i)
        BarrierInit(barriers + i * 8, 1);
      BarrierInit(b_full, 1);
      BarrierInitFence();
    }
    __syncthreads();
  }
  __device__ __forceinline__ ResidentRing<Tile> Ring(int group) const {
    ResidentRing<Tile> ring;
    ring.shared = rings + group * stages * Tile::kStageBytes;
    ring.barriers = barriers + group * 2 * Tile::kMostStages * 8;
    ring.stages = stages;
    return ring;
  }
  __device__ __forceinline__ uint32_t Outbox(int group) const {
    return outboxes + group * Tile::kPairs * Tile::kPairBytes;
  }
  uint32_t outboxes, rings, barriers, b_full;
  int stages;
};

// Bytes of shared memory.
template <typename Tile>
int ResidentBytes(int k_blocks) {
  return k_blocks * Tile::kTileN * 128 + Tile::kOutboxes +
         Tile::kGroups * Tile::Stages(k_blocks) * Tile::kStageBytes + Tile::kBarrierBytes;
}

// acc = the products of a warpgroup's tile, whose A comes next in its ring; B lies at `shared`.
template <typename Tile>
__device__ __forceinline__ void ResidentProducts(const Sm90Product& p, uint32_t shared,
                                                 ResidentRing<Tile>& ring,
                                                 float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  uint32_t before = 0;  // frees the stage whose products may still run
#pragma unroll 1
  for (int k = 0; k < p.k_blocks; ++k) {
    BarrierWait(ring.Full(), ring.parity);
    const uint64_t a = OperandDescriptor<true>(ring.A());
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(shared + k * Tile::kTileN * 128);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) Pin(acc[block]);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        Wgmma<typename Tile::T, true, Tile::kMajorB>(
            acc[block], a + block * (kBlockBytes / 16) + i * kOperandStep<true>,
            b + i * kOperandStep<Tile::kMajorB>, k + i > 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (k > 0 && threadIdx.x % 128 == 0) BarrierArrive(before);
    before = ring.Empty();
    ring.Advance();
  }
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) Pin(acc[block]);
  WgmmaWait<0>();
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) Pin(acc[block]);
  if (threadIdx.x % 128 == 0) BarrierArrive(before);
}

// Boxes of 64 x 64 outputs of a warpgroup's tile at row m.
template <typename Tile>
__device__ __forceinline__ void PutResident(const Sm90Product& p, const CUtensorMap& map,
                                            int instance, int m, int n0,
                                            Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
                                            float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  constexpr int kChunks = Tile::kTileN / 64, kBoxes = Tile::kBlocks * kChunks;
  const int m_end = p.phase[0].m;
  const auto store = [&](int i, uint32_t box) {
    const int row = m + i / kChunks * 64, n = n0 + i % kChunks * 64;
    if (row < m_end && n < p.n) StoreTile(map, box, n, instance, row);
  };
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    if (i % 2 == 0) outbox.Open();
    outbox.Put(i % 2, reinterpret_cast<float (&)[32]>(acc[i / kChunks][i % kChunks * 32]));
    if (i % 2 == 1) {
      outbox.Close([&](uint32_t boxes) {
        store(i - 1, boxes);
        store(i, boxes + kBlockBytes);
      });
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90ResidentKernel(const __grid_constant__ Sm90Product p, const int stages) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = SharedAddress(shared_bytes);
  const ResidentParts<Tile> at(shared, p.k_blocks, stages);
  const int columns = p.tiles_n * p.instances, column = int(blockIdx.x) % columns;
  const int instance = column / p.tiles_n, n = column % p.tiles_n * Tile::kTileN;
  const int first = int(blockIdx.x) / columns * Tile::kGroups;
  const int step = int(gridDim.x) / columns * Tile::kGroups;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const bool added = p.added != Sm90Added::kNothing;
  if (warp < 4) {
    RegistersDown<Tile::kProducerRegisters>();
    if (warp < Tile::kGroups && threadIdx.x % 32 == 0) {
      ResidentRing<Tile> ring = at.Ring(warp);
      if (warp == 0) {
        PrefetchMap(p.a[0]);
        BarrierExpect(at.b_full, p.k_blocks * Tile::kTileN * 128);
        for (int k = 0; k < p.k_blocks; ++k) {
          const uint32_t to = shared + k * Tile::kTileN * 128;
          if constexpr (Tile::kMajorB) {
            LoadTile(to, p.b, at.b_full, k * 64, p.shared_b ? 0 : instance, n, 0);
          } else {
#pragma unroll
            for (int i = 0; i < Tile::kTileN; i += 64) {
              LoadTile(to + i * 128, p.b, at.b_full, n + i, p.shared_b ? 0 : instance, k * 64, 0);
            }
          }
        }
      }
      for (int tile = first + warp; tile < p.phase[0].tiles_m; tile += step) {
        for (int k = 0; k < p.k_blocks; ++k) {
          BarrierWait(ring.Empty(), ring.parity ^ 1);
          BarrierExpect(ring.Full(), Tile::kStageBytes);
          LoadTile(ring.A(), p.a[0], ring.Full(), k * 64, p.shared_a ? 0 : instance,
                   tile * Tile::kRows);
          ring.Advance();
        }
        if (added) {
          for (int i = 0; i < Tile::kTileN; i += 64) {
            BarrierWait(ring.Empty(), ring.parity ^ 1);
            BarrierExpect(ring.Full(), Tile::kStageBytes);
            LoadTile(ring.A(), p.c, ring.Full(), n + i, instance, tile * Tile::kRows);
            ring.Advance();
          }
        }
      }
    }
  } else {
    RegistersUp<Tile::kConsumerRegisters>();
    const int group = warp / 4 - 1;
    ResidentRing<Tile> ring = at.Ring(group);
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(at.Outbox(group), group + 1);
    ColumnBias<typename Tile::T, Tile::kTileN, false> bias;
    bias.Load(p.epilogue, instance, n, p.n);
    BarrierWait(at.b_full, 0);
    for (int tile = first + group; tile < p.phase[0].tiles_m; tile += step) {
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      ResidentProducts<Tile>(p, shared, ring, acc);
      if (added) {
#pragma unroll
        for (int i = 0; i < Tile::kTileN / 64; ++i) {
          BarrierWait(ring.Full(), ring.parity);
#pragma unroll
          for (int block = 0; block < Tile::kBlocks; ++block) {
            AddBox<typename Tile::T>(ring.A() + block * kBlockBytes,
                                     reinterpret_cast<float (&)[32]>(acc[block][i * 32]));
          }
          ReadsFirst();
          NamedBarrier(group + 1, 128);  // all have read
          if (threadIdx.x % 128 == 0) BarrierArrive(ring.Empty());
          ring.Advance();
        }
      }
      const int m = tile * Tile::kRows, m_end = p.phase[0].m;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const int row = m + block * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        ScaleAndBias(p.epilogue, instance, row, m_end, bias, acc[block]);
        AddAddend<typename Tile::T>(p.epilogue, instance, row, m_end, n, p.n, acc[block]);
      }
      if (p.epilogue.save_z) PutResident<Tile>(p, p.z, instance, m, n, outbox, acc);
      ActivateFast<typename Tile::T>(
          p.epilogue.activation, p.epilogue.slope,
          reinterpret_cast<float (&)[Tile::kBlocks * Tile::kTileN / 2]>(acc[0][0]));
      PutResident<Tile>(p, p.d[0], instance, m, n, outbox, acc);
    }
    outbox.Drain();
  }
#endif
}

template <typename Tile>
Status LaunchSm90Resident(const Context& ctx, Sm90Product& p, int multiprocessors,
                          const std::string& what) {
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  const int64_t columns = int64_t(p.tiles_n) * p.instances;  // at most the multiprocessors
  const int stages = Tile::Stages(p.k_blocks);
  const auto kernel = Sm90ResidentKernel<Tile>;
  const int bytes = ResidentBytes<Tile>(p.k_blocks);
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  const int64_t rows =
      std::min<int64_t>(CeilDiv(p.phase[0].tiles_m, Tile::kGroups), multiprocessors / columns);
  kernel<<<unsigned(rows * columns), Tile::kThreads, bytes, ctx.stream>>>(p, stages);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda
