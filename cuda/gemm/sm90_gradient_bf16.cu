// The sm_90a product with an activation's derivative in bfloat16. See sm90_gradient.cuh.
#include "cuda/gemm/sm90_gradient.cuh"

namespace jaxconv::cuda {

Status LaunchSm90GradientBf16(const Context& ctx, Sm90Product& p, TileSize tile,
                              int multiprocessors, float* parts, void* sums,
                              const std::string& what) {
  return LaunchSm90GradientByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, parts, sums, what);
}

}  // namespace jaxconv::cuda
