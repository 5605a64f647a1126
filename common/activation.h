// Activations y = f(z), for host and device. jaxconv/_core/activations.py holds the same formulas (and
// the derivatives) in jnp; a test compares the two.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <string_view>

#ifdef __CUDACC__
#define JAXCONV_HD __host__ __device__ __forceinline__
#else
#define JAXCONV_HD inline
#endif

namespace jaxconv {

enum class Activation : int32_t {
  kNone,
  kRelu,
  kRelu6,
  kLeakyRelu,  // slope * z below zero
  kElu,
  kTanh,
  kSigmoid,
  kSilu,
  kGelu,  // tanh form
  kGeluExact,
  kHardSwish,
};

// Names on the wire, in the order of the enum.
inline constexpr std::string_view kActivationNames[] = {
    "none",    "relu", "relu6", "leaky_relu", "elu",       "tanh",
    "sigmoid", "silu", "gelu",  "gelu_exact", "hard_swish"};

inline constexpr int kActivationCount = static_cast<int>(std::size(kActivationNames));

#ifdef __CUDA_ARCH__
// float32 on a GPU. 2^z and 1 / z are one instruction each of the special function unit, at a quarter of an FMA's rate,
// with relative errors of 2^-22 and 2^-23; subnormal results are 0. A division or expf would be eight to ten
// instructions, the division's with a branch that keeps a thread's values from being computed side by side.
__device__ __forceinline__ float Exp2Approx(float z) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(z));
  return y;
}
__device__ __forceinline__ float ReciprocalApprox(float z) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(z));
  return y;
}
// NaN where z is, unlike fmaxf and fminf.
__device__ __forceinline__ float MaxNaN(float z, float limit) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(z), "f"(limit));
  return y;
}
__device__ __forceinline__ float MinNaN(float z, float limit) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(z), "f"(limit));
  return y;
}
inline constexpr float kLog2E = 1.4426950408889634f;

// exp(z), z in [-1000, 88]. t = z log2(e) is rounded, which 2^t would pass on as a relative error of up to |z| 2^-24; the
// rest, z - t ln 2, is known, ln 2 in two terms: exp(z) = 2^t (1 + rest). A 16-bit result does not need it.
template <bool kShort>
__device__ __forceinline__ float ExpApprox(float z) {
  const float t = z * kLog2E, e = Exp2Approx(t);
  if constexpr (kShort) return e;
  const float rest = fmaf(t, 1.90465421e-9f, fmaf(t, -0.693147182f, z));
  return fmaf(e, rest, e);
}
#endif

// z in [-limit, limit]; NaN stays. Where f has come to its end, so that infinity times 0 does not occur.
template <typename F>
JAXCONV_HD F Clamp(F z, F limit) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) return MinNaN(MaxNaN(z, -limit), limit);
#endif
  return z < -limit ? -limit : z > limit ? limit : z;
}

// max(z, limit); NaN stays.
template <typename F>
JAXCONV_HD F AtLeast(F z, F limit) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) return MaxNaN(z, limit);
#endif
  return z < limit ? limit : z;
}

template <typename F>
JAXCONV_HD F Relu6(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) return MinNaN(MaxNaN(z, 0.f), 6.f);
#endif
  return z != z ? z : (z > F(0) ? (z < F(6) ? z : F(6)) : F(0));
}

template <typename F>
JAXCONV_HD F Tanh(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) {
    // Both forms, no branch. Below 0.5 a polynomial fitted to a relative error of 2e-8; above it the difference cancels
    // less than two bits.
    const float other = fmaf(-2.f, ReciprocalApprox(1.f + ExpApprox<true>(2.f * fabsf(z))), 1.f);
    const float s = z * z;
    float series = fmaf(0.0172415f, s, -0.0530455f);
    series = fmaf(series, s, 0.13325879f);
    series = fmaf(series, s, -0.33333144f);
    series = fmaf(series * s, z, z);
    return fabsf(z) < 0.5f ? series : copysignf(other, z);
  }
#endif
  return F(tanh(z));
}

