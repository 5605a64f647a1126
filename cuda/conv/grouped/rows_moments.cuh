// The statistics of what rows.cu writes: of each channel, over the pixels of a warp's rows, as rounded,
//
//   mean = sum y / n;  m2 = sum (y - mean)^2
//
// A lane keeps sums of y - k and (y - k)^2 of the pixels and the four channels of its fragments as long as the block lives.
// k is the channel's own element in the middle of the warp's first tile, the same for all lanes, so at the end their sums
// just add. Sums that are exact stay exact, whatever the mean is: of n elements, one of which is k, the variance loses at
// most n ulps of float32. Each warp makes a part; conv/common/statistics.h merges them in order.
#pragma once

#include <cstdint>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/core/raw.cuh"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda::conv {

template <typename T>
struct RowMoments {
  static constexpr uint32_t kNone = 0xffffffffu;  // no float rounds to it

  uint32_t about[2] = {kNone, kNone};  // k of two channels, as y has them: [octet]
  float sum[2][2] = {}, square[2][2] = {};

  // A tile: [octet][pixel lane / 4, then that + 8], of which the first `columns` exist, at least one.
  __device__ __forceinline__ void Add(const uint32_t (&word)[4], int columns) {
    const int lane = threadIdx.x % 32;
    if (about[0] == kNone) {  // all lanes alike
      const int from = min(columns / 2, 7) * 4 + lane % 4;
      about[0] = __shfl_sync(0xffffffffu, word[0], from);
      about[1] = __shfl_sync(0xffffffffu, word[2], from);
    }
    const bool exists[2] = {lane / 4 < columns, lane / 4 + 8 < columns};
    float k[8], v[8];
    Unpack<T, 8>(make_uint4(about[0], about[0], about[1], about[1]), k);
    Unpack<T, 8>(make_uint4(exists[0] ? word[0] : about[0], exists[1] ? word[1] : about[0],
                            exists[0] ? word[2] : about[1], exists[1] ? word[3] : about[1]),
                 v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float d = v[i] - k[i];
      sum[i / 4][i % 2] += d;
      square[i / 4][i % 2] = fmaf(d, d, square[i / 4][i % 2]);
    }
  }

  // Part `part` of these 16 channels, from channel0 on, of `channels`: of `count` pixels.
  __device__ __forceinline__ void Write(const StatisticsParts& to, int part, int channel0,
                                        int channels, int count) const {
    const int lane = threadIdx.x % 32;
    float k[8];
    Unpack<T, 8>(make_uint4(about[0], about[0], about[1], about[1]), k);
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      float2 moments[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float s1 = sum[o][e], s2 = square[o][e];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) {
          s1 += __shfl_xor_sync(0xffffffffu, s1, other);
          s2 += __shfl_xor_sync(0xffffffffu, s2, other);
        }
        const float offset = s1 / float(count), m2 = fmaf(-s1, offset, s2);
        // NaN stays.
        moments[e] =
            count == 0 ? float2{} : make_float2(k[o * 4 + e] + offset, m2 < 0.f ? 0.f : m2);
      }
      const int channel = channel0 + o * 8 + lane * 2;
      if (lane < 4 && channel < channels) {
        *reinterpret_cast<float4*>(to.moments + int64_t(part) * channels + channel) =
            make_float4(moments[0].x, moments[0].y, moments[1].x, moments[1].y);
      }
    }
    if (lane == 0 && channel0 == 0) to.counts[part] = float(count);
  }
};

}  // namespace jaxconv::cuda::conv
