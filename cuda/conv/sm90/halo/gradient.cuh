// What the dgrads share that go back through an activation and sum up (HaloBeside::kKept, kNormed). A thread's accumulators are of two
// channels, upper and lower, so it has two sums (kNormed: four) over all tiles of its warpgroup; the four lanes that share the channels
// add theirs up, a warpgroup leaves a part, and a second kernel adds the parts up. The order of every addition is fixed
// by the problem and the number of CTAs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_gradient.cuh"
#include "cuda/gemm/sm90_sums.cuh"

namespace jaxconv::cuda {

// Registers of a thread that loads, and of one that multiplies: 504 with one warpgroup of those and two of these.
constexpr int HaloProducer(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 40 : kProducerRegisters;
}
constexpr int HaloConsumer(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 232 : kConsumerRegisters;
}

constexpr int HaloSums(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 2 : beside == HaloBeside::kKept ? 1 : 0;
}

// Volatile: the compiler would load it once, and run out of registers.
__device__ __forceinline__ float LoadAgain(const float* from) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];\n" : "=f"(v) : "l"(from));
  return v;
}

// Of a thread's upper and lower channel: z = (x - mean) * s + t. 0 of one that is not there.
struct HaloAffine {
  __device__ __forceinline__ HaloAffine(const HaloNorm& norm, int64_t channel, bool has_upper,
                                        bool has_lower) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      mean[row] = s[row] = t[row] = 0.f;
      if (row == 0 ? !has_upper : !has_lower) continue;
      const int64_t at = channel + row * 8;
      mean[row] = LoadAgain(norm.mean + at);
      s[row] = LoadAgain(norm.scale + at) * LoadAgain(norm.rstd + at);
      t[row] = LoadAgain(norm.bias + at);
    }
  }
  __device__ __forceinline__ float Of(float centred, int row) const {
    return fmaf(centred, s[row], t[row]);
  }
  float mean[2], s[2], t[2];
};

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

inline Status AddHaloNormSums(const Context& ctx, const HaloProduct& p, const std::string& what) {
  return LaunchColumnTotals<32, 2>(ctx, p.parts, 2 * p.ctas, p.instances * p.n,
                                   Sm90NormTotals{p.norm.rstd, p.norm.dscale, p.norm.dbias}, what);
}

}  // namespace jaxconv::cuda
