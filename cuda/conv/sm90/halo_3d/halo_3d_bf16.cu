// 3-D convolutions of few channels on the sm_90a main loop: bfloat16. See halo_3d.cuh.
#include "cuda/conv/sm90/halo_3d/halo_3d.cuh"

namespace jaxconv::cuda {

Status LaunchHalo3dProductBf16(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                               const std::string& what) {
  return LaunchHalo3dProduct<__nv_bfloat16>(ctx, p, multiprocessors, what);
}

Status LaunchHalo3dWgradBf16(const Context& ctx, Halo3dWgrad& p, const std::string& what) {
  return LaunchHalo3dWgrad<__nv_bfloat16>(ctx, p, what);
}

}  // namespace jaxconv::cuda
