// The sm_90a product in float16: m-major A, n-major B (dense with x transposed). See
// sm90_product.cuh.
#include "cuda/gemm/sm90_instances.cuh"

namespace jaxconv::cuda {

Status LaunchSm90MNF16(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                       const std::string& what) {
  return LaunchSm90ByTile<__half, false, false>(ctx, p, choice, multiprocessors, what);
}

}  // namespace jaxconv::cuda
