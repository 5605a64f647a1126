// cp.async: copies from global to shared memory that a thread starts, and waits for in groups.
#pragma once

#include <cstdint>

namespace jaxconv::cuda {

// 16 bytes past L1. Its neighbours in a line of 128 bytes may be another CTA's: they come to the L2 cache with it.
__device__ __forceinline__ void CopyAsync(uint32_t to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from)
               : "memory");
}

// 8 bytes.
__device__ __forceinline__ void CopyAsync(uint32_t to, const uint2* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void CopyAsync(uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void CopyCommit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace jaxconv::cuda
