// Products of 8-bit operands on the sm_90a main loop, both k-major, and what follows their sums (Sm90EightEpilogue), in one pass:
//
//   d[m, n] = narrow(f(scale[n] * (sum over (tap, k) of A[m, (tap, k)] * B[n, (tap, k)]) + bias[n] + ...) * out_scale)
//
// A is a plain matrix or columns of pixels, and tiles are numbered, as in sm90_product.cuh. A stage has 128 k.
//
// A thread of wgmma has columns 2t, 2t + 1, 8 + 2t, 9 + 2t of each sixteen (t = lane % 4), and of 8-bit results four
// neighbours should leave together. So the filters of a sixteen lie in shared memory in the order in which these are columns
// 4t .. 4t + 3: n = 4t + 2h + e at 8h + 2t + e. TMA brings them so: b's map has an axis for each of e, t and h.
//
// Sums of float8 products: the tensor cores keep about 14 bits of a sum, so a chain is a stage, 128 products, whose sums are
// added to others in float32.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/dtype.h"
#include "cuda/core/copy_async.cuh"
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma_eight.cuh"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_eight.h"
#include "cuda/gemm/sm90_eight_numbers.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// kNarrow: results of 8 bits, which leave by TMA through shared memory; others are written from registers. kHalves: a stage is
// two blocks of 64 k, each of a tap of its own, for channels that 64 divides and 128 does not. kGroups warpgroups multiply.
template <Number kX_, Number kW_, int kBlocks_, int kTileN_, bool kPingPong_, bool kNarrow_,
          bool kHalves_ = false, int kGroups_ = 2>
struct Sm90EightTile {
  static constexpr Number kX = kX_, kW = kW_;
  static constexpr bool kIntegers = IsInteger8(kX);
  using Sum = std::conditional_t<kIntegers, int32_t, float>;
  static constexpr int kGroups = kGroups_;  // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kGroups);
  // Four have half of the sums each, and hide more of each other's epilogue.
  static constexpr int kProducerRegisters = kGroups == 2 ? cuda::kProducerRegisters : 40;
  static constexpr int kConsumerRegisters = kGroups == 2 ? cuda::kConsumerRegisters : 104;
  static constexpr int kBlocks = kBlocks_, kTileN = kTileN_;  // as Sm90Tile's, also below
  static constexpr bool kPingPong = kPingPong_, kNarrow = kNarrow_, kPair = false;
  static constexpr bool kHalves = kHalves_;
  static constexpr int kTileK = 128;
  static constexpr int kTileM = kBlocks * 64 * (kPingPong ? 1 : kGroups);
  static constexpr int kRows = kTileM, kColumns = kTileN;
  static constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128;
  static constexpr int kStageBytesA = kBytesA, kStageBytes = kBytesA + kBytesB;
  // A box is 64 rows of results of 8 bits, of which a warp sends 16; a warpgroup has two.
  static constexpr int kBoxColumns = kTileN < 128 ? kTileN : 128, kBoxBytes = 64 * kBoxColumns;
  static constexpr int kBoxes = kTileN / kBoxColumns;  // side by side
  static constexpr int kOutboxBytes = kNarrow ? 2 * kBoxBytes : 0;
  static constexpr int kScaleBytes = kTileN * 16;  // of a warpgroup (EightScales)
  static constexpr int kStages =
      (kSm90SharedBytes - kGroups * (kOutboxBytes + kScaleBytes) - 256) / kStageBytes;
  static constexpr int kOutboxes = kStages * kStageBytes;  // offsets
  static constexpr int kScales = kOutboxes + kGroups * kOutboxBytes;
  static constexpr int kBarriers = kScales + kGroups * kScaleBytes;
  static constexpr int kUnits = 0, kUnitBytes = 0, kUnitOffset = 0;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2) * 8;
  static constexpr int kReaders = 4 * (kPingPong ? 1 : kGroups);  // warps
  static_assert(kGroups == 2 || (kGroups == 4 && !kPingPong));
  static_assert(kStages >= 3 && kSharedBytes <= kSm90SharedBytes);
  static_assert(kRows * kColumns <= kStageBytes, "a residual of 8 bits is a stage");
};

