// The sm_90a product with statistics in bfloat16. See sm90_statistics.cuh.
#include "cuda/gemm/sm90_statistics.cuh"

namespace jaxconv::cuda {

Status LaunchSm90StatisticsBf16(const Context& ctx, Sm90Product& p, TileSize tile,
                                int multiprocessors, Sm90Parts* to, const std::string& what) {
  return LaunchSm90StatisticsByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, to, what);
}

}  // namespace jaxconv::cuda
