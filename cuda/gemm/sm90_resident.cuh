// Products of many rows whose reduction is so short that B's columns stay in shared memory:
//
//   sum over k of A[m, k] * B[k, n]    A a matrix, k at most a few hundred
//
// 16 bit, sm_90a; the fields of Sm90Product and the Epilogue as in sm90_product.cuh, one phase, one tap, a plain A.
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
  static constexpr bool kMajorA = true, kMajorB = kMajorB_, kSwapped = false, kPingPong = false;
  static constexpr bool kMatrices = true;
  static constexpr int kTerms = 1;
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

// A group's ring of stages of A, with the interface of Sm90Ring; B stays where it is.
template <typename Tile>
struct ResidentRing {
  __device__ __forceinline__ uint32_t Full() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t Empty(int s) const {
    return barriers + (Tile::kMostStages + s) * 8;
  }
  __device__ __forceinline__ uint32_t A() const { return shared + stage * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t B() const { return resident + k * Tile::kTileN * 128; }
  __device__ __forceinline__ uint32_t Claim(uint32_t bytes = Tile::kStageBytes) const {
    BarrierWait(Empty(stage), parity ^ 1);
    BarrierExpect(Full(), bytes);
    return Full();
  }
  __device__ __forceinline__ void Await() const { BarrierWait(Full(), parity); }
  __device__ __forceinline__ void Release(int s) const {
    if (threadIdx.x % 128 == 0) BarrierArrive(Empty(s));
  }
  __device__ __forceinline__ void Advance() {
    ++k;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  uint32_t resident, shared, barriers;
  int stages, stage = 0, k = 0;  // k: stages since the tile's first
  uint32_t parity = 0;
};

// Where a CTA's shared memory has what, behind B; its barriers are ready when this returns.
template <typename Tile>
struct ResidentParts {
  __device__ __forceinline__ ResidentParts(uint32_t shared, int k_blocks, int stages)
      : resident(shared),
        outboxes(shared + k_blocks * Tile::kTileN * 128),
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
    ring.resident = resident;
    ring.shared = rings + group * stages * Tile::kStageBytes;
    ring.barriers = barriers + group * 2 * Tile::kMostStages * 8;
    ring.stages = stages;
    return ring;
  }
  __device__ __forceinline__ uint32_t Outbox(int group) const {
    return outboxes + group * Tile::kPairs * Tile::kPairBytes;
  }
  uint32_t resident, outboxes, rings, barriers, b_full;
  int stages;
};

// Bytes of shared memory.
template <typename Tile>
int ResidentBytes(int k_blocks) {
  return k_blocks * Tile::kTileN * 128 + Tile::kOutboxes +
         Tile::kGroups * Tile::Stages(k_blocks) * Tile::kStageBytes + Tile::kBarrierBytes;
}

template <typename Tile, typename Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90ResidentKernel(const __grid_constant__ Sm90Product p,
                       const __grid_constant__ typename Epilogue::Args args, const int stages) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = SharedAddress(shared_bytes);
  const ResidentParts<Tile> parts(shared, p.k_blocks, stages);
  Sm90Place at = Sm90OneColumn().template Locate<Tile>(p);
  const int first = int(p.by_columns.Div(blockIdx.x)) * Tile::kGroups;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int behind = Epilogue::Behind(p);
  if (warp < 4) {
    RegistersDown<Tile::kProducerRegisters>();
    if (warp < Tile::kGroups && threadIdx.x % 32 == 0) {
      ResidentRing<Tile> ring = parts.Ring(warp);
      if (warp == 0) {
        PrefetchMap(p.a[0]);
        BarrierExpect(parts.b_full, p.k_blocks * Tile::kTileN * 128);
        for (int k = 0; k < p.k_blocks; ++k) {
          LoadColumns<Tile::kMajorB, Tile::kTileN>(shared + k * Tile::kTileN * 128, p.b,
                                                   parts.b_full, k * 64, at.n,
                                                   p.shared_b ? 0 : at.instance, 0);
        }
      }
      for (int tile = first + warp; tile < p.phase[0].tiles_m; tile += p.resident_step) {
        at.m = tile * Tile::kRows;
        for (int k = 0; k < p.k_blocks; ++k) {
          const uint32_t full = ring.Claim();
          LoadTile(ring.A(), p.a[0], full, k * 64, p.shared_a ? 0 : at.instance, at.m);
          ring.Advance();
        }
        if (behind > 0) Epilogue::Produce(p, args, at, ring);
      }
    }
  } else {
    RegistersUp<Tile::kConsumerRegisters>();
    const int group = warp / 4 - 1;
    ResidentRing<Tile> ring = parts.Ring(group);
    Epilogue epilogue(p, args, parts.Outbox(group), group, 0);
    BarrierWait(parts.b_full, 0);
    for (int tile = first + group; tile < p.phase[0].tiles_m; tile += p.resident_step) {
      at.m = tile * Tile::kRows;
      epilogue.Begin(p, args, at);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      ring.k = 0;
      Sm90MainLoop(ring, 0, p.k_blocks, acc);
      epilogue.Finish(p, args, at, ring, acc);
    }
    epilogue.End(p, args, at, first + group);
  }
#endif
}

// *parts: of a column's sums, one of each warpgroup, at most `most`.
template <typename Tile, typename Epilogue>
Status LaunchSm90Resident(const Context& ctx, Sm90Product& p, const typename Epilogue::Args& args,
                          int multiprocessors, const std::string& what, int64_t most = INT32_MAX,
                          int* parts = nullptr) {
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  const int ctas = CtasOfColumn(p, Tile::kGroups, most / Tile::kGroups, multiprocessors);
  p.resident_step = ctas * Tile::kGroups;
  if (parts != nullptr) *parts = p.resident_step;
  const int stages = Tile::Stages(p.k_blocks);
  const auto kernel = Sm90ResidentKernel<Tile, Epilogue>;
  const int bytes = ResidentBytes<Tile>(p.k_blocks);
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(ctas * p.tiles_n * p.instances), Tile::kThreads, bytes, ctx.stream>>>(p, args,
                                                                                          stages);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda
