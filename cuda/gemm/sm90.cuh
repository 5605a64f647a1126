// The matrix main loop for sm_90a, shared by its views (sm90_product.cuh, conv/sm90/wgrad/wgrad.cuh):
//
//   acc[m, n] = sum over k of A[m, k] * B[k, n],  16-bit or TF32 operands, float32 sums
//
// A float32 operand may be a sum of bfloat16 terms (sm90_operands.h), a product of two is then a sum
// over pairs of terms.
//
// A CTA is three warpgroups. The first's first thread has TMA fill a ring of stages, 128
// bytes of k (64, or 32 in TF32) of A and B each; the other two multiply. Either both make one tile,
// each kBlocks * 64 of its rows (they share the stages and drift apart by a few, so that one's
// epilogue hides in part behind the other's products), or they take turns at whole tiles (ping-pong:
// one's epilogue hides behind the other's main loop). CTAs are persistent.
//
// Clusters of two that share B by multicast lose 1 to 8 % in products (H200, 1x1 layers of ResNet-50,
// 4096^3), where they fetch less but wait for each other; weight gradients have them (Sm90Pair).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/core/mbarrier.cuh"
#include "cuda/core/mma.cuh"  // SharedAddress
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma.cuh"

// The bodies of kernels compile for sm_90a only; elsewhere they are empty, or not compiled at
// all (CMakeLists.txt), and launchers refuse.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAXCONV_SM90A 1
#endif

namespace jaxconv::cuda {

inline constexpr int kSm90Threads = 384;
inline constexpr int kSm90SharedBytes = 227 * 1024;  // a CTA's most
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

// kMajorA, kMajorB: the operand is k-major in memory (and so in shared memory). kSwapped (products
// only): A is the filter, B the pixels, and the sums are d's transpose.
template <typename T_, bool kMajorA_, bool kMajorB_, int kBlocks_, int kTileN_, bool kPingPong_,
          bool kStaged_, int kTerms_ = 1, bool kRowTerms_ = false, bool kSwapped_ = false,
          bool kAlternate_ = false>
struct Sm90Tile {
  using T = T_;
  static constexpr bool kSwapped = kSwapped_;
  static constexpr bool kMatrices = false;                 // A and d may also be columns of pixels
  static constexpr int kTerms = kTerms_;                   // of T in an element of A or B
  using Out = std::conditional_t<(kTerms > 1), float, T>;  // type of the results
  // A comes as float32, in units of 128 rows x 32 k, half of a stage, and who multiplies splits it, in
  // registers (sm90_split.cuh).
  static constexpr bool kRowTerms = kRowTerms_;
  static constexpr int kThreads = kSm90Threads;
  static constexpr bool kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kBlocks = kBlocks_;  // blocks of 64 rows that a warpgroup makes
  static constexpr bool kPingPong = kPingPong_;
  static constexpr bool kAlternate = kAlternate_;
  static constexpr bool kPair = false;       // Sm90Pair
  static constexpr bool kHalves = false;     // Sm90Halves
  static constexpr bool kStaged = kStaged_;  // the epilogue goes through shared memory
  // Whether products of a second A and B may follow (Sm90Product): fprop's orders of 16 bit.
  static constexpr bool kShortcuts =
      kMajorA && !kMajorB && !kSwapped && kTerms == 1 && sizeof(T) == 2;

