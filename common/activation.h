// Activations y = f(z), for host and device. jaxconv/_activation.py holds the same formulas (and
// the derivatives) in jnp; a test compares the two.
#pragma once

#include <cmath>
#include <cstdint>
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

// F is float or double. `slope` is read by leaky_relu only.
template <typename F>
JAXCONV_HD F Activate(Activation activation, F z, F slope) {
  constexpr F kSqrt2OverPi = F(0.7978845608028654);
  constexpr F kSqrtHalf = F(0.7071067811865476);
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
      return F(1) / (F(1) + F(exp(-z)));
    case Activation::kSilu:
      return z / (F(1) + F(exp(-z)));
    case Activation::kGelu:
      return F(0.5) * z * (F(1) + F(tanh(kSqrt2OverPi * (z + F(0.044715) * z * z * z))));
    case Activation::kGeluExact:
      return F(0.5) * z * (F(1) + F(erf(z * kSqrtHalf)));
  }
  return z;
}

// f'(z), given z itself. At a kink the derivative is that of jax.nn's: relu'(0) = 0, leaky_relu'(0)
// = 1; relu6 is 0 at both of its kinks. Used where the pre-activation is at hand (batch-norm
// recomputes it).
template <typename F>
JAXCONV_HD F ActivateGrad(Activation activation, F z, F slope) {
  constexpr F kSqrt2OverPi = F(0.7978845608028654);
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
      F y = F(1) / (F(1) + F(exp(-z)));
      return y * (F(1) - y);
    }
    case Activation::kSilu: {
      F s = F(1) / (F(1) + F(exp(-z)));
      return s * (F(1) + z * (F(1) - s));
    }
    case Activation::kGelu: {
      F t = F(tanh(kSqrt2OverPi * (z + F(0.044715) * z * z * z)));
      return F(0.5) * (F(1) + t) +
             F(0.5) * z * (F(1) - t * t) * kSqrt2OverPi * (F(1) + F(3 * 0.044715) * z * z);
    }
    case Activation::kGeluExact:
      return F(0.5) * (F(1) + F(erf(z * kSqrtHalf))) + z * kInvSqrt2Pi * F(exp(F(-0.5) * z * z));
  }
  return F(1);
}

}  // namespace jaxconv
