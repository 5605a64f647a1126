// cuda/domain.h for group-norms.
#include "cuda/groupnorm/domain.h"

namespace jaxconv::cuda {

std::string GroupNormRefusal(const GroupNormProblem& p, const Plan& plan) {
  return groupnorm::Refusal(p, plan);
}

int64_t GroupNormWorkspace(GroupNormOp op, const GroupNormProblem& p, const Plan& plan) {
  return groupnorm::ScratchOf(op, p, plan).end;
}

int64_t GroupNormVector(const GroupNormProblem& p) { return groupnorm::Vector(p); }

int64_t GroupNormRows(const GroupNormProblem& p) {
  return groupnorm::LanesOf(p.channels, groupnorm::Vector(p)).rows;
}

}  // namespace jaxconv::cuda
