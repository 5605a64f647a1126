// The sm_80 instructions the matrix main loop is made of: cp.async, ldmatrix, mma.sync.
//
// Fragments of mma.m16n8, with g = lane / 4 and t = lane % 4. An operand register holds two
// neighbouring 16-bit k or one tf32 k; "low" is the first 8 (16-bit) or 4 (tf32) k of the step.
//   a[0]  row g, low k        a[1]  row g + 8, low k        a[2], a[3]  the same, high k
//   b[0]  column g, low k     b[1]  column g, high k
//   c[0], c[1]  row g, columns 2t and 2t + 1                c[2], c[3]  the same of row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/core/copy_async.cuh"

namespace jaxconv::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies `bytes` (0 to kBytes) from global to shared memory and fills the rest of kBytes with
// zeros. Nothing is read when bytes is 0, but `global` must still be aligned to kBytes. 16 bytes go
// past L1 (.cg), where a tile's neighbours would only evict each other.
//
// There is no "memory" clobber: commit and wait have it, and with one here each copy would make the
// compiler reload from memory what the next copy's address is computed from.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, int bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
                 "l"(global), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(bytes));
  }
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrix(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The same, each matrix transposed as 8 x 8 of 16-bit elements.
__device__ __forceinline__ void LoadMatrixTransposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// float32 bits -> TF32 bits, nearest with ties away from zero. (mma.sync itself would truncate.)
__device__ __forceinline__ uint32_t RoundToTf32(uint32_t bits) {
  uint32_t out;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(out) : "f"(__uint_as_float(bits)));
  return out;
}

// c += a * b, 16 x 8 x (32 bytes of k). T is __nv_bfloat16, __half, or float (operands already
// rounded to TF32).
template <typename T>
__device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);

template <>
__device__ __forceinline__ void Mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void Mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void Mma<float>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b + c: Mma above with registers of its own for the result, where c is what other registers hold.
template <typename T>
__device__ __forceinline__ void MmaTo(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1, const float (&c)[4]) {
#define JAXCONV_MMA(SHAPE, TYPE)                                                            \
  asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                               \
      ".f32 {%0, %1, %2, %3}, {%4, %5, "                                                    \
      "%6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"                                          \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), \
        "f"(c[2]), "f"(c[3]))
  if constexpr (std::is_same_v<T, float>) {
    JAXCONV_MMA("m16n8k8", "tf32");
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXCONV_MMA("m16n8k16", "bf16");
  } else {
    JAXCONV_MMA("m16n8k16", "f16");
  }
#undef JAXCONV_MMA
}

}  // namespace jaxconv::cuda
