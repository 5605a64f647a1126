// Convolutions of few channels on the sm_90a main loop: float16. See halo.cuh.
#include "cuda/conv/sm90/halo/halo.cuh"

namespace jaxconv::cuda {

Status LaunchHaloProductF16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                            const std::string& what) {
  return dgrad ? LaunchHaloProduct<__half, true>(ctx, p, multiprocessors, what)
               : LaunchHaloProduct<__half, false>(ctx, p, multiprocessors, what);
}

Status LaunchHaloWgradF16(const Context& ctx, HaloWgrad& p, int multiprocessors,
                          int64_t workspace_bytes, const std::string& what) {
  return LaunchHaloWgrad<__half>(ctx, p, multiprocessors, workspace_bytes, what);
}

}  // namespace jaxconv::cuda
