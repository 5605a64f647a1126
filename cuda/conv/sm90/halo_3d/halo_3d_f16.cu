// 3-D convolutions of few channels on the sm_90a main loop: float16. See halo_3d.cuh.
#include "cuda/conv/sm90/halo_3d/halo_3d.cuh"

namespace jaxconv::cuda {

Status LaunchHalo3dProductF16(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                              const std::string& what) {
  return LaunchHalo3dProduct<__half>(ctx, p, multiprocessors, what);
}

Status LaunchHalo3dWgradF16(const Context& ctx, Halo3dWgrad& p, const std::string& what) {
  return LaunchHalo3dWgrad<__half>(ctx, p, what);
}

}  // namespace jaxconv::cuda
