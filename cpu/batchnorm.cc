// Batch-norm on the host: statistics per (batch, channel) over outer and inner, of an array (batch,
// outer, channels, inner).
//
//   mean = sum x / n;  var = sum (x - mean)^2 / n, in two passes;  z = (x - mean) * rstd * scale +
//   bias (+ residual); y = f(z)
//
// The array is cut into blocks by its extents alone. Each block adds up its own elements in
// float64, one partial sum per channel, and the partials of a channel are added in the order of the
// blocks: the result does not depend on the number of threads. A reduction is thus two parallel
// loops (blocks, then channels), an elementwise step one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "common/launch.h"
#include "cpu/batchnorm.h"
#include "cpu/context.h"

namespace jaxconv::cpu {
namespace {

constexpr int64_t kBlockElements = BatchNormShape::kBlockElements;
constexpr int64_t kChannelStep = BatchNormShape::kChannelStep;
constexpr int64_t kBuffer = BatchNormShape::kBuffer;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With one channel all elements are neighbours: long runs of it instead of runs of one element.
BatchNormProblem Canonical(BatchNormProblem p) {
  if (p.channels == 1) {
    p.inner *= p.outer;
    p.outer = 1;
  }
  return p;
}

// The cut: a block is a box of outer x channels x inner in one instance.
struct Grid {
  explicit Grid(const BatchNormProblem& p) : p(p) {
    inner_step = std::clamp<int64_t>(p.inner, 1, kBlockElements);
    const int64_t fill = std::max<int64_t>(1, 4096 / inner_step);
    channel_step = p.inner == 1 ? kChannelStep : fill;
    channel_step = std::clamp<int64_t>(channel_step, 1, std::max<int64_t>(p.channels, 1));
    outer_step = std::max<int64_t>(1, kBlockElements / (inner_step * channel_step));
    inner_blocks = CeilDiv(p.inner, inner_step);
    outer_blocks = CeilDiv(p.outer, outer_step);
    channel_blocks = CeilDiv(p.channels, channel_step);
  }
  int64_t parts() const { return outer_blocks * inner_blocks; }  // partial sums per channel
  int64_t blocks() const { return p.batch * channel_blocks * parts(); }

