// wgmma (sm_90a): a warpgroup's D (64 x N, float32, in registers) += A (64 x 16) * B (16 x N), both
// 16-bit in shared memory, as TMA left them (128-byte swizzle). Or A (64 x 8) * B (8 x
// N) in TF32, k-major: a k there has twice the bytes, everything else is the same.
//
// Warp w of the group, lane l: d[4j], d[4j + 1] are row 16w + l/4, columns 8j + 2(l % 4) and the
// next; d[4j + 2], d[4j + 3] the same columns of row 16w + l/4 + 8.
//
// An operand's tile is a sequence of 8 KiB blocks of 64 rows x 128 bytes:
//   k-major   a row holds 64 k of one m or n: blocks follow each other along m or n
//   mn-major  a row holds 64 m or n of one k: likewise
// so a block is 64 (m or n) x 64 k either way, and only the 16-k step inside it differs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxconv::cuda {

inline constexpr int kBlockBytes = 64 * 128;

// The descriptor of the first 16 k of an operand that starts at `address`. Strides in units of 16
// bytes: from eight rows to the next eight (bits 32 to 45), and between blocks (bits 16 to 29, read
// for mn-major operands only). Bits 62 and 63: the 128-byte swizzle.
template <bool kMajorK>
__device__ __forceinline__ uint64_t OperandDescriptor(uint32_t address) {
  constexpr uint64_t kFixed = uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 |
                              uint64_t(kMajorK ? 1 : kBlockBytes / 16) << 16;
  return kFixed | uint64_t((address & 0x3FFFF) >> 4);
}

// A k-major operand whose rows are kRow = 32, 64 or 128 bytes (16, 32 or 64 k), in the swizzle of as
// many bytes: 16-byte chunk j of row r lies at j ^ (r * kRow / 128) % (kRow / 16). Its first row may be
// any row: the tensor cores permute by the address.
template <int kRow>
__device__ __forceinline__ uint64_t RowsDescriptor(uint32_t address) {
  static_assert(kRow == 32 || kRow == 64 || kRow == 128);
  constexpr uint64_t kSwizzle = kRow == 128 ? 1 : kRow == 64 ? 2 : 3;
  constexpr uint64_t kFixed = kSwizzle << 62 | uint64_t(8 * kRow / 16) << 32 | uint64_t(1) << 16;
  return kFixed | uint64_t((address & 0x3FFFF) >> 4);
}

// An mn-major operand of blocks of 32 m or n: rows of 64 bytes, a k each, in the 64-byte swizzle.
// `between`: rows from a block to the next; blocks may overlap, and start at any row.
__device__ __forceinline__ uint64_t NarrowDescriptor(uint32_t address, uint32_t between) {
  constexpr uint64_t kFixed = uint64_t(2) << 62 | uint64_t(8 * 64 / 16) << 32;
  return kFixed | uint64_t(between * (64 / 16)) << 16 | uint64_t((address & 0x3FFFF) >> 4);
}

// What a step of 16 k adds to a descriptor: 32 bytes along the rows, or 16 rows.
template <bool kMajorK>
inline constexpr uint64_t kOperandStep = (kMajorK ? 32 : 16 * 128) / 16;

// Before the first wgmma of a group that follows writes to the accumulators.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// The compiler must not move accumulators across this point.
template <int kCount>
__device__ __forceinline__ void Pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define JAXCONV_WGMMA_D0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAXCONV_WGMMA_D1 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAXCONV_WGMMA_D1H \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAXCONV_WGMMA_D2 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAXCONV_WGMMA_D3 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAXCONV_WGMMA_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXCONV_WGMMA_NEW4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define JAXCONV_WGMMA_NEW16(i) \
  JAXCONV_WGMMA_NEW4(i), JAXCONV_WGMMA_NEW4(i + 4), JAXCONV_WGMMA_NEW4(i + 8), JAXCONV_WGMMA_NEW4(i + 12)
