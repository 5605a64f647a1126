// The product of a dgrad whose epilogue is also the first half of the backward pass of the batch-norm in front, whose result
// y = f(z), z = (x - mean) * rstd * scale + bias, nobody but the convolution reads:
//
//   d = sum * f'(z);  dbias = sum of d's rows;  dscale = sum of d's rows * (x - mean) * rstd
//
// of d as rounded, in float32; f of p.epilogue, one whose derivative is constant between bounds (LinearPieces). For KK products
// of one phase and one instance; A may be columns of pixels, of several taps. sm90_norm_gradient.cu says how,
// sm90_norm_gradient_float32.cu in TF32.
#pragma once

#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct Sm90NormGradientArgs {
  const float *scale, *bias, *mean, *rstd;  // (n)
  float* parts;                             // (MostGradientParts(dtype, m), 2, n), in a workspace
  float *dscale, *dbias;                    // (n)
};

// p.c: x, like d; boxes of 64 columns x a tile's rows. A plain A of few k, whose filter stays in shared memory, has the tiles
// of kSumsTiles (`resident`), others those of kNormGradientTiles.
Status LaunchSm90NormGradient(const Context& ctx, DType dtype, Sm90Product& p,
                              const Sm90NormGradientArgs& to, TileSize tile, bool resident,
                              int multiprocessors, const std::string& what);

// The same in TF32. p.out: x as c, and d, rows of n without a gap.
Status LaunchSm90NormGradientTf32(const Context& ctx, Sm90Product& p,
                                  const Sm90NormGradientArgs& to, TileSize tile,
                                  int multiprocessors, const std::string& what);

}  // namespace jaxconv::cuda
