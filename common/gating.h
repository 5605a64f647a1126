// The gates of squeeze-and-excitation, for host and device. jaxconv/_ops/reference.py holds the same formulas.
#pragma once

#include "common/activation.h"

namespace jaxconv {

enum class Gating : int32_t { kSigmoid, kHardSigmoid };

// Names on the wire, in the order of the enum.
inline constexpr std::string_view kGatingNames[] = {"sigmoid", "hard_sigmoid"};

inline constexpr int kGatingCount = static_cast<int>(std::size(kGatingNames));

// hard_sigmoid is jax.nn's: relu6(z + 3) / 6.
template <typename F>
JAXCONV_HD F Gated(Gating gating, F z) {
  if (gating == Gating::kSigmoid) return Activate<F>(Activation::kSigmoid, z, F(0));
  return Relu6(z + F(3)) / F(6);
}

// The derivative, by the gate itself.
template <typename F>
JAXCONV_HD F GatedGrad(Gating gating, F gate) {
  if (gating == Gating::kSigmoid) return gate * (F(1) - gate);
  return gate > F(0) && gate < F(1) ? F(1) / F(6) : F(0);
}

}  // namespace jaxconv
