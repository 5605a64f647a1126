// The epilogue of the sm_90a products: a warpgroup's accumulators to
//
//   z = alpha * sum + bias;  d = f(z)
//
// in 16 bit, 64 x 64 outputs at a time: registers, activation, shared memory (stmatrix, in the copy
// engine's swizzle), and a bulk store that is waited for only when its 8 KiB are needed again.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/problem.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/mbarrier.cuh"
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma.cuh"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// 1 / (1 + exp(-z)). Relative error a few 2^-23 wherever the result is normal; far below a 16-bit
// output's half ulp.
__device__ __forceinline__ float FastSigmoid(float z) { return __fdividef(1.f, 1.f + __expf(-z)); }

// f over a thread's outputs. Formulas that are short by now are unrolled; the others go through one
// copy of the code, four values at a time, the array turning like a wheel.
template <int kCount>
__device__ __forceinline__ void ActivateFast(Activation activation, float slope,
                                             float (&v)[kCount]) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = Activate(Activation::kRelu, v[i], 0.f);
      return;
    case Activation::kSigmoid:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = FastSigmoid(v[i]);
      return;
    case Activation::kSilu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] *= FastSigmoid(v[i]);
      return;
    case Activation::kGelu:
      // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u))
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[i] *= FastSigmoid(1.5957691216057308f * v[i] * fmaf(0.044715f * v[i], v[i], 1.f));
      }
      return;
    default:
#pragma unroll 1
      for (int turn = 0; turn < kCount; turn += 4) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = Activate(activation, v[i], slope);
#pragma unroll
        for (int i = 0; i + 4 < kCount; ++i) v[i] = v[i + 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[kCount - 4 + i] = y[i];
      }
  }
}

__device__ __forceinline__ uint32_t PackHalves(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t PackHalves(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The bias of a thread's columns in kTileN columns, two elements a register, fetched before the
// main loop so that its latency hides there.
template <typename T, int kTileN>
struct ColumnBias {
  // n: the tile's first column; n_end is a multiple of 8.
  __device__ __forceinline__ void Load(const Sm90Epilogue& e, int instance, int n, int n_end) {
    if (e.bias_kind != BiasKind::kColumn) return;
    const T* bias = static_cast<const T*>(e.bias) + instance * e.stride_bias;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      pair[j] =
          n + j * 8 < n_end
              ? __ldg(reinterpret_cast<const uint32_t*>(bias + n + j * 8 + threadIdx.x % 4 * 2))
              : 0;
    }
  }
  uint32_t pair[kTileN / 8];
};

__device__ __forceinline__ float2 UnpackPair(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
__device__ __forceinline__ float2 UnpackPair(uint32_t pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// alpha * sum + bias over a thread's part of 64 x 64 outputs, in the order of wgmma's registers. m:
// the thread's first row; `chunk`: which 64 of the tile's columns.
template <typename T, int kTileN>
__device__ __forceinline__ void ScaleAndBias(const Sm90Epilogue& e, int instance, int m, int m_end,
                                             const ColumnBias<T, kTileN>& columns, int chunk,
                                             float (&v)[32]) {
  if (e.alpha != 1.f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] *= e.alpha;
  }
  if (e.bias_kind == BiasKind::kNone) return;
  if (e.bias_kind == BiasKind::kColumn) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 b = UnpackPair(columns.pair[chunk * 8 + j], T());
      v[j * 4] += b.x;
      v[j * 4 + 1] += b.y;
      v[j * 4 + 2] += b.x;
      v[j * 4 + 3] += b.y;
    }
    return;
  }
  const T* bias = static_cast<const T*>(e.bias) + instance * e.stride_bias;
  const bool scalar = e.bias_kind == BiasKind::kScalar;
  const float upper = ToFloat(bias[scalar || m >= m_end ? 0 : m]);
  const float lower = ToFloat(bias[scalar || m + 8 >= m_end ? 0 : m + 8]);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j * 4] += upper;
    v[j * 4 + 1] += upper;
    v[j * 4 + 2] += lower;
    v[j * 4 + 3] += lower;
  }
}

// A warpgroup's boxes of 64 rows x 64 columns on their way out: a ring of kPairs pairs. All 128
// threads call everything: Open, Put once or twice, Close.
template <typename T, int kPairs>
struct Sm90Outbox {
  // `barrier`: the named barrier of this warpgroup.
  __device__ __forceinline__ Sm90Outbox(uint32_t shared, int barrier)
      : shared(shared), barrier(barrier), leader(threadIdx.x % 128 == 0) {}

  __device__ __forceinline__ uint32_t Pair() const { return shared + pair * 2 * kBlockBytes; }

  // Waits until this pair's last contents are read.
  __device__ __forceinline__ void Open() const {
    if (leader) StoreWaitRead<kPairs - 1>();
    NamedBarrier(barrier, 128);
  }

  // v, in the order of wgmma's registers, rounded to T.
  __device__ __forceinline__ void Put(int which, const float (&v)[32]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // [0, 64)
    const uint32_t box = Pair() + which * kBlockBytes + row * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                       box + (((j * 2 + lane / 16) ^ (row % 8)) * 16)),
                   "r"(PackHalves(v[j * 8], v[j * 8 + 1], T())),
                   "r"(PackHalves(v[j * 8 + 2], v[j * 8 + 3], T())),
                   "r"(PackHalves(v[j * 8 + 4], v[j * 8 + 5], T())),
                   "r"(PackHalves(v[j * 8 + 6], v[j * 8 + 7], T()))
                   : "memory");
    }
  }

  // store(address of the pair) issues the bulk stores.
  template <typename Store>
  __device__ __forceinline__ void Close(Store&& store) {
    FenceForTma();
    NamedBarrier(barrier, 128);
    if (leader) {
      store(Pair());
      StoreCommit();
    }
    pair = pair + 1 == kPairs ? 0 : pair + 1;
  }

  __device__ __forceinline__ void Drain() const {
    if (leader) StoreWait();
  }

  uint32_t shared;
  int barrier;
  bool leader;
  int pair = 0;
};

}  // namespace jaxconv::cuda
