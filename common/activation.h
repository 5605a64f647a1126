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

template <typename F>
JAXCONV_HD F Sigmoid(F z) {
  return F(1) / (F(1) + F(exp(-z)));
}

// The normal distribution, 0.5 erfc(-z / sqrt(2)). A GPU's erfcf takes so many registers that kernels spill: there, with
// t = 1 / (1 + |z| / sqrt(8)), it is exp(-z^2 / 2) t P(t) below zero, P fitted to a relative error of 5e-8.
template <typename F>
JAXCONV_HD F NormalCdf(F z) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4) {
    const F t = F(1) / (F(1) + F(0.353553391) * F(fabs(z)));
    F tail = F(-0.0296920133);
    tail = tail * t + F(0.143056847);
    tail = tail * t + F(-0.245194036);
    tail = tail * t + F(0.140857655);
    tail = tail * t + F(-0.0145689432);
    tail = tail * t + F(0.101874315);
    tail = tail * t + F(0.121417988);
    tail = tail * t + F(0.141205997);
    tail = tail * t + F(0.141042168);
    tail *= t * F(exp(F(-0.5) * z * z));
    return z < F(0) ? tail : F(1) - tail;
  }
#endif
  return F(0.5) * F(erfc(z * F(-0.7071067811865476)));
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
    case Activation::kGeluExact:
      z = z < kLowest ? kLowest : z;
      return z * NormalCdf(z);
  }
  return z;
}

// f'(z), given z itself. At a kink the derivative is that of jax.nn's: relu'(0) = 0, leaky_relu'(0)
// = 1; relu6 is 0 at both of its kinks. Used where the pre-activation is at hand (batch-norm
// recomputes it).
template <typename F>
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
      return z > F(0) ? F(1) : F(exp(z));
    case Activation::kTanh: {
      F y = F(tanh(z));
      return F(1) - y * y;
    }
    case Activation::kSigmoid: {
      F y = Sigmoid(z);
      return y * (F(1) - y);
    }
    case Activation::kSilu: {
      z = Clamp(z, F(1e30));
      F s = Sigmoid(z);
      return s * (F(1) + z * (F(1) - s));
    }
    case Activation::kGelu: {  // 0 and 1 beyond 30, in float64 too
      z = Clamp(z, F(30));
      F s = Sigmoid(kSqrt8OverPi * (z + F(0.044715) * z * z * z));
      return s + z * s * (F(1) - s) * kSqrt8OverPi * (F(1) + F(3 * 0.044715) * z * z);
    }
    case Activation::kGeluExact: {  // 0 and 1 beyond 40
      z = Clamp(z, F(40));
      return NormalCdf(z) + z * kInvSqrt2Pi * F(exp(F(-0.5) * z * z));
    }
  }
  return F(1);
}

}  // namespace jaxconv
