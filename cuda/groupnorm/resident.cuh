// What the two "resident" kernels share: a thread's place, the slots that its vectors pass through, sums over warps and
// clusters, and the launch.
//
//   image, channels last            a CTA's slab: the thread that copied a vector is the only one that reads it
//   +------+------+------+          +------------------------+
//   |      |######|      |  rank 0  | step 0: a vector each  |  cp.async, `in_flight` steps ahead
//   |      |######|      |          | step 1                 |
//   |      +------+      |          | ...                    |
//   |      |######|      |  rank 1  +------------------------+
//   |      |######|      |
//   +------+------+------+          cluster: the CTAs of a tile, which exchange their sums
//     tile 0  tile 1  tile 2
#pragma once

#include <string>

#include "cuda/core/copy_async.cuh"
#include "cuda/core/device.h"
#include "cuda/groupnorm/domain.h"
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {

// domain.h: Resident.
struct Tiling {
  int lanes, tiles, ctas;
  int warp_rows, rows;   // pixels of a warp and of a CTA in a step
  int half;              // the largest power of two below warp_rows, or 0
  int channels, groups;  // of a tile
  int cells;
  uint32_t pixels;  // of a CTA
  uint32_t held;    // steps that stay
  bool all;         // all stay
  int slab;         // bytes
};

struct Spot {
  int64_t image;
  int tile, rank;    // rank: the CTA's in its cluster
  int warp, row;     // the thread's pixel of its warp's; those from warp_rows on have none
  int lane, vector;  // of the tile; of a pixel
  uint32_t at;       // the thread's first vector, from the image's first
  uint32_t stride;   // from one of its vectors to the next
  uint32_t count;    // of its vectors, steps
};

__device__ __forceinline__ Spot SpotOf(const Walk& w, const Tiling& t) {
  Spot s;
  const uint32_t cluster = blockIdx.x / t.ctas, image = cluster / t.tiles;
  s.rank = int(blockIdx.x - cluster * t.ctas);
  s.image = image;
  s.tile = int(cluster - image * t.tiles);
  const int in_warp = int(threadIdx.x) % kWarp;
  s.warp = int(threadIdx.x) / kWarp;
  s.row = in_warp / t.lanes;
  s.lane = in_warp - s.row * t.lanes;
  s.vector = s.tile * t.lanes + s.lane;
  const uint32_t first = s.rank * t.pixels + s.warp * t.warp_rows + s.row;
  const uint32_t end = min(w.pixels, (s.rank + 1) * t.pixels);
  s.at = first * w.row + s.vector;
  s.stride = t.rows * w.row;
  const bool inside = s.row < t.warp_rows && s.vector < w.row && first < end;
  s.count = inside ? (end - first - 1) / t.rows + 1 : 0;
  return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Slots

// A thread's vectors of kTensors tensors. A step is a group of copies, also where there is nothing to copy: when step s is
// waited for, those of the kInFlight - 1 steps after it are on their way. Steps from `held` on take the kInFlight slots
// from there on in turn.
template <int kTensors, int kInFlight>
class Slots {
 public:
  // The tensors' image begins `first` vectors from their start.
  __device__ __forceinline__ Slots(const Tiling& t, const Spot& at,
                                   const void* const (&tensors)[kTensors], int64_t first,
                                   const char* slab)
      : at_(at),
        held_(t.held),
        pitch_(kTensors * 16 * blockDim.x),
        slot_(static_cast<uint32_t>(__cvta_generic_to_shared(slab)) + threadIdx.x * 16),
        ring_(slot_ + held_ * pitch_),
        end_(t.all ? 0 : ring_ + kInFlight * pitch_),
        to_(slot_),
        place_(at.at) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) from_[k] = static_cast<const uint4*>(tensors[k]) + first;
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) CopyAhead(s);
  }

  // use(vectors), from the first step on.
  template <typename Use>
  __device__ __forceinline__ void Onwards(const Use& use) {
    uint4 raw[kTensors];
#pragma unroll 1
    for (uint32_t s = 0; s < at_.count; ++s) {
      CopyWait<kInFlight - 1>();
      Read(raw);
      use(raw);
      CopyAhead(s + kInFlight);
      slot_ = Next(slot_);
    }
  }

  // The second walk, from the last step on, whose copies came last: use(vectors, their offset from the image's first).
  template <typename Use>
  __device__ __forceinline__ void Backwards(const Use& use) {
    uint4 raw[kTensors];
    uint32_t place = at_.at + at_.count * at_.stride;
#pragma unroll 1
    for (uint32_t s = at_.count; s-- > 0;) {
      place -= at_.stride;
      slot_ = (slot_ == ring_ && s >= held_ ? end_ : slot_) - pitch_;
      CopyWait<kInFlight - 1>();
      Read(raw);
      use(raw, place);
      if (s >= held_ + kInFlight) Copy(slot_, place - kInFlight * at_.stride);
      CopyCommit();
    }
  }

 private:
  __device__ __forceinline__ uint32_t Next(uint32_t slot) const {
    slot += pitch_;
    return slot == end_ ? ring_ : slot;
  }
  __device__ __forceinline__ void CopyAhead(uint32_t s) {
    if (s < at_.count) Copy(to_, place_);
    CopyCommit();
    to_ = Next(to_);
    place_ += at_.stride;
  }
  __device__ __forceinline__ void Copy(uint32_t to, uint32_t place) const {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) CopyAsync(to + k * 16 * blockDim.x, from_[k] + place);
  }
  __device__ __forceinline__ void Read(uint4 (&raw)[kTensors]) const {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(raw[k].x), "=r"(raw[k].y), "=r"(raw[k].z), "=r"(raw[k].w)
                   : "r"(slot_ + k * 16 * blockDim.x)
                   : "memory");
    }
  }

  const Spot& at_;
  const uint32_t held_, pitch_;  // pitch: bytes of a step
  uint32_t slot_;                // of the step that is read; shared memory addresses
  const uint32_t ring_, end_;    // slots from `held` on; end: 0 where all stay
  uint32_t to_, place_;          // of the step that is copied next
  const uint4* from_[kTensors];
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums

