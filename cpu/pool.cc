// Poolings on the host: of each row of y its pixels' windows, tap by tap over runs of channels; of each row of dx the
// windows that have a tap there, in their order, so that the sums do not depend on the number of threads.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "common/launch.h"
#include "cpu/context.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

constexpr int64_t kRun = 64;  // channels whose maxima are held at a time

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Taps of the window that starts at `first` which lie in the array: [low, high).
struct Taps {
  Taps(const PoolProblem& p, int axis, int64_t out) : first(out * p.stride[axis] - p.pad[axis]) {
    low = first >= 0 ? 0 : CeilDiv(-first, p.dilation[axis]);
    high = first >= p.in[axis] ? 0 : CeilDiv(p.in[axis] - first, p.dilation[axis]);
    low = std::min(low, p.window[axis]);
    high = std::clamp(high, low, p.window[axis]);
  }
  int64_t first, low, high;
};

// Windows with a tap at i, [low, high), some of which dilation steps over.
struct Windows {
  Windows(const PoolProblem& p, int axis, int64_t i) : at(i + p.pad[axis]) {
    const int64_t reach = (p.window[axis] - 1) * p.dilation[axis];
    low = at <= reach ? 0 : CeilDiv(at - reach, p.stride[axis]);
    high = std::min(p.out[axis], at / p.stride[axis] + 1);
  }
  // The tap of window o, or -1.
  int64_t Tap(const PoolProblem& p, int axis, int64_t o) const {
    const int64_t offset = at - o * p.stride[axis];
    return offset % p.dilation[axis] == 0 ? offset / p.dilation[axis] : -1;
  }
  int64_t at, low, high;
};

// Positions while they are compared: as wide as T, for vectors of both.
template <typename T>
using Tap = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

// The windows of some channels.
template <typename T>
struct Run {
  T best[kRun], max[kRun];
  Tap<T> at[kRun];
};

template <typename T>
JAXCONV_INLINE void TakeTap(const T* v, int64_t count, Tap<T> tap, Run<T>& run) {
  for (int64_t c = 0; c < count; ++c) {
    const bool stays = run.best[c] >= v[c];
    run.best[c] = stays ? run.best[c] : v[c];
    run.at[c] = stays ? run.at[c] : tap;
    // A NaN is not equal to itself, and no maximum is below or above it.
    run.max[c] = (run.max[c] < v[c]) | (v[c] != v[c]) ? v[c] : run.max[c];
  }
}
JAXCONV_MULTIVERSION void Take(const float* v, int64_t count, int32_t tap, Run<float>& run) {
  TakeTap(v, count, tap, run);
}
JAXCONV_MULTIVERSION void Take(const double* v, int64_t count, int64_t tap, Run<double>& run) {
  TakeTap(v, count, tap, run);
}

// `count` neighbouring channels of a pixel of y; `x` is the first one's of the image, `padding` -inf as often.
template <typename T>
void Pixel(const PoolProblem& p, const Taps& depth, const Taps& rows, const Taps& columns,
           const T* x, int64_t count, const T* padding, T* y, uint8_t* position) {
  Run<T> run;
  std::copy_n(padding, count, run.best);
  std::copy_n(padding, count, run.max);
  std::fill_n(run.at, count, 0);
  Tap<T> tap = 0;
  for (int64_t t = 0; t < p.window[0]; ++t) {
    for (int64_t r = 0; r < p.window[1]; ++r) {
      const bool inside = t >= depth.low && t < depth.high && r >= rows.low && r < rows.high;
      const int64_t d = depth.first + t * p.dilation[0], h = rows.first + r * p.dilation[1];
      for (int64_t s = 0; s < p.window[2]; ++s, ++tap) {
        const int64_t w = columns.first + s * p.dilation[2];
        const bool here = inside && s >= columns.low && s < columns.high;
        // Padding takes the place of a NaN and of nothing else.
        Take(here ? x + ((d * p.in[1] + h) * p.in[2] + w) * p.c : padding, count, tap, run);
      }
    }
  }
  std::copy_n(run.max, count, y);
  if (position != nullptr) std::copy_n(run.at, count, position);
}