// Where wgmma finds the 32 k of step `k` of four in a stage: of A's block m, of B.
template <typename Tile>
struct EightOperands {
  __device__ __forceinline__ EightOperands(const Sm90Ring<Tile>& ring, int block0)
      : a(Descriptor(ring.A() + block0 * kBlock)), b(Descriptor(ring.B())) {}
  __device__ __forceinline__ uint64_t A(int m, int k) const {
    return a + (m * kBlock + Step(k, Tile::kBytesA)) / 16;
  }
  __device__ __forceinline__ uint64_t B(int k) const { return b + Step(k, Tile::kBytesB) / 16; }

  static constexpr int kBlock = Tile::kHalves ? kBlockBytes / 2 : kBlockBytes;  // of 64 rows
  __device__ __forceinline__ static uint64_t Descriptor(uint32_t address) {
    if constexpr (Tile::kHalves) {
      return RowsDescriptor<64>(address);
    } else {
      return OperandDescriptor<true>(address);
    }
  }
  __device__ __forceinline__ static constexpr int Step(int k, int bytes) {
    return Tile::kHalves ? k / 2 * (bytes / 2) + k % 2 * 32 : k * 32;
  }
  uint64_t a, b;
};

// Sums of warpgroup `group` over the next `steps` stages, as Sm90MainLoop; of integers added to what is in acc. `half`: the
// last stage has one block of two.
template <typename Tile, typename Seen>
__device__ __forceinline__ void Sm90EightLoop(Sm90Ring<Tile>& ring, int group, int steps, bool half,
                                              int32_t (&acc)[Tile::kBlocks][Tile::kTileN / 2],
                                              Seen&& seen) {
  const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
  if constexpr (Tile::kPingPong) ring.AwaitTurn(group);
  int before = -1;  // the stage whose products may still run
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.Await();
    const EightOperands<Tile> operands(ring, block0);
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    WgmmaFence();
    const auto multiply = [&](int first) {
#pragma unroll
      for (int k = first; k < first + 2; ++k) {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          WgmmaEight<Tile::kX, Tile::kW>(acc[m], operands.A(m, k), operands.B(k), 1);
        }
      }
    };
    multiply(0);
    if (!Tile::kHalves || !half || step + 1 < steps) {
      if (Tile::kHalves) WgmmaFence();
      multiply(2);
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (before >= 0) ring.ReleaseWarp(before);
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
  if (before >= 0) ring.ReleaseWarp(before);
}

