// The product whose epilogue also sums up what it writes: the mean and the sum of squares about it
// of each column of d, in parts that a second kernel combines. For KN products of one phase, without
// bias, activation and z. sm90_statistics.cuh says how.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct Sm90Parts {
  // In a workspace: (parts, columns of all instances) pairs (mean, sum of squares about it), and
  // (parts) numbers of rows, which may be 0, but not the first.
  float2* moments;
  float* counts;
  // The launch says: CTAs that share a column of tiles, and two parts of each.
  int rows;
  int parts;
};

// No more parts are made, whatever the tile.
inline int64_t MostStatisticsParts(int64_t rows) {
  return std::min<int64_t>(2 * ((rows + 127) / 128), 512);
}

Status LaunchSm90StatisticsBf16(const Context& ctx, Sm90Product& p, TileSize tile,
                                int multiprocessors, Sm90Parts* to, const std::string& what);
Status LaunchSm90StatisticsF16(const Context& ctx, Sm90Product& p, TileSize tile,
                               int multiprocessors, Sm90Parts* to, const std::string& what);

}  // namespace jaxconv::cuda
