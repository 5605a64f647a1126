// Reading and writing raw vectors of V elements of T, and the activation over a vector.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/activation.h"
#include "cuda/core/raw.cuh"

namespace jaxconv::cuda::batchnorm {

// Offsets in vectors. `ReadOnce` and `WriteOnce` leave the L2 cache to others: in a second pass the
// tensor's first pass is still partly there.
template <typename T, int V>
__device__ __forceinline__ Raw<T, V> Read(const void* base, int64_t at) {
  return __ldg(static_cast<const Raw<T, V>*>(base) + at);
}
template <typename T, int V>
__device__ __forceinline__ Raw<T, V> ReadOnce(const void* base, int64_t at) {
  return __ldcs(static_cast<const Raw<T, V>*>(base) + at);
}
template <typename T, int V>
__device__ __forceinline__ void Write(void* base, int64_t at, Raw<T, V> v) {
  static_cast<Raw<T, V>*>(base)[at] = v;
}
template <typename T, int V>
__device__ __forceinline__ void WriteOnce(void* base, int64_t at, Raw<T, V> v) {
  __stcs(static_cast<Raw<T, V>*>(base) + at, v);
}

// Rounds max(v, 0); NaN stays NaN.
template <typename T, int V>
__device__ __forceinline__ Raw<T, V> PackRelu(const float (&v)[V]) {
  if constexpr (sizeof(T) == 2 && V == 8) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (std::is_same_v<T, __half>) {
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;\n" : "=r"(w[j]) : "f"(v[2 * j + 1]), "f"(v[2 * j]));
      } else {
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(w[j]) : "f"(v[2 * j + 1]), "f"(v[2 * j]));
      }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    float y[V];
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = Activate(Activation::kRelu, v[j], 0.f);
    return Pack<T, V>(y);
  }
}

// The activations that an instance of a kernel knows. Those that networks train with have code of their own, which can be
// unrolled: several vectors on their way. kAny has one copy of all formulas, through which the vectors pass in turn.
enum class Form {
  kRelu,
  kPiecewise,  // none, relu, relu6, leaky_relu
  kSilu,
  kGelu,  // tanh form
  kHardSwish,
  kAny,
};

constexpr Form FormOf(Activation a) {
  if (a == Activation::kSilu) return Form::kSilu;
  if (a == Activation::kGelu) return Form::kGelu;
  if (a == Activation::kHardSwish) return Form::kHardSwish;
  return a == Activation::kNone || a == Activation::kRelu || a == Activation::kRelu6 ||
                 a == Activation::kLeakyRelu
             ? Form::kPiecewise
             : Form::kAny;
}

constexpr bool Knows(Form form, Activation a) {
  if (form == Form::kRelu) return a == Activation::kRelu;
  return form == Form::kAny || FormOf(a) == form;
}

// v[j] = kGrad ? v[j] * f'(z[j]) : f(z[j])
template <bool kGrad, Activation kActivation, bool kShort, int V>
__device__ __forceinline__ void ApplyOne(const float (&z)[V], float slope, float (&v)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    v[j] = kGrad ? v[j] * ActivateGrad<float, kShort>(kActivation, z[j], slope)
                 : Activate<float, kShort>(kActivation, z[j], slope);
  }
}

// The branches are outside the loop over the vector and uniform: one for each activation of the form from kFrom on, all
// of them without a list that could lack one. kShort: of T (activation.h).
template <bool kGrad, Form kForm, bool kShort, int V, int kFrom = 1>
__device__ __forceinline__ void Apply(Activation a, float slope, const float (&z)[V],
                                      float (&v)[V]) {
  if constexpr (kForm == Form::kRelu) {
    ApplyOne<kGrad, Activation::kRelu, kShort>(z, slope, v);
  } else if constexpr (kForm == Form::kSilu) {
    ApplyOne<kGrad, Activation::kSilu, kShort>(z, slope, v);
  } else if constexpr (kForm == Form::kGelu) {
    ApplyOne<kGrad, Activation::kGelu, kShort>(z, slope, v);
  } else if constexpr (kForm == Form::kHardSwish) {
    ApplyOne<kGrad, Activation::kHardSwish, kShort>(z, slope, v);
  } else if constexpr (kFrom == kActivationCount) {
    ApplyOne<kGrad, Activation::kNone, kShort>(z, slope, v);
  } else {
    constexpr Activation kThis = static_cast<Activation>(kFrom);
    if constexpr (Knows(kForm, kThis)) {
      if (a == kThis) return ApplyOne<kGrad, kThis, kShort>(z, slope, v);
    }
    Apply<kGrad, kForm, kShort, V, kFrom + 1>(a, slope, z, v);
  }
}

}  // namespace jaxconv::cuda::batchnorm