// The same of float8: a stage's sums are a chain of the tensor cores'. Two chains are under way together, and the first one's
// are added up while the second one's products run; of four warpgroups each has one, and the others' products run.
template <typename Tile, typename Seen>
__device__ __forceinline__ void Sm90EightLoop(Sm90Ring<Tile>& ring, int group, int steps, bool half,
                                              float (&sum)[Tile::kBlocks][Tile::kTileN / 2],
                                              Seen&& seen) {
  static_assert(!Tile::kPingPong && Tile::kBlocks == 1);
  constexpr int kCount = Tile::kTileN / 2;
  float even[kCount], odd[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[0][i] = even[i] = odd[i] = 0.f;
  const auto issue = [&](float (&acc)[kCount], bool last) {
    ring.Await();
    const EightOperands<Tile> operands(ring, group);
    Pin(acc);
    WgmmaFence();
    const auto multiply = [&](int first) {
#pragma unroll
      for (int k = first; k < first + 2; ++k)
        WgmmaEight<Tile::kX, Tile::kW>(acc, operands.A(0, k), operands.B(k), k > 0);
    };
    multiply(0);
    if (!Tile::kHalves || !last || !half) {
      if (Tile::kHalves) WgmmaFence();
      multiply(2);
    }
    WgmmaCommit();
  };
  const auto add = [&](float (&acc)[kCount], int stage) {
    Pin(acc);
    ring.ReleaseWarp(stage);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[0][i] = __fadd_rn(sum[0][i], acc[i]);
    Pin(sum[0]);
  };
  const auto alone = [&](bool last) {
    issue(even, last);
    WgmmaWait<0>();
    add(even, ring.stage);
    ring.Advance();
  };
  int step = 0;
  if constexpr (Tile::kGroups == 4) {
#pragma unroll 1
    for (; step < steps; ++step) alone(step + 1 == steps);
  } else {
#pragma unroll 1
    for (; step + 1 < steps; step += 2) {
      const int first = ring.stage;
      issue(even, false);
      ring.Advance();
      issue(odd, step + 2 == steps);
      WgmmaWait<1>();
      add(even, first);
      WgmmaWait<0>();
      add(odd, ring.stage);
      ring.Advance();
    }
    if (step < steps) alone(true);
  }
  seen();
}

// ---------------------------------------------------------------------------------------------------------------------
// The producer

template <typename Tile>
__device__ __forceinline__ void ProduceEightTile(const Sm90Product& p, const Sm90EightEpilogue& e,
                                                 const Sm90Place& at, Sm90Ring<Tile>& ring) {
  const Sm90Phase& phase = p.phase[0];
  int first[3] = {}, image = 0;
  if (p.rank_a != 0) {
    const Digits4 pixel = PixelOf(phase, at.m);
    image = pixel.digit[0];
    for (int i = 0; i < 3; ++i) first[i] = pixel.digit[3 - i] * phase.step[i] + phase.first[i];
  }
  const Sm90ShortcutPlace shortcut(p, at.m);
  const int sixteen = (at.instance * p.n + at.n) / 16;
  // 128 or 64 k of both operands. Behind the channels of a tap b has the next one's, which meet zeros of A.
  const auto load = [&](uint32_t a, uint32_t b, uint32_t full, int k, int tap,
                        const int (&offset)[3]) {
    if (p.rank_a != 0) {
      LoadColumn(p.rank_a, a, p.a[0], full, at.instance * p.channels + k, first, image, offset);
    } else {
      LoadTile(a, p.a[0], full, k, at.instance, at.m);
    }
    LoadTile(b, p.b, full, tap + k, 0, 0, 0, sixteen);
  };
  const auto load_shortcut = [&](uint32_t a, uint32_t b, uint32_t full, int k) {
    shortcut.Load(p, a, full, k);
    LoadTile(b, p.z, full, k, 0, 0, 0, sixteen);
  };
  int tap = 0;  // its first k in b
  if constexpr (Tile::kHalves) {
    int k = 0, s = 0, r = 0, t = 0;
    for (int step = 0; step < at.steps; ++step) {
      const int halves = e.half && step + 1 == at.steps ? 1 : 2;
      const uint32_t full = ring.Claim(Tile::kStageBytes / 2 * halves);
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        const uint32_t a = ring.A() + half * (Tile::kBytesA / 2),
                       b = ring.B() + half * (Tile::kBytesB / 2);
        if (t == e.taps[2]) {
          load_shortcut(a, b, full, k);
          k += 64;
          continue;
        }
        const int offset[3] = {s * phase.tap_step[0], r * phase.tap_step[1], t * phase.tap_step[2]};
        load(a, b, full, k, tap, offset);
        k += 64;
        if (k < p.channels) continue;
        k = 0;
        tap += p.channels;
        if (++s < e.taps[0]) continue;
        s = 0;
        if (++r < e.taps[1]) continue;
        r = 0;
        ++t;
      }
      ring.Advance();
    }
  } else {
    for (int t = 0; t < phase.taps[2]; ++t) {
      for (int r = 0; r < phase.taps[1]; ++r) {
        for (int s = 0; s < phase.taps[0]; ++s, tap += p.channels) {
          const int offset[3] = {s * phase.tap_step[0], r * phase.tap_step[1],
                                 t * phase.tap_step[2]};
          for (int k = 0; k < p.channels; k += Tile::kTileK) {
            load(ring.A(), ring.B(), ring.Claim(), k, tap, offset);
            ring.Advance();
          }
        }
      }
    }
    for (int step = 0; step < p.shortcut_steps; ++step) {
      load_shortcut(ring.A(), ring.B(), ring.Claim(), step * Tile::kTileK);
      ring.Advance();
    }
  }
}

// A residual of 8 bits, in boxes as d's: through the ring, behind the operands.
template <typename Tile>
__device__ __forceinline__ void ProduceResidual(const Sm90Product& p, const Sm90Place& at,
                                                Sm90Ring<Tile>& ring) {
  const uint32_t full = ring.Claim(Tile::kRows * Tile::kColumns);
#pragma unroll
  for (int i = 0; i < Tile::kBoxes; ++i) {
    LoadTile(ring.A() + i * Tile::kRows * Tile::kBoxColumns, p.c, full,
             at.n + i * Tile::kBoxColumns, at.instance, at.m);
  }
  ring.Advance();
}

// ---------------------------------------------------------------------------------------------------------------------
// The epilogue