template <typename T>
void Forward(const Context& ctx, const PoolProblem& p, const T* x, T* y, uint8_t* position) {
  T padding[kRun];
  std::fill_n(padding, kRun, -std::numeric_limits<T>::infinity());
  ParallelFor(ctx, p.n * p.out[0] * p.out[1], [&](int64_t row) {
    const Taps rows(p, 1, row % p.out[1]), depth(p, 0, row / p.out[1] % p.out[0]);
    const T* image = x + row / (p.out[0] * p.out[1]) * p.in_size() * p.c;
    for (int64_t q = 0; q < p.out[2]; ++q) {
      const Taps columns(p, 2, q);
      const int64_t to = (row * p.out[2] + q) * p.c;
      for (int64_t c = 0; c < p.c; c += kRun) {
        Pixel(p, depth, rows, columns, image + c, std::min(kRun, p.c - c), padding, y + to + c,
              position == nullptr ? nullptr : position + to + c);
      }
    }
  });
}

template <typename T>
void Backward(const Context& ctx, const PoolProblem& p, const uint8_t* position, const T* dy,
              T* dx) {
  ParallelFor(ctx, p.n * p.in[0] * p.in[1], [&](int64_t row) {
    const Windows rows(p, 1, row % p.in[1]), depth(p, 0, row / p.in[1] % p.in[0]);
    const int64_t image = row / (p.in[0] * p.in[1]) * p.out_size();
    for (int64_t w = 0; w < p.in[2]; ++w) {
      const Windows columns(p, 2, w);
      T* to = dx + (row * p.in[2] + w) * p.c;
      std::fill_n(to, p.c, T{0});
      for (int64_t o0 = depth.low; o0 < depth.high; ++o0) {
        for (int64_t o1 = rows.low; o1 < rows.high; ++o1) {
          for (int64_t o2 = columns.low; o2 < columns.high; ++o2) {
            const int64_t t = depth.Tap(p, 0, o0), r = rows.Tap(p, 1, o1),
                          s = columns.Tap(p, 2, o2);
            if (t < 0 || r < 0 || s < 0) continue;
            const int64_t tap = (t * p.window[1] + r) * p.window[2] + s;
            const int64_t from = (image + (o0 * p.out[1] + o1) * p.out[2] + o2) * p.c;
            for (int64_t c = 0; c < p.c; ++c)
              to[c] += position[from + c] == tap ? dy[from + c] : T{0};
          }
        }
      }
    }
  });
}

template <typename T>
JAXCONV_INLINE void AddScaledTo(const T* v, T factor, int64_t count, T* sum) {
  for (int64_t c = 0; c < count; ++c) sum[c] += v[c] * factor;
}
JAXCONV_MULTIVERSION void AddScaled(const float* v, float factor, int64_t count, float* sum) {
  AddScaledTo(v, factor, count, sum);
}
JAXCONV_MULTIVERSION void AddScaled(const double* v, double factor, int64_t count, double* sum) {
  AddScaledTo(v, factor, count, sum);
}

// What a window's sum is divided by, of its taps in the array along each axis.
int64_t Count(const AvgPoolProblem& p, const Taps& depth, const Taps& rows, const Taps& columns) {
  if (p.count_include_pad) return p.taps();
  return (depth.high - depth.low) * (rows.high - rows.low) * (columns.high - columns.low);
}

template <typename T>
void Average(const Context& ctx, const AvgPoolProblem& p, const T* x, T* y) {
  ParallelFor(ctx, p.n * p.out[0] * p.out[1], [&](int64_t row) {
    const Taps rows(p, 1, row % p.out[1]), depth(p, 0, row / p.out[1] % p.out[0]);
    const T* image = x + row / (p.out[0] * p.out[1]) * p.in_size() * p.c;
    for (int64_t q = 0; q < p.out[2]; ++q) {
      const Taps columns(p, 2, q);
      T* to = y + (row * p.out[2] + q) * p.c;
      std::fill_n(to, p.c, T{0});
      for (int64_t t = depth.low; t < depth.high; ++t) {
        for (int64_t r = rows.low; r < rows.high; ++r) {
          const T* from = image + ((depth.first + t) * p.in[1] + rows.first + r) * p.in[2] * p.c;
          for (int64_t s = columns.low; s < columns.high; ++s)
            AddScaled(from + (columns.first + s) * p.c, T{1}, p.c, to);
        }
      }
      const T count = static_cast<T>(Count(p, depth, rows, columns));
      for (int64_t c = 0; c < p.c; ++c) to[c] /= count;
    }
  });
}

