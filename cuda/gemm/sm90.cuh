// The matrix main loop for sm_90a, shared by its views (sm90_product.cuh, conv/wgmma_wgrad.cuh):
//
//   acc[m, n] = sum over k of A[m, k] * B[k, n],  16-bit operands, float32 sums
//
// A CTA is three warpgroups. The first's first thread has the copy engine fill a ring of stages, 64
// k of A and B each; the other two multiply. Either both make one tile, each kBlocks * 64 of its
// rows (they share the stages and drift apart by a few, so that one's epilogue hides in part behind
// the other's products), or they take turns at whole tiles (ping-pong: one's epilogue hides behind
// the other's main loop). CTAs are persistent.
//
// Clusters of two that share B by multicast lost 20 to 40 % on every shape tried (H200, 3x3 and 1x1
// layers of ResNet-50, 4096^3 products).
#pragma once

#include <cuda_runtime.h>

#include "cuda/core/mbarrier.cuh"
#include "cuda/core/mma.cuh"  // SharedAddress
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma.cuh"

// The bodies of kernels compile for sm_90a only; elsewhere they are empty, and launchers refuse.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAXCONV_SM90A 1
#endif

namespace jaxconv::cuda {

inline constexpr int kSm90Threads = 384;
inline constexpr int kSm90SharedBytes = 227 * 1024;  // a CTA's most
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

// kMajorA, kMajorB: the operand is k-major in memory (and so in shared memory).
template <typename T_, bool kMajorA_, bool kMajorB_, int kBlocks_, int kTileN_, bool kPingPong_,
          bool kStaged_>
struct Sm90Tile {
  using T = T_;
  static constexpr bool kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kBlocks = kBlocks_;  // blocks of 64 rows that a warpgroup makes
  static constexpr bool kPingPong = kPingPong_;
  static constexpr bool kStaged = kStaged_;  // the epilogue goes through shared memory

  static constexpr int kTileM = kBlocks * 64 * (kPingPong ? 1 : 2);
  static constexpr int kTileN = kTileN_;
  static constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // Pairs of 64 x 64 outputs that a warpgroup has on their way out. Two in ping-pong, so that a
  // whole tile leaves without a wait; elsewhere the stages are worth more.
  static constexpr int kPairs = kPingPong ? 2 : 1;
  static constexpr int kOutboxBytes = 2 * kPairs * kBlockBytes;  // of a warpgroup
  static constexpr int kStagingBytes = kStaged ? 2 * kOutboxBytes : 0;
  static constexpr int kStages = (kSm90SharedBytes - kStagingBytes - 256) / kStageBytes;
  static constexpr int kBarriers = kStages * kStageBytes + kStagingBytes;  // offset
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2) * 8;
  // Arrivals that free a stage.
  static constexpr int kReaders = kPingPong ? 1 : 2;
  static_assert(kStages >= 3 && kSharedBytes <= kSm90SharedBytes);
};

// The ring of stages: a stage's place in shared memory and its two barriers.
template <typename Tile>
struct Sm90Ring {
  __device__ __forceinline__ explicit Sm90Ring(uint32_t shared) : shared(shared) {}

  __device__ __forceinline__ uint32_t A() const { return shared + stage * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t B() const { return A() + Tile::kBytesA; }
  __device__ __forceinline__ uint32_t Full(int s) const { return shared + Tile::kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t Empty(int s) const { return Full(Tile::kStages + s); }

  __device__ __forceinline__ uint32_t Turn(int group) const {
    return Full(2 * Tile::kStages + group);
  }

  // One thread of the CTA; the others must not touch a barrier before.
  __device__ __forceinline__ void Init() const {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(Full(s), 1);
      BarrierInit(Empty(s), Tile::kReaders);
    }
    BarrierInit(Turn(0), 1);
    BarrierInit(Turn(1), 1);
    BarrierInitFence();
  }

  // Producer: waits until the stage is free and announces a load.
  __device__ __forceinline__ uint32_t Claim() const {
    BarrierWait(Empty(stage), parity ^ 1);
    const uint32_t full = Full(stage);
    BarrierExpect(full, Tile::kStageBytes);
    return full;
  }

  // Consumer, one warpgroup.
  __device__ __forceinline__ void Await() const { BarrierWait(Full(stage), parity); }
  __device__ __forceinline__ void Release(int s) const {
    if (threadIdx.x % 128 == 0) BarrierArrive(Empty(s));
  }

  __device__ __forceinline__ void Advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void Skip(int steps) {
    const unsigned to = unsigned(stage) + unsigned(steps);
    parity ^= (to / Tile::kStages) & 1;
    stage = int(to % Tile::kStages);
  }

  // Ping-pong: a group waits for the stages of its next tile only when the other has seen all of
  // the tile before, or it would take an earlier round of the ring for its own. Group 0 begins.
  __device__ __forceinline__ void AwaitTurn(int group) {
    BarrierWait(Turn(group), turns ^ (group == 0 ? 1 : 0));
    turns ^= 1;
  }
  __device__ __forceinline__ void PassTurn(int group) const {
    if (threadIdx.x % 128 == 0) BarrierArrive(Turn(group ^ 1));
  }

  uint32_t shared;
  int stage = 0;
  uint32_t parity = 0;
  uint32_t turns = 0;  // parity of this group's turns
};

// Sums of warpgroup `group` (0 or 1) over the next `steps` stages. At most one stage's products are
// in flight while the next stage's are issued.
template <typename Tile>
__device__ __forceinline__ void Sm90MainLoop(Sm90Ring<Tile>& ring, int group, int steps,
                                             float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 2; ++i) acc[m][i] = 0.f;
  }
  const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;  // in A's tile
  if constexpr (Tile::kPingPong) ring.AwaitTurn(group);
  int before = -1;  // the stage whose products may still run
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.Await();
    const uint64_t a = OperandDescriptor<Tile::kMajorA>(ring.A() + block0 * kBlockBytes);
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(ring.B());
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        Wgmma<typename Tile::T, Tile::kMajorA, Tile::kMajorB>(
            acc[m], a + m * (kBlockBytes / 16) + k * kOperandStep<Tile::kMajorA>,
            b + k * kOperandStep<Tile::kMajorB>, 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (before >= 0) ring.Release(before);
    before = ring.stage;
    ring.Advance();
  }
  if constexpr (Tile::kPingPong) ring.PassTurn(group);
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  WgmmaWait<0>();
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  if (before >= 0) ring.Release(before);
}

template <typename Tile>
__device__ __forceinline__ void Sm90Start(const Sm90Ring<Tile>& ring) {
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
}

// B's tile for 64 k. `map` is (k, instance, n, tap) for a k-major B, (n, instance, k, tap)
// otherwise.
template <typename Tile>
__device__ __forceinline__ void LoadB(const Sm90Ring<Tile>& ring, const CUtensorMap& map,
                                      uint32_t full, int k, int n, int instance, int tap) {
  if constexpr (Tile::kMajorB) {
    LoadTile(ring.B(), map, full, k, instance, n, tap);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kTileN; i += 64) {
      LoadTile(ring.B() + i * 128, map, full, n + i, instance, k, tap);
    }
  }
}

}  // namespace jaxconv::cuda
