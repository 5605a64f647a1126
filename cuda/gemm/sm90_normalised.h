// The product whose rows' operand is normalised on its way, a batch-norm of x by known statistics and its activation:
//
//   d[m, n] = sum over k of a[m, k] * B[k, n],  a = f((A - mean) * scale / sqrt(var + epsilon) + bias), rounded to A's type
//
// also with the statistics of d's columns. sm90_normalised.cu says how.
#pragma once

#include <string>

#include "common/activation.h"
#include "cuda/gemm/sm90_product.h"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda {

// Of A's columns, (channels) each. f: none, relu, relu6 or silu.
struct Sm90Normalisation {
  const float *scale, *bias, *mean, *var;
  int channels;
  float epsilon;
  Activation activation;
  uint32_t least,
      most;  // of what f gives, but for silu's; twice in a word. Filled in by the launch
};

// For KN products of one phase, one instance and one tap, 16 bit, with no epilogue. `to`: null unless statistics are wanted.
Status LaunchSm90Normalised(const Context& ctx, DType dtype, Sm90Product& p, Sm90Normalisation n,
                            TileSize tile, int multiprocessors, StatisticsParts* to,
                            const std::string& what);

}  // namespace jaxconv::cuda