#define JAXCONV_WGMMA_NEW32(i) JAXCONV_WGMMA_NEW16(i), JAXCONV_WGMMA_NEW16(i + 16)
#define JAXCONV_WGMMA_F16(i) \
  JAXCONV_WGMMA_F4(i), JAXCONV_WGMMA_F4(i + 4), JAXCONV_WGMMA_F4(i + 8), JAXCONV_WGMMA_F4(i + 12)
#define JAXCONV_WGMMA_F32(i) JAXCONV_WGMMA_F16(i), JAXCONV_WGMMA_F16(i + 16)
#define JAXCONV_WGMMA_F48(i) JAXCONV_WGMMA_F32(i), JAXCONV_WGMMA_F16(i + 32)
#define JAXCONV_WGMMA_F64(i) JAXCONV_WGMMA_F32(i), JAXCONV_WGMMA_F32(i + 32)
#define JAXCONV_WGMMA_F96(i) JAXCONV_WGMMA_F64(i), JAXCONV_WGMMA_F32(i + 64)
#define JAXCONV_WGMMA_F128(i) JAXCONV_WGMMA_F64(i), JAXCONV_WGMMA_F64(i + 64)

// accumulate = 0: D = A * B. The transposition flags are 1 for mn-major operands.
#define JAXCONV_WGMMA(N, TYPE, REGISTERS, OUTPUTS, A, B, P, TA, TB)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " \
               "%" A ", %" B ", p, 1, 1, %" TA ", %" TB ";\n}\n"                           \
               : OUTPUTS                                                                  \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorA ? 0 : 1), "n"(kMajorB ? 0 : 1))
#define JAXCONV_WGMMA_N(TYPE)                                                                      \
  if constexpr (kRegisters == 32) {                                                                \
    JAXCONV_WGMMA("64", TYPE, JAXCONV_WGMMA_D0, JAXCONV_WGMMA_F32(0), "32", "33", "34", "35",      \
                  "36");                                                                           \
  } else if constexpr (kRegisters == 48) {                                                         \
    JAXCONV_WGMMA("96", TYPE, JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1H, JAXCONV_WGMMA_F48(0), "48", \
                  "49", "50", "51", "52");                                                         \
  } else if constexpr (kRegisters == 64) {                                                         \
    JAXCONV_WGMMA("128", TYPE, JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1, JAXCONV_WGMMA_F64(0), "64", \
                  "65", "66", "67", "68");                                                         \
  } else if constexpr (kRegisters == 96) {                                                         \
    JAXCONV_WGMMA("192", TYPE, JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1 ", " JAXCONV_WGMMA_D2,       \
                  JAXCONV_WGMMA_F96(0), "96", "97", "98", "99", "100");                            \
  } else if constexpr (kRegisters == 128) {                                                                                         \
    JAXCONV_WGMMA("256", TYPE,                                                                     \
                  JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1 ", " \
                  JAXCONV_WGMMA_D2 ", " JAXCONV_WGMMA_D3, \
                  JAXCONV_WGMMA_F128(0), "128", "129", "130", "131", "132"); \
  }
#define JAXCONV_WGMMA_TF32(N, REGISTERS, OUTPUTS, A, B, P)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                     \
               "wgmma.mma_async.sync.aligned.m64n" N "k8.f32.tf32.tf32 {" REGISTERS "}, "          \
               "%" A ", %" B ", p, 1, 1;\n}\n"                                                     \
               : OUTPUTS                                                                           \
               : "l"(a), "l"(b), "r"(accumulate))
#define JAXCONV_WGMMA_TF32_ROWS(N, REGISTERS, OUTPUTS, A0, A1, A2, A3, B)                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k8.f32.tf32.tf32 {" REGISTERS "}, "           \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1;\n"                            \
               : OUTPUTS                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define JAXCONV_WGMMA_TERM_ROWS(N, REGISTERS, OUTPUTS, A0, A1, A2, A3, B, P, TB)                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" REGISTERS "}, "          \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, %" TB ";\n}\n"               \
               : OUTPUTS                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),               \
                 "n"(kMajorB ? 0 : 1))
