// The product whose epilogue is a gate: of h = x op(w) + bias, (m, 2 n), the two halves of the columns are a and g, and
// d[m, n] = a[m, n] * f(g[m, n]). h is written too where the epilogue saves z. sm90_gated.cu says how.
#pragma once

#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// For KN products of one phase, one instance and one tap, 16 bit. p.n: columns of d. p.b: (n, 1, k, half). p.z: (n, half, m), boxes
// of 64 x 64. The phase's filter_first: which half is a. The epilogue's bias: by column of h, or none.
Status LaunchSm90Gated(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                       int multiprocessors, const std::string& what);

}  // namespace jaxconv::cuda
