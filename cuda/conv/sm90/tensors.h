// A convolution's arrays as TMA sees them, and the launch of a product by its arithmetic.
#pragma once

#include <cstdint>
#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/core/context.h"
#include "cuda/core/tma.h"
#include "cuda/gemm/sm90_operands.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// (channels, W, [H, [D,]] N) of a channels-last tensor whose axes are `extent` (D H W).
inline TmaTensor ImageTensor(const void* base, int rank, int64_t channels,
                             const int64_t (&extent)[3], int64_t images) {
  TmaTensor t;
  t.base = base;
  t.rank = rank;
  t.extent[0] = channels;
  t.stride[0] = 1;
  int64_t stride = channels;
  for (int i = 0; i < rank - 2; ++i) {
    t.extent[i + 1] = extent[2 - i];
    t.stride[i + 1] = stride;
    stride *= extent[2 - i];
  }
  t.extent[rank - 1] = images;
  t.stride[rank - 1] = stride;
  return t;
}

// (columns of a group, group, rows) of a matrix of `rows` rows.
inline TmaTensor MatrixTensor(const void* base, int64_t columns, int64_t groups, int64_t rows) {
  return {base, 3, {columns, groups, rows}, {1, columns, columns * groups}};
}

// w (terms, T R S, C/G, K) as (K/G, group, C/G, terms*T*R*S).
inline TmaTensor FilterTensor(const ConvProblem& p, const void* w, int terms) {
  return {w,
          4,
          {p.group_k(), p.groups, p.group_c(), p.filter_size() * terms},
          {1, p.group_k(), p.k, p.k * p.group_c()}};
}

// The same of its transpose, w (T R S, K, C/G): (C/G, group, K/G, T*R*S).
inline TmaTensor TransposedFilterTensor(const ConvProblem& p, const void* w) {
  return {w,
          4,
          {p.group_c(), p.groups, p.group_k(), p.filter_size()},
          {1, p.group_k() * p.group_c(), p.group_c(), p.k * p.group_c()}};
}

inline int64_t CountX(const ConvProblem& p) { return p.n * p.in_size() * p.c; }
inline int64_t CountY(const ConvProblem& p) { return p.n * p.out_size() * p.k; }
inline int64_t CountW(const ConvProblem& p) { return p.filter_size() * p.group_c() * p.k; }

// Where float32 results go: a channels-last array of `channels` channels, whose axes are `extent`
// (D H W), seen in steps of `step` (W H D).
inline void SetFloatOutput(void* d, void* z, int64_t channels, int64_t group_channels,
                           const int64_t (&extent)[3], const int (&step)[3], Sm90FloatOutput* out) {
  out->d = static_cast<float*>(d);
  out->z = static_cast<float*>(z);
  out->instance = group_channels;
  int64_t stride = channels;
  for (int i = 0; i < 3; ++i) {
    out->stride[i] = stride * step[i];
    stride *= extent[2 - i];
  }
  out->stride_image = stride;
}

// fprop reads w as it lies (KN), in TF32 transposed but for clusters; dgrad reads it k-major.
inline Status LaunchProduct(const Context& ctx, const Sm90Arithmetic& in, bool k_major_b,
                            Sm90Product& product, Sm90Choice choice, int multiprocessors,
                            const std::string& what) {
  const DType dtype = in.element;
  if (in.tf32 && choice.kernel == Sm90Kernel::kCluster)
    return LaunchSm90ClusterTf32(ctx, product, choice.tile, k_major_b, what);
  if (in.tf32) return LaunchSm90KKTf32(ctx, product, choice, multiprocessors, what);
  if (in.terms > 1) {
    return k_major_b ? LaunchSm90KKFloat(ctx, product, choice, multiprocessors, what)
                     : LaunchSm90KNFloat(ctx, product, choice, multiprocessors, what);
  }
  if (dtype == DType::kBF16) {
    return k_major_b ? LaunchSm90KKBf16(ctx, product, choice, multiprocessors, what)
                     : LaunchSm90KNBf16(ctx, product, choice, multiprocessors, what);
  }
  return k_major_b ? LaunchSm90KKF16(ctx, product, choice, multiprocessors, what)
                   : LaunchSm90KNF16(ctx, product, choice, multiprocessors, what);
}

}  // namespace jaxconv::cuda
