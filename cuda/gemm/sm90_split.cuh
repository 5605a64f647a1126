// Float32 into bfloat16 terms (sm90_operands.h): one number, and on the fly between the copy engine
// and the tensor cores. A warpgroup of its own turns units of 128 rows x 128 bytes of float32, as
// the copy engine left them (128-byte swizzle), into the terms' tiles of a stage, in the same
// swizzle. It keeps up, but a stage then moves 448 KiB (wgrad: 512) through shared memory instead of
// 384, which is all that fits into the time of its products.
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

// This thread's row of the next unit into `row` of the terms' tiles at `planes`, its left (half 0)
// or right half.
template <typename Tile>
__device__ __forceinline__ void SplitUnit(Sm90Ring<Tile>& ring, uint32_t planes, int plane_bytes,
                                          int row, int half) {
  const int thread = threadIdx.x % 128;
  BarrierWait(ring.UnitFull(ring.unit), ring.unit_parity);
  const uint32_t from = ring.Unit() + thread * 128;
  const uint32_t to = planes + row * 128;
  const auto out = [&](int term, int chunk) {  // 8 elements
    return to + term * plane_bytes + (((half * 4 + chunk) ^ (row % 8)) * 16);
  };
  float x[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(x[i * 4]), "=f"(x[i * 4 + 1]), "=f"(x[i * 4 + 2]), "=f"(x[i * 4 + 3])
                 : "r"(from + ((i ^ (thread % 8)) * 16))
                 : "memory");
  }
  bool ordinary = true;
#pragma unroll
  for (int i = 0; i < 32; ++i) ordinary = ordinary && fabsf(x[i]) <= kLargestNearest;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t pair[4][Tile::kTerms];
#pragma unroll
    for (int i = 0; i < 4; ++i) SplitPair(x[chunk * 8 + i * 2], x[chunk * 8 + i * 2 + 1], pair[i]);
#pragma unroll
    for (int t = 0; t < Tile::kTerms; ++t) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(out(t, chunk)),
                   "r"(pair[0][t]), "r"(pair[1][t]), "r"(pair[2][t]), "r"(pair[3][t])
                   : "memory");
    }
  }
  if (!ordinary) {
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      float v;
      asm volatile("ld.shared.f32 %0, [%1];\n"
                   : "=f"(v)
                   : "r"(from + (((i / 4) ^ (thread % 8)) * 16) + i % 4 * 4)
                   : "memory");
      __nv_bfloat16 terms[Tile::kTerms];
      SplitNumber(v, terms);
#pragma unroll
      for (int t = 0; t < Tile::kTerms; ++t) {
        asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(out(t, i / 8) + i % 8 * 2),
                     "h"(__bfloat16_as_ushort(terms[t]))
                     : "memory");
      }
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) BarrierArrive(ring.UnitEmpty(ring.unit));
  ring.AdvanceUnit();
}

// The next stage; all 128 threads of the splitter.
template <typename Tile>
__device__ __forceinline__ void SplitStage(Sm90Ring<Tile>& ring) {
  if constexpr (Tile::kRaw > 0) {
    const int thread = threadIdx.x % 128;
    BarrierWait(ring.Empty(ring.stage), ring.parity ^ 1);
    for (int half = 0; half < 2; ++half) {
      SplitUnit(ring, ring.A(), Tile::kBytesA, thread, half);
    }
    if constexpr (Tile::kRaw > 1 && Tile::kTileN == 128) {
      for (int half = 0; half < 2; ++half) {
        SplitUnit(ring, ring.B(), Tile::kBytesB, thread, half);
      }
    } else if constexpr (Tile::kRaw > 1) {
      static_assert(Tile::kTileN == 64);
      SplitUnit(ring, ring.B(), Tile::kBytesB, thread % 64, thread / 64);
    }
    FenceForTma();
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(ring.Full(ring.stage));
    ring.Advance();
  }
}

}  // namespace jaxconv::cuda