// Adds s1 and s2 up over a warp's pixels, V / N neighbouring channels together, in an order that the tiling alone decides:
// to[lane * N + n].
template <int N, int V>
__device__ __forceinline__ void SumWarp(const Tiling& t, const Spot& at, const float (&s1)[V],
                                        const float (&s2)[V], float2* to) {
  constexpr int kTogether = V / N;
  float2 v[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    v[n] = make_float2(s1[n * kTogether], s2[n * kTogether]);
#pragma unroll
    for (int j = 1; j < kTogether; ++j) {
      v[n].x += s1[n * kTogether + j];
      v[n].y += s2[n * kTogether + j];
    }
  }
#pragma unroll 1
  for (int o = t.half; o > 0; o /= 2) {
    const bool has = at.row + o < t.warp_rows;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float x = __shfl_down_sync(0xffffffffu, v[n].x, o * t.lanes);
      const float y = __shfl_down_sync(0xffffffffu, v[n].y, o * t.lanes);
      if (has) v[n] = make_float2(v[n].x + x, v[n].y + y);
    }
  }
  if (at.row > 0) return;
#pragma unroll
  for (int n = 0; n < N; ++n) to[at.lane * N + n] = v[n];
}

// Every lane has the sum of get(i) for i in [0, count).
template <typename Get>
__device__ __forceinline__ float2 SumOf(int count, const Get& get) {
  float2 sum = make_float2(0.f, 0.f);
  for (int i = int(threadIdx.x) % kWarp; i < count; i += kWarp) {
    const float2 v = get(i);
    sum.x += v.x;
    sum.y += v.y;
  }
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
  }
  return sum;
}

// The CTAs of a cluster. Each puts its sums into the shared memory of all: between Meet and MeetAgain, which is where what
// was put can be read. Nobody reads another's memory, so that a CTA may end when it likes.
class Cluster {
 public:
  __device__ __forceinline__ explicit Cluster(int ctas) : ctas_(ctas) {
#if __CUDA_ARCH__ >= 900
    if (ctas_ > 1) asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
#endif
  }

  // All CTAs have begun.
  __device__ __forceinline__ void Meet() const { Wait(); }

  __device__ __forceinline__ void MeetAgain() const {
    if (ctas_ == 1) {
      __syncthreads();
      return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
#endif
    Wait();
  }

  // *to = v, of CTA `rank`.
  __device__ __forceinline__ void Put(float2* to, int rank, float2 v) const {
#if __CUDA_ARCH__ >= 900
    if (ctas_ > 1) {
      const uint32_t mine = static_cast<uint32_t>(__cvta_generic_to_shared(to));
      asm volatile(
          "{\n"
          ".reg .b32 remote;\n"
          "mapa.shared::cluster.u32 remote, %0, %1;\n"
          "st.shared::cluster.v2.f32 [remote], {%2, %3};\n"
          "}\n" ::"r"(mine),
          "r"(rank), "f"(v.x), "f"(v.y)
          : "memory");
      return;
    }
#endif
    *to = v;
  }

 private:
  __device__ __forceinline__ void Wait() const {
#if __CUDA_ARCH__ >= 900
    if (ctas_ > 1) asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
#endif
  }

  const int ctas_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The launch, on the host

template <typename Kernel, typename Args>
Status LaunchResident(const Context& ctx, GroupNormOp op, const GroupNormProblem& p,
                      const Plan& plan, const Device& device, Kernel kernel, const Args& args,
                      const std::string& what) {
  const Resident r = ResidentOf(op, p, plan.chunk, plan.splits, device);
  Tiling t = {};
  t.lanes = static_cast<int>(r.lanes);
  t.tiles = static_cast<int>(r.tiles);
  t.ctas = static_cast<int>(plan.splits);
  t.warp_rows = kWarp / t.lanes;
  t.rows = static_cast<int>(r.rows);
  while (t.half * 2 < t.warp_rows && t.warp_rows > 1) t.half = t.half == 0 ? 1 : t.half * 2;
  t.channels = t.lanes * Vector(p);
  t.groups = t.channels / static_cast<int>(p.group_channels());
  t.cells = static_cast<int>(r.cells);
  t.pixels = static_cast<uint32_t>(r.pixels);
  t.held = static_cast<uint32_t>(r.held);
  t.all = r.held == r.steps;
  t.slab = static_cast<int>(r.slab);
  JAXCONV_RETURN_IF_ERROR(PreferSharedMemory(reinterpret_cast<const void*>(kernel), what));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(plan.splits);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.walk.images * r.tiles * plan.splits));
  config.blockDim = dim3(static_cast<unsigned>(r.threads));
  config.dynamicSmemBytes = static_cast<size_t>(r.bytes);
  config.stream = ctx.stream;
  config.attrs = &cluster;
  config.numAttrs = plan.splits > 1 ? 1 : 0;
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, args, t), what);
}

inline Status NeedsVectors(const std::string& what) {
  return Status::Unimplemented(what + ": expected arrays aligned to 16 bytes");
}

}  // namespace jaxconv::cuda::groupnorm