  const BatchNormProblem& p;
  int64_t outer_step, channel_step, inner_step;
  int64_t outer_blocks, channel_blocks, inner_blocks;
};

struct Block {
  Block(const Grid& g, int64_t index) {
    part = index % g.parts();
    index /= g.parts();
    channel = index % g.channel_blocks * g.channel_step;
    batch = index / g.channel_blocks;
    outer = part / g.inner_blocks * g.outer_step;
    inner = part % g.inner_blocks * g.inner_step;
    outer_end = std::min(outer + g.outer_step, g.p.outer);
    channel_end = std::min(channel + g.channel_step, g.p.channels);
    inner_end = std::min(inner + g.inner_step, g.p.inner);
  }
  int64_t part, batch;
  int64_t outer, outer_end, channel, channel_end, inner, inner_end;
};

// Calls run(offset, channel, count) for every contiguous run of a block. channels-last (inner ==
// 1): a run is one element of each of `count` channels, the first being `channel` (counted over
// instances). Otherwise: `count` elements of one channel.
template <typename Run>
void ForEachRun(const BatchNormProblem& p, const Block& b, Run&& run) {
  for (int64_t o = b.outer; o < b.outer_end; ++o) {
    const int64_t row = (b.batch * p.outer + o) * p.channels;
    const int64_t first = b.batch * p.channels;
    if (p.inner == 1) {
      run(row + b.channel, first + b.channel, b.channel_end - b.channel);
    } else {
      for (int64_t c = b.channel; c < b.channel_end; ++c)
        run((row + c) * p.inner + b.inner, first + c, b.inner_end - b.inner);
    }
  }
}

// sum of value(i) for i in [0, count), in eight interleaved chains that the compiler keeps in
// vector registers.
template <typename Value>
double Sum(int64_t count, Value&& value) {
  double chain[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int j = 0; j < 8; ++j) chain[j] += value(i + j);
  for (; i < count; ++i) chain[0] += value(i);
  return ((chain[0] + chain[1]) + (chain[2] + chain[3])) +
         ((chain[4] + chain[5]) + (chain[6] + chain[7]));
}

// Adds value(i) for the i-th element of a run to the run's channel (or channels).
template <typename Value>
void AddRun(bool channels_last, int64_t count, double* sums, Value&& value) {
  if (channels_last) {
    for (int64_t i = 0; i < count; ++i) sums[i] += value(i);
  } else {
    sums[0] += Sum(count, value);
  }
}

// Sums over each channel of `kSums` quantities at once: accumulate(block, sums) adds a block's
// elements to sums[s][channel - block.channel], finish(channel, totals) gets each channel's totals.
// Channels count over instances.
template <int kSums, typename Accumulate, typename Finish>
void Reduce(const Context& ctx, const Grid& g, Accumulate&& accumulate, Finish&& finish) {
  const int64_t rows = g.p.batch * g.p.channels, parts = g.parts();
  std::vector<double> partial(kSums * rows * parts);  // (sums, parts, batch * channels)
  ParallelFor(ctx, g.blocks(), [&](int64_t index) {
    const Block b(g, index);
    double* sums[kSums];
    for (int s = 0; s < kSums; ++s)
      sums[s] = &partial[(s * parts + b.part) * rows + b.batch * g.p.channels + b.channel];
    accumulate(b, sums);
  });
  const int64_t step = 256;
  ParallelFor(ctx, CeilDiv(rows, step), [&](int64_t index) {
    for (int64_t r = index * step; r < std::min(rows, (index + 1) * step); ++r) {
      double totals[kSums] = {};
      for (int s = 0; s < kSums; ++s)
        for (int64_t i = 0; i < parts; ++i) totals[s] += partial[(s * parts + i) * rows + r];
      finish(r, totals);
    }
  });
}

// f is called with the activation as a compile-time constant, so that the loop inside it can be
// vectorised.
template <typename F>
void WithActivation(Activation activation, F&& f) {
#define JAXCONV_CASE(name) \
  case Activation::name:   \
    return f(std::integral_constant<Activation, Activation::name>{})
  switch (activation) {
    JAXCONV_CASE(kNone);
    JAXCONV_CASE(kRelu);
    JAXCONV_CASE(kRelu6);
    JAXCONV_CASE(kLeakyRelu);
    JAXCONV_CASE(kElu);
    JAXCONV_CASE(kTanh);
    JAXCONV_CASE(kSigmoid);
    JAXCONV_CASE(kSilu);
    JAXCONV_CASE(kGelu);
    JAXCONV_CASE(kGeluExact);
    JAXCONV_CASE(kHardSwish);
  }
#undef JAXCONV_CASE
}

// z = (x - mean) * scale + offset, an entry per (batch, channel).
template <typename T>
struct Affine {
  explicit Affine(int64_t rows) : mean(rows), scale(rows), offset(rows) {}

