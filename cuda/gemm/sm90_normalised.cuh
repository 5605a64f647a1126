// 16-bit operands that are normalised on their way to the tensor cores: TMA brings them as they lie, the warps that multiply
// take them from shared memory into registers (ldmatrix), and wgmma has its A from there. While a stage's products run, the
// next stage's numbers are normalised:
//
//   a = f(x * s + t) in float32, rounded    s = scale / sqrt(var + epsilon), t = bias - mean * s
//
// Of 16 bits, x has none that this could lose. Where there is no channel s and t are 0, and so is f(0).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/activation.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"
#include "cuda/gemm/sm90_normalised.h"

namespace jaxconv::cuda {

inline constexpr int kNormalisedTable = kMostNormalised * 8;  // bytes

// Each warp hands a stage back: all of them read it. kTable: bytes in shared memory for s and t of every channel.
template <typename Base, int kTable>
struct Sm90NormalisedTile : Base {
  static_assert(Base::kTerms == 1 && !Base::kSwapped && !Base::kPingPong && !Base::kPair);
  static constexpr int kStages =
      (kSm90SharedBytes - Base::kStagingBytes - kTable - 256) / Base::kStageBytes;
  static constexpr int kUnitOffset = kStages * Base::kStageBytes;
  static constexpr int kTableOffset = kUnitOffset + Base::kStagingBytes;
  static constexpr int kBarriers = kTableOffset + kTable;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2) * 8;
  static constexpr int kReaders = 4 * Base::kReaders;
  static_assert(kStages >= 3 && kSharedBytes <= kSm90SharedBytes);
};

// s and t of a channel, 0 where there is none.
__device__ __forceinline__ float2 AffineOf(const Sm90Normalisation& n, int channel) {
  if (channel >= n.channels) return make_float2(0.f, 0.f);
  const float rstd = 1.f / sqrtf(n.var[channel] + n.epsilon);
  const float scale = n.scale[channel] * rstd;
  return make_float2(scale, fmaf(-n.mean[channel], scale, n.bias[channel]));
}

// Of both numbers of a word: s of the first and of the second, then t. NaN stays NaN.
template <typename T, bool kSilu>
__device__ __forceinline__ uint32_t NormalisePair(uint32_t pair, const float4& affine,
                                                  const Sm90Normalisation& n) {
  const float2 x = UnpackPair(pair, T());
  float a = fmaf(x.x, affine.x, affine.z), b = fmaf(x.y, affine.y, affine.w);
  if constexpr (kSilu) {
    a = Activate<float, true>(Activation::kSilu, a, 0.f);
    b = Activate<float, true>(Activation::kSilu, b, 0.f);
  }
  uint32_t y = PackHalves(a, b, T());
  if constexpr (!kSilu) {  // after rounding, which keeps the order, 0 and 6
    if constexpr (std::is_same_v<T, __half>) {
      asm("max.NaN.f16x2 %0, %0, %1;\n" : "+r"(y) : "r"(n.least));
      asm("min.NaN.f16x2 %0, %0, %1;\n" : "+r"(y) : "r"(n.most));
    } else {
      asm("max.NaN.bf16x2 %0, %0, %1;\n" : "+r"(y) : "r"(n.least));
      asm("min.NaN.bf16x2 %0, %0, %1;\n" : "+r"(y) : "r"(n.most));
    }
  }
  return y;
}

// A warp's four 8 x 8 matrices of 16 rows x 16 k, as wgmma has A in registers, of a block of 64 rows x 64 k that starts at
// `block`; j counts the 16 k.
template <bool kMajor>
__device__ __forceinline__ void LoadRows(uint32_t block, int j, uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if constexpr (kMajor) {
    const int row = warp * 16 + lane % 16, chunk = j * 2 + lane / 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(block + row * 128 + ((chunk ^ (row % 8)) * 16))
                 : "memory");
  } else {
    const int line = (j * 2 + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(block + line * 128 + ((chunk ^ (line % 8)) * 16))
                 : "memory");
  }
}

// A stage's numbers of a warpgroup, 64 k of its blocks of rows.
template <typename Tile>
using Sm90Rows = uint32_t[Tile::kBlocks][4][4];

// The sums of Sm90MainLoop, with A from registers: take(step, a) waits for a stage and fills them.
template <typename Tile, typename Take>
__device__ __forceinline__ void Sm90RowsLoop(Sm90Ring<Tile>& ring, int steps, const Take& take,
                                             float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 2; ++i) acc[m][i] = 0.f;
  }
  // What a warp has read of a stage is in its products, which are done.
  const auto release = [&](int stage) {
    __syncwarp();
    ring.ReleaseWarp(stage);
  };
  Sm90Rows<Tile> a[2];
  int before = -1;  // the stage whose products may still run
  if (steps > 0) take(0, a[0]);
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (step + half >= steps) break;
      const uint64_t b = OperandDescriptor<Tile::kMajorB>(ring.B());
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        Pin(acc[m]);
        for (auto& four : a[half][m]) {
          for (uint32_t& pair : four) asm volatile("" : "+r"(pair)::"memory");
        }
      }
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          WgmmaHalfRows<typename Tile::T, Tile::kMajorB>(acc[m], a[half][m][k],
                                                         b + k * kOperandStep<Tile::kMajorB>);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (before >= 0) release(before);
      before = ring.stage;
      ring.Advance();
      if (step + half + 1 < steps) take(step + half + 1, a[half ^ 1]);
    }
  }
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  WgmmaWait<0>();
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  if (before >= 0) release(before);
}

template <typename T>
uint32_t TwiceInAWord(float v) {
  const T narrow(v);
  uint16_t bits;
  static_assert(sizeof(bits) == sizeof(narrow));
  __builtin_memcpy(&bits, &narrow, sizeof(bits));
  return uint32_t(bits) << 16 | bits;
}

// launch(silu), a constant, of an activation that the domain lets through.
template <typename T, typename F>
Status ForNormalisation(Sm90Normalisation& n, const F& launch) {
  const float infinity = __builtin_huge_valf();
  n.least = TwiceInAWord<T>(n.activation == Activation::kNone ? -infinity : 0.f);
  n.most = TwiceInAWord<T>(n.activation == Activation::kRelu6 ? 6.f : infinity);
  if (n.activation == Activation::kSilu) return launch(std::true_type());
  return launch(std::false_type());
}

}  // namespace jaxconv::cuda
