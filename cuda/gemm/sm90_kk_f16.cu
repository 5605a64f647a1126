// The sm_90a product in float16: k-major A, k-major B (dgrad; dense with w transposed). See
// sm90_product.cuh.
#include "cuda/gemm/sm90_instances.cuh"

namespace jaxconv::cuda {

Status LaunchSm90KKF16(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                       const std::string& what) {
  return LaunchSm90ByTile<__half, true, true>(ctx, p, choice, multiprocessors, what);
}

}  // namespace jaxconv::cuda
