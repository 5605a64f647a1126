// The batch-norm launchers of common/launch.h: what is refused, and which algorithm carries
// out the plan.
#include "cuda/batchnorm/batchnorm.h"

#include <string>

#include "common/launch.h"
#include "cuda/batchnorm/domain.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda {
namespace {

// The plan on the device at hand (domain.h), and its workspace. A team's may be smaller than planned: fewer teams run.
Status Confirm(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
               const Workspace& workspace, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const std::string refusal = BatchNormRefusal(op, p, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  if (plan.kernel == "resident_team") return Status::Ok();
  const int64_t needed = BatchNormWorkspace(op, p, plan, device);
  if (workspace.bytes >= needed && (needed == 0 || workspace.data != nullptr)) return Status::Ok();
  return Status::Invalid(what + ": needs a workspace of " + std::to_string(needed) +
                         " bytes, given " + std::to_string(workspace.bytes));
}

// A tile "64B" is 64 bytes of neighbouring channels; splits, the CTAs of a team.
Status ToTeamShape(const Plan& plan, const std::string& what, batchnorm::TeamShape& shape) {
  shape = {batchnorm::TeamWidth(plan.tile), static_cast<int>(plan.splits)};
  return shape.width > 0 ? Status::Ok() : Status::Unimplemented(what + ": it needs a tile");
}

const float* Float(const void* p) { return static_cast<const float*>(p); }
float* Float(void* p) { return static_cast<float*>(p); }

// What inference and training take, but for statistics.
template <typename Arrays>
batchnorm::ForwardTensors Given(const BatchNormProblem& p, const Arrays& a) {
  batchnorm::ForwardTensors t{};
  t.x = a.x;
  if (p.residual) t.residual = a.residual;
  t.y = a.y;
  t.scale = Float(a.scale);
  t.bias = Float(a.bias);
  return t;
}

// By the statistics that are given.
template <typename Arrays>
batchnorm::ForwardTensors Applied(const BatchNormProblem& p, const Arrays& a) {
  batchnorm::ForwardTensors t = Given(p, a);
  t.old_mean = Float(a.mean);
  t.old_var = Float(a.var);
  return t;
}

}  // namespace

Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormTrainArrays& a, Workspace workspace) {
  const std::string what = Describe("batchnorm_train", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kTrain, p, plan, workspace, what));
  batchnorm::ForwardTensors t = Given(p, a);
  t.old_mean = Float(a.running_mean);
  t.old_var = Float(a.running_var);
  t.new_mean = Float(a.new_mean);
  t.new_var = Float(a.new_var);
  t.mean = Float(a.mean);
  t.rstd = Float(a.rstd);
  const BatchNormProblem canonical = batchnorm::Canonical(p);
  if (plan.kernel == "resident_block") return batchnorm::ResidentTrain(ctx, canonical, t, what);
  if (plan.kernel == "resident_team") {
    batchnorm::TeamShape shape{};
    JAXCONV_RETURN_IF_ERROR(ToTeamShape(plan, what, shape));
    return batchnorm::TeamTrain(ctx, canonical, shape, t, workspace, what);
  }
  return batchnorm::TwoReadTrain(ctx, canonical, plan.splits, t, workspace, what);
}

// One pass.
Status BatchNormMoments(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                        const BatchNormMomentsArrays& a, Workspace workspace) {
  const std::string what = Describe("batchnorm_moments", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kMoments, p, plan, workspace, what));
  return batchnorm::TwoReadMoments(ctx, batchnorm::Canonical(p), plan.splits,
                                   {a.x, Float(a.k), Float(a.shift), Float(a.var)}, workspace,
                                   what);
}

// One pass.
Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormInferArrays& a, Workspace) {
  const std::string what = Describe("batchnorm_infer", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kInfer, p, plan, {}, what));
  return batchnorm::Infer(ctx, batchnorm::Canonical(p), Applied(p, a), what);
}