  static constexpr int kTileK = 128 / int(sizeof(T));  // of a stage
  static constexpr int kTileM = kBlocks * 64 * (kPingPong ? 1 : 2);
  static constexpr int kTileN = kTileN_;
  static constexpr int kRows = kSwapped ? kTileN : kTileM;  // of d
  static constexpr int kColumns = kSwapped ? kTileM : kTileN;
  static constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128;  // of a term
  static constexpr int kStageBytesA = kRowTerms ? 0 : kTerms * kBytesA;
  static constexpr int kStageBytes = kStageBytesA + kTerms * kBytesB;
  // Pairs of 64 x 64 outputs that a warpgroup has on their way out. Two in ping-pong, so that a
  // whole tile leaves without a wait; elsewhere the stages are worth more.
  static constexpr int kPairs = kPingPong ? 2 : 1;
  static constexpr int kOutboxBytes = 2 * kPairs * kBlockBytes;  // of a warpgroup
  static constexpr int kStagingBytes = kStaged ? 2 * kOutboxBytes : 0;
  static constexpr int kStages =
      kRowTerms ? 256 / kTileN : (kSm90SharedBytes - kStagingBytes - 256) / kStageBytes;
  static constexpr int kUnitBytes = 128 * 128;
  static constexpr int kUnits =
      kRowTerms ? (kSm90SharedBytes - 256 - kStages * kStageBytes) / kUnitBytes : 0;
  static constexpr int kUnitOffset = kStages * kStageBytes;
  static constexpr int kBarriers = kUnitOffset + kStagingBytes + kUnits * kUnitBytes;  // offset
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2 + 2 * kUnits) * 8;
  // Arrivals that free a stage.
  static constexpr int kReaders = kPingPong ? 1 : 2;
  static_assert(kStages >= (kTerms > 1 ? 2 : 3) && kSharedBytes <= kSm90SharedBytes);
  static_assert(!kRowTerms ||
                (kTerms > 1 && kTileM == 128 && !kStaged && !kPingPong && kUnits >= 4));
};

// 64 rows, of which both warpgroups make all sums over every other stage of k: for few rows. They
// exchange halves of the sums where other tiles stage their outputs.
template <typename T, bool kMajorA, bool kMajorB, int kTileN>
using Sm90Alternate = Sm90Tile<T, kMajorA, kMajorB, 1, kTileN, true, true, 1, false, false, true>;

// Two CTAs of a cluster, whose tiles lie side by side and share an operand, A or B: each fetches half
// of it for both.
template <typename Base, bool kSharesB_>
struct Sm90Pair : Base {
  static constexpr bool kPair = true;
  static constexpr bool kSharesB = kSharesB_;
};

// Of d's columns half as many as the sums have: B comes as two boxes of columns, those of a tap in the first half of the
// sums' columns, and the same columns of the tap beside it in the other half.
template <typename Base>
struct Sm90Halves : Base {
  static_assert(!Base::kSwapped && Base::kTerms == 1 && Base::kTileN % 128 == 0);
  static constexpr bool kHalves = true;
  static constexpr int kColumns = Base::kTileN / 2;
};

// The ring of stages: a stage's place in shared memory and its two barriers.
template <typename Tile>
struct Sm90Ring {
  __device__ __forceinline__ explicit Sm90Ring(uint32_t shared) : shared(shared) {}

  __device__ __forceinline__ uint32_t A(int term = 0) const {
    return shared + stage * Tile::kStageBytes + term * Tile::kBytesA;
  }
  __device__ __forceinline__ uint32_t B(int term = 0) const {
    return A() + Tile::kStageBytesA + term * Tile::kBytesB;
  }
  __device__ __forceinline__ uint32_t Full(int s) const { return shared + Tile::kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t Empty(int s) const { return Full(Tile::kStages + s); }

  __device__ __forceinline__ uint32_t Turn(int group) const {
    return Full(2 * Tile::kStages + group);
  }

  // One thread of the CTA; the others must not touch a barrier before.
  __device__ __forceinline__ void Init() const {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(Full(s), 1);
      BarrierInit(Empty(s), Tile::kReaders * (Tile::kPair ? 2 : 1));
    }
    BarrierInit(Turn(0), kTurnArrivals);
    BarrierInit(Turn(1), kTurnArrivals);
    for (int i = 0; i < Tile::kUnits; ++i) {
      BarrierInit(UnitFull(i), 1);
      BarrierInit(UnitEmpty(i), 8);
    }
    BarrierInitFence();
  }

  // Producer: waits until the stage is free and announces a load.
  __device__ __forceinline__ uint32_t Claim(uint32_t bytes = Tile::kStageBytes) const {
    BarrierWait(Empty(stage), parity ^ 1);
    const uint32_t full = Full(stage);
    BarrierExpect(full, bytes);
    return full;
  }

