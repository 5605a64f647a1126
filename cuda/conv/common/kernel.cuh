// What the convolution kernels of this folder share: division by run-time constants, the
// element-type switch, the epilogue of one output element, and the domain check of an index.
#pragma once

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/common/domain.h"
#include "cuda/core/activate.cuh"
#include "cuda/core/context.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/divmod.h"
#include "cuda/core/vec.cuh"

namespace jaxconv::cuda::conv {

struct QuotRem {
  int64_t quot;
  int rem;
};

// A tensor past 2^31 elements pays a 64-bit division; the usual one does not.
JAXCONV_HD QuotRem DivMod(int64_t n, FastDiv by) {
  if (n >> 31 == 0) {
    const uint32_t q = by.Div(uint32_t(n));
    return {int64_t(q), int(uint32_t(n) - q * by.d)};
  }
  const int64_t q = n / by.d;
  return {q, int(n - q * by.d)};
}

// Coordinates of every kernel are ints: extents, strides, paddings and dilated filter spans below
// 2^30, so that the sum of two stays an int.
JAXCONV_HD bool Inside(int a, int b, int extent) {
  return unsigned(a) + unsigned(b) < unsigned(extent);
}

// The largest dilation that the depthwise kernels' runs take along rows of `extent`: a larger one would
// leave most residues empty, and coordinates a few steps past the end must stay ints.
inline int64_t MostDilation(int64_t extent) {
  const int64_t most = int64_t(1) << 26;
  return extent < 1 ? 1 : extent < most ? extent : most;
}

// Ok if the workspace holds `needed` bytes.
Status CheckWorkspace(Workspace workspace, int64_t needed, const std::string& what);

// grid.x for `blocks` of them, or the sentence that says that they are too many.
Status CheckBlocks(int64_t blocks, const std::string& what);

// Three ints for a kernel.
struct Extents {
  int v[3];
};

inline Extents ToExtents(const int64_t (&v)[3]) { return {{int(v[0]), int(v[1]), int(v[2])}}; }

inline bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename T>
struct TypeTag {
  using type = T;
};

// f(TypeTag<element>{}); float64 and unknown types are the dispatch's to refuse.
template <typename F>
Status ForElement(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(TypeTag<float>{});
    case DType::kBF16:
      return f(TypeTag<__nv_bfloat16>{});
    case DType::kF16:
      return f(TypeTag<__half>{});
    default:
      return Status::Unimplemented(std::string("conv: ") + Name(dtype) +
                                   " has no CUDA kernel; expected float32, bfloat16 or float16");
  }
}

// bias (K) and z (like y) are null when absent.
template <typename T>
struct EpilogueArgs {
  const T* bias;
  T* z;
  Activation activation;
  float slope;
};

template <typename T>
EpilogueArgs<T> MakeEpilogue(const Epilogue& e, const void* bias, void* z) {
  return {e.bias ? static_cast<const T*>(bias) : nullptr,
          e.save_preactivation ? static_cast<T*>(z) : nullptr, e.activation, float(e.slope)};
}

// `p` is aligned to the vector; it is read only where `inside`.
template <typename T, int V>
__device__ __forceinline__ void LoadOrZero(bool inside, const T* p, Vec<T, V>& v) {
  if (inside) {
    v = *reinterpret_cast<const Vec<T, V>*>(p);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) v.v[i] = FromFloat<T>(0.f);
  }
}

// Two 16-bit elements as one word, the first in the low half.
__device__ __forceinline__ uint32_t PackPair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t PackPair(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Stores kCount elements at once; `p` is aligned to them. Words are packed and stored by
// intrinsics: nvcc 13.0 splits the plain assignment of a struct, even of a uint4, into element
// stores on one of two paths that store.
template <typename T, int kCount>
__device__ __forceinline__ void StorePacked(T* p, const float (&in)[kCount]) {
  constexpr int kWords = kCount * int(sizeof(T)) / 4;
  if constexpr (kCount == 1) {
    *p = FromFloat<T>(in[0]);
  } else {
    uint32_t word[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = __float_as_uint(in[i]);
      } else {
        word[i] = PackPair(in[2 * i], in[2 * i + 1], T());
      }
    }
    static_assert(kWords == 4 || kWords == 2);
    if constexpr (kWords == 4) {
      __stwb(reinterpret_cast<uint4*>(p), make_uint4(word[0], word[1], word[2], word[3]));
    } else {
      __stwb(reinterpret_cast<uint2*>(p), make_uint2(word[0], word[1]));
    }
  }
}

// One copy per unit: inlined, ten formulas times the outputs of a thread would swamp the main
// loops.
static __device__ __noinline__ float ActivateCall(Activation activation, float z, float slope) {
  return Activate(activation, z, slope);
}
static __device__ __noinline__ float4 ActivateCall(Activation activation, float4 z, float slope) {
  float v[4] = {z.x, z.y, z.z, z.w};
  ActivateGroup(activation, slope, v);
  return make_float4(v[0], v[1], v[2], v[3]);
}

// `activation` is uniform over the grid.
__device__ __forceinline__ float ApplyActivation(Activation activation, float z, float slope) {
  if (activation == Activation::kNone) return z;
  if (activation == Activation::kRelu) return Activate(Activation::kRelu, z, slope);
  return ActivateCall(activation, z, slope);
}

// The same for several outputs of a thread. Many, which it makes once, are computed side by side; of a few in a main loop
// that would cost the loop registers, and other warps hide the calls.
template <int kCount>
__device__ __forceinline__ void ApplyActivation(Activation activation, float (&z)[kCount],
                                                float slope) {
  if constexpr (kCount >= 16) {
    static_assert(kCount % 4 == 0);
    if (ActivateFrequent(activation, slope, z)) return;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 y =
          ActivateCall(activation, make_float4(z[i], z[i + 1], z[i + 2], z[i + 3]), slope);
      z[i] = y.x;
      z[i + 1] = y.y;
      z[i + 2] = y.z;
      z[i + 3] = y.w;
    }
    return;
  }
  if (activation == Activation::kNone) return;
  if (activation == Activation::kRelu) return ActivateEach<Activation::kRelu>(slope, z);
#pragma unroll
  for (int i = 0; i < kCount; ++i) z[i] = ActivateCall(activation, z[i], slope);
}

}  // namespace jaxconv::cuda::conv
