// d = f(alpha * op(a) @ op(b) + beta * c + bias): bfloat16 on tensor cores. See instances.cuh.
#include "cuda/gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchGemmBf16(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  return LaunchGemmMath<TensorMath, __nv_bfloat16>(ctx, g, what);
}

}  // namespace jaxconv::cuda
