// d = f(alpha * op(a) @ op(b) + beta * c + bias): float16 on tensor cores. See instances.cuh.
#include "cuda/gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchGemmF16(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  return LaunchGemmMath<TensorMath, __half>(ctx, g, what);
}

}  // namespace jaxconv::cuda
