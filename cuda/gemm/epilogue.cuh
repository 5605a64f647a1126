// What follows the sum, for every view of the main loop and for the second pass of a split
// reduction:
//
//   z = alpha * sum + beta * c + bias;  d = f(z)   (or d += ..., float32 partial sums only)
//
// A tile's sums lie in shared memory as float32; each thread then takes runs of 16 bytes along a
// row, so that d, z and c move in full lines whatever the accumulators' layout was.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/problem.h"
#include "cuda/core/activate.cuh"
#include "cuda/core/vec.cuh"

namespace jaxconv::cuda {

struct EpilogueParams {
  void* d = nullptr;
  void* z = nullptr;           // null unless wanted; addressed like d
  const void* c = nullptr;     // null without an addend; (m, n) with leading dimension ldc
  const void* bias = nullptr;  // null without
  int64_t ldd = 0, ldc = 0;
  // Between instances (batch, groups), in elements.
  int64_t stride_d = 0, stride_c = 0, stride_bias = 0;
  int64_t part_stride = 0;  // between the float32 partial sums of a split reduction, in elements
  float alpha = 1.f, beta = 0.f, slope = 0.f;
  BiasKind bias_kind = BiasKind::kNone;
  Activation activation = Activation::kNone;
  bool float32_out = false;
  bool accumulate = false;
  bool vector = false;  // bases, strides and leading dimensions of d, z, c allow 16-byte accesses
};

// The bias of columns [n, n + kCount), zero past n_end. Scalar and row biases are added by row, in
// FinishRun.
template <typename T, int kCount>
__device__ __forceinline__ void LoadColumnBias(const EpilogueParams& e, int instance, int n,
                                               int n_end, float (&bias)[kCount]) {
  const T* p = static_cast<const T*>(e.bias) + instance * e.stride_bias;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    bias[i] = e.bias_kind == BiasKind::kColumn && n + i < n_end ? ToFloat(p[n + i]) : 0.f;
  }
}

template <typename U, int kCount>
__device__ __forceinline__ void StoreRun(U* p, bool whole, int count, const float (&v)[kCount]) {
  if (whole) {
    StoreVec<U, kCount>(p, v);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) p[i] = FromFloat<U>(v[i]);
    }
  }
}

template <typename U, int kCount>
__device__ __forceinline__ void LoadRun(const U* p, bool whole, int count, float (&v)[kCount]) {
  if (whole) {
    LoadVec<U, kCount>(p, v);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = i < count ? ToFloat(p[i]) : 0.f;
  }
}

// Row m, columns [n, n + kCount) clipped at n_end; `row` is the offset of d's row from d's base.
// kPlain: d = sum, and no code for anything else.
template <typename T, bool kPlain, int kCount>
__device__ __forceinline__ void FinishRun(const EpilogueParams& e, int instance, int part,
                                          int64_t row, int m, int n, int n_end,
                                          const float (&bias)[kCount], float (&v)[kCount]) {
  const int count = n_end - n;
  const bool whole = e.vector && count >= kCount;
  const int64_t at = instance * e.stride_d + part * e.part_stride + row + n;
  if constexpr (!kPlain) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= e.alpha;
    if (e.c != nullptr) {
      float c[kCount];
      const int64_t at_c = instance * e.stride_c + m * e.ldc + n;
      LoadRun(static_cast<const T*>(e.c) + at_c, whole, count, c);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = fmaf(e.beta, c[i], v[i]);
    }
    if (e.bias_kind == BiasKind::kScalar || e.bias_kind == BiasKind::kRow) {
      const T* p = static_cast<const T*>(e.bias) + instance * e.stride_bias;
      const float b = ToFloat(p[e.bias_kind == BiasKind::kRow ? m : 0]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += b;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += bias[i];
    }
    if (e.z != nullptr) {
      if (e.float32_out) {
        StoreRun(static_cast<float*>(e.z) + at, whole, count, v);
      } else {
        StoreRun(static_cast<T*>(e.z) + at, whole, count, v);
      }
    }
    ActivateAll(e.activation, e.slope, v);
  }
  if (e.float32_out) {
    float* d = static_cast<float*>(e.d) + at;
    if (!kPlain && e.accumulate) {
      float old[kCount];
      LoadRun(d, whole, count, old);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += old[i];
    }
    StoreRun(d, whole, count, v);
  } else {
    StoreRun(static_cast<T*>(e.d) + at, whole, count, v);
  }
}

// Shared memory for a tile's sums: rows of kTileN + 8 floats, so that a warp's 8-byte stores of mma
// accumulators (8 rows x 4 pairs) meet no bank twice.
template <int kTileN>
inline constexpr int kStagePitch = kTileN + 8;

// The tile at (m0, n0). out_row[i]: offset of row m0 + i in d, or -1 outside.
template <typename T, bool kPlain, int kTileM, int kTileN, int kThreads>
__device__ __forceinline__ void FinishTile(const EpilogueParams& e, const float* stage,
                                           const int64_t* out_row, int instance, int part, int m0,
                                           int n0, int n_end) {
  constexpr int kRun = kVecWidth<T>;
  constexpr int kRuns = kTileN / kRun;  // in a row
  static_assert(kThreads % kRuns == 0);
  const int column = threadIdx.x % kRuns * kRun;
  const int n = n0 + column;
  if (n >= n_end) return;
  float bias[kRun];
  if constexpr (!kPlain) LoadColumnBias<T>(e, instance, n, n_end, bias);
#pragma unroll 1
  for (int i = threadIdx.x / kRuns; i < kTileM; i += kThreads / kRuns) {
    const int64_t row = out_row[i];
    if (row < 0) continue;
    float v[kRun];
    LoadVec<float, kRun>(stage + i * kStagePitch<kTileN> + column, v);
    FinishRun<T, kPlain>(e, instance, part, row, m0 + i, n, n_end, bias, v);
  }
}

}  // namespace jaxconv::cuda
