// What the kernels for rows of 64 or 112 pixels on sm_90a share.
#pragma once

#include "cuda/conv/stem/geometry.h"
#include "cuda/gemm/sm90.cuh"

namespace jaxconv::cuda::conv {

static_assert(kSm90Shared == kSm90SharedBytes);

// clang-format off
#define JAXCONV_R56                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "  \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "   \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}"
#define JAXCONV_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXCONV_R8(i) JAXCONV_R4(i), JAXCONV_R4(i + 4)
#define JAXCONV_N112(SHAPE, TYPE, TAIL)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"                                       \
               "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " JAXCONV_R56         \
               ", %56, %57, p, 1, 1" TAIL ";\n}\n"                                                \
               : JAXCONV_R8(0), JAXCONV_R8(8), JAXCONV_R8(16), JAXCONV_R8(24), JAXCONV_R8(32),     \
                 JAXCONV_R8(40), JAXCONV_R8(48)                                                    \
               : "l"(a), "l"(b), "r"(accumulate))
// clang-format on

// D (64 x 2 kRegisters) += A * B, 32 bytes of k, both k-major. accumulate = 0: D = A * B.
template <typename T, int kRegisters>
__device__ __forceinline__ void WgmmaRow(float (&d)[kRegisters], uint64_t a, uint64_t b,
                                         int accumulate) {
  if constexpr (kRegisters != 56) {
    Wgmma<T, true, true>(d, a, b, accumulate);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXCONV_N112("m64n112k16", "bf16", ", 0, 0");
  } else if constexpr (std::is_same_v<T, __half>) {
    JAXCONV_N112("m64n112k16", "f16", ", 0, 0");
  } else {
    JAXCONV_N112("m64n112k8", "tf32", "");
  }
}
#undef JAXCONV_N112
#undef JAXCONV_R8
#undef JAXCONV_R4
#undef JAXCONV_R56

// Matrices of 8 x 8 16-bit elements, transposed on their way to shared memory. Addresses as for
// StoreMatrix4.
__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
__device__ __forceinline__ void StoreMatrix2Transposed(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};\n" ::"r"(address),
               "r"(r0), "r"(r1)
               : "memory");
}

}  // namespace jaxconv::cuda::conv
