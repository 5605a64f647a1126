// 1x1 convolutions of unit stride without padding: im2col's columns are x itself, so each is a
// plain matrix product. With S = O*P*Q pixels per image and one group,
//
//   channels-last    y (N*S, C -> K):  y = x w        dx = dy w^T       dw (C, K) = x^T dy
//   channels-first   per image:        y = w x        dx = w^T dy       dw (K, C) = sum over n of
//   dy x^T
//
// Groups are slices of channels: the same products with the leading dimensions of the whole.
#include "cpu/conv.h"
#include "cpu/gemm.h"
#include "cpu/scratch.h"

namespace jaxconv::cpu {

template <typename T>
Status PointwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                      const T* w, const T* bias, const T* residual, T* y, T* z) {
  const int64_t cg = p.group_c(), kg = p.group_k(), size = p.out_size();
  if (p.channels_last) {
    JAXCONV_RETURN_IF_ERROR(Gemm(ctx, false, false, p.n * size, kg, cg, T(1), x, p.c, w, p.k, T(0),
                                 y, p.k, p.groups, {cg, kg, kg}));
  } else {
    for (int64_t g = 0; g < p.groups; ++g) {
      JAXCONV_RETURN_IF_ERROR(Gemm(ctx, false, false, kg, size, cg, T(1), w + g * kg * cg, cg,
                                   x + g * cg * size, size, T(0), y + g * kg * size, size, p.n,
                                   {0, p.c * size, p.k * size}));
    }
  }
  if (bias == nullptr && residual == nullptr && z == nullptr && e.activation == Activation::kNone) {
    return Status::Ok();
  }
  // Rows of K channels (channels-last, one bias each) or of S pixels (channels-first, one bias for
  // all).
  const int64_t rows = p.n * (p.channels_last ? size : p.k);
  const int64_t width = p.channels_last ? p.k : size;
  if (width == 0) return Status::Ok();
  const int64_t block = std::max<int64_t>(16384 / width, 1);  // rows per item: 64 KiB of float32
  ParallelFor(ctx, CeilDiv(rows, block), [&](int64_t item) {
    const int64_t first = item * block, last = std::min(first + block, rows);
    for (int64_t row = first; row < last && bias != nullptr; ++row) {
      AddBias(width, p.channels_last ? bias : bias + row % p.k, !p.channels_last, y + row * width);
    }
    FinishInPlace(e, (last - first) * width, y + first * width,
                  z == nullptr ? nullptr : z + first * width,
                  residual == nullptr ? nullptr : residual + first * width);
  });
  return Status::Ok();
}

template <typename T>
Status PointwiseDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  const int64_t cg = p.group_c(), kg = p.group_k(), size = p.out_size();
  if (p.channels_last) {
    return Gemm(ctx, false, true, p.n * size, cg, kg, T(1), dy, p.k, w, p.k, T(0), dx, p.c,
                p.groups, {kg, kg, cg});
  }
  for (int64_t g = 0; g < p.groups; ++g) {
    JAXCONV_RETURN_IF_ERROR(Gemm(ctx, true, false, cg, size, kg, T(1), w + g * kg * cg, cg,
                                 dy + g * kg * size, size, T(0), dx + g * cg * size, size, p.n,
                                 {0, p.k * size, p.c * size}));
  }
  return Status::Ok();
}

template <typename T>
Status PointwiseWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  const int64_t cg = p.group_c(), kg = p.group_k(), size = p.out_size();
  if (p.channels_last) {
    return Gemm(ctx, true, false, cg, kg, p.n * size, T(1), x, p.c, dy, p.k, T(0), dw, p.k,
                p.groups, {cg, kg, kg});
  }
  if (p.n == 0) std::fill(dw, dw + p.k * cg, T(0));
  for (int64_t n = 0; n < p.n; ++n) {
    JAXCONV_RETURN_IF_ERROR(Gemm(ctx, false, true, kg, cg, size, T(1), dy + n * p.k * size, size,
                                 x + n * p.c * size, size, T(n > 0), dw, cg, p.groups,
                                 {kg * size, cg * size, kg * cg}));
  }
  return Status::Ok();
}

JAXCONV_INSTANTIATE_CONV(Pointwise, float);
JAXCONV_INSTANTIATE_CONV(Pointwise, double);

}  // namespace jaxconv::cpu
