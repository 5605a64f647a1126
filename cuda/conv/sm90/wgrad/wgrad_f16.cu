// wgrad on the sm_90a main loop: float16. See wgrad.cuh.
#include "cuda/conv/sm90/wgrad/wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchSm90WgradF16(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                          int multiprocessors, const std::string& what) {
  return LaunchSm90WgradByTile<__half>(ctx, p, kernel, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
