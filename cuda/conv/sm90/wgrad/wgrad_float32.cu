// wgrad on the sm_90a main loop: float32 as bfloat16 terms in memory. See wgrad.cuh.
#include "cuda/conv/sm90/wgrad/wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchSm90WgradFloat(const Context& ctx, WgradLaunch& p, Sm90TileName tile,
                            int multiprocessors, int64_t workspace_bytes, const std::string& what) {
#define JAXCONV_SM90_CASE(name, tile_n)                                                            \
  case Sm90TileName::name:                                                                         \
    return LaunchSm90WgradTile<Sm90Tile<__nv_bfloat16, false, false, 1, tile_n, false, false, 3>>( \
        ctx, p, multiprocessors, workspace_bytes, what);
  switch (tile) {
    JAXCONV_SM90_CASE(k128x128, 128)
    JAXCONV_SM90_CASE(k128x64, 64)
    default:
      break;
  }
#undef JAXCONV_SM90_CASE
  return Status::Unimplemented(what + ": no such tile in float32");
}

}  // namespace jaxconv::cuda
