// Walks over whole rows of channels, channels last, whose vectors bulk copies bring (sm_90): a warp keeps a ring of shared
// memory full, up to 192 KB a multiprocessor on their way whatever registers the arithmetic takes. Loads of the threads' own
// leave 16 warps of them 49 KB, too few for two tensors at once (docs/kernels/batchnorm.md).
//
// A stage is as many rows as kStreamThreads threads have vectors for, of each tensor. A thread's vector has the same
// channels in every stage. Stages are taken in turn by the blocks, one a multiprocessor.
#pragma once

#include <algorithm>

#include "cuda/batchnorm/domain.h"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/layout.h"
#include "cuda/core/device.h"
#include "cuda/core/mbarrier.cuh"
#include "cuda/core/mma.cuh"
#include "cuda/core/raw.cuh"
#include "cuda/core/tma.cuh"

namespace jaxconv::cuda::batchnorm {

constexpr int kStreamBlock = kStreamThreads + 32;
constexpr int kStreamRing = 192 << 10;
constexpr int kStreamSlots = 24;
constexpr int kStreamTensors = 3;
constexpr int kStreamBarrier = 1;  // of the threads that compute

struct StreamShape {
  unsigned blocks;   // 0: the threads read for themselves
  uint32_t vectors;  // of a stage and tensor
  uint32_t stages;
  int slots;
  int64_t elements;  // of a tensor, in vectors
};

struct StreamInput {
  const void* tensor[kStreamTensors];
  int count;
};

// The shape of a walk over `tensors` arrays by at most `most` blocks. `a`: a block's layout, which becomes that of rows.
template <typename I>
Status MakeStream(const BatchNormProblem& p, int tensors, int64_t most, const std::string& what,
                  Layout& a, StreamShape& s) {
  s = {};
  if constexpr (I::kLast && I::V > 1) {
    const int64_t vectors = StreamVectors(a.row);
    if (!Streamed(p) || vectors == 0) return Status::Ok();
    Device device;
    JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
    if (!device.sm90()) return Status::Ok();
    s.vectors = static_cast<uint32_t>(vectors);
    s.elements = a.row * a.positions;
    s.stages = static_cast<uint32_t>((s.elements + vectors - 1) / vectors);
    s.slots =
        static_cast<int>(std::min<int64_t>(kStreamRing / (16 * vectors * tensors), kStreamSlots));
    s.blocks =
        static_cast<unsigned>(std::min<int64_t>({device.multiprocessors, int64_t{s.stages}, most}));
    a.lanes = static_cast<int>(a.row);
    a.tiles = 1;
  }
  return Status::Ok();
}

template <typename Kernel, typename... Args>
Status LaunchStream(const Context& ctx, const StreamShape& s, const std::string& what,
                    Kernel kernel, const Args&... args) {
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<s.blocks, kStreamBlock, kStreamRing, ctx.stream>>>(args..., s);
  return LaunchStatus(what);
}

extern __shared__ __align__(128) unsigned char stream_ring[];

// By all threads of the block, before anything else of a walk. f(v, at) for each vector of this thread: v[k] of tensor k,
// `at` its place in the array. kBackwards: the last stage first. The warp that copies returns from it late and has
// nothing more to do.
template <bool kBackwards, typename R, typename F>
__device__ __forceinline__ void WalkStream(const StreamShape& s, const StreamInput& in, F&& f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint64_t barriers[2 * kStreamSlots];
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * kStreamSlots;
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.slots; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, kStreamThreads);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const uint32_t bytes = s.vectors * 16, slot_bytes = bytes * in.count;
  const auto stage_at = [&](uint32_t turn) { return kBackwards ? s.stages - 1 - turn : turn; };
  int slot = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++slot == s.slots) {
      slot = 0;
      phase ^= 1;
    }
  };
  if (threadIdx.x >= kStreamThreads) {
    if (threadIdx.x > kStreamThreads) return;
    const uint32_t ring = SharedAddress(stream_ring);
    for (uint32_t turn = blockIdx.x; turn < s.stages; turn += gridDim.x, next()) {
      const int64_t first = int64_t{stage_at(turn)} * s.vectors;
      const int64_t left = s.elements - first;
      const uint32_t copied = left < s.vectors ? static_cast<uint32_t>(left) * 16 : bytes;
      BarrierWait(empty + 8 * slot, phase ^ 1);
      BarrierExpect(full + 8 * slot, copied * in.count);
#pragma unroll
      for (int k = 0; k < kStreamTensors; ++k) {
        if (k == in.count) break;
        LoadBytes(ring + slot * slot_bytes + k * bytes,
                  static_cast<const char*>(in.tensor[k]) + first * 16, copied, full + 8 * slot);
      }
    }
    return;
  }
  const R* ring = reinterpret_cast<const R*>(stream_ring);
  for (uint32_t turn = blockIdx.x; turn < s.stages; turn += gridDim.x) {
    const int64_t at = int64_t{stage_at(turn)} * s.vectors + threadIdx.x;
    const bool inside = threadIdx.x < s.vectors && at < s.elements;
    R v[kStreamTensors] = {};
    BarrierWait(full + 8 * slot, phase);
    if (inside) {
#pragma unroll
      for (int k = 0; k < kStreamTensors; ++k) {
        if (k < in.count) v[k] = ring[(slot * in.count + k) * s.vectors + threadIdx.x];
      }
    }
    ReadsFirst();
    // One lane for its warp is no faster, and compute-sanitizer's racecheck sees no order there.
    BarrierArrive(empty + 8 * slot);
    next();
    if (inside) f(v, at);
  }
#endif
}

}  // namespace jaxconv::cuda::batchnorm
