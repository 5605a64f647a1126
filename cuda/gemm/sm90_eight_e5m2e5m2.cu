// The sm_90a product of 8-bit operands: float8_e5m2 rows, float8_e5m2 columns. See sm90_eight.cuh.
#include "cuda/gemm/sm90_eight.cuh"

namespace jaxconv::cuda {

Status LaunchSm90EightE5M2E5M2(const Context& ctx, Sm90Product& p, const Sm90EightEpilogue& e,
                               TileSize tile, int multiprocessors, const std::string& what) {
  return LaunchSm90EightByTile<Number::kE5M2, Number::kE5M2>(ctx, p, e, tile, multiprocessors,
                                                             what);
}

}  // namespace jaxconv::cuda
