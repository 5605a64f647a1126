// cuda/domain.h for squeeze-and-excitation.
#include "cuda/squeeze_excite/domain.h"

namespace jaxconv::cuda {

std::string SqueezeExciteRefusal(const SqueezeExciteProblem& p, const Plan& plan,
                                 const Device& device) {
  return squeeze_excite::Refusal(p, plan, device);
}

int64_t SqueezeExciteVector(const SqueezeExciteProblem& p) { return squeeze_excite::Vector(p); }

SqueezeExciteSize SqueezeExciteCta(const SqueezeExciteProblem& p, const Plan& plan,
                                   const Device& device) {
  const squeeze_excite::Tiling t = squeeze_excite::TilingOf(p, plan.chunk, plan.splits, device);
  return {t.images, t.steps, t.held, t.bytes};
}

}  // namespace jaxconv::cuda
