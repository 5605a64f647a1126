// f'(z) as a few pieces, for the activations whose derivative is 1 between two bounds and a polynomial of what was kept
// outside: no branch where many accumulators go back through f. Host C++17 too, which says which activations these are.
#pragma once

#include <cmath>

#include "common/activation.h"

namespace jaxconv::cuda {

// Bounds of where a derivative is 1: the least z above 0, and the last below 6.
inline constexpr float kLeastAboveZero = 1.4e-45f, kLastBelowSix = 5.9999995f;

// Whether the derivative is a constant on each side of two bounds, of what f was given.
constexpr bool IsLinear(Activation f) {
  return f == Activation::kNone || f == Activation::kRelu || f == Activation::kRelu6 ||
         f == Activation::kLeakyRelu;
}

// Not of silu, gelu, gelu_exact and hard_swish.
constexpr bool HasPieces(Activation f) {
  switch (f) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kRelu6:
    case Activation::kLeakyRelu:
    case Activation::kElu:
    case Activation::kTanh:
    case Activation::kSigmoid:
      return true;
    case Activation::kSilu:
    case Activation::kGelu:
    case Activation::kGeluExact:
    case Activation::kHardSwish:
      return false;
  }
  return false;
}

// t * f', where kept is what f was given; of elu, tanh and sigmoid what it gave, of relu, relu6 and a leaky_relu of positive
// slope either.
struct DerivativePieces {
  float from = 0.f, to = 0.f;                        // f' is 1 in [from, to]
  float constant = 1.f, linear = 0.f, square = 0.f;  // elsewhere this polynomial of kept
  bool curved = false;  // it is more than its constant, and kept is finite
  bool drops = false;   // elsewhere t is dropped, whatever it is

  DerivativePieces() = default;
  DerivativePieces(Activation f, double slope) {
    const float never = HUGE_VALF;
    from = kLeastAboveZero;
    to = HUGE_VALF;
    switch (f) {
      case Activation::kRelu:
        drops = true;
        break;
      case Activation::kRelu6:
        to = kLastBelowSix;
        drops = true;
        break;
      case Activation::kLeakyRelu:
        from = 0.f;
        constant = float(slope);
        break;
      case Activation::kElu:  // 1 + y
        curved = true;
        linear = 1.f;
        break;
      case Activation::kTanh:  // 1 - y^2
        curved = true;
        from = never;
        square = -1.f;
        break;
      case Activation::kSigmoid:  // y - y^2
        curved = true;
        from = never;
        constant = 0.f;
        linear = 1.f;
        square = -1.f;
        break;
      default:
        break;
    }
  }

  JAXCONV_HD float operator()(float kept, float t) const {
    const float y = curved ? kept : 0.f;  // minus infinity times 0 is NaN
    const float outside = fmaf(y, fmaf(y, square, linear), constant);
    return kept >= from && kept <= to ? t : drops ? 0.f : t * outside;
  }

  // The same where IsLinear, of what f was given.
  JAXCONV_HD float Linear(float z, float t) const {
    return z >= from && z <= to ? t : drops ? 0.f : t * constant;
  }
};

}  // namespace jaxconv::cuda
