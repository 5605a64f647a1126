// Averages of windows, and their gradient (common/problem.h), by gathers: sums are of float32, in the order of the taps or of
// the windows, and each element is written once, so that a call's bits are always the same.
//
// Forward a thread makes 16 bytes of channels of one pixel of y, backward of 2 x 2 pixels of dx, whose windows it reads once
// for all four (backward.cu: blocks, and which taps are met). What windows share comes from L1 and L2: memory is passed over
// once, x and y.
#include "cuda/core/context.h"
#include "cuda/core/vec.cuh"
#include "cuda/pool/geometry.h"
#include "cuda/pool/pool.h"

namespace jaxconv::cuda::pool {
namespace {

constexpr int kThreads = 256;

// Taps [low, high) of the window that starts at `first` on an axis which are no padding.
struct Inside {
  int low, high;
  __device__ __forceinline__ Inside(const Geometry& g, int axis, int first)
      : low(max(0, -first)), high(min(g.window[axis], g.in[axis] - first)) {}
  // As a factor of a count.
  __device__ __forceinline__ float size() const { return float(max(0, high - low)); }
};

// 1 / count, rounded once; NaN of 0. (__frcp_rn is a call, for which registers are spilled.)
__device__ __forceinline__ float Reciprocal(float count) {
  const float near = __fdividef(1.0f, count);
  return fmaf(near, fmaf(-count, near, 1.0f), near);
}

// kWidth: the window's, or 0 for any: a row's taps are loaded before the first is added. `scale` is 1 / count, or 0 where
// padding does not count.
template <typename T, int V, int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    AvgPoolKernel(const Geometry g, const T* __restrict__ x, T* __restrict__ y, float scale,
                  unsigned count) {
  const unsigned thread = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  if (thread >= count) return;
  const unsigned pixel = g.lanes.Div(thread);
  const int channel = int(thread - pixel * g.lanes.d) * V;
  const Digits4 at = SplitDigits(int(pixel), g.extent[0], g.extent[1], g.extent[2]);
  int first[3];  // the window's first tap, which may be padding
#pragma unroll
  for (int i = 0; i < 3; ++i) first[i] = at.digit[i + 1] * g.stride[i] - g.pad[i];
  const Inside depth(g, 0, first[0]), rows(g, 1, first[1]), columns(g, 2, first[2]);

  float sum[V] = {};
  for (int t = depth.low; t < depth.high; ++t) {
    for (int r = rows.low; r < rows.high; ++r) {
      const T* row = x + channel +
                     ((int64_t(at.digit[0]) * g.in[0] + first[0] + t) * g.in[1] + first[1] + r) *
                         g.in[2] * int64_t(g.c);
      if constexpr (kWidth > 0) {
        Vec<T, V> taps[kWidth];
#pragma unroll
        for (int s = 0; s < kWidth; ++s) {
          const int w = first[2] + s;
          taps[s] = Vec<T, V>{};
          if (unsigned(w) < unsigned(g.in[2]))
            taps[s] = *reinterpret_cast<const Vec<T, V>*>(row + int64_t(w) * g.c);
        }
#pragma unroll
        for (int s = 0; s < kWidth; ++s) {
#pragma unroll
          for (int k = 0; k < V; ++k) sum[k] += ToFloat(taps[s].v[k]);
        }
      } else {
#pragma unroll 2
        for (int s = columns.low; s < columns.high; ++s) {
          float v[V];
          LoadVec<T, V>(row + int64_t(first[2] + s) * g.c, v);
#pragma unroll
          for (int k = 0; k < V; ++k) sum[k] += v[k];
        }
      }
    }
  }
  const float factor =
      scale != 0.0f ? scale : Reciprocal(depth.size() * rows.size() * columns.size());
#pragma unroll
  for (int k = 0; k < V; ++k) sum[k] *= factor;
  StoreVec<T, V>(y + int64_t(pixel) * g.c + channel, sum);
}

// Whether the window that starts at `first`, padded, has a tap at c.
__device__ __forceinline__ bool Reaches(const Geometry& g, int axis, int first, int c) {
  return unsigned(c - first) < unsigned(g.window[axis]);
}

template <typename T, int V, int kRows>
__global__ void __launch_bounds__(kThreads, V* kRows == 16 ? 3 : 4)
    AvgPoolBackwardKernel(const Geometry g, const T* __restrict__ dy, T* __restrict__ dx,
                          float scale, unsigned count) {
  const unsigned thread = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  if (thread >= count) return;
  const unsigned block = g.lanes.Div(thread);
  const int channel = int(thread - block * g.lanes.d) * V;
  const Digits4 at = SplitDigits(int(block), g.extent[0], g.extent[1], g.extent[2]);
  const int n = at.digit[0], d = at.digit[1];
  const int h = at.digit[2] * kRows - g.shift[1], w = at.digit[3] * 2 - g.shift[2];

  float sum[kRows][2][V] = {};
  const int c[3] = {d + g.pad[0], h + g.pad[1], w + g.pad[2]};
  const Range range[3] = {Windows(g, 0, c[0], 0), Windows(g, 1, c[1], kRows - 1),
                          Windows(g, 2, c[2], 1)};
  for (int o = range[0].low; o < range[0].high; ++o) {
    const float depth = Inside(g, 0, o * g.stride[0] - g.pad[0]).size();
    for (int p = range[1].low; p < range[1].high; ++p) {
      const float plane = depth * Inside(g, 1, p * g.stride[1] - g.pad[1]).size();
      bool rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) rows[i] = Reaches(g, 1, p * g.stride[1], c[1] + i);
      const int64_t row =
          ((int64_t(n) * g.out[0] + o) * g.out[1] + p) * g.out[2] * int64_t(g.c) + channel;
#pragma unroll 2
      for (int q = range[2].low; q < range[2].high; ++q) {
        float grad[V];
        LoadVec<T, V>(dy + row + int64_t(q) * g.c, grad);
        if (scale == 0.0f) {
          const float factor = Reciprocal(plane * Inside(g, 2, q * g.stride[2] - g.pad[2]).size());
#pragma unroll
          for (int k = 0; k < V; ++k) grad[k] *= factor;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool column = Reaches(g, 2, q * g.stride[2], c[2] + j);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (!column || !rows[i]) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) sum[i][j][k] += grad[k];
          }
        }
      }
    }
  }
  const float factor = scale != 0.0f ? scale : 1.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (unsigned(h + i) >= unsigned(g.in[1])) continue;
    const int64_t row = ((int64_t(n) * g.in[0] + d) * g.in[1] + (h + i)) * g.in[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (unsigned(w + j) >= unsigned(g.in[2])) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) sum[i][j][k] *= factor;
      StoreVec<T, V>(dx + (row + (w + j)) * g.c + channel, sum[i][j]);
    }
  }
}

