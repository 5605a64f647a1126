// 3-D convolutions of few channels on the sm_90a main loop: float16. See halo_3d.cuh.
#include "cuda/conv/sm90/halo_3d/halo_3d.cuh"

namespace jaxconv::cuda {

Status LaunchPlanesProductF16(const Context& ctx, PlanesProduct& p, int multiprocessors,
                              const std::string& what) {
  return LaunchPlanesProduct<__half>(ctx, p, multiprocessors, what);
}

Status LaunchPlanesWgradF16(const Context& ctx, PlanesWgrad& p, int64_t workspace_bytes,
                            const std::string& what) {
  return LaunchPlanesWgrad<__half>(ctx, p, workspace_bytes, what);
}

}  // namespace jaxconv::cuda
