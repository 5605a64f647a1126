// dx[n, i, c] = sum over the windows o that have a tap t at pixel i of dy[n, o, c] where position[n, o, c] == t, in float32
// and in the order of the windows: a gather, which writes each element once and needs no zeros to start from.
//
// A thread makes 16 bytes of channels of 2 x 2 pixels of dx (1 x 2 of images of one row): the windows that have a tap there
// are read once for all four, with a stride of 2 and 3 x 3 taps four windows instead of nine. Where the stride is even the
// blocks start where windows may (domain.h), and a warp's threads meet the same taps but for the edges. Memory is passed
// over once: dy and a byte for each of its elements are read, dx is written.
#include "cuda/core/context.h"
#include "cuda/core/vec.cuh"
#include "cuda/pool/geometry.h"
#include "cuda/pool/pool.h"

namespace jaxconv::cuda::pool {
namespace {

constexpr int kThreads = 256;
constexpr int kNoTap = -1;

// The tap of window o at the padded coordinate c.
__device__ __forceinline__ int TapAt(const Geometry& g, int axis, int c, int o) {
  const int offset = c - o * g.stride[axis];
  if (offset < 0) return kNoTap;
  const int tap = int(g.per_dilation[axis].Div(unsigned(offset)));
  return tap < g.window[axis] && tap * g.dilation[axis] == offset ? tap : kNoTap;
}

template <typename T, int V, int kRows>
__global__ void __launch_bounds__(kThreads)
    MaxPoolBackwardKernel(const Geometry g, const uint8_t* __restrict__ position,
                          const T* __restrict__ dy, T* __restrict__ dx, unsigned count) {
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
    const int depth = TapAt(g, 0, c[0], o);
    if (depth == kNoTap) continue;
    for (int p = range[1].low; p < range[1].high; ++p) {
      int rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) rows[i] = TapAt(g, 1, c[1] + i, p);
      const int64_t row =
          ((int64_t(n) * g.out[0] + o) * g.out[1] + p) * g.out[2] * int64_t(g.c) + channel;
#pragma unroll 2
      for (int q = range[2].low; q < range[2].high; ++q) {
        const int64_t from = row + int64_t(q) * g.c;
        const Vec<uint8_t, V> taps = *reinterpret_cast<const Vec<uint8_t, V>*>(position + from);
        float grad[V];
        LoadVec<T, V>(dy + from, grad);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = TapAt(g, 2, c[2] + j, q);
          if (column == kNoTap) continue;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (rows[i] == kNoTap) continue;
            const int tap = (depth * g.window[1] + rows[i]) * g.window[2] + column;
#pragma unroll
            for (int k = 0; k < V; ++k)
              if (int(taps.v[k]) == tap) sum[i][j][k] += grad[k];
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (unsigned(h + i) >= unsigned(g.in[1])) continue;
    const int64_t row = ((int64_t(n) * g.in[0] + d) * g.in[1] + (h + i)) * g.in[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (unsigned(w + j) >= unsigned(g.in[2])) continue;
      StoreVec<T, V>(dx + (row + (w + j)) * g.c + channel, sum[i][j]);
    }
  }
}

template <typename T, int V, int kRows>
Status Launch(const Context& ctx, const PoolProblem& p, const uint8_t* position, const void* dy,
              void* dx, const std::string& what) {
  const int64_t count = BackwardThreads(p, V);
  if (count > kMaxThreads) return TooMany(count, what);
  const unsigned blocks = unsigned(CeilDivide(count, kThreads));
  MaxPoolBackwardKernel<T, V, kRows><<<blocks, kThreads, 0, ctx.stream>>>(
      Geometry(p, V, true), position, static_cast<const T*>(dy), static_cast<T*>(dx),
      unsigned(count));
  return LaunchStatus(what);
}

}  // namespace

Status Backward(const Context& ctx, const PoolProblem& p, const uint8_t* position, const void* dy,
                void* dx, const std::string& what) {
  return WithInstance(p, {position, dy, dx}, [&](auto instance) {
    using I = decltype(instance);
    return BlockRows(p) == 2 ? Launch<typename I::T, I::V, 2>(ctx, p, position, dy, dx, what)
                             : Launch<typename I::T, I::V, 1>(ctx, p, position, dy, dx, what);
  });
}

}  // namespace jaxconv::cuda::pool
