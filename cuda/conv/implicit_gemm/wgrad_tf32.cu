// wgrad by implicit GEMM: float32 rounded to TF32 on tensor cores. See views.cuh.
#include "cuda/conv/implicit_gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchWgradTf32(const Context& ctx, const ConvLaunch<WgradParams>& c,
                       const std::string& what) {
  return LaunchConv<TensorMath, float>(ctx, c, what);
}

}  // namespace jaxconv::cuda
