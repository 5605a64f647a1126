// fprop and dgrad by implicit GEMM: bfloat16 on tensor cores. See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchFpropBf16(const Context& ctx, const ConvLaunch<FpropParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, __nv_bfloat16>(ctx, c, what);
}
Status LaunchDgradBf16(const Context& ctx, const ConvLaunch<DgradParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, __nv_bfloat16>(ctx, c, what);
}

}  // namespace jaxconv::cuda
