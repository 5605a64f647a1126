// What the convolution algorithms of cpu/ share: where an element lies, which outputs a tap
// reaches, the epilogue, and the algorithms' own entry points (chosen in conv.cc by
// plan.kernel).
//
// The sum is in common/problem.h. Output position o and tap t read the input position  i = o*stride
// - pad + t*dilation in each of the three spatial dimensions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/activation.h"
#include "common/problem.h"
#include "common/status.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

constexpr int64_t CeilDiv(int64_t a, int64_t b) {  // b > 0; rounds up for negative a too
  return a >= 0 ? (a + b - 1) / b : -(-a / b);
}

// How some algorithms cut their work up. Tests take their shapes from it, on both sides of each.
struct ConvShape {
  static constexpr int64_t kDirectBlock = 128;  // sums kept at a time: 1 KiB of float64
  // Of a row of dy at a time, where a channel has several outputs.
  static constexpr int64_t kDepthwisePixels = 64;
};

// Strides of x or y, in elements: n, then D H W, then channel.
struct ImageStrides {
  int64_t n, d[3], c;
};
inline ImageStrides StridesOf(bool channels_last, int64_t channels, const int64_t extent[3]) {
  const int64_t size = extent[0] * extent[1] * extent[2];
  const int64_t pixel = channels_last ? channels : 1;
  return {size * channels,
          {extent[1] * extent[2] * pixel, extent[2] * pixel, pixel},
          channels_last ? 1 : size};
}
inline ImageStrides XStrides(const ConvProblem& p) { return StridesOf(p.channels_last, p.c, p.in); }
inline ImageStrides YStrides(const ConvProblem& p) {
  return StridesOf(p.channels_last, p.k, p.out);
}

// Strides of w, in elements: tap (t*R + r)*S + s, input channel within the group, output channel
// (of all groups).
struct FilterStrides {
  int64_t tap, c, k;
};
inline FilterStrides WStrides(const ConvProblem& p) {
  if (p.channels_last) return {p.group_c() * p.k, p.k, 1};
  return {1, p.filter_size(), p.group_c() * p.filter_size()};
}

struct Range {
  int64_t begin, end;  // [begin, end); begin <= end
};

// Input position under output `o` and tap `t` of dimension `dim`; may lie in the padding.
inline int64_t InputAt(const ConvProblem& p, int dim, int64_t o, int64_t t) {
  return o * p.stride[dim] - p.pad[dim] + t * p.dilation[dim];
}

// The outputs of dimension `dim` for which tap `t` reads inside the input.
inline Range OutputsReached(const ConvProblem& p, int dim, int64_t t) {
  const int64_t first = InputAt(p, dim, 0, t);
  const int64_t begin = std::clamp<int64_t>(CeilDiv(-first, p.stride[dim]), 0, p.out[dim]);
  const int64_t end = std::clamp<int64_t>(CeilDiv(p.in[dim] - first, p.stride[dim]), 0, p.out[dim]);
  return {begin, std::max(begin, end)};
}

inline bool Inside(const ConvProblem& p, int dim, int64_t i) { return 0 <= i && i < p.in[dim]; }

// The output that reads input position `i` through tap `t`, or -1 if none does: the inverse of
// InputAt.
inline int64_t OutputOver(const ConvProblem& p, int dim, int64_t i, int64_t t) {
  const int64_t shifted = i + p.pad[dim] - t * p.dilation[dim];
  if (shifted < 0 || shifted % p.stride[dim] != 0) return -1;
  const int64_t o = shifted / p.stride[dim];
  return o < p.out[dim] ? o : -1;
}

// y = f(z), z = y + residual, for `count` elements; a copy of z goes to `z`. residual and z may be null.
template <typename T>
void FinishInPlace(const Epilogue& e, int64_t count, T* y, T* z, const T* residual = nullptr);

// y += bias: `bias` holds one value per element, or one for all if `shared`. Null adds nothing.
template <typename T>
void AddBias(int64_t count, const T* bias, bool shared, T* y);

// The algorithms. bias, residual and z may be null, as in common/launch.h; T is float or double.
#define JAXCONV_CONV_ALGORITHM(Name)                                                            \
  template <typename T>                                                                         \
  Status Name##Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,   \
                     const T* w, const T* bias, const T* residual, T* y, T* z);                 \
  template <typename T>                                                                         \
  Status Name##Dgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx); \
  template <typename T>                                                                         \
  Status Name##Wgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw)
JAXCONV_CONV_ALGORITHM(Direct);     // any problem
JAXCONV_CONV_ALGORITHM(Im2col);     // any problem
JAXCONV_CONV_ALGORITHM(Pointwise);  // IsPointwise(p): im2col whose columns are x itself
JAXCONV_CONV_ALGORITHM(Depthwise);  // groups == c
#undef JAXCONV_CONV_ALGORITHM

// One tap, and every output reads the input position of the same number.
inline bool IsPointwise(const ConvProblem& p) {
  for (int dim = 0; dim < 3; ++dim) {
    if (p.filter[dim] != 1 || p.stride[dim] != 1 || p.pad[dim] != 0 || p.in[dim] != p.out[dim]) {
      return false;
    }
  }
  return true;
}

// Explicit instantiations at the end of each algorithm's file.
#define JAXCONV_INSTANTIATE_CONV(Name, T)                                                       \
  template Status Name##Fprop<T>(const Context&, const ConvProblem&, const Epilogue&, const T*, \
                                 const T*, const T*, const T*, T*, T*);                         \
  template Status Name##Dgrad<T>(const Context&, const ConvProblem&, const T*, const T*, T*);   \
  template Status Name##Wgrad<T>(const Context&, const ConvProblem&, const T*, const T*, T*)

}  // namespace jaxconv::cpu
