// The instances of the sm_90a product for one pair of memory orders.
#pragma once

#include "cuda/gemm/sm90_cluster.cuh"
#include "cuda/gemm/sm90_plain.cuh"
#include "cuda/gemm/sm90_resident.cuh"
#include "cuda/gemm/sm90_rows.cuh"

namespace jaxconv::cuda {

template <typename T, bool kMajorA, bool kMajorB>
Status LaunchSm90ByTile(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                        const std::string& what) {
  const TileSize tile = choice.tile;
  if (choice.kernel == Sm90Kernel::kProduct) {
    return WithTile<kProductTiles>(tile, what, [&](auto rows, auto columns) {
      using Tile = Sm90TileOf<T, kMajorA, kMajorB, decltype(rows)::value, decltype(columns)::value>;
      return LaunchSm90Streamed<Tile, Sm90Plain<Tile>>(ctx, p, multiprocessors, what);
    });
  }
  if (choice.kernel == Sm90Kernel::kProductSwapped && tile == TileSize{256, 128}) {
    using Tile = Sm90Tile<T, kMajorB, kMajorA, 1, 256, false, true, 1, false, true>;
    return LaunchSm90Streamed<Tile, Sm90Plain<Tile>>(ctx, p, multiprocessors, what);
  }
  if constexpr (kMajorA) {
    if (choice.kernel == Sm90Kernel::kCluster)
      return LaunchSm90ClusterByTile<T, kMajorB>(ctx, p, tile, what);
    if (choice.kernel == Sm90Kernel::kRows && tile == TileSize{64, 128}) {
      return LaunchSm90Rows<Sm90Alternate<T, kMajorA, kMajorB, 128>>(ctx, p, multiprocessors, what);
    }
    if (choice.kernel == Sm90Kernel::kResident && tile == TileSize{128, 64}) {
      using Tile = Sm90Resident<T, kMajorB, 4, 2, 64>;
      return LaunchSm90Resident<Tile, Sm90Plain<Tile>>(ctx, p, {}, multiprocessors, what);
    }
    if (choice.kernel == Sm90Kernel::kResident && tile == TileSize{64, 256}) {
      using Tile = Sm90Resident<T, kMajorB, 2, 1, 256>;
      return LaunchSm90Resident<Tile, Sm90Plain<Tile>>(ctx, p, {}, multiprocessors, what);
    }
  }
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
