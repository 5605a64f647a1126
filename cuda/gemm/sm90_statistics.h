// The product whose epilogue also sums up what it writes: the mean and the sum of squares about it
// of each column of d, in parts that a second kernel combines. For KN products of one phase, without
// activation and z; what is added is a matrix, and a bias of the columns. sm90_moments.cuh says how. In TF32
// (sm90_statistics_float32.cu) of KK products.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/gemm/sm90_product.h"
#include "cuda/gemm/statistics_parts.h"

namespace jaxconv::cuda {

// to->parts: at most MostGradientParts.
Status LaunchSm90Statistics(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                            int multiprocessors, StatisticsParts* to, const std::string& what);
// p.out: c, and d, rows of all instances' columns.
Status LaunchSm90StatisticsTf32(const Context& ctx, Sm90Product& p, TileSize tile,
                                int multiprocessors, StatisticsParts* to, const std::string& what);

}  // namespace jaxconv::cuda