// Numbers of a tile's columns: scales, and biases of float32, 1 and -0, which change nothing, where there are none. And what
// sums of integers begin at, a bias of integers or 0. Scales and biases are on their way while the products run, if these do
// not begin at the biases.
//
// A thread's sums of two columns are neighbouring registers, and the next two those of the same columns eight rows below. So
// beginnings lie twice, two columns and the same again, and are loaded where they are wanted, without a move.
template <int kTileN>
struct EightScales {
  // Once, before Load.
  __device__ __forceinline__ void Clear() const {
    if (const int i = threadIdx.x % 128; i < kTileN / 2)
      asm volatile("st.shared.v4.s32 [%0], {0, 0, 0, 0};\n" ::"r"(Starts() + i * 16) : "memory");
  }
  // `shared`: this warpgroup's kTileN * 16 bytes, of which nobody reads what changes any more.
  __device__ __forceinline__ void Load(const Sm90EightEpilogue& e, int64_t first, int left) const {
    constexpr int kEach = kTileN / 4;  // chunks of four numbers
    const int i = threadIdx.x % 128, chunk = i % kEach;
    const bool bias = i >= kEach;
    if (i < (e.bias_of_sums ? kEach : 2 * kEach)) {
      const float* from = bias ? static_cast<const float*>(e.bias) : e.scale;
      const uint32_t to = shared + i * 16;
      if (from != nullptr && chunk * 4 < left) {
        CopyAsync(to, reinterpret_cast<const uint4*>(from + first + chunk * 4));
      } else {
        const float fill = bias ? -0.f : 1.f;
        asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};\n" ::"r"(to), "f"(fill) : "memory");
      }
    }
    if (e.bias_of_sums && e.bias != nullptr && i < kTileN) {
      const int column = i / 2 * 2;
      const uint32_t to = Starts() + i * 8;
      if (column < left) {
        const auto* from = static_cast<const int32_t*>(e.bias) + first + column;
        CopyAsync(to, reinterpret_cast<const uint2*>(from));
      }
    }
    CopyCommit();
  }
  // Before they are read; all threads of the warpgroup.
  __device__ __forceinline__ void Wait(int barrier) const {
    CopyWait<0>();
    NamedBarrier(barrier, 128);
  }
  __device__ __forceinline__ float4 Read(int column, bool bias) const {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(shared + (bias * kTileN + column) * 4)
                 : "memory");
    return v;
  }
  // Of a thread's sums: four are of columns i / 8 * 16 + lane % 4 * 4 + i / 4 % 2 * 2 and the next.
  __device__ __forceinline__ void Begin(int32_t (&acc)[kTileN / 2]) const {
    const uint32_t from = Starts() + threadIdx.x % 4 * 32;
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 4) {
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(acc[i]), "=r"(acc[i + 1]), "=r"(acc[i + 2]), "=r"(acc[i + 3])
                   : "r"(from + i / 8 * 128 + i / 4 % 2 * 16)
                   : "memory");
    }
  }
  __device__ __forceinline__ uint32_t Starts() const { return shared + kTileN * 8; }

  uint32_t shared;
};

// Four neighbours in a row of d: registers of the first (h = 0, e = 0) and so on.
__device__ __forceinline__ constexpr int RegisterOf(int sixteen, int below, int i) {
  return sixteen * 8 + i / 2 * 4 + below * 2 + i % 2;
}

// f(block, register, its column's scale or bias) of each sum.
template <typename Tile, typename F>
__device__ __forceinline__ void EachNumber(const EightScales<Tile::kTileN>& scales, bool bias,
                                           const F& f) {
#pragma unroll
  for (int sixteen = 0; sixteen < Tile::kTileN / 16; ++sixteen) {
    const float4 four = scales.Read(sixteen * 16 + threadIdx.x % 4 * 4, bias);
    const float number[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) f(m, RegisterOf(sixteen, i / 4, i % 4), number[i % 4]);
    }
  }
}

// v += the terms that `terms` makes of four neighbours of 8 bits.
template <typename Tile, typename Terms>
__device__ __forceinline__ void AddFromBoxes(uint32_t boxes, int block0,
                                             float (&v)[Tile::kBlocks][Tile::kTileN / 2],
                                             const Terms& terms) {
  const int lane = threadIdx.x % 32, in_block = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
    const int row = (block0 + m) * 64 + in_block;
#pragma unroll
    for (int sixteen = 0; sixteen < Tile::kTileN / 16; sixteen += 2) {
      constexpr int kPerBox = Tile::kBoxColumns / 16;
      const uint32_t box = boxes + sixteen / kPerBox * (Tile::kRows * Tile::kBoxColumns);
      uint32_t four[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                   : "r"(box + ChunkOf<Tile::kBoxColumns>(row, sixteen % kPerBox + lane / 16))
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float t[4];
        terms(four[i], t);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          float& sum = v[m][RegisterOf(sixteen + i / 2, i % 2, q)];
          sum = __fadd_rn(sum, t[q]);
        }
      }
    }
  }
}

