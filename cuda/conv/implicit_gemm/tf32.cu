// fprop and dgrad by implicit GEMM: float32 rounded to TF32 on tensor cores. See
// views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchFpropTf32(const Context& ctx, const ConvLaunch<FpropParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, float>(ctx, c, what);
}
Status LaunchDgradTf32(const Context& ctx, const ConvLaunch<DgradParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, float>(ctx, c, what);
}

}  // namespace jaxconv::cuda