// exp(z) of z <= 0.
template <typename F, bool kShort = false>
JAXCONV_HD F ExpOfNegative(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) return ExpApprox<kShort>(kShort ? z : MaxNaN(z, -104.f));
#endif
  return F(exp(z));
}

// exp(z) - 1 of z <= 0.
template <typename F>
JAXCONV_HD F ExpM1OfNegative(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) {  // as Tanh
    float series = fmaf(1.12555e-3f, z, 8.19281e-3f);
    series = fmaf(series, z, 0.04163182f);
    series = fmaf(series, z, 0.16666284f);
    series = fmaf(series, z, 0.49999986f);
    series = fmaf(series * z, z, z);
    return z > -0.5f ? series : ExpApprox<true>(z) - 1.f;
  }
#endif
  return F(expm1(z));
}

// The normal distribution, 0.5 erfc(-z / sqrt(2)). A GPU's erfcf takes so many registers that kernels spill: there, with
// t = 1 / (1 + |z| / sqrt(8)), it is exp(-z^2 / 2) t P(t) below zero, P fitted to a relative error of 5e-8.
template <typename F, bool kShort = false>
JAXCONV_HD F NormalCdf(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) {
    const float t = ReciprocalApprox(fmaf(0.353553391f, fabsf(z), 1.f));
    float tail = -0.0296920133f;
    tail = fmaf(tail, t, 0.143056847f);
    tail = fmaf(tail, t, -0.245194036f);
    tail = fmaf(tail, t, 0.140857655f);
    tail = fmaf(tail, t, -0.0145689432f);
    tail = fmaf(tail, t, 0.101874315f);
    tail = fmaf(tail, t, 0.121417988f);
    tail = fmaf(tail, t, 0.141205997f);
    tail = fmaf(tail, t, 0.141042168f);
    tail *= t * ExpOfNegative<float, kShort>(-0.5f * z * z);
    return z < 0.f ? tail : 1.f - tail;
  }
#endif
  return F(0.5) * F(erfc(z * F(-0.7071067811865476)));
}

// The gates of silu, sigmoid(v) with v = z, and of gelu (kGelu), 0.5 (1 + tanh(v / 2)) = sigmoid(v): f(z) is z times it.
template <bool kGelu, typename F>
JAXCONV_HD F GateArgument(F z) {
  return kGelu ? z * (F(1.5957691216057308) + F(0.071354816272600245) * (z * z)) : z;
}

#ifdef __CUDA_ARCH__
// exp(-v). kAnywhere: of any z; otherwise v is in [-88.7, 88.7], or kShort.
template <bool kGelu, bool kShort, bool kAnywhere>
__device__ __forceinline__ float GateExp(float z) {
  if constexpr (kGelu && kShort) {  // log2(e) is in the coefficients
    return Exp2Approx(z * fmaf(-0.102943240f, z * z, -2.30220820f));
  }
  const float v = GateArgument<kGelu>(z);
  return ExpApprox<kShort>(-(kAnywhere && !kShort ? Clamp(v, 88.f) : v));
}
#endif

template <bool kGelu, typename F, bool kShort>
JAXCONV_HD F Gate(F z) {
#ifdef __CUDA_ARCH__
  // From v = -87.4 on downwards the reciprocal would be subnormal, and is 0.
  if constexpr (sizeof(F) == 4) return ReciprocalApprox(1.f + GateExp<kGelu, kShort, true>(z));
#endif
  return F(1) / (F(1) + F(exp(-GateArgument<kGelu>(z))));
}

// A gate and what it lacks to 1. `z` becomes one where the gate is 0 or 1 if it was beyond, so that z times what is 0 is 0.
template <typename F>
struct GatePair {
  F gate, rest;
};
template <bool kGelu, typename F, bool kShort>
JAXCONV_HD GatePair<F> GateAndRest(F& z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) {
    z = Clamp(z, kGelu ? 10.03f : 88.f);  // v = 88
    const float e = GateExp<kGelu, kShort, false>(z), gate = ReciprocalApprox(1.f + e);
    return {gate, e * gate};
  }
#endif
  z = Clamp(z, kGelu ? F(30) : F(1e30));
  const F gate = Gate<kGelu, F, kShort>(z);
  return {gate, F(1) - gate};
}

