// What ldmatrix's counterparts look like here: 8 x 8 matrices of 16-bit elements to shared memory,
// and 4, 8 and 16 bytes from it by address.
#pragma once

#include <cstdint>

#include "cuda/core/mma.cuh"

namespace jaxconv::cuda::conv {

// Four 8 x 8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of
// matrix l / 8. A register holds row lane / 4, elements 2 (lane % 4) and the next.
__device__ __forceinline__ void StoreMatrix4(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t row = __shfl_sync(~0u, address, q * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(row + lane % 4 * 4), "r"(r[q]) : "memory");
  }
#endif
}

// Two of them, the addresses from lanes 0 to 15.
__device__ __forceinline__ void StoreMatrix2(uint32_t address, uint32_t r0, uint32_t r1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};\n" ::"r"(address), "r"(r0),
               "r"(r1)
               : "memory");
#else
  const int lane = threadIdx.x % 32;
  const uint32_t row0 = __shfl_sync(~0u, address, lane / 4);
  const uint32_t row1 = __shfl_sync(~0u, address, 8 + lane / 4);
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(row0 + lane % 4 * 4), "r"(r0) : "memory");
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(row1 + lane % 4 * 4), "r"(r1) : "memory");
#endif
}

__device__ __forceinline__ void LoadMatrix2Transposed(uint32_t& r0, uint32_t& r1,
                                                      uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t LoadShared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void StoreShared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace jaxconv::cuda::conv
