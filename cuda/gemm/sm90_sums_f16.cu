// The sm_90a product with a batch-norm's sums in float16. See sm90_sums.cuh.
#include "cuda/gemm/sm90_sums.cuh"

namespace jaxconv::cuda {

Status LaunchSm90SumsF16(const Context& ctx, Sm90Product& p, const Sm90Sums& to, TileSize tile,
                         int multiprocessors, const std::string& what) {
  return LaunchSm90SumsByTile<__half>(ctx, p, to, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
