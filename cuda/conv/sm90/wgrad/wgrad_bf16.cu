// wgrad on the sm_90a main loop: bfloat16. See wgrad.cuh.
#include "cuda/conv/sm90/wgrad/wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchSm90WgradBf16(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                           int multiprocessors, const std::string& what) {
  return LaunchSm90WgradByTile<__nv_bfloat16>(ctx, p, kernel, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
