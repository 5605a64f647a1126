// The sm_90a product in bfloat16: k-major A, n-major B (fprop; dense). See sm90_product.cuh.
#include "cuda/gemm/sm90_instances.cuh"

namespace jaxconv::cuda {

Status LaunchSm90KNBf16(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                        const std::string& what) {
  return LaunchSm90ByTile<__nv_bfloat16, true, false>(ctx, p, choice, multiprocessors, what);
}

}  // namespace jaxconv::cuda
