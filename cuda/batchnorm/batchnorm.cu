// The three batch-norm launchers of common/launch.h: what is refused, and which algorithm carries
// out the plan.
#include "cuda/batchnorm/batchnorm.h"

#include <algorithm>
#include <string>

#include "common/launch.h"
#include "cuda/batchnorm/layout.h"

namespace jaxconv::cuda {
namespace {

std::string What(const char* op, const BatchNormProblem& p, const Plan& plan) {
  return std::string(op) + "[" + std::string(plan.kernel) + " " + Name(p.dtype) +
         (plan.tile.empty() ? "" : " " + std::string(plan.tile)) +
         " splits=" + std::to_string(plan.splits) + "]";
}

Status CheckProblem(const BatchNormProblem& p, const std::string& what) {
  if (p.dtype == DType::kF64)
    return Status::Unimplemented(what + ": the GPU kernels take float32, bfloat16 and float16");
  if (p.reduced() >= batchnorm::kMaxPositions)
    return Status::Unimplemented(what + ": " + std::to_string(p.reduced()) +
                                 " elements per channel, fewer than 2^31 expected");
  return Status::Ok();
}

Status UnknownAlgorithm(const std::string& what) {
  return Status::Unimplemented(what +
                               ": expected algorithm two_read, resident_block or resident_team");
}

// A tile "64B" is 64 bytes of neighbouring channels; splits, the CTAs of a team.
Status ToTeamShape(const Plan& plan, const std::string& what, batchnorm::TeamShape& shape) {
  for (const int width : {32, 64, 128}) {
    if (plan.tile == std::to_string(width) + "B") {
      shape = {width, static_cast<int>(std::clamp<int64_t>(plan.splits, 1, 1 << 20))};
      return Status::Ok();
    }
  }
  return Status::Unimplemented(what + ": expected tile 32B, 64B or 128B, got '" +
                               std::string(plan.tile) + "'");
}

// 0 is taken as 1.
int64_t Splits(const Plan& plan) { return std::max<int64_t>(plan.splits, 1); }

const float* Float(const void* p) { return static_cast<const float*>(p); }
float* Float(void* p) { return static_cast<float*>(p); }

}  // namespace

Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* running_mean,
                      const void* running_var, const void* residual, void* y, void* new_mean,
                      void* new_var, void* mean, void* rstd, Workspace workspace) {
  const std::string what = What("batchnorm_train", p, plan);
  JAXCONV_RETURN_IF_ERROR(CheckProblem(p, what));
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  batchnorm::ForwardTensors t{};
  t.x = x;
  t.residual = p.residual ? residual : nullptr;
  t.y = y;
  t.scale = Float(scale);
  t.bias = Float(bias);
  t.old_mean = Float(running_mean);
  t.old_var = Float(running_var);
  t.new_mean = Float(new_mean);
  t.new_var = Float(new_var);
  t.mean = Float(mean);
  t.rstd = Float(rstd);
  const BatchNormProblem canonical = batchnorm::Canonical(p);
  if (plan.kernel == "two_read")
    return batchnorm::TwoReadTrain(ctx, canonical, Splits(plan), t, workspace, what);
  if (plan.kernel == "resident_block") return batchnorm::ResidentTrain(ctx, canonical, t, what);
  if (plan.kernel == "resident_team") {
    batchnorm::TeamShape shape{};
    JAXCONV_RETURN_IF_ERROR(ToTeamShape(plan, what, shape));
    return batchnorm::TeamTrain(ctx, canonical, shape, t, workspace, what);
  }
  return UnknownAlgorithm(what);
}

// One pass, whatever the plan's algorithm.
Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, const void* residual, void* y) {
  const std::string what = What("batchnorm_infer", p, plan);
  JAXCONV_RETURN_IF_ERROR(CheckProblem(p, what));
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
  batchnorm::ForwardTensors t{};
  t.x = x;
  t.residual = p.residual ? residual : nullptr;
  t.y = y;
  t.scale = Float(scale);
  t.bias = Float(bias);
  t.old_mean = Float(mean);
  t.old_var = Float(var);
  return batchnorm::Infer(ctx, batchnorm::Canonical(p), t, what);
}

Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                         const void* x, const void* dy, const void* scale, const void* bias,
                         const void* mean, const void* rstd, const void* residual, void* dx,
                         void* dscale, void* dbias, void* dresidual, Workspace workspace) {
  const std::string what = What("batchnorm_backward", p, plan);
  JAXCONV_RETURN_IF_ERROR(CheckProblem(p, what));
  if (p.batch == 0 || p.channels == 0) return Status::Ok();
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
  if (plan.kernel == "two_read")
    return batchnorm::TwoReadBackward(ctx, canonical, Splits(plan), t, workspace, what);
  if (plan.kernel == "resident_block") return batchnorm::ResidentBackward(ctx, canonical, t, what);
  if (plan.kernel == "resident_team") {
    batchnorm::TeamShape shape{};
    JAXCONV_RETURN_IF_ERROR(ToTeamShape(plan, what, shape));
    return batchnorm::TeamBackward(ctx, canonical, shape, t, workspace, what);
  }
  return UnknownAlgorithm(what);
}

}  // namespace jaxconv::cuda
