// See statistics.h. Eight channels to a CTA, 32 threads to a channel, each of which merges every 32nd
// part; then shuffles and shared memory, in an order that the number of parts fixes. Means are held
// as differences from the first part's, which are of the size of the deviations: merging rounds
// those and not the mean. Reads every part once: latency is all that this costs.
#include "cuda/conv/common/statistics.h"

#include <cuda_runtime.h>

#include "cuda/gemm/moments.cuh"

namespace jaxconv::cuda {
namespace {

constexpr int kChannels = 8;  // 64 bytes of a part
constexpr int kThreads = 256;
constexpr int kLanes = kThreads / kChannels;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps / 2 * kChannels == 32);
// Loads of a thread on their way: all, where there are two parts a multiprocessor.
constexpr int kFlight = 9;

__device__ __forceinline__ Moments Across(const Moments& a, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, a.count, lanes), __shfl_xor_sync(0xffffffffu, a.mean, lanes),
          __shfl_xor_sync(0xffffffffu, a.m2, lanes)};
}

__global__ void __launch_bounds__(kThreads)
    CombineStatisticsKernel(const StatisticsParts from, float rows, int64_t channels, float* mean,
                            float* var) {
  __shared__ Moments shared[kWarps][kChannels];
  const int c = threadIdx.x % kChannels, lane = threadIdx.x / kChannels;
  const int64_t channel = int64_t(blockIdx.x) * kChannels + c;
  const float2* moments = from.moments + channel;
  const float origin = moments[0].x;
  Moments all = {0.f, 0.f, 0.f};
  for (int part = lane; part < from.parts; part += kFlight * kLanes) {
    float2 v[kFlight];
    float count[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int at = part + i * kLanes;
      v[i] = at < from.parts ? moments[at * channels] : make_float2(0.f, 0.f);
      count[i] = at < from.parts ? from.counts[at] : 0.f;
    }
    Moments some[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      some[i] = {count[i], count[i] > 0.f ? v[i].x - origin : 0.f, v[i].y};
    }
    // By twos: the chain of merges is what takes time.
#pragma unroll
    for (int step = 1; step < kFlight; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kFlight; i += 2 * step) some[i] = Merge(some[i], some[i + step]);
    }
    all = Merge(all, some[0]);
  }
  all = Merge(all, Across(all, 8));
  all = Merge(all, Across(all, 16));
  if (threadIdx.x % 32 < kChannels) shared[threadIdx.x / 32][c] = all;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  all = Merge(shared[lane][c], shared[lane + kWarps / 2][c]);
  all = Merge(all, Across(all, 8));
  all = Merge(all, Across(all, 16));
  if (threadIdx.x >= kChannels) return;
  mean[channel] = origin + all.mean;
  var[channel] = all.m2 / rows;
}

}  // namespace

Status CombineStatistics(const Context& ctx, const StatisticsParts& from, int64_t rows,
                         int64_t channels, void* mean, void* var, const std::string& what) {
  if (rows < 1 || channels % kChannels != 0) {
    return Status::Invalid(what + ": statistics need at least one row and channels in eights");
  }
  CombineStatisticsKernel<<<unsigned(channels / kChannels), kThreads, 0, ctx.stream>>>(
      from, float(rows), channels, static_cast<float*>(mean), static_cast<float*>(var));
  return LaunchStatus(what + " statistics");
}

}  // namespace jaxconv::cuda
