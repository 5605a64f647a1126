// With g the group of output channel k, c an input channel of it, and at(o, t) = o * stride - pad + t * dilation:
//
//   fprop  z[n, o, k]  = bias[k] + residual[n, o, k] + sum over taps t, channels c of x[n, at(o, t), g * C/G + c] * w[t, c, k];  y = f(z)
//   dgrad  dx[n, i, c] = sum over taps t and k of c's group of   dy[n, o, k] * w[t, c, k]       where at(o, t) = i
//   wgrad  dw[t, c, k] = sum over n, o of                        x[n, at(o, t), g * C/G + c] * dy[n, o, k]
//
// A thread makes one element of y, dx or dw, in the order of memory, and adds its products one after another; wgrad's sum
// over N*O*P*Q pixels is cut into `splits` runs, a thread each, which SumPartials adds in order. Each output is written
// once; inputs are read through the caches as often as there are outputs of theirs, which is what bounds it.
#include "cuda/conv/direct/direct.h"

#include <algorithm>

#include "cuda/conv/common/index.cuh"
#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/reduce.h"
#include "cuda/core/describe.h"

namespace jaxconv::cuda {
namespace conv {
namespace {

template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    DirectFpropKernel(const Meeting m, const T* __restrict__ x, const T* __restrict__ w,
                      const EpilogueArgs<T> e, const T* residual, T* __restrict__ y,
                      int64_t count) {
  for (int64_t i = FirstElement(); i < count; i += ElementStride()) {
    const Position out = m.y.Split(i);
    Position in{out.n, out.c / m.group_k * m.group_c, {}};  // the first channel of the group
    float sum = 0.f;
    for (int64_t tap = 0; tap < m.w.taps; ++tap) {
      if (!m.InputAt(out.at, tap, in.at)) continue;
      const T* from = x + m.x.At(in);
      const T* filter = w + m.w.At({tap, 0, out.c});
      for (int64_t c = 0; c < m.group_c; ++c) {
        sum += ToFloat(from[c * m.x.channel_step()]) * ToFloat(filter[c * m.w.channel_step()]);
      }
    }
    if (e.bias != nullptr) sum += ToFloat(e.bias[out.c]);
    if (residual != nullptr) sum += ToFloat(residual[i]);
    if (e.z != nullptr) e.z[i] = FromFloat<T>(sum);
    y[i] = FromFloat<T>(ApplyActivation(e.activation, sum, e.slope));
  }
}

template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    DirectDgradKernel(const Meeting m, const T* __restrict__ dy, const T* __restrict__ w,
                      T* __restrict__ dx, int64_t count) {
  for (int64_t i = FirstElement(); i < count; i += ElementStride()) {
    const Position in = m.x.Split(i);
    const int64_t group = in.c / m.group_c, c = in.c - group * m.group_c;
    Position out{in.n, group * m.group_k, {}};  // the first output channel of the group
    float sum = 0.f;
    for (int64_t tap = 0; tap < m.w.taps; ++tap) {
      if (!m.OutputAt(in.at, tap, out.at)) continue;
      const T* from = dy + m.y.At(out);
      const T* filter = w + m.w.At({tap, c, out.c});
      for (int64_t k = 0; k < m.group_k; ++k) {
        sum += ToFloat(from[k * m.y.channel_step()]) * ToFloat(filter[k * m.w.output_step()]);
      }
    }
    dx[i] = FromFloat<T>(sum);
  }
}

// Element i of part i / elements. `partials` is null with one part.
template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    DirectWgradKernel(const Meeting m, const T* __restrict__ x, const T* __restrict__ dy,
                      T* __restrict__ dw, float* __restrict__ partials, int64_t elements,
                      int64_t pixels, int64_t part_pixels, int64_t count) {
  for (int64_t i = FirstElement(); i < count; i += ElementStride()) {
    const int64_t part = i / elements, element = i - part * elements;
    const FilterPosition f = m.w.Split(element);
    // Pixels of all images, as channels-last arrays of one channel number them.
    const int64_t begin = part * part_pixels;
    const int64_t end = begin + part_pixels < pixels ? begin + part_pixels : pixels;
    Position out = ImageArray{1, {m.y.extent[0], m.y.extent[1], m.y.extent[2]}, true}.Split(begin);
    out.c = f.k;
    Position in{0, f.k / m.group_k * m.group_c + f.c, {}};
    float sum = 0.f;
    for (int64_t pixel = begin; pixel < end; ++pixel, m.y.Advance(out)) {
      in.n = out.n;
      if (m.InputAt(out.at, f.tap, in.at)) {
        sum += ToFloat(x[m.x.At(in)]) * ToFloat(dy[m.y.At(out)]);
      }
    }
    if (partials != nullptr) {
      partials[i] = sum;
    } else {
      dw[element] = FromFloat<T>(sum);
    }
  }
}

}  // namespace
}  // namespace conv

using conv::ElementBlocks;
using conv::kElementThreads;

Status DirectFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace) {
  const int64_t count = p.n * p.k * p.out_size();
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    conv::DirectFpropKernel<T><<<ElementBlocks(count), kElementThreads, 0, ctx.stream>>>(
        conv::Meeting(p), static_cast<const T*>(x), static_cast<const T*>(w),
        conv::MakeEpilogue<T>(e, bias, z), static_cast<const T*>(residual), static_cast<T*>(y),
        count);
    return LaunchStatus(Describe("conv_fprop", p, plan));
  });
}

Status DirectDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace) {
  const int64_t count = p.n * p.c * p.in_size();
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    conv::DirectDgradKernel<T><<<ElementBlocks(count), kElementThreads, 0, ctx.stream>>>(
        conv::Meeting(p), static_cast<const T*>(dy), static_cast<const T*>(w), static_cast<T*>(dx),
        count);
    return LaunchStatus(Describe("conv_dgrad", p, plan));
  });
}

Status DirectWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  const int64_t elements = conv::FilterCount(p), pixels = p.n * p.out_size();
  const int64_t parts = plan.splits, count = parts * elements;
  float* partials = parts > 1 ? static_cast<float*>(workspace.data) : nullptr;
  JAXCONV_RETURN_IF_ERROR(conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    conv::DirectWgradKernel<T><<<ElementBlocks(count), kElementThreads, 0, ctx.stream>>>(
        conv::Meeting(p), static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dw),
        partials, elements, pixels, CeilDiv(pixels, parts), count);
    return LaunchStatus(what);
  }));
  if (partials == nullptr) return Status::Ok();
  return conv::SumPartials(ctx, p.dtype, partials, parts, elements, {}, dw, what.c_str());
}

}  // namespace jaxconv::cuda