// One pass.
Status BatchNormSigns(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormSignsArrays& a, Workspace) {
  const std::string what = Describe("batchnorm_signs", p, plan);
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kSigns, p, plan, {}, what));
  batchnorm::ForwardTensors t = Applied(p, a);
  t.signs = a.signs.as<uint8_t>();
  return batchnorm::Infer(ctx, batchnorm::Canonical(p), t, what);
}

Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                         const BatchNormBackwardArrays& a, Workspace workspace) {
  const std::string what = Describe("batchnorm_backward", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kBackward, p, plan, workspace, what));
  const bool needs_z = p.activation != Activation::kNone;
  batchnorm::BackwardTensors t{};
  t.x = a.x;
  t.dy = a.dy;
  if (p.residual && needs_z) t.residual = a.residual;
  t.dx = a.dx;
  t.dresidual = a.dresidual;
  t.scale = Float(a.scale);
  t.bias = Float(a.bias);
  t.mean = Float(a.mean);
  t.rstd = Float(a.rstd);
  t.dscale = Float(a.dscale);
  t.dbias = Float(a.dbias);
  const BatchNormProblem canonical = batchnorm::Canonical(p);
  if (plan.kernel == "resident_block") return batchnorm::ResidentBackward(ctx, canonical, t, what);
  if (plan.kernel == "resident_team") {
    batchnorm::TeamShape shape{};
    JAXCONV_RETURN_IF_ERROR(ToTeamShape(plan, what, shape));
    return batchnorm::TeamBackward(ctx, canonical, shape, t, workspace, what);
  }
  return batchnorm::TwoReadBackward(ctx, canonical, plan.splits, t, workspace, what);
}

Status BatchNormBackwardAdd(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                            const BatchNormBackwardAddArrays& a, Workspace workspace) {
  const std::string what = Describe("batchnorm_backward_add", p, plan);
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kBackwardAdd, p, plan, workspace, what));
  batchnorm::BackwardTensors t{};
  t.x = a.x;
  t.dy = a.dy;
  t.addend = a.c;
  t.dx = a.dx;
  t.scale = Float(a.scale);
  t.bias = Float(a.bias);
  t.mean = Float(a.mean);
  t.rstd = Float(a.rstd);
  t.dscale = Float(a.dscale);
  t.dbias = Float(a.dbias);
  return batchnorm::TwoReadBackward(ctx, batchnorm::Canonical(p), plan.splits, t, workspace, what);
}

// One pass.
Status BatchNormDx(const Context& ctx, const BatchNormProblem& p, int64_t count, const Plan& plan,
                   const BatchNormDxArrays& a, Workspace) {
  const std::string what = Describe("batchnorm_dx", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kDx, p, plan, {}, what));
  const bool needs_z = p.activation != Activation::kNone;
  batchnorm::BackwardTensors t{};
  t.x = a.x;
  t.dy = a.dy;
  if (p.residual && needs_z) t.residual = a.residual;
  t.dx = a.dx;
  t.scale = Float(a.scale);
  t.bias = Float(a.bias);
  t.mean = Float(a.mean);
  t.rstd = Float(a.rstd);
  // Read only.
  t.dscale = const_cast<float*>(Float(a.dscale));
  t.dbias = const_cast<float*>(Float(a.dbias));
  return batchnorm::DxOfSums(ctx, batchnorm::Canonical(p), count, t, what);
}

Status BatchNormShortcutBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                                 const BatchNormShortcutBackwardArrays& a, Workspace workspace) {
  const std::string what = Describe("batchnorm_shortcut_backward", p, plan);
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kShortcutBackward, p, plan, workspace, what));
  batchnorm::ShortcutTensors t{};
  t.x = a.x;
  t.dy = a.dy;
  t.r = a.r;
  t.of_x = {Float(a.scale), Float(a.bias), Float(a.mean), Float(a.rstd)};
  t.of_r = {Float(a.scale_r), Float(a.bias_r), Float(a.mean_r), Float(a.rstd_r)};
  t.dscale = Float(a.dscale);
  t.dbias = Float(a.dbias);
  t.dscale_r = Float(a.dscale_r);
  t.dx = a.dx;
  t.dr = a.dr;
  return batchnorm::ShortcutBackward(ctx, batchnorm::Canonical(p), plan.splits, t, workspace, what);
}

}  // namespace jaxconv::cuda
