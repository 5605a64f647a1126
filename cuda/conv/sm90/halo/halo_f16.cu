// Convolutions of few channels on the sm_90a main loop: float16. See halo.cuh.
#include "cuda/conv/sm90/halo/halo.cuh"

namespace jaxconv::cuda {

Status LaunchHaloProductF16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                            const std::string& what) {
  return LaunchHaloForward<__half>(ctx, p, dgrad, multiprocessors, what);
}

Status LaunchHaloGradientF16(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                             const std::string& what) {
  return LaunchHaloGradient<__half>(ctx, p, dbias, multiprocessors, what);
}

Status LaunchHaloWgradF16(const Context& ctx, HaloWgrad& p, const std::string& what) {
  return LaunchHaloWgrad<__half>(ctx, p, what);
}

}  // namespace jaxconv::cuda
