// wgrad on the sm_90a main loop: float32 as bfloat16 terms in memory. See wgrad.cuh.
#include "cuda/conv/sm90/wgrad/wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchSm90WgradFloat(const Context& ctx, WgradLaunch& p, WgradKernel, TileSize tile,
                            int multiprocessors, const std::string& what) {
#define JAXCONV_SM90_CASE(rows, columns)                                     \
  if (tile == TileSize{rows, columns}) {                                     \
    return LaunchSm90WgradTile<                                              \
        Sm90Tile<__nv_bfloat16, false, false, 1, columns, false, false, 3>>( \
        ctx, p, multiprocessors, what);                                      \
  }
  JAXCONV_SM90_CASE(128, 128)
  JAXCONV_SM90_CASE(128, 64)
#undef JAXCONV_SM90_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
