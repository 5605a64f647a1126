// What the way back through an activation is in any type: f' from c (sm90_gradient.h), and where the sums of columns go.
#pragma once

#include "common/activation.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/derivative.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// The piecewise linear activations: f' is 1 in [from, to]; outside it is `below`, or dy is dropped.
struct LinearPieces {
  float from, to, below;
  bool drops;
  __device__ __forceinline__ explicit LinearPieces(const Sm90Epilogue& e)
      : from(e.activation == Activation::kLeakyRelu ? 0.f : kLeastAboveZero),
        to(e.activation == Activation::kRelu6 ? kLastBelowSix : INFINITY),
        below(e.activation == Activation::kLeakyRelu ? e.slope : 1.f),
        drops(e.activation == Activation::kRelu || e.activation == Activation::kRelu6) {}
  __device__ __forceinline__ float operator()(float z, float dy) const {
    return z >= from && z <= to ? dy : drops ? 0.f : dy * below;
  }
};

// f' from c, of an activation that is not piecewise linear. kShort: as ActivateGrad's.
template <Activation kActivation, bool kShort>
__device__ __forceinline__ float SlopeFrom(float c) {
  if constexpr (kActivation == Activation::kElu) {
    return c > 0.f ? 1.f : 1.f + c;
  } else if constexpr (kActivation == Activation::kTanh) {
    return fmaf(-c, c, 1.f);
  } else if constexpr (kActivation == Activation::kSigmoid) {
    return fmaf(-c, c, c);
  } else if constexpr (kActivation == Activation::kHardSwish) {  // ActivateGrad's form spills
    return c >= 3.f ? 1.f : c <= -3.f ? 0.f : fmaf(c, 1.f / 3, 0.5f);
  } else {
    return ActivateGrad<float, kShort>(kActivation, c, 0.f);
  }
}

template <typename T>
struct Sm90GradientTotals {
  __device__ __forceinline__ void operator()(int column, const float (&sum)[1]) const {
    to[column] = FromFloat<T>(sum[0]);
  }
  T* to;
};

}  // namespace jaxconv::cuda
