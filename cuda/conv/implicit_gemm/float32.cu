// fprop and dgrad by implicit GEMM: float32 without rounding of the operands (SIMT). See
// views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchFpropFloat32(const Context& ctx, const ConvLaunch<FpropParams>& c,
                          const std::string& what) {
  return LaunchConv<SimtMath, float>(ctx, c, what);
}
Status LaunchDgradFloat32(const Context& ctx, const ConvLaunch<DgradParams>& c,
                          const std::string& what) {
  return LaunchConv<SimtMath, float>(ctx, c, what);
}

}  // namespace jaxconv::cuda
