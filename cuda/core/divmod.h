// Numbers written in mixed radices, host and device: a pixel index as (n, o, p, q), a reduction
// index as (t, r, s, c). A kernel divides once, when it starts; after that it walks by adding the
// digits of a fixed step, with carries.
#pragma once

#include <cstdint>

#include "common/activation.h"  // JAXCONV_HD

namespace jaxconv::cuda {

// value = ((digit[0] * extent[0] + digit[1]) * extent[1] + digit[2]) * extent[2] + digit[3], so
// extent[i] bounds digit[i + 1]; digit[0] is unbounded.
struct Digits4 {
  int digit[4];
};

// value >= 0; extents >= 1.
JAXCONV_HD Digits4 SplitDigits(int value, int extent0, int extent1, int extent2) {
  unsigned rest = unsigned(value);
  Digits4 d;
  d.digit[3] = int(rest % unsigned(extent2));
  rest /= unsigned(extent2);
  d.digit[2] = int(rest % unsigned(extent1));
  rest /= unsigned(extent1);
  d.digit[1] = int(rest % unsigned(extent0));
  d.digit[0] = int(rest / unsigned(extent0));
  return d;
}

// d += step, digit by digit; both are canonical, so a carry is 0 or 1.
JAXCONV_HD void AddDigits(Digits4& d, const Digits4& step, int extent0, int extent1, int extent2) {
  d.digit[3] += step.digit[3];
  int carry = d.digit[3] >= extent2;
  d.digit[3] -= carry ? extent2 : 0;
  d.digit[2] += step.digit[2] + carry;
  carry = d.digit[2] >= extent1;
  d.digit[2] -= carry ? extent1 : 0;
  d.digit[1] += step.digit[1] + carry;
  carry = d.digit[1] >= extent0;
  d.digit[1] -= carry ? extent0 : 0;
  d.digit[0] += step.digit[0] + carry;
}

// n / d for n in [0, 2^31) by one multiplication: with p = 31 + ceil(log2 d) and m = ceil(2^p / d),
// the error of n * m / 2^p is below 1 / d for every such n, so the floor is exact.
struct FastDiv {
  uint32_t d = 1, mul = 0, shift = 0;

  FastDiv() = default;
  // d in [1, 2^31).
  explicit FastDiv(int64_t divisor) : d(uint32_t(divisor)) {
    if (d == 1) return;
    int log = 1;
    while ((int64_t(1) << log) < divisor) ++log;
    mul = uint32_t(((uint64_t(1) << (31 + log)) + d - 1) / d);
    shift = uint32_t(log - 1);
  }

  JAXCONV_HD uint32_t Div(uint32_t n) const {
    return d == 1 ? n : uint32_t((uint64_t(n) * mul) >> 32) >> shift;
  }
};

// SplitDigits by divisors whose multipliers are at hand: extent[i] as there.
JAXCONV_HD Digits4 SplitDigits(int value, const FastDiv& extent0, const FastDiv& extent1,
                               const FastDiv& extent2) {
  Digits4 d;
  const uint32_t a = extent2.Div(uint32_t(value)), b = extent1.Div(a), c = extent0.Div(b);
  d.digit[3] = int(uint32_t(value) - a * extent2.d);
  d.digit[2] = int(a - b * extent1.d);
  d.digit[1] = int(b - c * extent0.d);
  d.digit[0] = int(c);
  return d;
}

JAXCONV_HD int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxconv::cuda
