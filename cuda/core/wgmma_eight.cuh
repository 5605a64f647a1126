// wgmma (sm_90a) of 8-bit operands: a warpgroup's D (64 x N, in registers) += A (64 x 32) * B (32 x N), both k-major in shared
// memory, as TMA left them (128-byte swizzle). D is int32 of integers, which wraps around, and float32 of float8, whose sums
// the tensor cores keep to about 14 bits. The places of D are wgmma.cuh's; a k there has half of the bytes, so a step of 32 k
// is its step of 16.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/core/wgmma.cuh"

namespace jaxconv::cuda {

// The compiler must not move accumulators across this point.
template <int kCount>
__device__ __forceinline__ void Pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// clang-format off
#define JAXCONV_EIGHT_D0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAXCONV_EIGHT_D1 JAXCONV_EIGHT_D0 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAXCONV_EIGHT_D2 JAXCONV_EIGHT_D1 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAXCONV_EIGHT_4(o, i) o(d[i]), o(d[i + 1]), o(d[i + 2]), o(d[i + 3])
#define JAXCONV_EIGHT_16(o, i) \
  JAXCONV_EIGHT_4(o, i), JAXCONV_EIGHT_4(o, i + 4), JAXCONV_EIGHT_4(o, i + 8), JAXCONV_EIGHT_4(o, i + 12)
#define JAXCONV_EIGHT_32(o, i) JAXCONV_EIGHT_16(o, i), JAXCONV_EIGHT_16(o, i + 16)
#define JAXCONV_EIGHT_64(o, i) JAXCONV_EIGHT_32(o, i), JAXCONV_EIGHT_32(o, i + 32)
#define JAXCONV_EIGHT_128(o, i) JAXCONV_EIGHT_64(o, i), JAXCONV_EIGHT_64(o, i + 64)
#define JAXCONV_EIGHT_INT "+r"
#define JAXCONV_EIGHT_FLOAT "+f"

// accumulate = 0: D = A * B.
#define JAXCONV_EIGHT(N, TYPES, SIGNS, REGISTERS, OUTPUTS, A, B, P)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                 \
               "wgmma.mma_async.sync.aligned.m64n" N "k32." TYPES " {" REGISTERS "}, "         \
               "%" A ", %" B ", p" SIGNS ";\n}\n"                                              \
               : OUTPUTS                                                                       \
               : "l"(a), "l"(b), "r"(accumulate))
#define JAXCONV_EIGHT_N(TYPES, SIGNS, o)                                                                         \
  if constexpr (kRegisters == 32) {                                                                              \
    JAXCONV_EIGHT("64", TYPES, SIGNS, JAXCONV_EIGHT_D0, JAXCONV_EIGHT_32(o, 0), "32", "33", "34");               \
  } else if constexpr (kRegisters == 64) {                                                                       \
    JAXCONV_EIGHT("128", TYPES, SIGNS, JAXCONV_EIGHT_D1, JAXCONV_EIGHT_64(o, 0), "64", "65", "66");              \
  } else {                                                                                                       \
    JAXCONV_EIGHT("256", TYPES, SIGNS, JAXCONV_EIGHT_D2, JAXCONV_EIGHT_128(o, 0), "128", "129", "130");          \
  }
#define JAXCONV_EIGHT_CASE(A, B, TYPES, SIGNS, o)             \
  if constexpr (kA == Number::A && kB == Number::B) {         \
    JAXCONV_EIGHT_N(TYPES, SIGNS, o)                          \
  }
// clang-format on

template <Number kA, Number kB, int kRegisters>
__device__ __forceinline__ void WgmmaEight(int32_t (&d)[kRegisters], uint64_t a, uint64_t b,
                                           int accumulate) {
  static_assert(kRegisters == 32 || kRegisters == 64 || kRegisters == 128);
  JAXCONV_EIGHT_CASE(kS8, kS8, "s32.s8.s8", "", JAXCONV_EIGHT_INT)
  JAXCONV_EIGHT_CASE(kS8, kU8, "s32.s8.u8", "", JAXCONV_EIGHT_INT)
  JAXCONV_EIGHT_CASE(kU8, kS8, "s32.u8.s8", "", JAXCONV_EIGHT_INT)
  JAXCONV_EIGHT_CASE(kU8, kU8, "s32.u8.u8", "", JAXCONV_EIGHT_INT)
}

template <Number kA, Number kB, int kRegisters>
__device__ __forceinline__ void WgmmaEight(float (&d)[kRegisters], uint64_t a, uint64_t b,
                                           int accumulate) {
  static_assert(kRegisters == 32 || kRegisters == 64 || kRegisters == 128);
  JAXCONV_EIGHT_CASE(kE4M3, kE4M3, "f32.e4m3.e4m3", ", 1, 1", JAXCONV_EIGHT_FLOAT)
  JAXCONV_EIGHT_CASE(kE4M3, kE5M2, "f32.e4m3.e5m2", ", 1, 1", JAXCONV_EIGHT_FLOAT)
  JAXCONV_EIGHT_CASE(kE5M2, kE4M3, "f32.e5m2.e4m3", ", 1, 1", JAXCONV_EIGHT_FLOAT)
  JAXCONV_EIGHT_CASE(kE5M2, kE5M2, "f32.e5m2.e5m2", ", 1, 1", JAXCONV_EIGHT_FLOAT)
}

#undef JAXCONV_EIGHT_CASE
#undef JAXCONV_EIGHT_N
#undef JAXCONV_EIGHT
#undef JAXCONV_EIGHT_FLOAT
#undef JAXCONV_EIGHT_INT
#undef JAXCONV_EIGHT_128
#undef JAXCONV_EIGHT_64
#undef JAXCONV_EIGHT_32
#undef JAXCONV_EIGHT_16
#undef JAXCONV_EIGHT_4
#undef JAXCONV_EIGHT_D2
#undef JAXCONV_EIGHT_D1
#undef JAXCONV_EIGHT_D0

}  // namespace jaxconv::cuda
