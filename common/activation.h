// Activations y = f(z), for host and device. jaxconv/_activation.py holds the same formulas (and
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
};

// Names on the wire, in the order of the enum.
inline constexpr std::string_view kActivationNames[] = {
    "none", "relu", "relu6", "leaky_relu", "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_exact"};

inline constexpr int kActivationCount = static_cast<int>(std::size(kActivationNames));

// 1 / (1 + exp(-z)) and, in `rest`, 1 minus it without cancellation.
template <typename F>
JAXCONV_HD F Sigmoid(F z, F* rest = nullptr) {
  const F e = F(exp(-z)), s = F(1) / (F(1) + e);
  if (rest != nullptr) *rest = z > F(0) ? e * s : F(1) - s;
  return s;
}

// z in [-limit, limit]; NaN stays. Where f has come to its end, so that infinity times 0 does not occur.
template <typename F>
JAXCONV_HD F Clamp(F z, F limit) {
  return z < -limit ? -limit : z > limit ? limit : z;
}

// f(z), whose tails are right to a relative error: nothing is subtracted from 1. F is float or double. `slope` is read by
// leaky_relu only. No default: a missing activation does not compile (-Werror=switch).
template <typename F>
JAXCONV_HD F Activate(Activation activation, F z, F slope) {
  constexpr F kSqrt8OverPi = F(1.5957691216057308);
  constexpr F kSqrtHalf = F(0.7071067811865476);
  // Below, silu, gelu and gelu_exact are 0, also at minus infinity.
  constexpr F kLowest = F(-1e30);
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return z > F(0) || z != z ? z : F(0);  // NaN stays NaN, as jax.nn.relu
    case Activation::kRelu6:
      return z != z ? z : (z > F(0) ? (z < F(6) ? z : F(6)) : F(0));
    case Activation::kLeakyRelu:
      return z >= F(0) || z != z ? z : slope * z;
    case Activation::kElu:
      return z > F(0) || z != z ? z : F(expm1(z));
    case Activation::kTanh:
      return F(tanh(z));
    case Activation::kSigmoid:
      return Sigmoid(z);
    case Activation::kSilu:
      z = z < kLowest ? kLowest : z;
      return z * Sigmoid(z);
    case Activation::kGelu:  // 0.5 (1 + tanh(u)) = sigmoid(2u)
      z = z < kLowest ? kLowest : z;
      return z * Sigmoid(kSqrt8OverPi * (z + F(0.044715) * z * z * z));
    case Activation::kGeluExact:  // 0.5 (1 + erf(u)) = 0.5 erfc(-u)
      z = z < kLowest ? kLowest : z;
      return F(0.5) * z * F(erfc(-z * kSqrtHalf));
  }
  return z;
}

// f'(z), given z itself. At a kink the derivative is that of jax.nn's: relu'(0) = 0, leaky_relu'(0)
// = 1; relu6 is 0 at both of its kinks. Used where the pre-activation is at hand (batch-norm
// recomputes it).
template <typename F>
JAXCONV_HD F ActivateGrad(Activation activation, F z, F slope) {
  constexpr F kSqrt8OverPi = F(1.5957691216057308);
  constexpr F kSqrtHalf = F(0.7071067811865476);
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
      return z > F(0) ? F(1) : F(exp(z));
    case Activation::kTanh: {
      F y = F(tanh(z));
      return F(1) - y * y;
    }
    case Activation::kSigmoid: {
      F rest, y = Sigmoid(z, &rest);
      return y * rest;
    }
    case Activation::kSilu: {
      z = Clamp(z, F(1e30));
      F rest, s = Sigmoid(z, &rest);
      return s * (F(1) + z * rest);
    }
    case Activation::kGelu: {  // 0 and 1 beyond 30, in float64 too
      z = Clamp(z, F(30));
      F rest, s = Sigmoid(kSqrt8OverPi * (z + F(0.044715) * z * z * z), &rest);
      return s + z * s * rest * kSqrt8OverPi * (F(1) + F(3 * 0.044715) * z * z);
    }
    case Activation::kGeluExact: {  // 0 and 1 beyond 40
      z = Clamp(z, F(40));
      return F(0.5) * F(erfc(-z * kSqrtHalf)) + z * kInvSqrt2Pi * F(exp(F(-0.5) * z * z));
    }
  }
  return F(1);
}

}  // namespace jaxconv
