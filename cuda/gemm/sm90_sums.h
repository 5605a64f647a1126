// The product of a 1x1 convolution's dgrad whose epilogue is also the first half of the backward pass of a batch-norm in
// front, y = relu(xhat * scale + bias + residual) with xhat = (x - mean) * rstd:
//
//   d = [y > 0] * (sum + c);  dbias = sum of d's rows;  dscale = sum of d's rows * xhat
//
// of d as rounded, in float32. For KK products of one phase and one instance. sm90_sums.cu says how, sm90_sums_float32.cu in
// TF32.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct Sm90Sums {
  CUtensorMap x;             // like d, boxes of 64 x 64
  const uint8_t* signs;      // (m, n / 8): bit j of byte i is y[8i + j] > 0; n a multiple of 128
  const float *mean, *rstd;  // (n)
  float* parts;              // (MostGradientParts(dtype, m), 2, n), in a workspace
  float *dscale, *dbias;     // (n)
};

// The same in TF32. p.out has c and d, rows of n without a gap.
struct Sm90FloatSums {
  const float* x;  // like d
  const uint8_t* signs;
  const float *mean, *rstd;
  float* parts;
  float *dscale, *dbias;
};

Status LaunchSm90Sums(const Context& ctx, DType dtype, Sm90Product& p, const Sm90Sums& to,
                      TileSize tile, int multiprocessors, const std::string& what);
Status LaunchSm90SumsTf32(const Context& ctx, Sm90Product& p, const Sm90FloatSums& to,
                          TileSize tile, int multiprocessors, const std::string& what);

}  // namespace jaxconv::cuda
