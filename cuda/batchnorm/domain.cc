// cuda/domain.h for batch-norms.
#include "cuda/batchnorm/domain.h"

namespace jaxconv::cuda {

std::string BatchNormRefusal(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                             const Device& device) {
  return batchnorm::Refusal(op, p, plan, device);
}

int64_t BatchNormWorkspace(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                           const Device& device) {
  return batchnorm::WorkspaceOf(op, p, plan, device);
}

int64_t BatchNormVector(const BatchNormProblem& p) { return batchnorm::Vector(p); }

bool BatchNormStreamed(const BatchNormProblem& p) { return batchnorm::Streamed(p); }

TeamCount BatchNormTeams(BatchNormOp, const BatchNormProblem& p, int width, const Device& device) {
  return {int64_t{device.multiprocessors} * batchnorm::kTeamBlocks,
          batchnorm::TeamGroups(p, width)};
}

}  // namespace jaxconv::cuda