  // What rounding takes from the mean goes into the offset.
  void Set(int64_t row, double exact_mean, double rstd, T gamma, T beta) {
    mean[row] = static_cast<T>(exact_mean);
    scale[row] = static_cast<T>(gamma * rstd);
    offset[row] = static_cast<T>(beta - (exact_mean - mean[row]) * gamma * rstd);
  }
  std::vector<T> mean, scale, offset;
};

// z of a run; i counts within it.
template <typename T>
void Preactivation(bool channels_last, const Affine<T>& a, int64_t channel, int64_t count,
                   const T* x, const T* residual, T* z) {
  const T *mean = &a.mean[channel], *scale = &a.scale[channel], *offset = &a.offset[channel];
  if (channels_last) {
    for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - mean[i]) * scale[i] + offset[i];
  } else {
    const T m = *mean, s = *scale, o = *offset;
    for (int64_t i = 0; i < count; ++i) z[i] = (x[i] - m) * s + o;
  }
  if (residual != nullptr)
    for (int64_t i = 0; i < count; ++i) z[i] += residual[i];
}

template <typename T>
void Normalise(const Context& ctx, const BatchNormProblem& p, const Affine<T>& a, const T* x,
               const T* residual, T* y) {
  const Grid g(p);
  const T slope = static_cast<T>(p.slope);
  ParallelFor(ctx, g.blocks(), [&](int64_t index) {
    ForEachRun(p, Block(g, index), [&](int64_t at, int64_t channel, int64_t count) {
      T* out = y + at;
      Preactivation(p.inner == 1, a, channel, count, x + at,
                    residual == nullptr ? nullptr : residual + at, out);
      if (p.activation == Activation::kNone) return;
      WithActivation(p.activation, [&](auto activation) {
        for (int64_t i = 0; i < count; ++i)
          out[i] = Activate<T>(decltype(activation)::value, out[i], slope);
      });
    });
  });
}

// finish(row, mean, var) for each (batch, channel).
template <typename T, typename Finish>
void Moments(const Context& ctx, const BatchNormProblem& p, const T* x, Finish&& finish) {
  const Grid g(p);
  const bool channels_last = p.inner == 1;
  const double n = static_cast<double>(p.reduced());  // 0: the statistics are NaN
  std::vector<double> exact_mean(p.batch * p.channels);

  Reduce<1>(
      ctx, g,
      [&](const Block& b, double** sums) {
        ForEachRun(p, b, [&](int64_t at, int64_t channel, int64_t count) {
          double* sum = sums[0] + (channel - b.batch * p.channels - b.channel);
          AddRun(channels_last, count, sum, [v = x + at](int64_t i) { return double(v[i]); });
        });
      },
      [&](int64_t r, const double* totals) { exact_mean[r] = totals[0] / n; });

  Reduce<1>(
      ctx, g,
      [&](const Block& b, double** sums) {
        ForEachRun(p, b, [&](int64_t at, int64_t channel, int64_t count) {
          double* sum = sums[0] + (channel - b.batch * p.channels - b.channel);
          const double* m = &exact_mean[channel];
          const T* v = x + at;
          if (channels_last) {
            AddRun(true, count, sum, [=](int64_t i) { return (v[i] - m[i]) * (v[i] - m[i]); });
          } else {
            AddRun(false, count, sum, [=, m = *m](int64_t i) { return (v[i] - m) * (v[i] - m); });
          }
        });
      },
      [&](int64_t r, const double* totals) { finish(r, exact_mean[r], totals[0] / n); });
}

template <typename T>
Status Train(const Context& ctx, const BatchNormProblem& p, const T* x, const T* scale,
             const T* bias, const T* running_mean, const T* running_var, const T* residual, T* y,
             T* new_mean, T* new_var, T* mean, T* rstd) {
  Affine<T> affine(p.batch * p.channels);
  Moments(ctx, p, x, [&](int64_t r, double exact_mean, double var) {
    const double inverse = 1.0 / std::sqrt(var + p.epsilon);
    mean[r] = static_cast<T>(exact_mean);
    rstd[r] = static_cast<T>(inverse);
    new_mean[r] = static_cast<T>(p.momentum * running_mean[r] + (1 - p.momentum) * exact_mean);
    new_var[r] = static_cast<T>(p.momentum * running_var[r] + (1 - p.momentum) * var);
    affine.Set(r, exact_mean, inverse, scale[r], bias[r]);
  });
  Normalise(ctx, p, affine, x, residual, y);
  return Status::Ok();
}

template <typename T>
Status Infer(const Context& ctx, const BatchNormProblem& p, const T* x, const T* scale,
             const T* bias, const T* mean, const T* var, const T* residual, T* y) {
  Affine<T> affine(p.batch * p.channels);
  for (int64_t r = 0; r < p.batch * p.channels; ++r)
    affine.Set(r, mean[r], 1.0 / std::sqrt(var[r] + p.epsilon), scale[r], bias[r]);
  Normalise(ctx, p, affine, x, residual, y);
  return Status::Ok();
}

// What backward reads.
template <typename T>
struct Gradients {
  const T *x, *dy, *scale, *bias, *mean, *rstd, *residual;

  // With the statistics that the forward pass kept.
  Affine<T> ToAffine(const BatchNormProblem& p) const {
    const bool needs_z = p.activation != Activation::kNone;
    Affine<T> affine(p.batch * p.channels);
    for (int64_t r = 0; r < p.batch * p.channels; ++r)
      affine.Set(r, mean[r], rstd[r], scale[r], needs_z ? bias[r] : T(0));
    return affine;
  }

  // Calls use(at, channel, count, dz) for the block's runs, cut to at most kBuffer elements.
  template <typename Use>
  void ForEachDz(const BatchNormProblem& p, const Affine<T>& affine, const Block& b,
                 Use&& use) const {
    const bool channels_last = p.inner == 1;
    const T slope = static_cast<T>(p.slope);
    ForEachRun(p, b, [&](int64_t run_at, int64_t run_channel, int64_t run_count) {
      for (int64_t i = 0; i < run_count; i += kBuffer) {
        const int64_t at = run_at + i, count = std::min(kBuffer, run_count - i);
        const int64_t channel = channels_last ? run_channel + i : run_channel;
        if (p.activation == Activation::kNone) {
          use(at, channel, count, dy + at);
          continue;
        }
        T dz[kBuffer];
        Preactivation(channels_last, affine, channel, count, x + at,
                      residual == nullptr ? nullptr : residual + at, dz);
        WithActivation(p.activation, [&](auto activation) {
          for (int64_t j = 0; j < count; ++j)
            dz[j] = dy[at + j] * ActivateGrad<T>(decltype(activation)::value, dz[j], slope);
        });
        use(at, channel, count, dz);
      }
    });
  }
};

// dx = scale * rstd * (dz + (slope * (x - mean) + offset)). With the factor outside of the sum, no
// number of a channel is of rstd's square: of deviations beyond 1e18 that is below float32's normal
// numbers, of those below 1e-19 above its largest.
template <typename T>
struct DxOf {
  explicit DxOf(int64_t rows) : slope(rows), offset(rows) {}