// v += a residual in the stage.
template <typename Tile>
__device__ __forceinline__ void AddResidualStage(const Sm90EightEpilogue& e, uint32_t boxes,
                                                 int block0, float scale,
                                                 float (&v)[Tile::kBlocks][Tile::kTileN / 2]) {
  const auto scaled = [=](float (&t)[4]) {
#pragma unroll
    for (float& r : t) r = __fmul_rn(r, scale);
  };
  if (e.residual_type == Number::kE4M3) {
    AddFromBoxes<Tile>(boxes, block0, v, [=](uint32_t four, float (&t)[4]) {
      Bytes::Floats<__NV_E4M3>(four, t);
      scaled(t);
    });
  } else if (e.residual_type == Number::kE5M2) {
    AddFromBoxes<Tile>(boxes, block0, v, [=](uint32_t four, float (&t)[4]) {
      Bytes::Floats<__NV_E5M2>(four, t);
      scaled(t);
    });
  } else if (e.residual_type == Number::kU8 && scale > 0.f && scale < Bytes::kMostScale) {
    AddFromBoxes<Tile>(boxes, block0, v,
                       [=](uint32_t four, float (&t)[4]) { Bytes::Scaled(four, scale, t); });
  } else {
    const bool is_signed = e.residual_type == Number::kS8;
    AddFromBoxes<Tile>(boxes, block0, v, [=](uint32_t four, float (&t)[4]) {
      Bytes::Integers(four, is_signed, t);
      scaled(t);
    });
  }
}

// Four neighbours of a residual of more bits, as it lies.
template <Number kType>
__device__ __forceinline__ void ReadFour(const void* residual, int64_t at, float (&r)[4]) {
  if constexpr (kType == Number::kF32) {
    const float4 v =
        __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(residual) + at));
    r[0] = v.x;
    r[1] = v.y;
    r[2] = v.z;
    r[3] = v.w;
  } else {
    using T = std::conditional_t<kType == Number::kBF16, __nv_bfloat16, __half>;
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(residual) + at));
    const float2 low = UnpackPair(v.x, T()), high = UnpackPair(v.y, T());
    r[0] = low.x;
    r[1] = low.y;
    r[2] = high.x;
    r[3] = high.y;
  }
}

// f(row below the tile's first of an instance, column, register of the first of four neighbours' block, sixteen, below) over
// those of a thread that are d's.
template <typename Tile, typename F>
__device__ __forceinline__ void EachFour(const Sm90Product& p, const Sm90Place& at, int block0,
                                         const F& f) {
  const int m_end = p.phase[0].m, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
    const int row = at.m + (block0 + m) * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int sixteen = 0; sixteen < Tile::kTileN / 16; ++sixteen) {
      const int n = at.n + sixteen * 16;  // p.n is a multiple of 16
      if (n >= p.n) continue;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        if (row + below * 8 < m_end) f(row + below * 8, n + lane % 4 * 4, m, sixteen, below);
      }
    }
  }
}

// v += a residual of more bits.
template <typename Tile>
__device__ __forceinline__ void AddResidualAsItLies(const Sm90Product& p,
                                                    const Sm90EightEpilogue& e, const Sm90Place& at,
                                                    int block0, float scale,
                                                    float (&v)[Tile::kBlocks][Tile::kTileN / 2]) {
  const int64_t first = int64_t(at.instance) * p.n;
#define JAXCONV_EIGHT_RESIDUAL(kind)                                                        \
  case Number::kind:                                                                        \
    EachFour<Tile>(p, at, block0, [&](int row, int n, int m, int sixteen, int below) {      \
      float r[4];                                                                           \
      ReadFour<Number::kind>(e.residual, first + row * e.row + n, r);                       \
      AddScaled(r, scale, &v[m][RegisterOf(sixteen, below, 0)],                             \
                &v[m][RegisterOf(sixteen, below, 1)], &v[m][RegisterOf(sixteen, below, 2)], \
                &v[m][RegisterOf(sixteen, below, 3)]);                                      \
    });                                                                                     \
    return;
  switch (e.residual_type) {
    JAXCONV_EIGHT_RESIDUAL(kBF16)
    JAXCONV_EIGHT_RESIDUAL(kF16)
    JAXCONV_EIGHT_RESIDUAL(kF32)
    default:
      break;
  }
#undef JAXCONV_EIGHT_RESIDUAL
}

