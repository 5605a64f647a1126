// Group-norm forward with the tile in shared memory (resident.cuh): x is read once. Sums as in forward.cu.
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/resident.cuh"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {
namespace {

template <int V>
__device__ __forceinline__ void SumWarpCells(const Tiling& t, const Spot& at, const float (&s1)[V],
                                             const float (&s2)[V], float2* sums) {
  float2* mine = sums + at.warp * t.lanes * t.cells;
  if (t.cells == 1) return SumWarp<1>(t, at, s1, s2, mine);
  if (t.cells == 2) return SumWarp<2>(t, at, s1, s2, mine);
  if (t.cells == 4) return SumWarp<4>(t, at, s1, s2, mine);
  if constexpr (V == 8) SumWarp<8>(t, at, s1, s2, mine);
}

template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kMostThreads, 2)
    ResidentKernel(const __grid_constant__ ForwardArgs p, const __grid_constant__ Tiling t) {
  // z = x * factor + offset for 16-bit x, whose few bits leave nothing of the mean in the deviation's place that this could
  // lose; (x - mean) * factor + offset for float32.
  constexpr bool kFolded = sizeof(T) == 2;
  extern __shared__ __align__(16) char memory[];
  const Walk& w = p.walk;
  const Spot at = SpotOf(w, t);
  const Cluster cluster(t.ctas);
  const int64_t image = at.image * w.pixels * w.row;  // vectors
  const void* const tensors[] = {p.x};
  Slots<1, InFlight(GroupNormOp::kForward)> slots(t, at, tensors, image, memory);

  const int warps = int(blockDim.x) / kWarp;
  float *scale = reinterpret_cast<float*>(memory + t.slab), *bias = scale + t.channels;
  float2* warp_sums = reinterpret_cast<float2*>(bias + t.channels);  // (warps, lanes, cells)
  float2* cta_sums = warp_sums + warps * t.lanes * t.cells;          // (ctas, groups)
  float *shifts = reinterpret_cast<float*>(cta_sums + t.ctas * t.groups),
        *means = shifts + t.groups, *rests = means + t.groups, *rstds = rests + t.groups;
  const int first_group = at.tile * t.groups, first_channel = at.tile * t.channels;
  const int groups = min(t.groups, w.groups - first_group);
  const int64_t params = int64_t(uint32_t(at.image) / w.per_instance) * w.channels + first_channel;
  for (int g = threadIdx.x; g < t.groups; g += blockDim.x) {
    const T* x = static_cast<const T*>(p.x) + image * V;
    shifts[g] = g < groups ? Shift(w, x, first_group + g) : 0.f;
  }
  for (int c = threadIdx.x; c < t.channels; c += blockDim.x) {
    const bool inside = first_channel + c < w.channels;
    scale[c] = inside ? p.scale[params + c] : 0.f;
    bias[c] = inside ? p.bias[params + c] : 0.f;
  }
  __syncthreads();

  {
    float k[V], s1[V] = {}, s2[V] = {};
    ForChannels<V>(w, at.lane * V, [&](int j, int group) { k[j] = shifts[group]; });
    slots.Onwards([&](const uint4(&raw)[1]) {
      float v[V];
      Unpack<T, V>(raw[0], v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = v[j] - k[j];
        s1[j] += d;
        s2[j] = fmaf(d, d, s2[j]);
      }
    });
    SumWarpCells<V>(t, at, s1, s2, warp_sums);
  }
  __syncthreads();
  cluster.Meet();
  const int cells = w.group_channels * t.cells / V;  // of a group, in a warp
  for (int g = at.warp; g < groups; g += warps) {
    const float2 sum = SumOf(warps * cells, [&](int i) {
      const int warp = i / cells;
      return warp_sums[warp * t.lanes * t.cells + g * cells + (i - warp * cells)];
    });
    const int rank = int(threadIdx.x) % kWarp;
    if (rank < t.ctas) cluster.Put(cta_sums + at.rank * t.groups + g, rank, sum);
  }
  cluster.MeetAgain();
  for (int g = threadIdx.x; g < groups; g += blockDim.x) {
    float2 sum = cta_sums[g];
    for (int r = 1; r < t.ctas; ++r) {
      sum.x += cta_sums[r * t.groups + g].x;
      sum.y += cta_sums[r * t.groups + g].y;
    }
    const Moments m = MomentsOf(w, shifts[g], sum);
    means[g] = m.mean;
    rests[g] = m.rest;
    rstds[g] = m.rstd;
    if (at.rank == 0) {
      p.mean[at.image * w.groups + first_group + g] = m.mean;
      p.rstd[at.image * w.groups + first_group + g] = m.rstd;
    }
  }
  __syncthreads();

  float mean[V], factor[V], offset[V];
  ReadNumbers<V>(scale + at.lane * V, factor);
  ReadNumbers<V>(bias + at.lane * V, offset);
  ForChannels<V>(w, at.lane * V, [&](int j, int group) {
    mean[j] = means[group];
    factor[j] *= rstds[group];
    offset[j] -= rests[group] * factor[j];
    if (kFolded) offset[j] = fmaf(-mean[j], factor[j], offset[j]);
  });
  T* y = static_cast<T*>(p.y) + image * V;
  slots.Backwards([&](const uint4(&raw)[1], uint32_t place) {
    float z[V];
    Unpack<T, V>(raw[0], z);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = fmaf(kFolded ? z[j] : z[j] - mean[j], factor[j], offset[j]);
    Apply<false, kActivation, T>(w.activation, w.slope, z, z);
    Write<T, V>(y, place, z);
  });
}

}  // namespace

Status ResidentForward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                       const Device& device, bool aligned, const ForwardArgs& args,
                       const std::string& what) {
  return WithInstance(p, aligned, [&](auto element, auto vector, auto activation) -> Status {
    using T = decltype(element);
    constexpr int V = decltype(vector)::value, kActivation = decltype(activation)::value;
    if constexpr (V == 1) {
      return NeedsVectors(what);
    } else {
      return LaunchResident(ctx, GroupNormOp::kForward, p, plan, device,
                            ResidentKernel<T, V, kActivation>, args, what);
    }
  });
}

}  // namespace jaxconv::cuda::groupnorm
