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
                     const void* x, const void* w1, const void* b1, const void* w2, const void* b2,
                     void* y, void* mean, void* z1, void* gate) {
  const std::string what = Describe("squeeze_excite", p, plan);
  if (p.images == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(Confirm(p, plan, what, {x, y, w1, w2}, &device));
  const squeeze_excite::ForwardArgs args = {x, Float(w1),   Float(b1), Float(w2),  Float(b2),
                                            y, Float(mean), Float(z1), Float(gate)};
  return squeeze_excite::Forward(ctx, p, plan, device, args, what);
}

Status SqueezeExciteBackward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                             const void* x, const void* dy, const void* w1, const void* w2,
                             const void* z1, const void* gate, void* dz2, void* dz1, void* dx) {
  const std::string what = Describe("squeeze_excite_backward", p, plan);
  if (p.images == 0) return Status::Ok();
  Device device;
  JAXCONV_RETURN_IF_ERROR(Confirm(p, plan, what, {x, dy, dx, w1, w2}, &device));
  const squeeze_excite::BackwardArgs args = {
      x, dy, Float(w1), Float(w2), Float(z1), Float(gate), Float(dz2), Float(dz1), dx};
  return squeeze_excite::Backward(ctx, p, plan, device, args, what);
}

}  // namespace jaxconv::cuda