  // By the means of dz and of dz * xhat.
  void Set(int64_t row, double rstd, double mean_dz, double mean_dz_xhat) {
    slope[row] = static_cast<T>(-rstd * mean_dz_xhat);
    offset[row] = static_cast<T>(-mean_dz);
  }
  std::vector<T> slope, offset;
};

// The second walk: `dx` and `dresidual`, where they are wanted.
template <typename T>
void WriteGradients(const Context& ctx, const BatchNormProblem& p, const Gradients<T>& t,
                    const Affine<T>& affine, const DxOf<T>& of, T* dx, T* dresidual) {
  const Grid g(p);
  ParallelFor(ctx, g.blocks(), [&](int64_t index) {
    t.ForEachDz(p, affine, Block(g, index),
                [&](int64_t at, int64_t channel, int64_t count, const T* dz) {
                  if (dresidual != nullptr) std::copy(dz, dz + count, dresidual + at);
                  if (dx == nullptr) return;
                  const T *v = t.x + at, *m = &affine.mean[channel], *f = &affine.scale[channel];
                  const T *k = &of.slope[channel], *o = &of.offset[channel];
                  T* out = dx + at;
                  if (p.inner == 1) {
                    for (int64_t i = 0; i < count; ++i)
                      out[i] = f[i] * (dz[i] + (k[i] * (v[i] - m[i]) + o[i]));
                  } else {
                    const T m0 = *m, f0 = *f, k0 = *k, o0 = *o;
                    for (int64_t i = 0; i < count; ++i)
                      out[i] = f0 * (dz[i] + (k0 * (v[i] - m0) + o0));
                  }
                });
  });
}

template <typename T>
Status Backward(const Context& ctx, const BatchNormProblem& p, const Gradients<T>& t, T* dx,
                T* dscale, T* dbias, T* dresidual) {
  const Grid g(p);
  const bool channels_last = p.inner == 1;
  const int64_t rows = p.batch * p.channels;
  const Affine<T> affine = t.ToAffine(p);
  DxOf<T> of(rows);
  const double n = static_cast<double>(p.reduced());
  Reduce<2>(
      ctx, g,
      [&](const Block& b, double** sums) {
        t.ForEachDz(p, affine, b, [&](int64_t at, int64_t channel, int64_t count, const T* dz) {
          const int64_t first = channel - b.batch * p.channels - b.channel;
          const T *v = t.x + at, *m = &affine.mean[channel];
          AddRun(channels_last, count, sums[0] + first, [=](int64_t i) { return double(dz[i]); });
          if (channels_last) {
            AddRun(true, count, sums[1] + first,
                   [=](int64_t i) { return double(dz[i]) * (double(v[i]) - m[i]); });
          } else {
            AddRun(false, count, sums[1] + first,
                   [=, m = double(*m)](int64_t i) { return double(dz[i]) * (double(v[i]) - m); });
          }
        });
      },
      [&](int64_t r, const double* totals) {
        const double inverse = t.rstd[r];
        dbias[r] = static_cast<T>(totals[0]);
        dscale[r] = n > 0 ? static_cast<T>(totals[1] * inverse) : T(0);
        of.Set(r, inverse, totals[0] / n, inverse * (totals[1] / n));
      });
  if (dx != nullptr || dresidual != nullptr) WriteGradients(ctx, p, t, affine, of, dx, dresidual);
  return Status::Ok();
}

// dx by sums over `n` elements a channel.
template <typename T>
Status Dx(const Context& ctx, const BatchNormProblem& p, const Gradients<T>& t, const T* dscale,
          const T* dbias, double n, T* dx) {
  DxOf<T> of(p.batch * p.channels);
  for (int64_t r = 0; r < p.batch * p.channels; ++r)
    of.Set(r, t.rstd[r], dbias[r] / n, dscale[r] / n);
  WriteGradients(ctx, p, t, t.ToAffine(p), of, dx, static_cast<T*>(nullptr));
  return Status::Ok();
}

// f(T{}) for the element types of this backend.
template <typename F>
Status WithType(DType dtype, const char* what, F&& f) {
  if (dtype == DType::kF32) return f(float{});
  if (dtype == DType::kF64) return f(double{});
  return Status::Unimplemented(std::string(what) + ": the CPU takes float32 and float64, got " +
                               Name(dtype));
}

template <typename T>
const T* As(const void* p, T) {
  return static_cast<const T*>(p);
}
template <typename T>
T* As(void* p, T) {
  return static_cast<T*>(p);
}

}  // namespace

