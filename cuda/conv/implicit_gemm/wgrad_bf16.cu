// wgrad by implicit GEMM: bfloat16 on tensor cores. See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchWgradBf16(const Context& ctx, const ConvLaunch<WgradParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, __nv_bfloat16>(ctx, c, what);
}

}  // namespace jaxconv::cuda
