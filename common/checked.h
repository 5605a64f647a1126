// 64-bit integers that know whether a sum, difference or product left 64 bits. Numbers from outside (extents, pads,
// strides) are bounded with them once, in ffi/; behind that plain int64_t does.
#pragma once

#include <cstdint>

namespace jaxconv {

class Checked {
 public:
  constexpr Checked(int64_t value) : value_(value) {}  // NOLINT: numbers take part as they are

  friend Checked operator+(Checked a, Checked b) {
    const bool over = __builtin_add_overflow(a.value_, b.value_, &a.value_);
    return a.After(b, over);
  }
  friend Checked operator-(Checked a, Checked b) {
    const bool over = __builtin_sub_overflow(a.value_, b.value_, &a.value_);
    return a.After(b, over);
  }
  friend Checked operator*(Checked a, Checked b) {
    const bool over = __builtin_mul_overflow(a.value_, b.value_, &a.value_);
    return a.After(b, over);
  }

  // No step overflowed, and the value is in [low, high].
  constexpr bool Within(int64_t low, int64_t high) const {
    return !overflow_ && low <= value_ && value_ <= high;
  }
  constexpr int64_t value() const { return value_; }  // meaningless unless Within(...)

 private:
  Checked After(Checked b, bool over) const {
    Checked result = *this;
    result.overflow_ = overflow_ || b.overflow_ || over;
    return result;
  }

  int64_t value_;
  bool overflow_ = false;
};

}  // namespace jaxconv
