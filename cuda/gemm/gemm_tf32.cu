// d = f(alpha * op(a) @ op(b) + beta * c + bias): float32 rounded to TF32 on tensor cores. See
// instances.cuh.
#include "cuda/gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchGemmTf32(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  return LaunchGemmMath<TensorMath, float>(ctx, g, what);
}

}  // namespace jaxconv::cuda
