// The epilogue of the sm_90a products: a warpgroup's accumulators to
//
//   z = alpha * sum + beta * c + bias;  d = f(z)
//
// in 16 bit, 64 x 64 outputs at a time: registers, activation, shared memory (stmatrix, in TMA's
// swizzle), and a bulk store that is waited for only when its 8 KiB are needed again.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/problem.h"
#include "cuda/core/activate.cuh"
#include "cuda/core/convert.cuh"
#include "cuda/core/mbarrier.cuh"
#include "cuda/core/tma.cuh"
#include "cuda/core/wgmma.cuh"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// 2^z and 1 / z, each one instruction of the special function unit (a quarter of an instruction's
// rate); relative errors 2^-22 and 2^-23.
__device__ __forceinline__ float FastExp2(float z) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(z));
  return y;
}
__device__ __forceinline__ float FastReciprocal(float z) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(z));
  return y;
}

inline constexpr float kLog2E = 1.4426950408889634f;

// max(z, 0), NaN where z is.
__device__ __forceinline__ float FastRelu(float z) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;\n" : "=f"(y) : "f"(z));
  return y;
}

// 1 / (1 + exp(-z)), far below a 16-bit output's half ulp wherever that is normal.
__device__ __forceinline__ float FastSigmoid(float z) {
  return FastReciprocal(1.f + FastExp2(-kLog2E * z));
}

// The unit's own tanh errs by 2^-11 of the result: a quarter of bfloat16's half ulp, but two of
// float16's.
__device__ __forceinline__ float FastTanh(float z, __nv_bfloat16) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(z));
  return y;
}
// Below 0.03 the series, whose next term is 1e-7 of the result; above it the difference cancels no
// more than 6 bits. Both are computed: a branch a value cost five times as much.
__device__ __forceinline__ float FastTanh(float z, __half) {
  const float series = z * fmaf(-0.333333333f * z, z, 1.f);
  const float other = fmaf(-2.f, FastReciprocal(1.f + FastExp2(2.f * kLog2E * z)), 1.f);
  float y;
  asm("{\n.reg .pred p;\nsetp.lt.f32 p, %1, 0f3CF5C28F;\nselp.f32 %0, %2, %3, p;\n}\n"  // 0.03
      : "=f"(y)
      : "f"(fabsf(z)), "f"(series), "f"(other));
  return y;
}

// 0.5 z (1 + tanh u), u = sqrt(2 / pi) (z + 0.044715 z^3). In bfloat16 by the unit's tanh: rounding hides
// its error down to z = -4; below, where |y| < 2e-4, y errs by up to 2e-6.
__device__ __forceinline__ float FastGelu(float z, __nv_bfloat16) {
  const float u = z * fmaf(0.035677408f * z, z, 0.79788456f), half = 0.5f * z;
  return fmaf(half, FastTanh(u, __nv_bfloat16()), half);
}
// 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)): no cancellation.
__device__ __forceinline__ float FastGelu(float z, __half) {
  return z * FastSigmoid(z * fmaf(0.071354816f * z, z, 1.5957691216057308f));
}

// z Phi(z), Phi(-|z|) = 0.5 erfc(|z| / sqrt(2)) = exp(-z^2 / 2) t P(t), t = 1 / (1 + 0.3182 |z|). P was fitted to
// a relative error of 1e-5 over |z| < 21; beyond, the exponential is 0. Branch-free and short of registers, unlike erfcf.
__device__ __forceinline__ float FastGeluExact(float z) {
  const float t = FastReciprocal(fmaf(0.318198052f, fabsf(z), 1.f));
  float tail = fmaf(-0.0679535854f, t, 0.146197699f);
  tail = fmaf(tail, t, 0.0446375017f);
  tail = fmaf(tail, t, 0.124290822f);
  tail = fmaf(tail, t, 0.125837423f);
  tail = fmaf(tail, t, 0.126985401f);
  tail *= t * FastExp2(-0.5f * kLog2E * z * z);
  return z < -20.f ? 0.f : z * (z < 0.f ? tail : 1.f - tail);
}

