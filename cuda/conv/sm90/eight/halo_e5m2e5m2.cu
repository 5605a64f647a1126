// 3x3 convolutions of few channels of 8-bit numbers: float8_e5m2 pixels, float8_e5m2 filters. See halo.cuh.
#include "cuda/conv/sm90/eight/halo.cuh"

namespace jaxconv::cuda {

Status LaunchEightHaloE5M2E5M2(const Context& ctx, EightHalo& p, int64_t row, int multiprocessors,
                               const std::string& what) {
  return LaunchEightHalo<Number::kE5M2, Number::kE5M2>(ctx, p, row, multiprocessors, what);
}

}  // namespace jaxconv::cuda
