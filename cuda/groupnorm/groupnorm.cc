// The two group-norm launchers of common/launch.h: what is refused, and how blocks cover the problem.
#include "cuda/groupnorm/groupnorm.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/launch.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/groupnorm/domain.h"

namespace jaxconv::cuda {
namespace {

bool Aligned16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

Status Confirm(GroupNormOp op, const GroupNormProblem& p, const Plan& plan,
               const Workspace& workspace, const Device& device, const std::string& what) {
  const std::string refusal = GroupNormRefusal(op, p, plan, device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  const int64_t needed = GroupNormWorkspace(op, p, plan);
  if (needed == 0) return Status::Ok();
  if (workspace.bytes >= needed && workspace.data != nullptr && Aligned16({workspace.data}))
    return Status::Ok();
  return Status::Invalid(what + ": needs a workspace of " + std::to_string(needed) +
                         " bytes, given " + std::to_string(workspace.bytes));
}

Status ConfirmAligned(bool aligned, const std::string& what) {
  return aligned ? Status::Ok() : Status::Invalid(what + ": arrays must be 16-byte aligned");
}

groupnorm::Walk MakeWalk(const GroupNormProblem& p, const Plan& plan, bool vectors) {
  const groupnorm::Lanes lanes = groupnorm::LanesOf(p.channels, vectors ? groupnorm::Vector(p) : 1);
  groupnorm::Walk w = {};
  w.images = p.batch * p.images;
  w.per_instance = static_cast<uint32_t>(p.images);
  w.pixels = static_cast<uint32_t>(p.pixels);
  w.chunk = static_cast<uint32_t>(CeilDivide(p.pixels, plan.splits));
  w.splits = static_cast<uint32_t>(plan.splits);
  w.lead = static_cast<uint32_t>(std::min(plan.chunk, w.images * plan.splits));
  w.channels = static_cast<int>(p.channels);
  w.groups = static_cast<int>(p.groups);
  w.group_channels = static_cast<int>(p.group_channels());
  w.row = static_cast<int>(lanes.row);
  w.tiles = static_cast<int>(lanes.tiles);
  w.lanes = static_cast<int>(lanes.lanes);
  w.rows = static_cast<int>(lanes.rows);
  w.activation = p.activation;
  w.slope = static_cast<float>(p.slope);
  w.inv_n = 1.0 / (static_cast<double>(p.pixels) * static_cast<double>(p.group_channels()));
  w.epsilon = p.epsilon;
  return w;
}

const float* Float(const void* p) { return static_cast<const float*>(p); }
float* Float(void* p) { return static_cast<float*>(p); }

}  // namespace

Status GroupNorm(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                 const GroupNormArrays& a, Workspace workspace) {
  const std::string what = Describe("groupnorm", p, plan);
  if (p.batch == 0 || p.images == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  JAXCONV_RETURN_IF_ERROR(Confirm(GroupNormOp::kForward, p, plan, workspace, device, what));
  const groupnorm::Scratch at = groupnorm::ScratchOf(GroupNormOp::kForward, p, plan);
  char* scratch = static_cast<char*>(workspace.data);
  const bool aligned = Aligned16({a.x, a.y, a.scale, a.bias});
  groupnorm::ForwardArgs args = {};
  args.walk = MakeWalk(p, plan, aligned);
  args.x = a.x;
  args.y = a.y;
  args.scale = Float(a.scale);
  args.bias = Float(a.bias);
  args.mean = Float(a.mean);
  args.rstd = Float(a.rstd);
  args.parts = reinterpret_cast<float2*>(scratch + at.parts);
  args.counters = reinterpret_cast<unsigned*>(scratch + at.counters);
  if (plan.kernel == "rows") {
    JAXCONV_RETURN_IF_ERROR(ConfirmAligned(aligned, what));
    return groupnorm::RowsForward(ctx, p, device, args, what);
  }
  if (plan.kernel == "resident")
    return groupnorm::ResidentForward(ctx, p, plan, device, aligned, args, what);
  return groupnorm::Forward(ctx, p, plan.kernel == "interleaved", aligned, args, what);
}

Status GroupNormBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                         const GroupNormBackwardArrays& a, Workspace workspace) {
  const std::string what = Describe("groupnorm_backward", p, plan);
  if (p.batch == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  JAXCONV_RETURN_IF_ERROR(Confirm(GroupNormOp::kBackward, p, plan, workspace, device, what));
  const groupnorm::Scratch at = groupnorm::ScratchOf(GroupNormOp::kBackward, p, plan);
  char* scratch = static_cast<char*>(workspace.data);
  const bool aligned = Aligned16({a.x, a.dy, a.dx, a.scale, a.bias});
  groupnorm::BackwardArgs args = {};
  args.walk = MakeWalk(p, plan, aligned);
  args.x = a.x;
  args.dy = a.dy;
  args.dx = a.dx;
  args.scale = Float(a.scale);
  args.bias = Float(a.bias);
  args.mean = Float(a.mean);
  args.rstd = Float(a.rstd);
  args.dscale = Float(a.dscale);
  args.dbias = Float(a.dbias);
  args.parts = reinterpret_cast<float2*>(scratch + at.parts);
  args.sums = reinterpret_cast<float*>(scratch + at.sums);
  args.counters = reinterpret_cast<unsigned*>(scratch + at.counters);
  if (plan.kernel == "rows") {
    JAXCONV_RETURN_IF_ERROR(ConfirmAligned(aligned, what));
    return groupnorm::RowsBackward(ctx, p, device, args, what);
  }
  if (plan.kernel == "resident") {
    JAXCONV_RETURN_IF_ERROR(groupnorm::ResidentBackward(ctx, p, plan, device, aligned, args, what));
  } else {
    JAXCONV_RETURN_IF_ERROR(
        groupnorm::Backward(ctx, p, plan.kernel == "interleaved", aligned, args, what));
  }
  const int64_t rows = p.images * (plan.kernel == "resident" ? 1 : plan.splits);
  return groupnorm::AddShares(ctx, p, rows, device.sm90(), args, what);
}

}  // namespace jaxconv::cuda