float Scale(const AvgPoolProblem& p) {
  return p.count_include_pad ? 1.0f / static_cast<float>(p.taps()) : 0.0f;
}

template <typename T, int V, int kWidth>
Status Launch(const Context& ctx, const AvgPoolProblem& p, const void* x, void* y,
              const std::string& what) {
  const int64_t count = ForwardThreads(p, V);
  if (count > kMaxThreads) return TooMany(count, what);
  const unsigned blocks = unsigned(CeilDivide(count, kThreads));
  AvgPoolKernel<T, V, kWidth>
      <<<blocks, kThreads, 0, ctx.stream>>>(Geometry(p, V, false), static_cast<const T*>(x),
                                            static_cast<T*>(y), Scale(p), unsigned(count));
  return LaunchStatus(what);
}

template <typename T, int V, int kRows>
Status LaunchBackward(const Context& ctx, const AvgPoolProblem& p, const void* dy, void* dx,
                      const std::string& what) {
  const int64_t count = BackwardThreads(p, V);
  if (count > kMaxThreads) return TooMany(count, what);
  const unsigned blocks = unsigned(CeilDivide(count, kThreads));
  AvgPoolBackwardKernel<T, V, kRows>
      <<<blocks, kThreads, 0, ctx.stream>>>(Geometry(p, V, true), static_cast<const T*>(dy),
                                            static_cast<T*>(dx), Scale(p), unsigned(count));
  return LaunchStatus(what);
}

}  // namespace

Status Average(const Context& ctx, const AvgPoolProblem& p, const void* x, void* y,
               const std::string& what) {
  return WithInstance(p, {x, y}, [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    if constexpr (I::V > 1) {
      if (p.window[2] == 2) return Launch<T, I::V, 2>(ctx, p, x, y, what);
      if (p.window[2] == 3) return Launch<T, I::V, 3>(ctx, p, x, y, what);
    }
    return Launch<T, I::V, 0>(ctx, p, x, y, what);
  });
}

Status AverageBackward(const Context& ctx, const AvgPoolProblem& p, const void* dy, void* dx,
                       const std::string& what) {
  return WithInstance(p, {dy, dx}, [&](auto instance) {
    using I = decltype(instance);
    return BlockRows(p) == 2 ? LaunchBackward<typename I::T, I::V, 2>(ctx, p, dy, dx, what)
                             : LaunchBackward<typename I::T, I::V, 1>(ctx, p, dy, dx, what);
  });
}

}  // namespace jaxconv::cuda::pool
