// The two squeeze-and-excitation launchers of common/launch.h: what is refused.
#include "cuda/squeeze_excite/squeeze_excite.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/launch.h"
#include "cuda/core/describe.h"
#include "cuda/core/device.h"
#include "cuda/squeeze_excite/domain.h"

namespace jaxconv::cuda {
namespace {

Status Confirm(const SqueezeExciteProblem& p, const Plan& plan, const std::string& what,
               std::initializer_list<const void*> arrays, Device* device) {
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, device));
  const std::string refusal = SqueezeExciteRefusal(p, plan, *device);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  const bool aligned = std::all_of(arrays.begin(), arrays.end(), [](const void* a) {
    return reinterpret_cast<uintptr_t>(a) % 16 == 0;
  });
  return aligned ? Status::Ok() : Status::Invalid(what + ": arrays must be 16-byte aligned");
}

const float* Float(const void* p) { return static_cast<const float*>(p); }
float* Float(void* p) { return static_cast<float*>(p); }

}  // namespace

Status SqueezeExcite(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                     const SqueezeExciteArrays& a, Workspace) {
  const std::string what = Describe("squeeze_excite", p, plan);
  if (p.images == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(Confirm(p, plan, what, {a.x, a.y, a.w1, a.w2}, &device));
  const squeeze_excite::ForwardArgs args = {a.x,           Float(a.w1), Float(a.b1),
                                            Float(a.w2),   Float(a.b2), a.y,
                                            Float(a.mean), Float(a.z1), Float(a.gate)};
  return squeeze_excite::Forward(ctx, p, plan, device, args, what);
}

Status SqueezeExciteBackward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                             const SqueezeExciteBackwardArrays& a, Workspace) {
  const std::string what = Describe("squeeze_excite_backward", p, plan);
  if (p.images == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(Confirm(p, plan, what, {a.x, a.dy, a.dx, a.w1, a.w2}, &device));
  const squeeze_excite::BackwardArgs args = {a.x,          a.dy,         Float(a.w1),
                                             Float(a.w2),  Float(a.z1),  Float(a.gate),
                                             Float(a.dz2), Float(a.dz1), a.dx};
  return squeeze_excite::Backward(ctx, p, plan, device, args, what);
}

}  // namespace jaxconv::cuda
