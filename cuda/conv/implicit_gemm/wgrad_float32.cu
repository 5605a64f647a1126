// wgrad by implicit GEMM: float32 without rounding of the operands (SIMT). See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchWgradFloat32(const Context& ctx, const ConvLaunch<WgradParams>& c,
                          const std::string& what) {
  return LaunchConv<SimtMath, float>(ctx, c, what);
}

}  // namespace jaxconv::cuda