  // Units of float32 on their way to the splitter: the same for them.
  __device__ __forceinline__ uint32_t Unit() const {
    return shared + Tile::kUnitOffset + unit * Tile::kUnitBytes;
  }
  __device__ __forceinline__ uint32_t UnitFull(int i) const {
    return Full(2 * Tile::kStages + 2 + i);
  }
  __device__ __forceinline__ uint32_t UnitEmpty(int i) const { return UnitFull(Tile::kUnits + i); }
  __device__ __forceinline__ uint32_t ClaimUnit() const {
    BarrierWait(UnitEmpty(unit), unit_parity ^ 1);
    const uint32_t full = UnitFull(unit);
    BarrierExpect(full, Tile::kUnitBytes);
    return full;
  }
  __device__ __forceinline__ void AdvanceUnit() {
    if (++unit == Tile::kUnits) {
      unit = 0;
      unit_parity ^= 1;
    }
  }

  // Consumer, one warpgroup.
  __device__ __forceinline__ void Await() const { BarrierWait(Full(stage), parity); }
  __device__ __forceinline__ void Release(int s) const {
    if constexpr (Tile::kPair) {  // it is free when both CTAs have read theirs
      if (threadIdx.x % 128 < 2) BarrierArriveAt(Empty(s), threadIdx.x % 128);
    } else {
      if (threadIdx.x % 128 == 0) BarrierArrive(Empty(s));
    }
  }
  // Of one warp, whose others need not have read the stage: kReaders counts warps.
  __device__ __forceinline__ void ReleaseWarp(int s) const {
    if constexpr (Tile::kPair) {
      if (threadIdx.x % 32 < 2) BarrierArriveAt(Empty(s), threadIdx.x % 32);
    } else {
      if (threadIdx.x % 32 == 0) BarrierArrive(Empty(s));
    }
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
  __device__ __forceinline__ void PassTurn(int group) const { cuda::PassTurn(Turn(group ^ 1)); }

  uint32_t shared;
  int stage = 0;
  uint32_t parity = 0;
  uint32_t turns = 0;  // parity of this group's turns
  int unit = 0;
  uint32_t unit_parity = 0;
};

// The same for operands of several terms: sums of warpgroup `group` over the next `steps` stages.
//
// The tensor cores cut the sum after every 16 k towards zero, a bias that grows with the length of
// the chain. So a chain is a stage: its 64 k of every pair of terms, the small products first, and
// then its sums are added to `sum`, rounded to nearest.
template <typename Tile>
__device__ __forceinline__ void Sm90TermsLoop(Sm90Ring<Tile>& ring, int group, int steps,
                                              float (&sum)[Tile::kBlocks][Tile::kTileN / 2]) {
  static_assert(!Tile::kPingPong && Tile::kTerms == 3);
  // Pairs by how small they are; terms count from the largest.
  constexpr int kTermA[6] = {0, 2, 1, 0, 1, 0}, kTermB[6] = {2, 0, 1, 1, 0, 0};
  constexpr int kSmallest = Tile::kTerms - 1;
  float acc[Tile::kBlocks][Tile::kTileN / 2];
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 2; ++i) sum[m][i] = acc[m][i] = 0.f;
  }
  const int block0 = group * Tile::kBlocks;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.Await();
    const uint64_t a = OperandDescriptor<Tile::kMajorA>(ring.A() + block0 * kBlockBytes);
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(ring.B());
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    WgmmaFence();
#pragma unroll
    for (int pair = 0; pair < 6; ++pair) {
      // In memory the smallest term comes first.
      const uint64_t a_term = a + (kSmallest - kTermA[pair]) * (Tile::kBytesA / 16);
      const uint64_t b_term = b + (kSmallest - kTermB[pair]) * (Tile::kBytesB / 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          Wgmma<typename Tile::T, Tile::kMajorA, Tile::kMajorB>(
              acc[m], a_term + m * (kBlockBytes / 16) + k * kOperandStep<Tile::kMajorA>,
              b_term + k * kOperandStep<Tile::kMajorB>, pair > 0 || k > 0);
        }
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    ring.Release(ring.stage);
    ring.Advance();
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < Tile::kTileN / 2; ++i) sum[m][i] += acc[m][i];
    }
  }
}

// Sums of warpgroup `group` (0 or 1) over the next `steps` stages. At most one stage's products are
// in flight while the next stage's are issued. `seen` is called when all stages are there: what it
// waits for in ping-pong the other group's next tile comes behind. Ring: Sm90Ring, or another with its interface.
template <template <typename> class Ring, typename Tile, typename Seen>
__device__ __forceinline__ void Sm90MainLoop(Ring<Tile>& ring, int group, int steps,
                                             float (&acc)[Tile::kBlocks][Tile::kTileN / 2],
                                             Seen&& seen) {
  static_assert(Tile::kTerms == 1);
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
  seen();
  if constexpr (Tile::kPingPong) ring.PassTurn(group);
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  WgmmaWait<0>();
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  if (before >= 0) ring.Release(before);
}

