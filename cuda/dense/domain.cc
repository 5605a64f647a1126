// cuda/domain.h for dense products.
#include "cuda/dense/domain.h"

namespace jaxconv::cuda {

std::string DenseRefusal(const DenseProblem& p, const Plan& plan, const Device& device) {
  if (plan.splits < 1) return "it needs splits of at least 1, got " + std::to_string(plan.splits);
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  if (plan.kernel == "gemm") return dense::RefuseGemm(p, plan);
  if (FamilyOf(plan.kernel) == "sm90") return dense::RefuseSm90(p, plan, device);
  return "there is no such kernel";
}

int64_t DenseWorkspace(const DenseProblem& p, const Plan& plan) {
  return dense::WorkspaceOf(p, plan);
}

}  // namespace jaxconv::cuda