// f over a thread's outputs, which become T.
template <typename T, int kCount>
__device__ __forceinline__ void ActivateFast(Activation activation, float slope,
                                             float (&v)[kCount]) {
#define JAXCONV_ACTIVATE(kind, expression)                    \
  case Activation::kind:                                      \
    _Pragma("unroll") for (int i = 0; i < kCount; i += 8) {   \
      auto& some = reinterpret_cast<float (&)[8]>(v[i]);      \
      Pin(some); /* or the scheduler runs out of registers */ \
      _Pragma("unroll") for (float& z : some) z = expression; \
      Pin(some);                                              \
    }                                                         \
    return;
  static_assert(kActivationCount == 11, "a new activation needs its case below");
  switch (activation) {
    case Activation::kNone:
      return;
      JAXCONV_ACTIVATE(kRelu, FastRelu(z))
      JAXCONV_ACTIVATE(kRelu6, Activate(Activation::kRelu6, z, 0.f))
      JAXCONV_ACTIVATE(kLeakyRelu, Activate(Activation::kLeakyRelu, z, slope))
      JAXCONV_ACTIVATE(kTanh, FastTanh(z, T()))
      JAXCONV_ACTIVATE(kSigmoid, FastSigmoid(z))
      JAXCONV_ACTIVATE(kSilu, z * FastSigmoid(z))
      JAXCONV_ACTIVATE(kGelu, FastGelu(z, T()))
      JAXCONV_ACTIVATE(kHardSwish, Activate(Activation::kHardSwish, z, 0.f))
    case Activation::kElu:
    case Activation::kGeluExact:
#pragma unroll
      for (int i = 0; i < kCount; i += 32) {
        // Not short, or with branches that cost registers: unrolled, elu spills.
        Wheel(reinterpret_cast<float (&)[32]>(v[i]), [&](float (&some)[4]) {
#pragma unroll
          for (float& z : some)
            z = activation == Activation::kElu ? Activate(Activation::kElu, z, 0.f)
                                               : FastGeluExact(z);
        });
      }
  }
#undef JAXCONV_ACTIVATE
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
// main loop so that its latency hides there; wide tiles have no registers for that.
template <typename T, int kTileN, bool kKept = (kTileN <= 256)>
struct ColumnBias {
  // n: the tile's first column; n_end is a multiple of 8.
  __device__ __forceinline__ void Load(const Sm90Epilogue& e, int instance, int n, int n_end) {
    if (e.bias_kind != BiasKind::kColumn) return;
    from = static_cast<const T*>(e.bias) + instance * e.stride_bias + n + threadIdx.x % 4 * 2;
    left = n_end - n;
    if constexpr (kKept) {
#pragma unroll
      for (int j = 0; j < kTileN / 8; ++j) pair[j] = Fetch(j);
    }
  }
  __device__ __forceinline__ uint32_t Fetch(int j) const {
    return j * 8 < left ? __ldg(reinterpret_cast<const uint32_t*>(from + j * 8)) : 0;
  }
  __device__ __forceinline__ uint32_t Get(int j) const {
    if constexpr (kKept) {
      return pair[j];
    } else {
      return Fetch(j);
    }
  }
  const T* from;
  int left;
  uint32_t pair[kKept ? kTileN / 8 : 1];
};

__device__ __forceinline__ float2 UnpackPair(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
__device__ __forceinline__ float2 UnpackPair(uint32_t pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// alpha * sum + bias over a thread's part of a block of 64 rows, in the order of wgmma's registers.
// m: the thread's first row; its others are 8 below.
template <typename T, int kTileN, bool kKept, int kCount>
__device__ __forceinline__ void ScaleAndBias(const Sm90Epilogue& e, int instance, int m, int m_end,
                                             const ColumnBias<T, kTileN, kKept>& columns,
                                             float (&v)[kCount]) {
  if (e.alpha != 1.f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= e.alpha;
  }
  if (e.bias_kind == BiasKind::kNone) return;
  if (e.bias_kind == BiasKind::kColumn) {
    if constexpr (kCount * 2 == kTileN) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float2 b = UnpackPair(columns.Get(j), T());
        v[j * 4] += b.x;
        v[j * 4 + 1] += b.y;
        v[j * 4 + 2] += b.x;
        v[j * 4 + 3] += b.y;
      }
    }
    return;
  }
  const T* bias = static_cast<const T*>(e.bias) + instance * e.stride_bias;
  const bool scalar = e.bias_kind == BiasKind::kScalar;
  const float upper = ToFloat(bias[scalar || m >= m_end ? 0 : m]);
  const float lower = ToFloat(bias[scalar || m + 8 >= m_end ? 0 : m + 8]);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    v[j * 4] += upper;
    v[j * 4 + 1] += upper;
    v[j * 4 + 2] += lower;
    v[j * 4 + 3] += lower;
  }
}

// v += beta * c, for a thread's part of a block of 64 rows from column n on. c is read as it is
// needed, four bytes at a time, sixteen loads in flight together; neighbours' share their sectors.
template <typename T, int kCount>
__device__ __forceinline__ void AddAddend(const Sm90Epilogue& e, int instance, int m, int m_end,
                                          int n, int n_end, float (&v)[kCount]) {
  if (e.c == nullptr) return;
  const T* c = static_cast<const T*>(e.c) + instance * e.stride_c + int64_t(m) * n_end + n +
               threadIdx.x % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kCount / 32; ++chunk) {
    uint32_t pair[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int below = i % 2 * 8, right = chunk * 64 + i / 2 * 8;
      const bool inside = m + below < m_end && n + right < n_end;  // n_end is a multiple of 8
      const T* at = c + below * int64_t(n_end) + right;
      pair[i] = inside ? __ldg(reinterpret_cast<const uint32_t*>(at)) : 0;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair2 = UnpackPair(pair[i], T());
      v[chunk * 32 + i * 2] = fmaf(e.beta, pair2.x, v[chunk * 32 + i * 2]);
      v[chunk * 32 + i * 2 + 1] = fmaf(e.beta, pair2.y, v[chunk * 32 + i * 2 + 1]);
    }
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

  // v is the transpose of a box: rows of wgmma are its columns.
  __device__ __forceinline__ void PutTransposed(int which, const float (&v)[32]) const {
    const int lane = threadIdx.x % 32;
    const int chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;  // of 8 of the box's columns
#pragma unroll
    for (int j = 0; j < 8; j += 2) {  // 8 of the box's rows
      const int row = (j + lane / 16) * 8 + lane % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                       Pair() + which * kBlockBytes + row * 128 + ((chunk ^ (row % 8)) * 16)),
                   "r"(PackHalves(v[j * 4], v[j * 4 + 1], T())),
                   "r"(PackHalves(v[j * 4 + 2], v[j * 4 + 3], T())),
                   "r"(PackHalves(v[j * 4 + 4], v[j * 4 + 5], T())),
                   "r"(PackHalves(v[j * 4 + 6], v[j * 4 + 7], T()))
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
