// What a thread of halo_3d.cuh keeps over all its places of its 8 channels (Halo3dBeside), and how it writes a place.
//
//   kMoments  of y as rounded, mean = sum y / n and m2 = sum (y - mean)^2. A thread sums up y - k and (y - k)^2, k its own
//             first y of the channel. The 8 lanes of a warp that share channels merge theirs (Chan, Golub and LeVeque 1983).
//   kNormed   dz = f'(z) * dgrad, z = (x - mean) * rstd * scale + bias, as rounded, and the sums of dz and dz * (x - mean)
//
// Each warp leaves a part, which a second kernel adds to others. The problem and the number of CTAs fix the order of every
// addition.
#pragma once

#include <cstdint>

#include "cuda/conv/sm90/halo_3d/halo_3d.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/raw.cuh"
#include "cuda/gemm/moments.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"

namespace jaxconv::cuda {

// Where channel j of a place's 8 is among the thread's sums.
constexpr int Halo3dSum(int j) { return j / 2 * 4 + j % 2; }

template <typename T>
__device__ __forceinline__ uint4 RoundPlace(const float* v) {
  return make_uint4(PackHalves(v[0], v[1], T()), PackHalves(v[4], v[5], T()),
                    PackHalves(v[8], v[9], T()), PackHalves(v[12], v[13], T()));
}

template <typename T>
__device__ __forceinline__ void PutPlace(void* base, int64_t at, uint4 place) {
  *reinterpret_cast<uint4*>(static_cast<T*>(base) + at) = place;
}

template <typename T, Halo3dBeside kBeside>
struct Halo3dSums {
  __device__ __forceinline__ Halo3dSums(const Halo3dProduct&, int) {}
  __device__ __forceinline__ void Write(const Halo3dProduct&, int, int) const {}
};

template <typename T>
struct Halo3dSums<T, Halo3dBeside::kMoments> {
  __device__ __forceinline__ Halo3dSums(const Halo3dProduct&, int) {}

  // pixel: of the plane at base, negative where there is none.
  template <int kPlaces, typename Pixels>
  __device__ __forceinline__ void Put(const Halo3dProduct& p, int64_t base, const Pixels& pixel,
                                      int channel, const float* v) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int at = pixel[i / 2][i % 2];
      if (at < 0) continue;
      const uint4 y = RoundPlace<T>(v + i / 2 * 16 + i % 2 * 2);
      PutPlace<T>(p.d, (base + at) * p.n + channel, y);
      if (count == 0) about = y;
      ++count;
      float k[8], rounded[8];
      Unpack<T, 8>(about, k);
      Unpack<T, 8>(y, rounded);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float d = rounded[j] - k[j];
        sum[j] += d;
        square[j] = fmaf(d, d, square[j]);
      }
    }
  }

  __device__ __forceinline__ void Write(const Halo3dProduct& p, int part, int channel) const {
    float k[8];
    Unpack<T, 8>(about, k);
    float2 of[8];
    float pixels = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Moments m = {float(count), 0.f, 0.f};
      if (count > 0) {
        const float offset = sum[j] / float(count), m2 = fmaf(-sum[j], offset, square[j]);
        m.mean = k[j] + offset;
        m.m2 = m2 < 0.f ? 0.f : m2;  // NaN stays
      }
#pragma unroll
      for (int other = 4; other < 32; other *= 2) {
        m = Merge(m, {__shfl_xor_sync(0xffffffffu, m.count, other),
                      __shfl_xor_sync(0xffffffffu, m.mean, other),
                      __shfl_xor_sync(0xffffffffu, m.m2, other)});
      }
      of[j] = make_float2(m.mean, m.m2);
      pixels = m.count;
    }
    const int lane = threadIdx.x % 32;
    if (lane < 4 && channel < p.n) {
      float4* to = reinterpret_cast<float4*>(p.statistics.moments + int64_t(part) * p.n + channel);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        to[j] = make_float4(of[2 * j].x, of[2 * j].y, of[2 * j + 1].x, of[2 * j + 1].y);
    }
    if (lane == 0 && channel == 0) p.statistics.counts[part] = pixels;
  }

  uint4 about = {};
  int count = 0;
  float sum[8] = {}, square[8] = {};
};

template <typename T>
struct Halo3dSums<T, Halo3dBeside::kNormed> {
  __device__ __forceinline__ Halo3dSums(const Halo3dProduct& p, int channel) {
    const bool exists = channel < p.n;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = channel + j;
      mean[j] = exists ? __ldg(p.norm.mean + c) : 0.f;
      s[j] = exists ? __ldg(p.norm.scale + c) * __ldg(p.norm.rstd + c) : 0.f;
      t[j] = exists ? __ldg(p.norm.bias + c) : 0.f;
    }
  }

  template <int kPlaces, typename Pixels>
  __device__ __forceinline__ void Put(const Halo3dProduct& p, int64_t base, const Pixels& pixel,
                                      int channel, const float* v) {
    uint4 x[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int at = pixel[i / 2][i % 2];
      x[i] = at < 0 ? uint4{}
                    : __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm.x) +
                                                           (base + at) * p.n + channel));
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int at = pixel[i / 2][i % 2];
      if (at < 0) continue;
      float centred[8], dz[16];
      Unpack<T, 8>(x[i], centred);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        centred[j] -= mean[j];
        dz[Halo3dSum(j)] = p.derivative.Linear(fmaf(centred[j], s[j], t[j]),
                                               v[i / 2 * 16 + i % 2 * 2 + Halo3dSum(j)]);
      }
      const uint4 out = RoundPlace<T>(dz);
      PutPlace<T>(p.d, (base + at) * p.n + channel, out);
      float rounded[8];
      Unpack<T, 8>(out, rounded);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[0][j] += rounded[j];
        sum[1][j] = fmaf(rounded[j], centred[j], sum[1][j]);
      }
    }
  }

  __device__ __forceinline__ void Write(const Halo3dProduct& p, int part, int channel) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
          sum[i][j] += __shfl_xor_sync(0xffffffffu, sum[i][j], other);
      }
    }
    if (threadIdx.x % 32 >= 4 || channel >= p.n) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4* to = reinterpret_cast<float4*>(p.sums + (int64_t(part) * 2 + i) * p.n + channel);
      to[0] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      to[1] = make_float4(sum[i][4], sum[i][5], sum[i][6], sum[i][7]);
    }
  }

  float mean[8], s[8], t[8], sum[2][8] = {};
};

}  // namespace jaxconv::cuda