#define JAXCONV_WGMMA_HALF_ROWS(N, TYPE, REGISTERS, OUTPUTS, A0, A1, A2, A3, B, TB)                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, "  \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1, %" TB ";\n"                 \
               : OUTPUTS                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kMajorB ? 0 : 1))
#define JAXCONV_WGMMA_HALF_ROWS_N(TYPE)                                                            \
  if constexpr (kRegisters == 32) {                                                                \
    JAXCONV_WGMMA_HALF_ROWS("64", TYPE, JAXCONV_WGMMA_D0, JAXCONV_WGMMA_F32(0), "32", "33", "34",  \
                            "35", "36", "37");                                                     \
  } else if constexpr (kRegisters == 64) {                                                         \
    JAXCONV_WGMMA_HALF_ROWS("128", TYPE, JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1,                   \
                            JAXCONV_WGMMA_F64(0), "64", "65", "66", "67", "68", "69");             \
  } else {                                                                                         \
    JAXCONV_WGMMA_HALF_ROWS("256", TYPE, JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1 ", "               \
                            JAXCONV_WGMMA_D2 ", " JAXCONV_WGMMA_D3, JAXCONV_WGMMA_F128(0), "128",  \
                            "129", "130", "131", "132", "133");                                    \
  }
// clang-format on

// D (+)= A * B in bfloat16, A in registers, two numbers each: warp w of the group, lane l: a[0] is row
// 16w + l/4, k 2 (l % 4) and the next; a[1] row + 8; a[2] k + 8; a[3] both.
template <bool kMajorB, int kRegisters>
__device__ __forceinline__ void WgmmaTermRows(float (&d)[kRegisters], const uint32_t (&a)[4],
                                              uint64_t b, int accumulate) {
  static_assert(kRegisters == 32 || kRegisters == 64);
  if constexpr (kRegisters == 32) {
    JAXCONV_WGMMA_TERM_ROWS("64", JAXCONV_WGMMA_D0, JAXCONV_WGMMA_F32(0), "32", "33", "34", "35",
                            "36", "37", "38");
  } else {
    JAXCONV_WGMMA_TERM_ROWS("128", JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1, JAXCONV_WGMMA_F64(0),
                            "64", "65", "66", "67", "68", "69", "70");
  }
}

// The same without what D was, which needs no registers until then. N is 64.
template <bool kMajorB>
__device__ __forceinline__ void WgmmaTermRowsNew(float (&d)[32], const uint32_t (&a)[4],
                                                 uint64_t b) {
  const int accumulate = 0;
  JAXCONV_WGMMA_TERM_ROWS("64", JAXCONV_WGMMA_D0, JAXCONV_WGMMA_NEW32(0), "32", "33", "34", "35",
                          "36", "37", "38");
}

// D += A * B in 16 bits, A in registers as WgmmaTermRows has it.
template <typename T, bool kMajorB, int kRegisters>
__device__ __forceinline__ void WgmmaHalfRows(float (&d)[kRegisters], const uint32_t (&a)[4],
                                              uint64_t b) {
  static_assert(kRegisters == 32 || kRegisters == 64 || kRegisters == 128);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXCONV_WGMMA_HALF_ROWS_N("bf16")
  } else {
    static_assert(std::is_same_v<T, __half>);
    JAXCONV_WGMMA_HALF_ROWS_N("f16")
  }
}

