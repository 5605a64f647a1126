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

JAXCONV_HD int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxconv::cuda