// A warpgroup's two boxes on their way out. Each warp sends 16 rows of them, without waiting for the others.
template <typename Tile>
struct EightOutbox {
  __device__ __forceinline__ uint32_t Box() const { return shared + box * Tile::kBoxBytes; }

  // Of the tile's block m and columns of boxes `column`, all rounded to kType.
  template <Number kType>
  __device__ __forceinline__ void Put(const Sm90Product& p, const Sm90Place& at, int block0,
                                      const float (&v)[Tile::kBlocks][Tile::kTileN / 2]) {
    constexpr int kPerBox = Tile::kBoxColumns / 16;
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16, row = first + lane % 16;
#pragma unroll
    for (int i = 0; i < Tile::kBlocks * Tile::kBoxes; ++i) {
      const int m = i / Tile::kBoxes, column = i % Tile::kBoxes;
      if (lane == 0) StoreWaitRead<1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kPerBox; j += 2) {
        uint32_t four[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int sixteen = column * kPerBox + j + q / 2, below = q % 2;
          four[q] = Narrowed<kType>(
              v[m][RegisterOf(sixteen, below, 0)], v[m][RegisterOf(sixteen, below, 1)],
              v[m][RegisterOf(sixteen, below, 2)], v[m][RegisterOf(sixteen, below, 3)]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                         Box() + ChunkOf<Tile::kBoxColumns>(row, j + lane / 16)),
                     "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3])
                     : "memory");
      }
      FenceForTma();
      __syncwarp();
      if (lane == 0) {
        const int to_m = at.m + (block0 + m) * 64 + first, to_n = at.n + column * Tile::kBoxColumns;
        if (to_m < p.phase[0].m && to_n < p.n)
          StoreTile(p.d[0], Box() + first * Tile::kBoxColumns, to_n, at.instance, to_m);
        StoreCommit();
      }
      box ^= 1;
    }
  }

  uint32_t shared;
  int box = 0;
};

// From registers: rows of d are multiples of 16 elements.
template <typename Tile>
__device__ __forceinline__ void PutWide(const Sm90Product& p, const Sm90EightEpilogue& e,
                                        const Sm90Place& at, int block0,
                                        const float (&v)[Tile::kBlocks][Tile::kTileN / 2]) {
  const int64_t first = int64_t(at.instance) * p.n;
  const auto each = [&](const auto& put) {
    EachFour<Tile>(p, at, block0, [&](int row, int n, int m, int sixteen, int below) {
      put(first + row * e.row + n, v[m][RegisterOf(sixteen, below, 0)],
          v[m][RegisterOf(sixteen, below, 1)], v[m][RegisterOf(sixteen, below, 2)],
          v[m][RegisterOf(sixteen, below, 3)]);
    });
  };
  if (e.type == Number::kBF16) {
    each([&](int64_t i, float a, float b, float c, float d) {
      using T = __nv_bfloat16;
      *reinterpret_cast<uint2*>(static_cast<T*>(e.d) + i) =
          uint2{PackHalves(a, b, T()), PackHalves(c, d, T())};
    });
  } else if (e.type == Number::kF16) {
    each([&](int64_t i, float a, float b, float c, float d) {
      using T = __half;
      *reinterpret_cast<uint2*>(static_cast<T*>(e.d) + i) =
          uint2{PackHalves(a, b, T()), PackHalves(c, d, T())};
    });
  } else {  // 32 bits as they are
    each([&](int64_t i, float a, float b, float c, float d) {
      *reinterpret_cast<float4*>(static_cast<float*>(e.d) + i) = float4{a, b, c, d};
    });
  }
}

// The tiles of a CTA: for (EightTiles<Tile> tiles(p, e); tiles.More(); ++tiles) ... tiles.Locate().
template <typename Tile>
struct EightTiles {
  __device__ __forceinline__ EightTiles(const Sm90Product& p, const Sm90EightEpilogue& e)
      : p(p), e(e), tile(int(blockIdx.x)), end(p.tiles), step(int(gridDim.x)) {
    if (e.walk == EightWalk::kRuns) {
      const int64_t all = p.tiles;
      end = int((tile + 1) * all / step);
      tile = int(tile * all / step);
      step = 1;
    }
  }
  __device__ __forceinline__ bool More() const { return tile < end; }
  __device__ __forceinline__ void operator++() { tile += step; }
  __device__ __forceinline__ Sm90Place Locate() const {
    if (e.walk == EightWalk::kBands) return LocateTile<Tile>(p, tile);
    int number = tile;
    if (e.walk == EightWalk::kRuns) {  // down the columns
      const int column = int(e.by_rows.Div(tile));
      number = (tile - column * int(e.by_rows.d)) * int(p.by_columns.d) + column;
    }
    return LocateInColumn<Tile>(p, number);
  }