Status ChannelMoments(const Context& ctx, const BatchNormProblem& p, const void* x, void* mean,
                      void* var) {
  return WithType(p.dtype, "conv_statistics", [&](auto t) {
    Moments(ctx, Canonical(p), As(x, t), [=](int64_t r, double exact_mean, double exact_var) {
      As(mean, t)[r] = static_cast<decltype(t)>(exact_mean);
      As(var, t)[r] = static_cast<decltype(t)>(exact_var);
    });
    return Status::Ok();
  });
}

Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan&,
                      const BatchNormTrainArrays& a, Workspace) {
  return WithType(p.dtype, "batchnorm_train", [&](auto t) {
    return Train(ctx, Canonical(p), As(a.x, t), As(a.scale, t), As(a.bias, t),
                 As(a.running_mean, t), As(a.running_var, t),
                 As(p.residual ? a.residual.as<void>() : nullptr, t), As(a.y, t), As(a.new_mean, t),
                 As(a.new_var, t), As(a.mean, t), As(a.rstd, t));
  });
}

Status BatchNormMoments(const Context& ctx, const BatchNormProblem& p, const Plan&,
                        const BatchNormMomentsArrays& a, Workspace) {
  return WithType(p.dtype, "batchnorm_moments", [&](auto t) {
    using T = decltype(t);
    Moments(ctx, Canonical(p), As(a.x, t), [=](int64_t r, double exact_mean, double exact_var) {
      const T rounded = static_cast<T>(exact_mean);
      As(a.k, t)[r] = rounded;
      As(a.shift, t)[r] = static_cast<T>(exact_mean - rounded);
      As(a.var, t)[r] = static_cast<T>(exact_var);
    });
    return Status::Ok();
  });
}

Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan&,
                      const BatchNormInferArrays& a, Workspace) {
  return WithType(p.dtype, "batchnorm_infer", [&](auto t) {
    return Infer(ctx, Canonical(p), As(a.x, t), As(a.scale, t), As(a.bias, t), As(a.mean, t),
                 As(a.var, t), As(p.residual ? a.residual.as<void>() : nullptr, t), As(a.y, t));
  });
}

Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan&,
                         const BatchNormBackwardArrays& a, Workspace) {
  const bool needs_residual = p.residual && p.activation != Activation::kNone;
  return WithType(p.dtype, "batchnorm_backward", [&](auto t) {
    const Gradients<decltype(t)> given = {As(a.x, t),
                                          As(a.dy, t),
                                          As(a.scale, t),
                                          As(a.bias, t),
                                          As(a.mean, t),
                                          As(a.rstd, t),
                                          As(needs_residual ? a.residual.as<void>() : nullptr, t)};
    return Backward(ctx, Canonical(p), given, As(a.dx, t), As(a.dscale, t), As(a.dbias, t),
                    As(a.dresidual, t));
  });
}

Status BatchNormDx(const Context& ctx, const BatchNormProblem& p, int64_t count, const Plan&,
                   const BatchNormDxArrays& a, Workspace) {
  const bool needs_residual = p.residual && p.activation != Activation::kNone;
  return WithType(p.dtype, "batchnorm_dx", [&](auto t) {
    const Gradients<decltype(t)> given = {As(a.x, t),
                                          As(a.dy, t),
                                          As(a.scale, t),
                                          As(a.bias, t),
                                          As(a.mean, t),
                                          As(a.rstd, t),
                                          As(needs_residual ? a.residual.as<void>() : nullptr, t)};
    return Dx(ctx, Canonical(p), given, As(a.dscale, t), As(a.dbias, t), static_cast<double>(count),
              As(a.dx, t));
  });
}

}  // namespace jaxconv::cpu
