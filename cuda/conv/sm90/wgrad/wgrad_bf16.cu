// wgrad on the sm_90a main loop: bfloat16. See wgrad.cuh.
#include "cuda/conv/sm90/wgrad/wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchSm90WgradBf16(const Context& ctx, WgradLaunch& p, Sm90TileName tile,
                           int multiprocessors, int64_t workspace_bytes, const std::string& what) {
  return LaunchSm90WgradByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, workspace_bytes, what);
}

}  // namespace jaxconv::cuda
