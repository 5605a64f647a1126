// Group-norm backward with the tiles of x and dy in shared memory (resident.cuh): both are read once. Sums as in
// backward.cu; an image's share of dbias and dscale is its cluster's.
#include "cuda/core/mbarrier.cuh"
#include "cuda/groupnorm/affine.cuh"
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/resident.cuh"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {
namespace {

// Registers for 768 threads of a multiprocessor, three CTAs of 256; for 512 where an instance has all activations.
constexpr int BoundOf(int activation) { return activation == kAny ? 512 : 768; }
static_assert(kMostThreads <= 512);

template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(BoundOf(kActivation), 1)
    ResidentKernel(const __grid_constant__ BackwardArgs p, const __grid_constant__ Tiling t) {
  constexpr bool kFolded = sizeof(T) == 2;  // resident_forward.cu
  extern __shared__ __align__(16) char memory[];
  const Walk& w = p.walk;
  const Spot at = SpotOf(w, t);
  const Cluster cluster(t.ctas);
  const int64_t image = at.image * w.pixels * w.row;  // vectors
  const void* const tensors[] = {p.x, p.dy};
  Slots<2, InFlight(GroupNormOp::kBackward)> slots(t, at, tensors, image, memory);

  const int warps = int(blockDim.x) / kWarp;
  float2* warp_sums = reinterpret_cast<float2*>(memory + t.slab);  // (warps, channels)
  float2* cta_sums = warp_sums + warps * t.channels;               // (ctas, channels)
  float2* totals = cta_sums + t.ctas * t.channels;  // (channels), times the channel's scale
  float *constants = reinterpret_cast<float*>(totals + t.channels), *slopes = constants + t.groups;
  Affine<V> a = {};
  if (at.vector < w.row) a = ReadAffine<V>(p, at.image, at.vector * V);
  {
    float s1[V] = {}, s2[V] = {};
    slots.Onwards([&](const uint4(&raw)[2]) {
      float centred[V], dz[V];
      Backpropagate<T, V, kActivation>(w, a, raw[0], raw[1], centred, dz);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        s1[j] += dz[j];
        s2[j] = fmaf(dz[j], centred[j], s2[j]);
      }
    });
    SumWarp<V>(t, at, s1, s2, warp_sums + at.warp * t.channels);
  }
  __syncthreads();
  cluster.Meet();
  for (int c = threadIdx.x; c < t.channels; c += blockDim.x) {
    float2 sum = warp_sums[c];
#pragma unroll 4
    for (int warp = 1; warp < warps; ++warp) {
      sum.x += warp_sums[warp * t.channels + c].x;
      sum.y += warp_sums[warp * t.channels + c].y;
    }
    for (int r = 0; r < t.ctas; ++r) cluster.Put(cta_sums + at.rank * t.channels + c, r, sum);
  }
  cluster.MeetAgain();
  const int first_channel = at.tile * t.channels;
  const float* rstd = p.rstd + at.image * w.groups;
  for (int c = threadIdx.x; c < t.channels; c += blockDim.x) {
    const int channel = first_channel + c;
    if (channel >= w.channels) break;
    float2 sum = cta_sums[c];
    for (int r = 1; r < t.ctas; ++r) {
      sum.x += cta_sums[r * t.channels + c].x;
      sum.y += cta_sums[r * t.channels + c].y;
    }
    if (at.rank == 0) {
      float* shares = p.sums + at.image * 2 * w.channels + channel;
      shares[0] = sum.x;
      shares[w.channels] = sum.y * rstd[channel / w.group_channels];
    }
    const float scale =
        p.scale[int64_t(uint32_t(at.image) / w.per_instance) * w.channels + channel];
    totals[c] = make_float2(scale * sum.x, scale * sum.y);
  }
  AllowLaunchAfter();
  if (p.dx == nullptr) return;
  __syncthreads();
  // dx = factor * dz + constant + slope * (x - mean)
  const int first_group = at.tile * t.groups, groups = min(t.groups, w.groups - first_group);
  const float inv_n = static_cast<float>(w.inv_n);
  for (int g = at.warp; g < groups; g += warps) {
    const float2 sum =
        SumOf(w.group_channels, [&](int i) { return totals[g * w.group_channels + i]; });
    if (threadIdx.x % kWarp == 0) {
      const float r = rstd[first_group + g];
      constants[g] = -r * (sum.x * inv_n);
      slopes[g] = -(r * (sum.y * inv_n)) * r * r;  // r's cube may be below float32's numbers
    }
  }
  __syncthreads();
  if (at.count == 0) return;
  float constant[V], slope[V];
  ForChannels<V>(w, at.lane * V, [&](int j, int group) {
    constant[j] = constants[group];
    slope[j] = slopes[group];
    if (kFolded) {
      a.offset[j] = fmaf(-a.mean[j], a.factor[j], a.offset[j]);
      constant[j] = fmaf(-a.mean[j], slope[j], constant[j]);
      a.mean[j] = 0.f;
    }
  });
  T* dx = static_cast<T*>(p.dx) + image * V;
  slots.Backwards([&](const uint4(&raw)[2], uint32_t place) {
    float x[V], z[V], dz[V];
    Unpack<T, V>(raw[0], x);
    Unpack<T, V>(raw[1], dz);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (!kFolded) x[j] -= a.mean[j];
      z[j] = fmaf(x[j], a.factor[j], a.offset[j]);
    }
    Apply<true, kActivation, T>(w.activation, w.slope, z, dz);
#pragma unroll
    for (int j = 0; j < V; ++j) dz[j] = fmaf(dz[j], a.factor[j], fmaf(slope[j], x[j], constant[j]));
    Write<T, V>(dx, place, dz);
  });
}

}  // namespace

Status ResidentBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                        const Device& device, bool aligned, const BackwardArgs& args,
                        const std::string& what) {
  if (args.walk.images == 0) return Status::Ok();
  return WithInstance(p, aligned, [&](auto element, auto vector, auto activation) -> Status {
    using T = decltype(element);
    constexpr int V = decltype(vector)::value, kActivation = decltype(activation)::value;
    if constexpr (V == 1) {
      return NeedsVectors(what);
    } else {
      return LaunchResident(ctx, GroupNormOp::kBackward, p, plan, device,
                            ResidentKernel<T, V, kActivation>, args, what);
    }
  });
}

}  // namespace jaxconv::cuda::groupnorm
