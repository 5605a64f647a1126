// The sm_90a product with an activation's derivative in float16. See sm90_gradient.cuh.
#include "cuda/gemm/sm90_gradient.cuh"

namespace jaxconv::cuda {

Status LaunchSm90GradientF16(const Context& ctx, Sm90Product& p, TileSize tile, int multiprocessors,
                             float* parts, void* sums, const std::string& what) {
  return LaunchSm90GradientByTile<__half>(ctx, p, tile, multiprocessors, parts, sums, what);
}

}  // namespace jaxconv::cuda