template <template <typename> class Ring, typename Tile>
__device__ __forceinline__ void Sm90MainLoop(Ring<Tile>& ring, int group, int steps,
                                             float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  Sm90MainLoop(ring, group, steps, acc, [] {});
}

// The same for kAlternate: group g takes the stages in even (odd) slots, half of the sum.
template <typename Tile>
__device__ __forceinline__ void Sm90AlternateLoop(Sm90Ring<Tile>& ring, int group, int steps,
                                                  float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  static_assert(Tile::kAlternate && Tile::kStages % 2 == 0 &&
                64 * Tile::kTileN * 4 <= Tile::kStagingBytes);
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 2; ++i) acc[m][i] = 0.f;
    Pin(acc[m]);
  }
  int before = -1;  // the stage whose products may still run
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.Advance()) {
    if (ring.stage % 2 != group) continue;
    ring.Await();
    const uint64_t a = OperandDescriptor<Tile::kMajorA>(ring.A());
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
  }
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  WgmmaWait<0>();
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  if (before >= 0) ring.Release(before);
}

// After it: this group's half of the columns (group 0: the first), with the other's sums added.
// `shared`: kTileN * 64 * 4 bytes. All 256 threads of the consumers.
template <typename Tile>
__device__ __forceinline__ void Sm90ShareSums(uint32_t shared, int group,
                                              const float (&acc)[Tile::kTileN / 2],
                                              float (&mine)[Tile::kTileN / 4]) {
  constexpr int kHalf = Tile::kTileN / 4;
  const uint32_t at = shared + threadIdx.x % 128 * 16, half = kHalf / 4 * 128 * 16;
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      mine[i + j] = group == 0 ? acc[i + j] : acc[kHalf + i + j];
      v[j] = group == 0 ? acc[kHalf + i + j] : acc[i + j];
    }
    asm volatile(
        "st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(at + group * half + i / 4 * 128 * 16),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
        : "memory");
  }
  NamedBarrier(3, 256);
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    float v[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(at + (group ^ 1) * half + i / 4 * 128 * 16)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) mine[i + j] += v[j];
  }
  NamedBarrier(4, 256);  // read, before the next tile's come
}

template <typename Tile>
__device__ __forceinline__ void Sm90Start(const Sm90Ring<Tile>& ring) {
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
  if constexpr (Tile::kPair) ClusterSync();
}

// The tile of the columns' operand for 128 bytes of k. `map` is (k, instance, n, tap) for a k-major
// operand, (n, instance, k, tap) otherwise.
template <bool kMajor, int kColumns>
__device__ __forceinline__ void LoadColumns(uint32_t to, const CUtensorMap& map, uint32_t full,
                                            int k, int n, int instance, int tap) {
  if constexpr (kMajor) {
    constexpr int kBox = kColumns > 256 ? 64 : kColumns;  // FilterBoxRows
#pragma unroll
    for (int i = 0; i < kColumns; i += kBox) {
      LoadTile(to + i * 128, map, full, k, instance, n + i, tap);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i += 64) {
      LoadTile(to + i * 128, map, full, n + i, instance, k, tap);
    }
  }
}

// A term of it for a stage; the taps of one term follow those of another.
template <typename Tile>
__device__ __forceinline__ void LoadB(const Sm90Ring<Tile>& ring, const CUtensorMap& map,
                                      uint32_t full, int k, int n, int instance, int tap,
                                      int term = 0) {
  LoadColumns<Tile::kSwapped ? Tile::kMajorA : Tile::kMajorB, Tile::kColumns>(
      Tile::kSwapped ? ring.A(term) : ring.B(term), map, full, k, n, instance, tap);
  if constexpr (Tile::kHalves) {
    LoadColumns<Tile::kMajorB, Tile::kColumns>(ring.B() + Tile::kColumns * 128, map, full, k, n,
                                               instance, tap ^ 1);
  }
}

}  // namespace jaxconv::cuda
