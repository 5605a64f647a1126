// 3x3 convolutions of few channels of 8-bit numbers: int8 pixels, int8 filters. See halo.cuh.
#include "cuda/conv/sm90/eight/halo.cuh"

namespace jaxconv::cuda {

Status LaunchEightHaloS8S8(const Context& ctx, EightHalo& p, int64_t row, int multiprocessors,
                           const std::string& what) {
  return LaunchEightHalo<Number::kS8, Number::kS8>(ctx, p, row, multiprocessors, what);
}

}  // namespace jaxconv::cuda
