// cuda/domain.h for group-norms.
#include "cuda/groupnorm/domain.h"

namespace jaxconv::cuda {

std::string GroupNormRefusal(GroupNormOp op, const GroupNormProblem& p, const Plan& plan,
                             const Device& device) {
  return groupnorm::Refusal(op, p, plan, device);
}

int64_t GroupNormUnit(const GroupNormProblem& p) {
  const int64_t unit = groupnorm::UnitOf(p);
  return unit > groupnorm::kWarp ? 0 : unit * 16;
}

int64_t GroupNormWorkspace(GroupNormOp op, const GroupNormProblem& p, const Plan& plan) {
  return groupnorm::ScratchOf(op, p, plan).end;
}

int64_t GroupNormVector(const GroupNormProblem& p) { return groupnorm::Vector(p); }

int64_t GroupNormRows(const GroupNormProblem& p) {
  return groupnorm::LanesOf(p.channels, groupnorm::Vector(p)).rows;
}

}  // namespace jaxconv::cuda
