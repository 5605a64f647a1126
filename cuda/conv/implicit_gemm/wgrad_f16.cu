// wgrad by implicit GEMM: float16 on tensor cores. See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchWgradF16(const Context& ctx, const ConvLaunch<WgradParams>& c,
                      const std::string& what) {
  return LaunchConv<TensorMath, __half>(ctx, c, what);
}

}  // namespace jaxconv::cuda
