// What the kernels of 8-bit operands share behind their sums: 8-bit numbers as float32 and back, and boxes of them in shared
// memory. Each operation is rounded by itself (Sm90EightEpilogue).
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "common/dtype.h"

namespace jaxconv::cuda {

// The place of the sixteenth chunk `chunk` of row `row` in a box of kColumns bytes a row, swizzled.
template <int kColumns>
__device__ __forceinline__ uint32_t ChunkOf(int row, int chunk) {
  constexpr int kChunks = kColumns / 16;
  return uint32_t(row * kColumns + ((chunk ^ (row * kColumns / 128 % kChunks)) * 16));
}

__device__ __forceinline__ float SumAsFloat(int32_t sum) { return __int2float_rn(sum); }
__device__ __forceinline__ float SumAsFloat(float sum) { return sum; }

// Four neighbours of 8 bits as float32.
struct Bytes {
  // Of integers: a byte in the mantissa of 2^23 is 2^23 more than it is; signed ones are flipped to 128 more first. Conversions
  // of bytes have a quarter of the rate.
  __device__ __forceinline__ static void Integers(uint32_t four, bool is_signed, float (&r)[4]) {
    const uint32_t flipped = is_signed ? four ^ 0x80808080u : four;
    const float bias = is_signed ? 8388736.f : 8388608.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = __fsub_rn(__uint_as_float(__byte_perm(flipped, 0x4B000000u, 0x7440 + i)), bias);
    }
  }
  // Of unsigned integers, times a positive scale below kMostScale, rounded once: (2^23 + r) * scale - 2^23 * scale, whose last
  // term is exact, in one operation.
  static constexpr float kMostScale = 1e30f;
  __device__ __forceinline__ static void Scaled(uint32_t four, float scale, float (&t)[4]) {
    const float minus = __fmul_rn(-8388608.f, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      t[i] = __fmaf_rn(__uint_as_float(__byte_perm(four, 0x4B000000u, 0x7440 + i)), scale, minus);
  }
  template <__nv_fp8_interpretation_t kKind>
  __device__ __forceinline__ static void Floats(uint32_t four, float (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const __half2_raw pair =
          __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(four >> (8 * i)), kKind);
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      r[i] = two.x;
      r[i + 1] = two.y;
    }
  }
};

// v = v + r * scale, four neighbours.
__device__ __forceinline__ void AddScaled(const float (&r)[4], float scale, float* v0, float* v1,
                                          float* v2, float* v3) {
  *v0 = __fadd_rn(*v0, __fmul_rn(r[0], scale));
  *v1 = __fadd_rn(*v1, __fmul_rn(r[1], scale));
  *v2 = __fadd_rn(*v2, __fmul_rn(r[2], scale));
  *v3 = __fadd_rn(*v3, __fmul_rn(r[3], scale));
}

// Four numbers, rounded to nearest even and saturated: a byte each, the first lowest. NaN is 0 in integers.
template <Number kType>
__device__ __forceinline__ uint32_t Narrowed(float a, float b, float c, float d) {
  if constexpr (IsFloat8(kType)) {
    uint16_t low, high;
    if constexpr (kType == Number::kE4M3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(b), "f"(a));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(d), "f"(c));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(b), "f"(a));
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(d), "f"(c));
    }
    return uint32_t(low) | uint32_t(high) << 16;
  } else {
    const int i[4] = {__float2int_rn(a), __float2int_rn(b), __float2int_rn(c), __float2int_rn(d)};
    uint32_t high, all;
    if constexpr (kType == Number::kS8) {
      asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;\n" : "=r"(high) : "r"(i[3]), "r"(i[2]));
      asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;\n"
          : "=r"(all)
          : "r"(i[1]), "r"(i[0]), "r"(high));
    } else {
      asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;\n" : "=r"(high) : "r"(i[3]), "r"(i[2]));
      asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;\n"
          : "=r"(all)
          : "r"(i[1]), "r"(i[0]), "r"(high));
    }
    return all;
  }
}

}  // namespace jaxconv::cuda
