// Transaction barriers in shared memory (sm_90). A barrier's phase ends when its arrivals are in
// and the bytes that were announced have come; a wait names the parity of the phase it waits for.
// A fresh barrier is in phase 0, so a wait for parity 1 returns at once.
#pragma once

#include <cstdint>

namespace jaxconv::cuda {

// Barriers are named by their shared memory address; they are 8 bytes.
__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes the inits of this thread visible to TMA.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Arrives, and announces that `bytes` more will come.
__device__ __forceinline__ void BarrierExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// The same barrier of a CTA of the cluster. What this thread wrote is not handed over: a release to
// the cluster is a fence of the whole device (MEMBAR.ALL.GPU) at every call.
__device__ __forceinline__ void BarrierArriveAt(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// All threads of a cluster's CTAs.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// In a launch that may begin while the one before it ends: waits until that has ended and what it
// wrote can be read.
__device__ __forceinline__ void AwaitLaunchBefore() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// In the one before: its blocks may come once every block here has said so, or has ended.
__device__ __forceinline__ void AllowLaunchAfter() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra out;\n"
      "bra again;\n"
      "out:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A barrier of `threads` threads of the CTA; id in [1, 15], 0 is __syncthreads.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Warpgroups that take turns: all threads of the one whose turn it was. Each of its warps arrives, not
// one for all: a barrier tells its last two phases apart only, so that a warp that has not seen its
// turn when the next one comes waits for ever.
inline constexpr int kTurnArrivals = 4;
__device__ __forceinline__ void PassTurn(uint32_t to) {
  if (threadIdx.x % 32 == 0) BarrierArrive(to);
}

}  // namespace jaxconv::cuda
