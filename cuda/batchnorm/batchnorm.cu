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

// What inference takes, and training with the running statistics in the place of those to apply.
batchnorm::ForwardTensors Given(const BatchNormProblem& p, const void* x, const void* scale,
                                const void* bias, const void* mean, const void* var,
                                const void* residual, void* y) {
  batchnorm::ForwardTensors t{};
  t.x = x;
  t.residual = p.residual ? residual : nullptr;
  t.y = y;
  t.scale = Float(scale);
  t.bias = Float(bias);
  t.old_mean = Float(mean);
  t.old_var = Float(var);
  return t;
}

}  // namespace

Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* running_mean,
                      const void* running_var, const void* residual, void* y, void* new_mean,
                      void* new_var, void* mean, void* rstd, Workspace workspace) {
  const std::string what = Describe("batchnorm_train", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kTrain, p, plan, workspace, what));
  batchnorm::ForwardTensors t = Given(p, x, scale, bias, running_mean, running_var, residual, y);
  t.new_mean = Float(new_mean);
  t.new_var = Float(new_var);
  t.mean = Float(mean);
  t.rstd = Float(rstd);
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
                        const void* x, void* k, void* shift, void* var, Workspace workspace) {
  const std::string what = Describe("batchnorm_moments", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kMoments, p, plan, workspace, what));
  return batchnorm::TwoReadMoments(ctx, batchnorm::Canonical(p), plan.splits,
                                   {x, Float(k), Float(shift), Float(var)}, workspace, what);
}

// One pass.
Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, const void* residual, void* y) {
  const std::string what = Describe("batchnorm_infer", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kInfer, p, plan, {}, what));
  return batchnorm::Infer(ctx, batchnorm::Canonical(p),
                          Given(p, x, scale, bias, mean, var, residual, y), what);
}

// One pass.
Status BatchNormSigns(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, const void* residual, void* y, void* signs) {
  const std::string what = Describe("batchnorm_signs", p, plan);
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kSigns, p, plan, {}, what));
  batchnorm::ForwardTensors t = Given(p, x, scale, bias, mean, var, residual, y);
  t.signs = static_cast<uint8_t*>(signs);
  return batchnorm::Infer(ctx, batchnorm::Canonical(p), t, what);
}

Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                         const void* x, const void* dy, const void* scale, const void* bias,
                         const void* mean, const void* rstd, const void* residual, void* dx,
                         void* dscale, void* dbias, void* dresidual, Workspace workspace) {
  const std::string what = Describe("batchnorm_backward", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kBackward, p, plan, workspace, what));
  const bool needs_z = p.activation != Activation::kNone;
  batchnorm::BackwardTensors t{};
  t.x = x;
  t.dy = dy;
  t.residual = p.residual && needs_z ? residual : nullptr;
  t.dx = dx;
  t.dresidual = dresidual;
  t.scale = Float(scale);
  t.bias = Float(bias);
  t.mean = Float(mean);
  t.rstd = Float(rstd);
  t.dscale = Float(dscale);
  t.dbias = Float(dbias);
  const BatchNormProblem canonical = batchnorm::Canonical(p);
  if (plan.kernel == "resident_block") return batchnorm::ResidentBackward(ctx, canonical, t, what);
  if (plan.kernel == "resident_team") {
    batchnorm::TeamShape shape{};
    JAXCONV_RETURN_IF_ERROR(ToTeamShape(plan, what, shape));
    return batchnorm::TeamBackward(ctx, canonical, shape, t, workspace, what);
  }
  return batchnorm::TwoReadBackward(ctx, canonical, plan.splits, t, workspace, what);
}

// One pass.
Status BatchNormDx(const Context& ctx, const BatchNormProblem& p, const Plan& plan, const void* x,
                   const void* dy, const void* scale, const void* bias, const void* mean,
                   const void* rstd, const void* dscale, const void* dbias, const void* residual,
                   int64_t count, void* dx) {
  const std::string what = Describe("batchnorm_dx", p, plan);
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kDx, p, plan, {}, what));
  const bool needs_z = p.activation != Activation::kNone;
  batchnorm::BackwardTensors t{};
  t.x = x;
  t.dy = dy;
  t.residual = p.residual && needs_z ? residual : nullptr;
  t.dx = dx;
  t.scale = Float(scale);
  t.bias = Float(bias);
  t.mean = Float(mean);
  t.rstd = Float(rstd);
  // Read only.
  t.dscale = const_cast<float*>(Float(dscale));
  t.dbias = const_cast<float*>(Float(dbias));
  return batchnorm::DxOfSums(ctx, batchnorm::Canonical(p), count, t, what);
}

Status BatchNormShortcutBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                                 const void* x, const void* dy, const void* scale, const void* bias,
                                 const void* mean, const void* rstd, const void* r,
                                 const void* scale_r, const void* bias_r, const void* mean_r,
                                 const void* rstd_r, void* dscale, void* dbias, void* dscale_r,
                                 void* dx, void* dr, Workspace workspace) {
  const std::string what = Describe("batchnorm_shortcut_backward", p, plan);
  JAXCONV_RETURN_IF_ERROR(Confirm(BatchNormOp::kShortcutBackward, p, plan, workspace, what));
  batchnorm::ShortcutTensors t{};
  t.x = x;
  t.dy = dy;
  t.r = r;
  t.of_x = {Float(scale), Float(bias), Float(mean), Float(rstd)};
  t.of_r = {Float(scale_r), Float(bias_r), Float(mean_r), Float(rstd_r)};
  t.dscale = Float(dscale);
  t.dbias = Float(dbias);
  t.dscale_r = Float(dscale_r);
  t.dx = dx;
  t.dr = dr;
  return batchnorm::ShortcutBackward(ctx, batchnorm::Canonical(p), plan.splits, t, workspace, what);
}

}  // namespace jaxconv::cuda
