// Float32 into bfloat16 terms (sm90_operands.h), and products whose A is split on its way: by the
// warpgroups that multiply, in registers, while the products of the numbers before run.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/core/mbarrier.cuh"
#include "cuda/core/tma.cuh"
#include "cuda/gemm/sm90.cuh"

namespace jaxconv::cuda {

// Beyond it, within half a bfloat16 ulp of float32's largest number, the nearest bfloat16 is
// infinite.
inline constexpr float kLargestNearest = 3.3895313e38f;

// Any number. terms[0] is the smallest.
template <int kTerms>
__device__ __forceinline__ void SplitNumber(float x, __nv_bfloat16 (&terms)[kTerms]) {
  const bool finite = fabsf(x) <= 3.402823466e38f;
  float rest = finite ? x : 0.f;
#pragma unroll
  for (int i = kTerms - 1; i >= 0; --i) {
    __nv_bfloat16 term = __float2bfloat16_rn(rest);
    if (i == kTerms - 1 && fabsf(rest) > kLargestNearest) term = __float2bfloat16_rz(rest);
    terms[i] = term;
    rest -= __bfloat162float(term);
  }
  if (!finite) {
    terms[0] = __float2bfloat16_rn(x);
    terms[kTerms - 1] = __float2bfloat16_rn(copysignf(1.f, x));
  }
}

// Two numbers up to kLargestNearest, packed.
template <int kTerms>
__device__ __forceinline__ void SplitPair(float a, float b, uint32_t (&terms)[kTerms]) {
#pragma unroll
  for (int i = kTerms - 1; i >= 0; --i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    terms[i] = *reinterpret_cast<const uint32_t*>(&pair);
    a -= __uint_as_float(terms[i] << 16);
    b -= __uint_as_float(terms[i] & 0xffff0000u);
  }
}

// Numbers into terms, in pairs: pair i has v[2i] and v[2i + 1].
__device__ __forceinline__ void SplitEight(const float (&v)[8], uint32_t (&terms)[4][3]) {
  // Each is ordinary if their sum is; additions run twice as fast as comparisons.
  const float sum = ((fabsf(v[0]) + fabsf(v[1])) + (fabsf(v[2]) + fabsf(v[3]))) +
                    ((fabsf(v[4]) + fabsf(v[5])) + (fabsf(v[6]) + fabsf(v[7])));
  const bool ordinary = sum <= kLargestNearest;
  if (ordinary) {
#pragma unroll
    for (int i = 0; i < 4; ++i) SplitPair(v[2 * i], v[2 * i + 1], terms[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __nv_bfloat16 low[3], high[3];
      SplitNumber(v[2 * i], low);
      SplitNumber(v[2 * i + 1], high);
#pragma unroll
      for (int t = 0; t < 3; ++t) {
        terms[i][t] = __bfloat16_as_ushort(low[t]) | uint32_t(__bfloat16_as_ushort(high[t])) << 16;
      }
    }
  }
}

// So that no two lanes of a half warp meet in a bank, rows g and g + 8 of 16 as the tensor cores count
// are other ones of A's tile: k-major, row 2g (g > 3: 2g - 7) and 8 more; m-major, row 2g and the next.
// Lane l's first one:
template <bool kMajorA>
__device__ __forceinline__ int TermRow(int lane) {
  return kMajorA ? lane / 4 % 4 * 2 + lane / 16 : lane / 4 * 2;
}
template <bool kMajorA>
inline constexpr int kTermRowBetween = kMajorA ? 8 : 1;

// The terms of a warpgroup's 64 rows of the next unit, 128 rows x 32 k, twice 16 k as fragments.
template <typename Tile>
__device__ __forceinline__ void TakeUnit(Sm90Ring<Tile>& ring, int group,
                                         uint32_t (&a)[2][Tile::kTerms][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32,
            row = TermRow<Tile::kMajorA>(lane);
  BarrierWait(ring.UnitFull(ring.unit), ring.unit_parity);
  float v[2][8];  // two k each of (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8)
  const auto load = [](uint32_t from, float& first, float& second) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(first), "=f"(second)
                 : "r"(from)
                 : "memory");
  };
  if constexpr (Tile::kMajorA) {
    const uint32_t from = ring.Unit() + (group * 64 + warp * 16 + row) * 128 + lane % 2 * 8;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int chunk = k * 4 + i / 2 * 2 + lane % 4 / 2;
        load(from + i % 2 * 1024 + ((chunk ^ row) * 16), v[k][i * 2], v[k][i * 2 + 1]);
      }
    }
  } else {
    // Boxes of 32 rows; a line has one k.
    const uint32_t from = ring.Unit() + (group * 2 + warp / 2) * 4096 + lane / 4 % 2 * 8;
    const int chunk = warp % 2 * 4 + lane / 8;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int line = lane % 4 * 2 + i % 2, j = i / 2 * 4 + i % 2;
        load(from + (k * 16 + i / 2 * 8 + line) * 128 + ((chunk ^ line) * 16), v[k][j],
             v[k][j + 2]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t terms[4][3];
    SplitEight(v[k], terms);
#pragma unroll
    for (int t = 0; t < 3; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][t][i] = terms[i][t];
    }
  }
  ReadsFirst();
  __syncwarp();
  if (lane == 0) BarrierArrive(ring.UnitEmpty(ring.unit));
  ring.AdvanceUnit();
}

// The same products as Sm90TermsLoop; a chain is half a stage, 32 k.
template <typename Tile>
__device__ __forceinline__ void Sm90TermRowsLoop(Sm90Ring<Tile>& ring, int group, int steps,
                                                 float (&sum)[1][Tile::kTileN / 2]) {
  constexpr int kTermA[6] = {0, 2, 1, 0, 1, 0}, kTermB[6] = {2, 0, 1, 1, 0, 0};
  constexpr int kSmallest = Tile::kTerms - 1;
  float acc[Tile::kTileN / 2];
#pragma unroll
  for (int i = 0; i < Tile::kTileN / 2; ++i) sum[0][i] = acc[i] = 0.f;
  uint32_t a[2][2][Tile::kTerms][4];
  if (steps > 0) TakeUnit(ring, group, a[0]);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.Await();
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(ring.B());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Pin(acc);
      WgmmaFence();
#pragma unroll
      for (int pair = 0; pair < 6; ++pair) {
        const uint64_t b_term = b + (kSmallest - kTermB[pair]) * (Tile::kBytesB / 16);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          WgmmaTermRows<Tile::kMajorB>(acc, a[half][k][kSmallest - kTermA[pair]],
                                       b_term + (half * 2 + k) * kOperandStep<Tile::kMajorB>,
                                       pair > 0 || k > 0);
        }
      }
      WgmmaCommit();
      if (half == 0 || step + 1 < steps) TakeUnit(ring, group, a[half ^ 1]);
      WgmmaWait<0>();
      Pin(acc);
#pragma unroll
      for (int i = 0; i < Tile::kTileN / 2; ++i) sum[0][i] += acc[i];
    }
    ring.Release(ring.stage);
    ring.Advance();
  }
}

}  // namespace jaxconv::cuda
