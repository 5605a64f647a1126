// Products of few rows in TF32. See sm90_cluster.cuh.
#include "cuda/gemm/sm90_cluster.cuh"

namespace jaxconv::cuda {

Status LaunchSm90ClusterTf32(const Context& ctx, Sm90Product& p, TileSize tile, bool k_major_b,
                             const std::string& what) {
  return k_major_b ? LaunchSm90ClusterByTile<float, true>(ctx, p, tile, what)
                   : LaunchSm90ClusterByTile<float, false>(ctx, p, tile, what);
}

}  // namespace jaxconv::cuda
