// Rows of a channels-last array, one after another through a ring in shared memory (sm_90).
//
// A convolution of stride 1 needs each input row once if its consumer keeps the R rows of sums that
// the row contributes to in registers. So a block walks down an image: one thread has TMA
// bring row after row (with the columns' halo; what lies outside comes as zeros, without a
// predicate or an address being computed), the warps use it and hand the stage back. The ring runs
// on across the block's units, so that loads never wait for an image to end.
//
// A strip is `images` images x all rows x `width` columns of one slab of channels. A block keeps to one slab, so that its filter stays in registers, and takes an equal share of
// the rows of all its strips: a part of a strip, then whole ones, then a part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/core/mbarrier.cuh"
#include "cuda/core/mma.cuh"
#include "cuda/core/tma.cuh"
#include "cuda/core/tma.h"

namespace jaxconv::cuda::conv {

// An array (images, H, W, channels).
struct RowArray {
  int images, h, w, channels;
};

// x and y of a convolution that leaves D alone: its planes are images.
inline RowArray RowsOfX(const ConvProblem& p) {
  return {int(p.n * p.in[0]), int(p.in[1]), int(p.in[2]), int(p.c)};
}
inline RowArray RowsOfY(const ConvProblem& p) {
  return {int(p.n * p.in[0]), int(p.out[1]), int(p.out[2]), int(p.k)};
}

// The arrays that fprop, or dgrad, reads and writes, and the padding before the rows and columns
// read. `flipped`: of dgrad as a convolution of dy of stride 1, by the filter reversed.
template <typename Args>
void SetRows(Args& g, const ConvProblem& p, bool dgrad, bool flipped) {
  g.from = dgrad ? RowsOfY(p) : RowsOfX(p);
  g.to = dgrad ? RowsOfX(p) : RowsOfY(p);
  g.pad_h = int(flipped ? (p.filter[1] - 1) * p.dilation[1] - p.pad[1] : p.pad[1]);
  g.pad_w = int(flipped ? (p.filter[2] - 1) * p.dilation[2] - p.pad[2] : p.pad[2]);
}

// How rows and columns of src and dst meet: one to one; two of src for one of dst (stride 2); one of
// src for two of dst (its dgrad).
enum class Meet { kOne, kGather, kSpread };

struct RowUnits {
  int images, width, height;  // of a strip
  int slabs;
  int64_t rows, share;      // of all strips of a slab; of a block at most
  FastDiv by_w, by_h;       // strips along W; height
  int stages, stage_bytes;  // of the ring
  int ring_bytes;           // of the stages, or of sums that a kernel ends with where they were
};

// Rows [p, end) of a strip, which starts at (image, q).
struct RowUnit {
  int image, q, p, end;
};

// The unit that starts with row `row` of a slab's strips, up to row `last` of them.
JAXCONV_HD RowUnit UnitOf(const RowUnits& u, int64_t row, int64_t last) {
  const QuotRem strip = DivMod(row, u.by_h);
  const QuotRem w = DivMod(strip.quot, u.by_w);
  const int64_t rest = last - row;
  const int end = rest < u.height - strip.rem ? strip.rem + int(rest) : u.height;
  return {int(w.quot) * u.images, w.rem * u.width, strip.rem, end};
}

// Stage s of the ring lies at ring + s * stage_bytes; its barriers at `barriers`.
struct RowRing {
  uint32_t ring, barriers;
  int stages, stage_bytes;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ RowRing(uint32_t ring, uint32_t barriers, const RowUnits& u)
      : ring(ring), barriers(barriers), stages(u.stages), stage_bytes(u.stage_bytes) {}
  __device__ __forceinline__ void Init(int readers) const {
    for (int s = 0; s < stages; ++s) {
      BarrierInit(barriers + s * 16, 1);
      BarrierInit(barriers + s * 16 + 8, readers);
    }
    BarrierInitFence();
  }
  __device__ __forceinline__ uint32_t At() const { return ring + uint32_t(stage * stage_bytes); }
  // Producer: waits until the stage is free, announces `bytes`, returns the barrier they count on.
  __device__ __forceinline__ uint32_t Claim(uint32_t bytes) const {
    const uint32_t full = barriers + stage * 16;
    BarrierWait(full + 8, parity ^ 1);
    BarrierExpect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void Await() const { BarrierWait(barriers + stage * 16, parity); }
  // One lane of each warp of whose products wgmma reads the stage, after these and __syncwarp().
  __device__ __forceinline__ void Release() const { BarrierArrive(barriers + stage * 16 + 8); }
  // A warp that has read the stage itself hands it back, and goes on to the next.
  __device__ __forceinline__ void GiveBack() {
    ReadsFirst();
    __syncwarp();
    if (threadIdx.x % 32 == 0) Release();
    Advance();
  }
  __device__ __forceinline__ void Advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

inline int Multiprocessors() {
  int device = 0, count = 132;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  return count;
}

// The ring as large as the `sums` bytes that overlay it at the end: what lies behind it, its barriers,
// stays what it is.
inline void CoverSums(RowUnits& u, int sums) {
  u.ring_bytes = std::max(u.stages * u.stage_bytes, sums);
}

// Sets what UnitOf needs: strips of u.images images and u.width columns of `images` x `height` x
// `width`, shared by `parts` blocks.
inline void ShareRows(RowUnits& u, int images, int height, int width, int64_t parts) {
  const int64_t strips_w = CeilDiv(width, u.width);
  u.height = height;
  u.rows = CeilDiv(images, u.images) * strips_w * height;
  u.share = CeilDiv(u.rows, parts);
  u.by_w = FastDiv(strips_w);
  u.by_h = FastDiv(height);
}

}  // namespace jaxconv::cuda::conv
