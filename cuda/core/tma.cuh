// TMA (sm_90) on the device. A load fills a box in shared memory and counts
// its bytes, those of zeros too, on a barrier; a store is part of the issuing thread's bulk groups.
// Coordinates are in the order of the descriptor's dimensions, the contiguous one first.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jaxconv::cuda {

__device__ __forceinline__ void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// Neighbouring bytes, a multiple of 16 of them, at addresses that are.
__device__ __forceinline__ void LoadBytes(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same to both CTAs of a cluster: the same place, and the same barrier, of each.
__device__ __forceinline__ void LoadTileForBoth(uint32_t to, const CUtensorMap& map,
                                                uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(uint16_t(3))
      : "memory");
}

__device__ __forceinline__ void LoadTileForBoth(uint32_t to, const CUtensorMap& map,
                                                uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(uint16_t(3))
      : "memory");
}

// A column of pixels: `at` is the first one's place (W, H, D), `offset` what is added to each.
__device__ __forceinline__ void LoadColumn(int rank, uint32_t to, const CUtensorMap& map,
                                           uint32_t barrier, int channel, const int (&at)[3], int n,
                                           const int (&offset)[3]) {
  const uint16_t w = uint16_t(offset[0]), h = uint16_t(offset[1]), d = uint16_t(offset[2]);
  if (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};\n" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(channel), "r"(at[0]), "r"(at[1]), "r"(n), "h"(w), "h"(h)
        : "memory");
  } else if (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};\n" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(channel), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(n), "h"(w),
        "h"(h), "h"(d)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2], {%6};\n" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(channel), "r"(at[0]), "r"(n), "h"(w)
        : "memory");
  }
}

__device__ __forceinline__ void StoreTile(const CUtensorMap& map, uint32_t from, int c0, int c1,
                                          int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::
          "l"(&map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void StoreColumn(int rank, const CUtensorMap& map, uint32_t from,
                                            int channel, const int (&at)[3], int n) {
  if (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group "
        "[%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
        "r"(from), "r"(channel), "r"(at[0]), "r"(at[1]), "r"(n)
        : "memory");
  } else if (rank == 5) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.im2col_no_offs.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(&map),
        "r"(from), "r"(channel), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(n)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group "
        "[%0, {%2, %3, %4}], [%1];\n" ::"l"(&map),
        "r"(from), "r"(channel), "r"(at[0]), "r"(n)
        : "memory");
  }
}

__device__ __forceinline__ void StoreCommit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Until at most kPending of this thread's groups still have to read shared memory.
template <int kPending>
__device__ __forceinline__ void StoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void StoreWait() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// Ordinary writes of this thread to shared memory, before TMA's reads.
__device__ __forceinline__ void FenceForTma() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Before an arrival that hands shared memory back to be written again, by TMA or by others: this thread's ordinary reads of
// it have taken place. An arrival does not wait for loads whose results nobody has asked for yet, and these may wait
// behind the thread's stores to global memory for longer than TMA takes: an H200 read what came next.
__device__ __forceinline__ void ReadsFirst() { FenceForTma(); }

}  // namespace jaxconv::cuda
