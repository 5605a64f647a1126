// The sm_90a product of 8-bit operands: int8 rows, int8 columns. See sm90_eight.cuh.
#include "cuda/gemm/sm90_eight.cuh"

namespace jaxconv::cuda {

Status LaunchSm90EightS8S8(const Context& ctx, Sm90Product& p, const Sm90EightEpilogue& e,
                           TileSize tile, int multiprocessors, const std::string& what) {
  return LaunchSm90EightByTile<Number::kS8, Number::kS8>(ctx, p, e, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
