// 3-D convolutions of few channels on the sm_90a main loop: bfloat16. See halo_3d.cuh.
#include "cuda/conv/sm90/halo_3d/halo_3d.cuh"

namespace jaxconv::cuda {

Status LaunchPlanesProductBf16(const Context& ctx, PlanesProduct& p, int multiprocessors,
                               const std::string& what) {
  return LaunchPlanesProduct<__nv_bfloat16>(ctx, p, multiprocessors, what);
}

Status LaunchPlanesWgradBf16(const Context& ctx, PlanesWgrad& p, int64_t workspace_bytes,
                             const std::string& what) {
  return LaunchPlanesWgrad<__nv_bfloat16>(ctx, p, workspace_bytes, what);
}

}  // namespace jaxconv::cuda