  const Sm90Product& p;
  const Sm90EightEpilogue& e;
  int tile, end, step;
};

// A warpgroup's sums on their way to d. Each step goes over all sums before the next begins (sm90_plain.cuh).
template <typename Tile>
__device__ __forceinline__ void FinishEightTile(
    const Sm90Product& p, const Sm90EightEpilogue& e, const Sm90Place& at, int group, int block0,
    float residual_scale, float out_scale, const EightScales<Tile::kTileN>& scales,
    bool scales_on_their_way, Sm90Ring<Tile>& ring, EightOutbox<Tile>& outbox,
    const typename Tile::Sum (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  float v[Tile::kBlocks][Tile::kTileN / 2];
  if constexpr (!Tile::kNarrow && Tile::kIntegers) {
    if (e.type == Number::kS32) {
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < Tile::kTileN / 2; ++i) v[m][i] = __int_as_float(acc[m][i]);
      }
      PutWide<Tile>(p, e, at, block0, v);
      return;
    }
  }
  if (scales_on_their_way) scales.Wait(group + 1);
  EachNumber<Tile>(scales, false, [&](int m, int i, float scale) {
    v[m][i] = __fmul_rn(SumAsFloat(acc[m][i]), scale);
  });
  if (!e.bias_of_sums) {
    EachNumber<Tile>(scales, true,
                     [&](int m, int i, float bias) { v[m][i] = __fadd_rn(v[m][i], bias); });
  }
  if (p.added == Sm90Added::kMatrix) {
    ring.Await();
    AddResidualStage<Tile>(e, ring.A(), block0, residual_scale, v);
    ReadsFirst();
    __syncwarp();
    ring.ReleaseWarp(ring.stage);
    ring.Advance();
  } else if (e.residual != nullptr) {
    AddResidualAsItLies<Tile>(p, e, at, block0, residual_scale, v);
  }
  auto& all = reinterpret_cast<float (&)[Tile::kBlocks * Tile::kTileN / 2]>(v[0][0]);
  // Saturation is a relu too, if what is saturated has v's sign.
  if (e.activation != Activation::kRelu || e.type != Number::kU8 || !(out_scale >= 0.f))
    ActivateFast<__half>(e.activation, e.slope, all);
  if (e.out_scale != nullptr) {
#pragma unroll
    for (float& z : all) z = __fmul_rn(z, out_scale);
  }
  if constexpr (Tile::kNarrow) {
    switch (e.type) {
      case Number::kU8:
        outbox.template Put<Number::kU8>(p, at, block0, v);
        break;
      case Number::kE4M3:
        outbox.template Put<Number::kE4M3>(p, at, block0, v);
        break;
      case Number::kE5M2:
        outbox.template Put<Number::kE5M2>(p, at, block0, v);
        break;
      default:
        outbox.template Put<Number::kS8>(p, at, block0, v);
    }
  } else {
    PutWide<Tile>(p, e, at, block0, v);
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90EightKernel(const __grid_constant__ Sm90Product p,
                    const __grid_constant__ Sm90EightEpilogue e) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  const bool added = p.added == Sm90Added::kMatrix;
  if (group < 0) {
    RegistersDown<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.a[0]);
      PrefetchMap(p.b);
      for (EightTiles<Tile> tiles(p, e); tiles.More(); ++tiles) {
        const Sm90Place at = tiles.Locate();
        ProduceEightTile(p, e, at, ring);
        if (added) ProduceResidual(p, at, ring);
      }
    }
  } else {
    RegistersUp<Tile::kConsumerRegisters>();
    const EightScales<Tile::kTileN> scales{ring.shared + Tile::kScales + group * Tile::kScaleBytes};
    EightOutbox<Tile> outbox{ring.shared + Tile::kOutboxes + group * Tile::kOutboxBytes};
    const float residual_scale = e.residual_scale == nullptr ? 1.f : __ldg(e.residual_scale);
    const float out_scale = e.out_scale == nullptr ? 1.f : __ldg(e.out_scale);
    const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
    if constexpr (Tile::kIntegers) scales.Clear();
    const bool half = Tile::kHalves && e.half;
    int turn = 0;
    int64_t columns = -1;  // the last tile's first
    for (EightTiles<Tile> tiles(p, e); tiles.More(); ++tiles) {
      if (Tile::kPingPong) {
        turn ^= 1;
        if (turn == group) {
          Sm90Place other;
          LocateSteps(p, tiles.tile, other);
          ring.Skip(other.steps + added);
          continue;
        }
      }
      const Sm90Place at = tiles.Locate();
      bool on_their_way = false;
      if (const int64_t first = int64_t(at.instance) * p.n + at.n; first != columns) {
        NamedBarrier(group + 1, 128);  // the last tile's scales are read
        scales.Load(e, first, p.n - at.n);
        columns = first;
        on_their_way = !e.bias_of_sums;
        if (e.bias_of_sums) scales.Wait(group + 1);
      }
      typename Tile::Sum acc[Tile::kBlocks][Tile::kTileN / 2];
      if constexpr (Tile::kIntegers) {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) scales.Begin(acc[m]);
      }
      Sm90EightLoop(ring, group, at.steps, half, acc, [&] {
        if (Tile::kPingPong && added) ring.Await();
      });
      FinishEightTile<Tile>(p, e, at, group, block0, residual_scale, out_scale, scales,
                            on_their_way, ring, outbox, acc);
    }
    if (threadIdx.x % 32 == 0) StoreWait();
    CopyWait<0>();
  }
