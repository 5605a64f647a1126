// wgrad on the sm_90a main loop: float16. See wgmma_wgrad.cuh.
#include "cuda/conv/wgmma_wgrad.cuh"

namespace jaxconv::cuda {

Status LaunchWgmmaWgradF16(const Context& ctx, WgradLaunch& p, Sm90TileName tile,
                           int multiprocessors, int64_t workspace_bytes, const std::string& what) {
  return LaunchWgmmaWgradByTile<__half>(ctx, p, tile, multiprocessors, workspace_bytes, what);
}

}  // namespace jaxconv::cuda
