// Group-norm on the host, of an array (images, pixels, channels): an image at a time, statistics per group in two passes.
//
//   mean = sum x / n;  var = sum (x - mean)^2 / n;  z = (x - mean) * rstd * scale + bias;  y = f(z)
//
// Written for tests of the call, not for speed: XLA is at the processor's limit. An image's sums are float64 and in the order
// of memory, those over images in the order of the images: the result does not depend on the number of threads.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "common/launch.h"
#include "cpu/context.h"

namespace jaxconv::cpu {
namespace {

Status Confirm(const char* op, const GroupNormProblem& p, const Plan& plan) {
  if (plan.kernel != "two_read") {
    return Status::Unimplemented(std::string(op) + ": there is no kernel '" +
                                 std::string(plan.kernel) + "' on the CPU");
  }
  if (p.dtype == DType::kF32 || p.dtype == DType::kF64) return Status::Ok();
  return Status::Unimplemented(std::string(op) + ": it needs float32 or float64, got " +
                               Name(p.dtype));
}

template <typename F>
void ForwardImage(const GroupNormProblem& p, int64_t image, const F* x, const F* scale,
                  const F* bias, F* y, F* means, F* rstds) {
  const int64_t first = image * p.pixels * p.channels, width = p.group_channels();
  const double n = double(p.pixels) * double(width);
  scale += image / p.images * p.channels;
  bias += image / p.images * p.channels;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t from = g * width;
    const auto for_all = [&](auto&& f) {
      for (int64_t i = 0; i < p.pixels; ++i)
        for (int64_t c = from; c < from + width; ++c) f(first + i * p.channels + c, c);
    };
    double sum = 0, squares = 0;
    for_all([&](int64_t at, int64_t) { sum += x[at]; });
    const double mean = sum / n;
    for_all([&](int64_t at, int64_t) { squares += (x[at] - mean) * (x[at] - mean); });
    const F rstd = F(1 / std::sqrt(squares / n + p.epsilon));
    for_all([&](int64_t at, int64_t c) {
      y[at] = Activate(p.activation, F(x[at] - mean) * (rstd * scale[c]) + bias[c], F(p.slope));
    });
    means[image * p.groups + g] = F(mean);
    rstds[image * p.groups + g] = rstd;
  }
}

// `sums`: (2, channels), the image's share of dbias and dscale.
template <typename F>
void BackwardImage(const GroupNormProblem& p, int64_t image, const F* x, const F* dy,
                   const F* scale, const F* bias, const F* means, const F* rstds, F* dx,
                   double* sums) {
  const int64_t first = image * p.pixels * p.channels, width = p.group_channels();
  const double n = double(p.pixels) * double(width);
  scale += image / p.images * p.channels;
  bias += image / p.images * p.channels;
  for (int64_t g = 0; g < p.groups; ++g) {
    const F mean = means[image * p.groups + g], rstd = rstds[image * p.groups + g];
    const int64_t from = g * width;
    const auto for_all = [&](auto&& f) {
      for (int64_t i = 0; i < p.pixels; ++i) {
        for (int64_t c = from; c < from + width; ++c) {
          const int64_t at = first + i * p.channels + c;
          const F centred = x[at] - mean;
          const F z = centred * (rstd * scale[c]) + bias[c];
          f(at, c, centred * rstd, dy[at] * ActivateGrad(p.activation, z, F(p.slope)));
        }
      }
    };
    for_all([&](int64_t, int64_t c, F xhat, F dz) {
      sums[c] += dz;
      sums[p.channels + c] += double(dz) * xhat;
    });
    if (dx == nullptr) continue;
    double s1 = 0, s2 = 0;
    for (int64_t c = from; c < from + width; ++c) {
      s1 += scale[c] * sums[c];
      s2 += scale[c] * sums[p.channels + c];
    }
    const F constant = F(s1 / n), slope = F(s2 / n);
    for_all([&](int64_t at, int64_t c, F xhat, F dz) {
      dx[at] = rstd * (scale[c] * dz - constant - xhat * slope);
    });
  }
}

template <typename F>
void Backward(const Context& ctx, const GroupNormProblem& p, const F* x, const F* dy,
              const F* scale, const F* bias, const F* means, const F* rstds, F* dx, F* dscale,
              F* dbias) {
  std::vector<double> sums(size_t(p.batch * p.images * 2 * p.channels), 0.0);
  ParallelFor(ctx, p.batch * p.images, [&](int64_t image) {
    BackwardImage(p, image, x, dy, scale, bias, means, rstds, dx,
                  sums.data() + image * 2 * p.channels);
  });
  for (int64_t at = 0; at < p.batch * p.channels; ++at) {
    const int64_t instance = at / p.channels, channel = at % p.channels;
    const double* mine = sums.data() + instance * p.images * 2 * p.channels + channel;
    double total_bias = 0, total_scale = 0;
    for (int64_t i = 0; i < p.images; ++i) {
      total_bias += mine[i * 2 * p.channels];
      total_scale += mine[i * 2 * p.channels + p.channels];
    }
    dbias[at] = F(total_bias);
    dscale[at] = F(total_scale);
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

Status GroupNorm(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                 const GroupNormArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("groupnorm", p, plan));
  WithFloat(p.dtype, [&](auto zero) {
    using F = decltype(zero);
    const auto in = [](const void* a) { return static_cast<const F*>(a); };
    const auto out = [](void* a) { return static_cast<F*>(a); };
    ParallelFor(ctx, p.batch * p.images, [&](int64_t image) {
      ForwardImage<F>(p, image, in(a.x), in(a.scale), in(a.bias), out(a.y), out(a.mean),
                      out(a.rstd));
    });
  });
  return Status::Ok();
}

Status GroupNormBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                         const GroupNormBackwardArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("groupnorm_backward", p, plan));
  WithFloat(p.dtype, [&](auto zero) {
    using F = decltype(zero);
    const auto in = [](const void* a) { return static_cast<const F*>(a); };
    const auto out = [](void* a) { return static_cast<F*>(a); };
    Backward<F>(ctx, p, in(a.x), in(a.dy), in(a.scale), in(a.bias), in(a.mean), in(a.rstd),
                out(a.dx), out(a.dscale), out(a.dbias));
  });
  return Status::Ok();
}

}  // namespace jaxconv::cpu