// f(z), whose tails are right to a relative error: nothing is subtracted from 1. F is float or double. `slope` is read by
// leaky_relu only. No default: a missing activation does not compile (-Werror=switch).
// kShort: the result will be rounded to 16 bits. A GPU then takes fewer instructions, and errs by less than 3e-5,
// relatively: the half ulp of a float16 is 2.4e-4 at least.
template <typename F, bool kShort = false>
JAXCONV_HD F Activate(Activation activation, F z, F slope) {
  // Below, silu, gelu, gelu_exact and hard_swish are 0, also at minus infinity.
  constexpr F kLowest = F(-1e30);
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:  // NaN stays NaN, as jax.nn.relu
#ifdef __CUDA_ARCH__
      if constexpr (sizeof(F) == 4) return MaxNaN(z, 0.f);
#endif
      return z > F(0) || z != z ? z : F(0);
    case Activation::kRelu6:
      return Relu6(z);
    case Activation::kLeakyRelu:
      return z < F(0) ? slope * z : z;
    case Activation::kElu:
      return z > F(0) || z != z ? z : ExpM1OfNegative(z);
    case Activation::kTanh:
      return Tanh(z);
    case Activation::kSigmoid:
      return Gate<false, F, kShort>(z);
    case Activation::kSilu:
      z = AtLeast(z, kLowest);
      return z * Gate<false, F, kShort>(z);
    case Activation::kGelu:
      z = AtLeast(z, kLowest);
      return z * Gate<true, F, kShort>(z);
    case Activation::kGeluExact:
      z = AtLeast(z, kLowest);
      return z * NormalCdf<F, kShort>(z);
    case Activation::kHardSwish:  // z + 3 is exact where it is small
      z = AtLeast(z, kLowest);
      return z * F(1.0 / 6) * Relu6(z + F(3));
  }
  return z;
}

// f'(z), given z itself. At a kink the derivative is that of jax.nn's: relu'(0) = 0, leaky_relu'(0)
// = 1; relu6 is 0 at both of its kinks; hard_swish is 0 at -3 and 1 at 3. Used where the
// pre-activation is at hand (batch-norm recomputes it).
template <typename F, bool kShort = false>
JAXCONV_HD F ActivateGrad(Activation activation, F z, F slope) {
  constexpr F kSqrt8OverPi = F(1.5957691216057308);
  constexpr F kInvSqrt2Pi = F(0.3989422804014327);
  switch (activation) {
    case Activation::kNone:
      return F(1);
    case Activation::kRelu:
      return z > F(0) ? F(1) : F(0);
    case Activation::kRelu6:
      return z > F(0) && z < F(6) ? F(1) : F(0);
    case Activation::kLeakyRelu:
      return z >= F(0) ? F(1) : slope;
    case Activation::kElu:
      return z > F(0) ? F(1) : ExpOfNegative<F, kShort>(z);
    case Activation::kTanh: {
      F y = Tanh(z);
      return F(1) - y * y;
    }
    case Activation::kSigmoid: {
      const auto [gate, rest] = GateAndRest<false, F, kShort>(z);
      return gate * rest;
    }
    case Activation::kSilu: {
      const auto [gate, rest] = GateAndRest<false, F, kShort>(z);
      return gate * (F(1) + z * rest);
    }
    case Activation::kGelu: {
      const auto [gate, rest] = GateAndRest<true, F, kShort>(z);
      return gate + z * gate * rest * (kSqrt8OverPi + F(3 * 0.071354816272600245) * (z * z));
    }
    case Activation::kGeluExact: {  // 0 and 1 beyond 40
      z = Clamp(z, F(40));
      return NormalCdf<F, kShort>(z) + z * kInvSqrt2Pi * ExpOfNegative<F, kShort>(F(-0.5) * z * z);
    }
    case Activation::kHardSwish: {
      const F between = (F(2) * z + F(3)) * F(1.0 / 6);
      return z <= F(-3) ? F(0) : z >= F(3) ? F(1) : between;
    }
  }
  return F(1);
}

}  // namespace jaxconv