// D += A * B in TF32, A in registers: warp w of the group, lane l: a[0] is row 16w + l/4, k l % 4;
// a[1] row + 8; a[2] k + 4; a[3] both.
template <int kRegisters>
__device__ __forceinline__ void WgmmaRows(float (&d)[kRegisters], const uint32_t (&a)[4],
                                          uint64_t b) {
  static_assert(kRegisters == 32 || kRegisters == 64 || kRegisters == 128);
  if constexpr (kRegisters == 32) {
    JAXCONV_WGMMA_TF32_ROWS("64", JAXCONV_WGMMA_D0, JAXCONV_WGMMA_F32(0), "32", "33", "34", "35",
                            "36");
  } else if constexpr (kRegisters == 64) {
    JAXCONV_WGMMA_TF32_ROWS("128", JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1, JAXCONV_WGMMA_F64(0),
                            "64", "65", "66", "67", "68");
  } else {
    WgmmaRows(reinterpret_cast<float (&)[64]>(d[0]), a, b);
    WgmmaRows(reinterpret_cast<float (&)[64]>(d[64]), a, b + 2 * kBlockBytes / 16);
  }
}

template <typename T, bool kMajorA, bool kMajorB, int kRegisters>
__device__ __forceinline__ void Wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b,
                                      int accumulate) {
  static_assert(kRegisters == 32 || kRegisters == 48 || kRegisters == 64 || kRegisters == 96 ||
                kRegisters == 128 || kRegisters == 160);
  if constexpr (kRegisters == 160) {  // N = 320: four blocks of B, and the fifth
    constexpr uint64_t kFourth = 4 * kBlockBytes / 16;
    Wgmma<T, kMajorA, kMajorB>(reinterpret_cast<float (&)[128]>(d[0]), a, b, accumulate);
    Wgmma<T, kMajorA, kMajorB>(reinterpret_cast<float (&)[32]>(d[128]), a, b + kFourth, accumulate);
    return;
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXCONV_WGMMA_N("bf16")
  } else if constexpr (std::is_same_v<T, float>) {
    static_assert(kMajorA && kMajorB);
    if constexpr (kRegisters == 32) {
      JAXCONV_WGMMA_TF32("64", JAXCONV_WGMMA_D0, JAXCONV_WGMMA_F32(0), "32", "33", "34");
    } else if constexpr (kRegisters == 64) {
      JAXCONV_WGMMA_TF32("128", JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1, JAXCONV_WGMMA_F64(0), "64",
                         "65", "66");
    } else {
      JAXCONV_WGMMA_TF32(
          "256", JAXCONV_WGMMA_D0 ", " JAXCONV_WGMMA_D1 ", " JAXCONV_WGMMA_D2 ", " JAXCONV_WGMMA_D3,
          JAXCONV_WGMMA_F128(0), "128", "129", "130");
    }
  } else {
    static_assert(std::is_same_v<T, __half>);
    JAXCONV_WGMMA_N("f16")
  }
}

#undef JAXCONV_WGMMA_N
#undef JAXCONV_WGMMA_TF32
#undef JAXCONV_WGMMA_TF32_ROWS
#undef JAXCONV_WGMMA_TERM_ROWS
#undef JAXCONV_WGMMA_HALF_ROWS
#undef JAXCONV_WGMMA_HALF_ROWS_N
#undef JAXCONV_WGMMA
#undef JAXCONV_WGMMA_F128
#undef JAXCONV_WGMMA_F96
#undef JAXCONV_WGMMA_F64
#undef JAXCONV_WGMMA_F48
#undef JAXCONV_WGMMA_F32
#undef JAXCONV_WGMMA_F16
#undef JAXCONV_WGMMA_F4
#undef JAXCONV_WGMMA_NEW32
#undef JAXCONV_WGMMA_NEW16
#undef JAXCONV_WGMMA_NEW4
#undef JAXCONV_WGMMA_D3
#undef JAXCONV_WGMMA_D2
#undef JAXCONV_WGMMA_D1
#undef JAXCONV_WGMMA_D1H
#undef JAXCONV_WGMMA_D0

// Registers of a thread of this warpgroup; every warp of the group calls it.
template <int kRegisters>
__device__ __forceinline__ void RegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace jaxconv::cuda
