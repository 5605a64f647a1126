// fprop and dgrad by implicit GEMM: float16 on tensor cores. See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchFpropF16(const Context& ctx, const ConvLaunch<FpropParams>& c,
                      const std::string& what) {
  return LaunchConv<TensorMath, __half>(ctx, c, what);
}
Status LaunchDgradF16(const Context& ctx, const ConvLaunch<DgradParams>& c,
                      const std::string& what) {
  return LaunchConv<TensorMath, __half>(ctx, c, what);
}

}  // namespace jaxconv::cuda
