// The product whose epilogue is the way back through an activation: d = sum * f', computed
// from c, and the sum of each column of d, as rounded. c is what f was given; of elu, tanh and sigmoid what it gave, of relu,
// relu6 and a leaky_relu of positive slope either.
// For KK products of one phase and one instance; A may be columns of pixels, of several taps. sm90_gradient.cu says how, sm90_gradient_float32.cu in TF32.
#pragma once

#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// p.c: like d, boxes of 64 columns x a tile's rows. `parts`: (MostGradientParts(dtype, m), n), room for
// sums in float32; `sums`: (n), of d's type.
Status LaunchSm90Gradient(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                          int multiprocessors, float* parts, void* sums, const std::string& what);

// The same in TF32. p.out: c, and d, rows of n without a gap. `parts`, `sums`: as above, float32.
Status LaunchSm90GradientTf32(const Context& ctx, Sm90Product& p, TileSize tile,
                              int multiprocessors, float* parts, float* sums,
                              const std::string& what);

}  // namespace jaxconv::cuda
