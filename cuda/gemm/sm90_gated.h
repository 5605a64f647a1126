// Products beside a gate. The first one's epilogue is the gate: of h = x op(w) + bias, (m, 2 n), the two halves of the columns
// are a and g, and d[m, n] = a[m, n] * f(g[m, n]). h is written too where the epilogue saves z. sm90_gated.cu and
// sm90_gated_gradient.cu say how.
#pragma once

#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// For KN products of one phase, one instance and one tap, 16 bit. p.n: columns of d. p.b: (n, 1, k, half). p.z: (n, half, m), boxes
// of 64 x 64. The phase's filter_first: which half is a. The epilogue's bias: by column of h, or none.
Status LaunchSm90Gated(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                       int multiprocessors, const std::string& what);

// The way back: dy is the sums, da = dy * f(g), dg = dy * a * f'(g), and the sums of both's columns, as rounded. For KK products
// of one phase and one instance. p.n: columns of dy. p.c and p.z: z and dz, (n, half, m), boxes of 64 x 64; `first`: g is the
// first half. `parts`: (MostColumnParts(m), 2 n), room for sums in float32; `sums`: (2 n), of dz's type.
Status LaunchSm90GatedGradient(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                               bool first, int multiprocessors, float* parts, void* sums,
                               const std::string& what);

}  // namespace jaxconv::cuda