#endif
}

template <typename Tile>
Status LaunchSm90Eight(const Context& ctx, Sm90Product& p, Sm90EightEpilogue e, int multiprocessors,
                       const std::string& what) {
  static_assert(sizeof(Sm90Product) + sizeof(Sm90EightEpilogue) <= 4096);
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  const int blocks = std::min(p.tiles, multiprocessors);
  const int columns = p.tiles_n * p.instances;
  // Runs have all of x under way at once, which L2 should hold.
  constexpr int64_t kHeld = 16 << 20;
  const bool held = int64_t(p.phase[0].m) * p.channels * p.instances <= kHeld;
  e.by_rows = FastDiv(std::max(p.tiles / columns, 1));
  e.walk = blocks % columns == 0          ? EightWalk::kColumn
           : held && p.tiles > 2 * blocks ? EightWalk::kRuns
                                          : EightWalk::kBands;
  const auto kernel = Sm90EightKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), Tile::kThreads, Tile::kSharedBytes, ctx.stream>>>(p, e);
  return LaunchStatus(what);
}

template <Number kX, Number kW>
Status LaunchSm90EightByTile(const Context& ctx, Sm90Product& p, const Sm90EightEpilogue& e,
                             TileSize tile, int multiprocessors, const std::string& what) {
#define JAXCONV_EIGHT_TILE(rows, columns, blocks, ping_pong, halves, groups)                \
  if (tile == TileSize{rows, columns} && EightHalves(tile, kW, p.channels) == halves) {     \
    using Narrow = Sm90EightTile<kX, kW, blocks, columns, ping_pong, true, halves, groups>; \
    using Wide = Sm90EightTile<kX, kW, blocks, columns, ping_pong, false, halves, groups>;  \
    return SizeOf(e.type) == 1 ? LaunchSm90Eight<Narrow>(ctx, p, e, multiprocessors, what)  \
                               : LaunchSm90Eight<Wide>(ctx, p, e, multiprocessors, what);   \
  }
  if constexpr (IsFloat8(kX)) {
    JAXCONV_EIGHT_TILE(128, 128, 1, false, false, 2)
    JAXCONV_EIGHT_TILE(256, 64, 1, false, false, 4)
    JAXCONV_EIGHT_TILE(256, 64, 1, false, true, 4)
  } else {
    JAXCONV_EIGHT_TILE(128, 128, 2, true, false, 2)
    if constexpr (kW == Number::kS8) {
      JAXCONV_EIGHT_TILE(256, 128, 1, false, false, 4)
      JAXCONV_EIGHT_TILE(256, 128, 1, false, true, 4)
      JAXCONV_EIGHT_TILE(256, 64, 1, false, false, 4)
      JAXCONV_EIGHT_TILE(256, 64, 1, false, true, 4)
    }
  }
#undef JAXCONV_EIGHT_TILE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
