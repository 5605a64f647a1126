// The sm_90a product in float16: k-major A, n-major B (fprop; dense). See sm90_product.cuh.
#include "cuda/gemm/sm90_instances.cuh"

namespace jaxconv::cuda {

Status LaunchSm90KNF16(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                       const std::string& what) {
  return LaunchSm90ByTile<__half, true, false>(ctx, p, choice, multiprocessors, what);
}

}  // namespace jaxconv::cuda
