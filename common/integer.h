// One output of an integer convolution, for host and device: the sum of problem.h as it is written. Sums are taken in
// unsigned numbers of 32 or 64 bits, which wrap around; y's type is their low bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/activation.h"  // JAXCONV_HD
#include "common/problem.h"

namespace jaxconv::integer {

// An output by its coordinates, and the group of its channel.
struct Output {
  int64_t n, k, group, o[3];
};

// Divides by what 32 bits may not hold.
struct PlainDivider {
  int64_t d;
  JAXCONV_HD int64_t Div(int64_t value) const { return value / d; }
};

// y's steps and extents, by which an element's index is taken apart.
template <typename Divider>
struct Place {
  Divider n_step, k_step, at_step[3];
  Divider n, k, out[3];
  Divider group_k;
};

template <typename Divider, typename Make>
Place<Divider> MakePlace(const IntegerConvProblem& p, const Make& make) {
  Place<Divider> place;
  place.n_step = make(p.y_n);
  place.k_step = make(p.y_k);
  place.n = make(p.n);
  place.k = make(p.k);
  place.group_k = make(p.group_k());
  for (int d = 0; d < 3; ++d) {
    place.at_step[d] = make(p.out[d] == 1 ? 1 : p.y_at[d]);
    place.out[d] = make(p.out[d]);
  }
  return place;
}

// i / step % extent. An axis of one element may have any step.
template <typename Index, typename Divider>
JAXCONV_HD int64_t Digit(Index i, const Divider& step, const Divider& extent) {
  const Index whole = Index(step.Div(i));
  return int64_t(whole) - int64_t(extent.Div(whole)) * int64_t(extent.d);
}

template <typename Index, typename Divider>
JAXCONV_HD Output OutputAt(const Place<Divider>& place, Index i) {
  Output y;
  y.n = Digit(i, place.n_step, place.n);
  y.k = Digit(i, place.k_step, place.k);
  y.group = int64_t(place.group_k.Div(Index(y.k)));
  for (int d = 0; d < 3; ++d) y.o[d] = Digit(i, place.at_step[d], place.out[d]);
  return y;
}

// Where x has what lies at `at` of axis d of z, which is x dilated; -1: z has nothing of x there. `Coordinate` holds all
// that a window steps over.
template <typename Coordinate>
JAXCONV_HD Coordinate InX(const IntegerConvProblem& p, int d, Coordinate at) {
  if (at < 0) return -1;
  if (p.x_dilation[d] != 1) {
    const Coordinate step = Coordinate(p.x_dilation[d]), whole = at / step;
    if (whole * step != at) return -1;
    at = whole;
  }
  return at < Coordinate(p.in[d]) ? at : Coordinate(-1);
}

template <typename Sum, typename X, typename W, typename Coordinate>
JAXCONV_HD Sum SumOf(const IntegerConvProblem& p, const X* x, const W* w, const Output& y) {
  x += p.batch_groups > 1 ? (y.group * p.n + y.n) * p.x_n : y.n * p.x_n + y.group * p.c * p.x_c;
  w += y.k * p.w_k;
  Coordinate first[3];
  for (int d = 0; d < 3; ++d) first[d] = Coordinate(y.o[d] * p.stride[d] - p.pad[d]);
  Sum sum = 0;
  for (Coordinate t = 0; t < Coordinate(p.filter[0]); ++t) {
    const Coordinate i = InX(p, 0, Coordinate(first[0] + t * Coordinate(p.w_dilation[0])));
    if (i < 0) continue;
    for (Coordinate r = 0; r < Coordinate(p.filter[1]); ++r) {
      const Coordinate h = InX(p, 1, Coordinate(first[1] + r * Coordinate(p.w_dilation[1])));
      if (h < 0) continue;
      const X* from = x + i * p.x_at[0] + h * p.x_at[1];
      const W* by = w + t * p.w_at[0] + r * p.w_at[1];
      for (Coordinate s = 0; s < Coordinate(p.filter[2]); ++s) {
        const Coordinate v = InX(p, 2, Coordinate(first[2] + s * Coordinate(p.w_dilation[2])));
        if (v < 0) continue;
        const X* a = from + v * p.x_at[2];
        const W* b = by + s * p.w_at[2];
        for (int64_t c = 0; c < p.c; ++c) sum += Sum(a[c * p.x_c]) * Sum(b[c * p.w_c]);
      }
    }
  }
  return sum;
}

template <typename Sum>
JAXCONV_HD void Store(Integer type, void* y, int64_t i, Sum sum) {
  switch (SizeOf(type)) {
    case 1:
      static_cast<uint8_t*>(y)[i] = uint8_t(sum);
      break;
    case 2:
      static_cast<uint16_t*>(y)[i] = uint16_t(sum);
      break;
    case 4:
      static_cast<uint32_t*>(y)[i] = uint32_t(sum);
      break;
    default:
      static_cast<uint64_t*>(y)[i] = sum;
  }
}

template <typename T>
struct Type {
  using type = T;
};

// f(Type<Sum>, Type<X>, Type<W>). Where the sum is of 32 bits, the sign of those that are not shorter says nothing.
template <typename Sum, typename F>
auto WithOperands(const IntegerConvProblem& p, const F& f) {
  const auto same = [&](auto type) { return f(Type<Sum>(), type, type); };
  const bool narrow = sizeof(Sum) == 4;
  switch (p.x_type) {
    case Integer::kS8:
      return p.w_type == Integer::kS8 ? same(Type<int8_t>())
                                      : f(Type<Sum>(), Type<int8_t>(), Type<uint8_t>());
    case Integer::kU8:
      return p.w_type == Integer::kU8 ? same(Type<uint8_t>())
                                      : f(Type<Sum>(), Type<uint8_t>(), Type<int8_t>());
    case Integer::kS16:
      return same(Type<int16_t>());
    case Integer::kU16:
      return same(Type<uint16_t>());
    case Integer::kS32:
      return narrow ? same(Type<uint32_t>()) : same(Type<int32_t>());
    case Integer::kU32:
      return same(Type<uint32_t>());
    default:
      return same(Type<uint64_t>());
  }
}

// The same, with the sum that p.y_type needs.
template <typename F>
auto WithTypes(const IntegerConvProblem& p, const F& f) {
  return SizeOf(p.y_type) == 8 ? WithOperands<uint64_t>(p, f) : WithOperands<uint32_t>(p, f);
}

}  // namespace jaxconv::integer
