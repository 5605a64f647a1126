// Squeeze-and-excitation on the host, of an array (images, pixels, channels), an image at a time.
//
// Written for tests of the call, not for speed: XLA is at the processor's limit. Sums are float64 and in the order of memory:
// the result does not depend on the number of threads.
#include <cstdint>
#include <string>
#include <vector>

#include "common/launch.h"
#include "cpu/context.h"

namespace jaxconv::cpu {
namespace {

Status Confirm(const char* op, const SqueezeExciteProblem& p, const Plan& plan) {
  if (plan.kernel != "one_pass") {
    return Status::Unimplemented(std::string(op) + ": there is no kernel '" +
                                 std::string(plan.kernel) + "' on the CPU");
  }
  if (p.dtype == DType::kF32 || p.dtype == DType::kF64) return Status::Ok();
  return Status::Unimplemented(std::string(op) + ": it needs float32 or float64, got " +
                               Name(p.dtype));
}

template <typename F>
void ForwardImage(const SqueezeExciteProblem& p, const F* x, const F* w1, const F* b1, const F* w2,
                  const F* b2, F* y, F* mean, F* z1, F* gate) {
  std::vector<double> sums(size_t(p.channels), 0.0), hidden(size_t(p.hidden), 0.0);
  for (int64_t i = 0; i < p.pixels; ++i)
    for (int64_t c = 0; c < p.channels; ++c) sums[c] += x[i * p.channels + c];
  for (int64_t c = 0; c < p.channels; ++c) mean[c] = F(sums[c] / double(p.pixels));
  for (int64_t c = 0; c < p.channels; ++c)
    for (int64_t r = 0; r < p.hidden; ++r) hidden[r] += double(mean[c]) * w1[c * p.hidden + r];
  for (int64_t r = 0; r < p.hidden; ++r) z1[r] = F(hidden[r]) + b1[r];
  sums.assign(size_t(p.channels), 0.0);
  for (int64_t r = 0; r < p.hidden; ++r) {
    const F h = Activate(p.activation, z1[r], F(p.slope));
    for (int64_t c = 0; c < p.channels; ++c) sums[c] += double(h) * w2[r * p.channels + c];
  }
  for (int64_t c = 0; c < p.channels; ++c) gate[c] = Gated(p.gating, F(sums[c]) + b2[c]);
  for (int64_t i = 0; i < p.pixels; ++i)
    for (int64_t c = 0; c < p.channels; ++c)
      y[i * p.channels + c] = x[i * p.channels + c] * gate[c];
}

template <typename F>
void BackwardImage(const SqueezeExciteProblem& p, const F* x, const F* dy, const F* w1, const F* w2,
                   const F* z1, const F* gate, F* dz2, F* dz1, F* dx) {
  std::vector<double> sums(size_t(p.channels), 0.0);
  for (int64_t i = 0; i < p.pixels * p.channels; ++i)
    sums[i % p.channels] += double(dy[i]) * double(x[i]);
  for (int64_t c = 0; c < p.channels; ++c) dz2[c] = F(sums[c]) * GatedGrad(p.gating, gate[c]);
  for (int64_t r = 0; r < p.hidden; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < p.channels; ++c) sum += double(dz2[c]) * w2[r * p.channels + c];
    dz1[r] = F(sum) * ActivateGrad(p.activation, z1[r], F(p.slope));
  }
  if (dx == nullptr) return;
  for (int64_t c = 0; c < p.channels; ++c) {
    double sum = 0;
    for (int64_t r = 0; r < p.hidden; ++r) sum += double(dz1[r]) * w1[c * p.hidden + r];
    const F constant = F(sum / double(p.pixels));
    for (int64_t i = 0; i < p.pixels; ++i)
      dx[i * p.channels + c] = dy[i * p.channels + c] * gate[c] + constant;
  }
}

template <typename Run>
void WithFloat(DType dtype, Run&& run) {
  if (dtype == DType::kF64) {
    run(double{});
  } else {
    run(float{});
  }
}

}  // namespace

Status SqueezeExcite(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                     const SqueezeExciteArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("squeeze_excite", p, plan));
  WithFloat(p.dtype, [&](auto zero) {
    using F = decltype(zero);
    const auto in = [](const void* a) { return static_cast<const F*>(a); };
    const auto out = [](void* a) { return static_cast<F*>(a); };
    ParallelFor(ctx, p.images, [&](int64_t image) {
      const int64_t whole = image * p.pixels * p.channels, row = image * p.channels;
      ForwardImage<F>(p, in(a.x) + whole, in(a.w1), in(a.b1), in(a.w2), in(a.b2), out(a.y) + whole,
                      out(a.mean) + row, out(a.z1) + image * p.hidden, out(a.gate) + row);
    });
  });
  return Status::Ok();
}

Status SqueezeExciteBackward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                             const SqueezeExciteBackwardArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("squeeze_excite_backward", p, plan));
  WithFloat(p.dtype, [&](auto zero) {
    using F = decltype(zero);
    const auto in = [](const void* a) { return static_cast<const F*>(a); };
    const auto out = [](void* a) { return static_cast<F*>(a); };
    ParallelFor(ctx, p.images, [&](int64_t image) {
      const int64_t whole = image * p.pixels * p.channels, row = image * p.channels;
      const int64_t hidden = image * p.hidden;
      BackwardImage<F>(p, in(a.x) + whole, in(a.dy) + whole, in(a.w1), in(a.w2), in(a.z1) + hidden,
                       in(a.gate) + row, out(a.dz2) + row, out(a.dz1) + hidden,
                       a.dx == nullptr ? nullptr : out(a.dx) + whole);
    });
  });
  return Status::Ok();
}

}  // namespace jaxconv::cpu
