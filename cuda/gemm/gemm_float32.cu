// d = f(alpha * op(a) @ op(b) + beta * c + bias): float32 without rounding of the operands (SIMT).
// See instances.cuh.
#include "cuda/gemm/instances.cuh"

namespace jaxconv::cuda {

Status LaunchGemmFloat32(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  return LaunchGemmMath<SimtMath, float>(ctx, g, what);
}

}  // namespace jaxconv::cuda
