// f over the outputs of a thread, float32. The activation is uniform over the grid: its switch is taken once for several
// values, which are then computed side by side. Taken for each, with a call or a turn of a wheel, silu took 0.1 us a value,
// which nothing hides where a multiprocessor has one tile.
#pragma once

#include "common/activation.h"

namespace jaxconv::cuda {

template <Activation kActivation, int kCount>
__device__ __forceinline__ void ActivateEach(float slope, float (&v)[kCount]) {
#pragma unroll
  for (float& z : v) z = Activate(kActivation, z, slope);
}

template <int kCount>
__device__ __forceinline__ void ActivateGroup(Activation activation, float slope,
                                              float (&v)[kCount]) {
#define JAXCONV_ACTIVATE(kind) \
  case Activation::kind:       \
    return ActivateEach<Activation::kind>(slope, v);
  static_assert(kActivationCount == 11, "a new activation needs its case below");
  switch (activation) {
    case Activation::kNone:
      return;
      JAXCONV_ACTIVATE(kRelu)
      JAXCONV_ACTIVATE(kRelu6)
      JAXCONV_ACTIVATE(kLeakyRelu)
      JAXCONV_ACTIVATE(kElu)
      JAXCONV_ACTIVATE(kTanh)
      JAXCONV_ACTIVATE(kSigmoid)
      JAXCONV_ACTIVATE(kSilu)
      JAXCONV_ACTIVATE(kGelu)
      JAXCONV_ACTIVATE(kGeluExact)
      JAXCONV_ACTIVATE(kHardSwish)
  }
#undef JAXCONV_ACTIVATE
}

// True where it was f: what most convolutions are followed by, which lies unrolled.
template <int kCount>
__device__ __forceinline__ bool ActivateFrequent(Activation activation, float slope,
                                                 float (&v)[kCount]) {
  switch (activation) {
    case Activation::kNone:
      return true;
    case Activation::kRelu:
      ActivateEach<Activation::kRelu>(slope, v);
      return true;
    case Activation::kRelu6:
      ActivateEach<Activation::kRelu6>(slope, v);
      return true;
    case Activation::kSilu:
      ActivateEach<Activation::kSilu>(slope, v);
      return true;
    default:
      return false;
  }
}

// f over an array, four values at a time (two, one, where they do not divide it) through one copy of its code: the array turns
// like a wheel. Unrolled, eight copies of ten functions would be most of the kernel.
template <int kCount, typename F>
__device__ __forceinline__ void Wheel(float (&v)[kCount], const F& f) {
  constexpr int kGroup = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int turn = 0; turn < kCount; turn += kGroup) {
    float y[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] = v[i];
    f(y);
#pragma unroll
    for (int i = 0; i + kGroup < kCount; ++i) v[i] = v[i + kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[kCount - kGroup + i] = y[i];
  }
}

// f over a thread's outputs.
template <int kCount>
__device__ __forceinline__ void ActivateAll(Activation activation, float slope,
                                            float (&v)[kCount]) {
  if (ActivateFrequent(activation, slope, v)) return;
  Wheel(v, [&](auto& some) { ActivateGroup(activation, slope, some); });
}

}  // namespace jaxconv::cuda
