// The instances of the sm_90a product for one pair of memory orders.
#pragma once

#include "cuda/gemm/sm90_cluster.cuh"
#include "cuda/gemm/sm90_product.cuh"
#include "cuda/gemm/sm90_resident.cuh"
#include "cuda/gemm/sm90_rows.cuh"

namespace jaxconv::cuda {

template <typename T, bool kMajorA, bool kMajorB>
Status LaunchSm90ByTile(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                        const std::string& what) {
  const TileSize tile = choice.tile;
#define JAXCONV_SM90_CASE(rows, columns, blocks, tile_n, ping_pong)                         \
  if (tile == TileSize{rows, columns}) {                                                    \
    using Tile = Sm90Tile<T, kMajorA, kMajorB, blocks, tile_n, ping_pong, true>;            \
    return LaunchSm90Product<Tile>(ctx, Sm90ProductKernel<Tile>, p, multiprocessors, what); \
  }
  if (choice.kernel == Sm90Kernel::kProduct) {
    JAXCONV_SM90_CASE(128, 256, 1, 256, false)
    JAXCONV_SM90_CASE(256, 128, 2, 128, false)
    JAXCONV_SM90_CASE(128, 128, 2, 128, true)
    JAXCONV_SM90_CASE(256, 64, 2, 64, false)
    JAXCONV_SM90_CASE(128, 320, 1, 320, false)
  }
#undef JAXCONV_SM90_CASE
  if (choice.kernel == Sm90Kernel::kProductSwapped && tile == TileSize{256, 128}) {
    using Tile = Sm90Tile<T, kMajorB, kMajorA, 1, 256, false, true, 1, false, true>;
    return LaunchSm90Product<Tile>(ctx, Sm90ProductKernel<Tile>, p, multiprocessors, what);
  }
  if constexpr (kMajorA) {
    if (choice.kernel == Sm90Kernel::kCluster)
      return LaunchSm90ClusterByTile<T, kMajorB>(ctx, p, tile, what);
    if (choice.kernel == Sm90Kernel::kRows && tile == TileSize{64, 128}) {
      return LaunchSm90Rows<Sm90Alternate<T, kMajorA, kMajorB, 128>>(ctx, p, multiprocessors, what);
    }
    if (choice.kernel == Sm90Kernel::kResident && tile == TileSize{128, 64}) {
      return LaunchSm90Resident<Sm90Resident<T, kMajorB, 4, 2, 64>>(ctx, p, multiprocessors, what);
    }
    if (choice.kernel == Sm90Kernel::kResident && tile == TileSize{64, 256}) {
      return LaunchSm90Resident<Sm90Resident<T, kMajorB, 2, 1, 256>>(ctx, p, multiprocessors, what);
    }
  }
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
