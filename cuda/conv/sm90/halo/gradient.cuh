// What the dgrads share that go back through an activation and sum up (HaloBeside::kKept, kNormed). A thread's accumulators
// are of two channels, upper and lower, so it has two sums (kNormed: four) over all tiles of its warpgroup; the four lanes
// that share the channels add theirs up, a warpgroup leaves a part, and a second kernel adds the parts up. The order of
// every addition is fixed by the problem and the number of CTAs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_gradient.cuh"

namespace jaxconv::cuda {

// upper, lower: channels of an instance; channel: upper's of all.
template <int kSums>
__device__ __forceinline__ void WriteHaloSums(const HaloProduct& p, int part, int64_t channel,
                                              bool has_upper, bool has_lower,
                                              float (&sum)[kSums][2]) {
#pragma unroll
  for (auto& two : sum) {
#pragma unroll
    for (float& v : two) {
      v += __shfl_xor_sync(0xffffffffu, v, 1);
      v += __shfl_xor_sync(0xffffffffu, v, 2);
    }
  }
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    float* to = p.parts + (int64_t(part) * kSums + i) * p.instances * p.n + channel;
    if (has_upper) to[0] = sum[i][0];
    if (has_lower) to[8] = sum[i][1];
  }
}

// Behind a launch whose p.ctas are filled in.
template <typename T>
Status AddHaloSums(const Context& ctx, const HaloProduct& p, void* dbias, const std::string& what) {
  return LaunchColumnTotals<8, 1>(ctx, p.parts, 2 * p.ctas, p.instances * p.n,
                                  Sm90GradientTotals<T>{static_cast<T*>(dbias)}, what);
}

}  // namespace jaxconv::cuda
