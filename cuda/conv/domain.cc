// cuda/domain.h for convolutions: the family's part of a kernel's name picks the family's domain.
#include "cuda/domain.h"

#include "cuda/conv/common/domain.h"
#include "cuda/conv/depthwise/domain.h"
#include "cuda/conv/direct/domain.h"
#include "cuda/conv/grouped/domain.h"
#include "cuda/conv/im2col/domain.h"
#include "cuda/conv/implicit_gemm/domain.h"
#include "cuda/conv/integer/domain.h"
#include "cuda/conv/narrow/domain.h"
#include "cuda/conv/sm90/domain.h"
#include "cuda/conv/sm90/eight/domain.h"
#include "cuda/conv/stem/domain.h"
#include "cuda/core/derivative.h"

namespace jaxconv::cuda {
namespace {

// Whether a family's kernel adds a residual to its sums.
bool AddsResidual(std::string_view family, std::string_view member, const ConvProblem& p) {
  if (family == "sm90") return conv::sm90::AddsResidual(member, p);
  return family == "direct" || family == "im2col" || family == "implicit_gemm" ||
         (family == "narrow" && member == "rows");
}

// Whether a family's kernel adds to its dgrads; sm90 says so itself.
bool AddsToDgrad(std::string_view family, std::string_view member) {
  return (family == "narrow" && member == "rows") ||
         (family == "depthwise" && conv::depthwise::AddsToDgrad(member));
}

// As sm90 runs it. Not folded where it sums up: the sums are of x's own channels.
ConvProblem OfSm90(ConvOp op, const ConvProblem& p) {
  if (op == ConvOp::kDgradSums || op == ConvOp::kGradient || op == ConvOp::kNormGradient) return p;
  return conv::FoldPatches(p, op == ConvOp::kDgrad || op == ConvOp::kDgradAdd);
}

}  // namespace

std::string IntegerRefusal(const IntegerConvProblem& p, const Plan& plan) {
  return conv::integer::Refusal(p, plan);
}

std::string ScaledRefusal(const ScaledConvProblem& p, const Plan& plan, const Device& device) {
  if (plan.kernel == "sm90/eight") return conv::sm90::RefuseEight(p, plan, device);
  if (plan.kernel == "sm90/eight_halo") return conv::sm90::RefuseEightHalo(p, plan, device);
  return "there is no such kernel";
}

std::string ConvRefusal(ConvOp op, const ConvProblem& p, const Plan& plan, const Device& device) {
  const std::string_view family = FamilyOf(plan.kernel), member = MemberOf(plan.kernel);
  if (plan.splits < 1) return "it needs splits of at least 1, got " + std::to_string(plan.splits);
  if (op == ConvOp::kDgradAdd && family != "sm90") {
    if (!AddsToDgrad(family, member))
      return "only sm90, narrow and depthwise/rows_mma can add to a dgrad";
    op = ConvOp::kDgrad;  // that is all the difference
  }
  if (op == ConvOp::kDgradSums && family != "sm90") return "only sm90 takes sums of its dgrad";
  if (op == ConvOp::kNormGradient && family != "sm90")
    return "only sm90 goes back through a batch-norm in its dgrads";
  if (op == ConvOp::kGradientAdd) {
    if (family != "narrow" || member != "rows")
      return "only narrow adds to a dgrad behind an activation's derivative";
    op = ConvOp::kGradient;  // that is all the difference
  }
  if (op == ConvOp::kGradient && family != "sm90" && family != "narrow")
    return "only sm90 and narrow go back through an activation in their dgrads";
  if (op == ConvOp::kFpropAdd) {
    if (!AddsResidual(family, member, p)) return "it cannot add a residual";
    op = ConvOp::kFprop;  // that is all the difference
  }
  if (op == ConvOp::kAddStatistics) {
    if (family != "sm90") return "only sm90 takes statistics of a sum";
    op = ConvOp::kStatistics;  // that is all the difference
  }
  if (op == ConvOp::kStatistics && family != "sm90" && family != "grouped")
    return "only sm90 and grouped take statistics of their results";
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  if (family == "depthwise") return conv::depthwise::Refusal(member, op, p, device);
  if (family == "direct") return conv::direct::Refusal(p);
  if (family == "im2col") return conv::im2col::Refusal(p, plan);
  if (family == "implicit_gemm") {
    return conv::implicit_gemm::Refusal(op, conv::FoldPatches(p, op == ConvOp::kDgrad), plan);
  }
  if (family == "stem") return conv::stem::Refusal(member, op, p, plan, device);
  if (family == "grouped") return conv::grouped::Refusal(member, op, p, device);
  if (family == "narrow") return conv::narrow::Refusal(member, op, p, device);
  if (family == "sm90") return conv::sm90::Refusal(op, OfSm90(op, p), plan, device);
  return "there is no such kernel";
}

std::string NormalisedRefusal(ConvOp op, const ConvProblem& p, Activation activation,
                              const Plan& plan, const Device& device) {
  const std::string_view family = FamilyOf(plan.kernel);
  if (plan.splits < 1) return "it needs splits of at least 1, got " + std::to_string(plan.splits);
  if (family == "sm90") return conv::sm90::RefuseNormalised(op, p, activation, plan, device);
  if (family != "depthwise")
    return "only depthwise kernels and sm90/normalised normalise their input";
  std::string why = conv::depthwise::RefuseNormalised(MemberOf(plan.kernel), p, activation);
  if (!why.empty()) return why;
  return ConvRefusal(op == ConvOp::kSums ? ConvOp::kWgrad : op, p, plan, device);
}

std::string PooledRefusal(const ConvProblem& p, Activation activation, const PoolProblem& q,
                          Number x, Number y, const Plan& plan, const Device& device) {
  if (plan.kernel != "stem/sm90_pooled") return "only stem/sm90_pooled takes a pooling's maxima";
  if (!plan.tile.empty()) return "it has one tile";
  return conv::stem::RefusePooled(p, activation, q, x, y, device);
}

std::string ShortcutRefusal(const ConvProblem& p, const ConvProblem& q, const Plan& plan,
                            const Device& device) {
  if (plan.kernel != "sm90/product") return "only sm90/product takes a shortcut";
  if (plan.splits != 1) return "it has no splits, got " + std::to_string(plan.splits);
  return conv::sm90::RefuseShortcut(p, q, plan, device);
}

std::string GradientRefusal(ConvOp op, const ConvProblem& p, Activation activation,
                            const Plan& plan, const Device& device) {
  std::string why = ConvRefusal(op, p, plan, device);
  if (!why.empty()) return why;
  if (op == ConvOp::kNormGradient) {
    return IsLinear(activation) ? ""
                                : "behind a batch-norm it has no derivative of " +
                                      std::string(kActivationNames[int(activation)]);
  }
  if (HasPieces(activation)) return "";
  if (FamilyOf(plan.kernel) == "sm90" && conv::sm90::HasEveryDerivative(MemberOf(plan.kernel)))
    return "";
  return std::string(plan.kernel) + " has no derivative of " +
         std::string(kActivationNames[int(activation)]);
}

ConvProblem ConvFolded(const ConvProblem& p, bool dgrad) { return conv::FoldPatches(p, dgrad); }

int64_t ConvWorkspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  const std::string_view family = FamilyOf(plan.kernel);
  if (op == ConvOp::kFpropAdd) op = ConvOp::kFprop;
  if (op == ConvOp::kAddStatistics) op = ConvOp::kStatistics;
  if (op == ConvOp::kGradientAdd) op = ConvOp::kGradient;
  if (family == "depthwise") return conv::depthwise::Workspace(op, p, plan);
  if (family == "direct") return conv::direct::Workspace(op, p, plan);
  if (family == "im2col") return conv::im2col::Workspace(op, p, plan);
  if (family == "implicit_gemm") return conv::implicit_gemm::Workspace(op, p, plan);
  if (family == "grouped") return conv::grouped::Workspace(op, p, plan);
  if (family == "narrow") return conv::narrow::Workspace(op, p, plan);
  if (family == "stem") return conv::stem::Workspace(op, p, plan);
  if (family == "sm90") return conv::sm90::Workspace(op, OfSm90(op, p), plan);
  return 0;
}

}  // namespace jaxconv::cuda