template <typename T>
void AverageBackward(const Context& ctx, const AvgPoolProblem& p, const T* dy, T* dx) {
  ParallelFor(ctx, p.n * p.in[0] * p.in[1], [&](int64_t row) {
    const Windows rows(p, 1, row % p.in[1]), depth(p, 0, row / p.in[1] % p.in[0]);
    const int64_t image = row / (p.in[0] * p.in[1]) * p.out_size();
    for (int64_t w = 0; w < p.in[2]; ++w) {
      const Windows columns(p, 2, w);
      T* to = dx + (row * p.in[2] + w) * p.c;
      std::fill_n(to, p.c, T{0});
      for (int64_t o0 = depth.low; o0 < depth.high; ++o0) {
        for (int64_t o1 = rows.low; o1 < rows.high; ++o1) {
          for (int64_t o2 = columns.low; o2 < columns.high; ++o2) {
            const int64_t count = Count(p, Taps(p, 0, o0), Taps(p, 1, o1), Taps(p, 2, o2));
            const int64_t from = ((image + (o0 * p.out[1] + o1) * p.out[2]) + o2) * p.c;
            AddScaled(dy + from, T{1} / static_cast<T>(count), p.c, to);
          }
        }
      }
    }
  });
}

Status Confirm(const char* op, const PoolProblem& p, const Plan& plan) {
  const std::string what = std::string(op) + "[" + std::string(plan.kernel) + "]";
  if (plan.kernel != "gather") return Status::Unimplemented(what + ": there is no such kernel");
  if (p.dtype != DType::kF32 && p.dtype != DType::kF64)
    return Status::Unimplemented(what + ": it needs float32 or float64");
  return Status::Ok();
}

}  // namespace

Status MaxPool(const Context& ctx, const PoolProblem& p, const Plan& plan, const MaxPoolArrays& a,
               Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("max_pool", p, plan));
  if (p.n * p.c * p.out_size() == 0) return Status::Ok();
  if (p.dtype == DType::kF64) {
    Forward(ctx, p, a.x.as<double>(), a.y.as<double>(), a.position.as<uint8_t>());
  } else {
    Forward(ctx, p, a.x.as<float>(), a.y.as<float>(), a.position.as<uint8_t>());
  }
  return Status::Ok();
}

Status MaxPoolBackward(const Context& ctx, const PoolProblem& p, const Plan& plan,
                       const MaxPoolBackwardArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("max_pool_backward", p, plan));
  if (p.n * p.c * p.in_size() == 0) return Status::Ok();
  if (p.dtype == DType::kF64) {
    Backward(ctx, p, a.position.as<uint8_t>(), a.dy.as<double>(), a.dx.as<double>());
  } else {
    Backward(ctx, p, a.position.as<uint8_t>(), a.dy.as<float>(), a.dx.as<float>());
  }
  return Status::Ok();
}

Status AvgPool(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
               const AvgPoolArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("avg_pool", p, plan));
  if (p.n * p.c * p.out_size() == 0) return Status::Ok();
  if (p.dtype == DType::kF64) {
    Average(ctx, p, a.x.as<double>(), a.y.as<double>());
  } else {
    Average(ctx, p, a.x.as<float>(), a.y.as<float>());
  }
  return Status::Ok();
}

Status AvgPoolBackward(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
                       const AvgPoolBackwardArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Confirm("avg_pool_backward", p, plan));
  if (p.n * p.c * p.in_size() == 0) return Status::Ok();
  if (p.dtype == DType::kF64) {
    AverageBackward(ctx, p, a.dy.as<double>(), a.dx.as<double>());
  } else {
    AverageBackward(ctx, p, a.dy.as<float>(), a.dx.as<float>());
  }
  return Status::Ok();
}

}  // namespace jaxconv::cpu
