// Convolutions of few channels on the sm_90a main loop: bfloat16. See halo.cuh.
#include "cuda/conv/sm90/halo/halo.cuh"

namespace jaxconv::cuda {

Status LaunchHaloProductBf16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                             const std::string& what) {
  return LaunchHaloForward<__nv_bfloat16>(ctx, p, dgrad, multiprocessors, what);
}

Status LaunchHaloGradientBf16(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                              const std::string& what) {
  return LaunchHaloGradient<__nv_bfloat16>(ctx, p, dbias, multiprocessors, what);
}

Status LaunchHaloWgradBf16(const Context& ctx, HaloWgrad& p, const std::string& what) {
  return LaunchHaloWgrad<__nv_bfloat16>(ctx, p, what);
}

}  // namespace jaxconv::cuda
