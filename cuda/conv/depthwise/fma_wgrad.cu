// dw[t, k] = sum over n, o of  x[n, o * stride - pad + t * dilation, k / (K/C)] * dy[n, o, k]
//
// A thread owns V channels (16 bytes of them channels-last, otherwise one) and one row of S taps, and
// sums over runs of kRun = 4 adjacent output pixels (with a dilation, as far apart as it says): 4 +
// (kRun - 1) * stride + S loads for 4 * S * V products. A block of 256 threads is (channels) x (tap
// rows) x (lanes over runs): the tap rows read the same dy, and x rows that overlap, at the same time, so
// DRAM sees each about once.
// The lanes are added in shared memory as a fixed tree. Grid: channel tiles x tap-row tiles x
// splits; a split takes a contiguous part of the runs, and writes dw or, with several, its partial
// sum. Where the filter row is not specialised, every tap is a row of its own (S = 1).
#include <algorithm>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/reduce.h"
#include "cuda/conv/depthwise/kernels.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 4;           // adjacent output pixels of a step
constexpr int kBlockTapRows = 4;  // at most

template <typename T>
struct DepthwiseWgradArgs {
  const T* x;
  const T* dy;
  T* dw;            // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  Extents in, filter, out, stride, pad, dilation;
  int64_t runs, split_runs;             // N * O * P * runs of a row; a split's part of them
  FastDiv by_row, by_h, by_d;           // runs of a row, P, O
  FastDiv run_step;                     // the dilation; runs start at its residues first. Else 1
  int64_t x_image, x_pixel, x_channel;  // strides in elements
  int64_t dy_image, dy_pixel, dy_channel;
  int64_t dw_tap, dw_channel, dw_count;
  int channels, multiplier;      // K, K/C
  int tile_vecs, channel_tiles;  // V-channel vectors of a block
  int tap_rows, block_tap_rows, tap_row_tiles;
};

// 7 taps of 8 channels spill at two blocks an SM (128 registers); 8 channels take no dilation here.
// kStride 0: S is 1 and stride and dilation along W are read from the arguments.
template <typename T, int V, int S, int kStride>
__global__ void __launch_bounds__(kThreads, S* V > 48 ? 1 : 2)
    DepthwiseWgradKernel(const DepthwiseWgradArgs<T> g) {
  static_assert(kStride > 0 || S == 1);
  constexpr bool kSteps = kStride == 1 && V != 8;
  __shared__ Vec<float, V> sums[kThreads];

  int64_t block = blockIdx.x;
  const int tile = int(block % g.channel_tiles);
  block /= g.channel_tiles;
  const int tap_row0 = int(block % g.tap_row_tiles) * g.block_tap_rows;
  const int64_t split = block / g.tap_row_tiles;

  // tid = (tap row * lanes + lane) * tile_vecs + vec
  const int lanes = kThreads / (g.tile_vecs * g.block_tap_rows);
  const int vec = int(threadIdx.x) % g.tile_vecs;
  const int lane = int(threadIdx.x) / g.tile_vecs % lanes;
  const int tap_row =
      tap_row0 + int(threadIdx.x) / (g.tile_vecs * lanes);  // [0, T*R) or [0, T*R*S)
  const int channel = (tile * g.tile_vecs + vec) * V;       // [0, K)
  const bool live = int(threadIdx.x) < g.tile_vecs * lanes * g.block_tap_rows &&
                    channel < g.channels && tap_row < g.tap_rows;

  float acc[S][V] = {};
  if (live) {
    const int s0 = kStride > 0 ? 0 : tap_row % g.filter.v[2];
    const int tr = kStride > 0 ? tap_row : tap_row / g.filter.v[2];
    const int r0 = tr % g.filter.v[1], t0 = tr / g.filter.v[1];
    const int stride = kStride > 0 ? kStride : g.stride.v[2];
    const int off_d = t0 * g.dilation.v[0] - g.pad.v[0];
    const int off_h = r0 * g.dilation.v[1] - g.pad.v[1];
    const int off_w = s0 * g.dilation.v[2] - g.pad.v[2];
    const T* x = g.x + channel / g.multiplier * g.x_channel;
    const T* dy = g.dy + channel * g.dy_channel;
    const int64_t end = min(g.runs, (split + 1) * g.split_runs);
    for (int64_t run = split * g.split_runs + lane; run < end; run += lanes) {
      const QuotRem q = DivMod(run, g.by_row);
      const QuotRem p = DivMod(q.quot, g.by_h);
      const QuotRem o = DivMod(p.quot, g.by_d);
      const int d = o.rem * g.stride.v[0] + off_d, h = p.rem * g.stride.v[1] + off_h;
      if (!Inside(d, 0, g.in.v[0]) || !Inside(h, 0, g.in.v[1])) continue;
      const int step = kSteps ? int(g.run_step.d) : 1;
      int q0 = q.rem * kRun;
      if (kSteps && step > 1) {
        const int chunk = int(g.run_step.Div(q.rem));
        q0 = q.rem - chunk * step + chunk * kRun * step;
      }
      const int w0 = q0 * stride + off_w;
      const T* x_row =
          x + o.quot * g.x_image + (int64_t(d) * g.in.v[1] + h) * g.in.v[2] * g.x_pixel;
      const T* dy_row = dy + o.quot * g.dy_image +
                        (int64_t(o.rem) * g.out.v[1] + p.rem) * g.out.v[2] * g.dy_pixel;

      Vec<T, V> grad[kRun];
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const int at = q0 + e * step;
        LoadOrZero<T, V>(at < g.out.v[2], dy_row + int64_t(at) * g.dy_pixel, grad[e]);
      }
      if constexpr (kStride > 0) {
        constexpr int kCols = (kRun - 1) * kStride + S;
        Vec<T, V> in[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          const int at = w0 + c * step;
          LoadOrZero<T, V>(Inside(w0, c * step, g.in.v[2]), x_row + int64_t(at) * g.x_pixel, in[c]);
        }
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            const int s = c - e * kStride;
            if (s < 0 || s >= S) continue;
#pragma unroll
            for (int i = 0; i < V; ++i) acc[s][i] += ToFloat(in[c].v[i]) * ToFloat(grad[e].v[i]);
          }
        }
      } else {
        Vec<T, V> in[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const int w = w0 + e * stride;
          LoadOrZero<T, V>(q0 + e < g.out.v[2] && Inside(w, 0, g.in.v[2]),
                           x_row + int64_t(w) * g.x_pixel, in[e]);
        }
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
#pragma unroll
          for (int i = 0; i < V; ++i) acc[0][i] += ToFloat(in[e].v[i]) * ToFloat(grad[e].v[i]);
        }
      }
    }
  }

  // The lanes of a (tap row, vec), halved until one is left; an odd one out waits for the next
  // step.
#pragma unroll
  for (int s = 0; s < S; ++s) {
    Vec<float, V>& mine = sums[threadIdx.x];
#pragma unroll
    for (int i = 0; i < V; ++i) mine.v[i] = acc[s][i];
    __syncthreads();
    for (int count = lanes; count > 1;) {
      const int half = (count + 1) / 2;
      if (live && lane + half < count) {
        const Vec<float, V> other = sums[threadIdx.x + half * g.tile_vecs];
#pragma unroll
        for (int i = 0; i < V; ++i) mine.v[i] += other.v[i];
      }
      count = half;
      __syncthreads();
    }
    if (live && lane == 0) {
      const int64_t to = (int64_t(tap_row) * S + s) * g.dw_tap + channel * g.dw_channel;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (g.partials != nullptr) {
          g.partials[split * g.dw_count + to + i * g.dw_channel] = mine.v[i];
        } else {
          g.dw[to + i * g.dw_channel] = FromFloat<T>(mine.v[i]);
        }
      }
    }
  }
}

template <typename T, int V>
Status Launch(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
              const void* dy, void* dw, float* partials, const std::string& what) {
  DepthwiseWgradArgs<T> g{};
  g.x = static_cast<const T*>(x);
  g.dy = static_cast<const T*>(dy);
  g.dw = static_cast<T*>(dw);
  g.partials = partials;
  g.in = ToExtents(p.in);
  g.filter = ToExtents(p.filter);
  g.out = ToExtents(p.out);
  g.stride = ToExtents(p.stride);
  g.pad = ToExtents(p.pad);
  g.dilation = ToExtents(p.dilation);
  void (*kernel)(const DepthwiseWgradArgs<T>) = nullptr;
  int64_t step = 1;
  if (p.stride[2] == 1 && p.dilation[2] <= (V == 8 ? 1 : MostDilation(p.out[2]))) {
    if (p.filter[2] == 3) kernel = DepthwiseWgradKernel<T, V, 3, 1>;
    if (p.filter[2] == 5) kernel = DepthwiseWgradKernel<T, V, 5, 1>;
    if (p.filter[2] == 7) kernel = DepthwiseWgradKernel<T, V, 7, 1>;
    if (kernel != nullptr) step = p.dilation[2];
  } else if (p.dilation[2] == 1 && p.stride[2] == 2) {
    if (p.filter[2] == 3) kernel = DepthwiseWgradKernel<T, V, 3, 2>;
  }
  const int64_t row_runs = step * CeilDiv(CeilDiv(p.out[2], step), kRun);
  g.run_step = FastDiv(step);
  g.by_row = FastDiv(row_runs);
  g.by_h = FastDiv(p.out[1]);
  g.by_d = FastDiv(p.out[0]);
  g.runs = p.n * p.out[0] * p.out[1] * row_runs;
  g.split_runs = CeilDiv(g.runs, splits);
  const bool last = p.channels_last;
  g.x_image = p.c * p.in_size();
  g.x_pixel = last ? p.c : 1;
  g.x_channel = last ? 1 : p.in_size();
  g.dy_image = p.k * p.out_size();
  g.dy_pixel = last ? p.k : 1;
  g.dy_channel = last ? 1 : p.out_size();
  g.dw_tap = last ? p.k : 1;
  g.dw_channel = last ? 1 : p.filter_size();
  g.dw_count = p.k * p.filter_size();
  g.channels = int(p.k);
  g.multiplier = int(p.k / p.c);

  g.tap_rows = int(p.filter[0] * p.filter[1]);
  if (kernel == nullptr) {
    kernel = DepthwiseWgradKernel<T, V, 1, 0>;
    g.tap_rows = int(p.filter_size());
  }
  g.tap_row_tiles = int(CeilDiv(g.tap_rows, kBlockTapRows));
  g.block_tap_rows = int(CeilDiv(g.tap_rows, g.tap_row_tiles));

  const int64_t vecs = CeilDiv(p.k, V);
  const int64_t most = last ? (V == 1 ? 64 : 128 / V) : 1;
  g.tile_vecs = int(CeilDiv(vecs, CeilDiv(vecs, most)));
  g.channel_tiles = int(CeilDiv(vecs, g.tile_vecs));

  const int64_t blocks = splits * g.tap_row_tiles * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  kernel<<<unsigned(blocks), kThreads, 0, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status DepthwiseFmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                         const void* dy, void* dw, float* partials, const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kVecWidth<T>;
    const bool vector = p.channels_last && p.k == p.c && p.c % V == 0;
    return vector ? Launch<T, V>(ctx, p, splits, x, dy, dw, partials, what)
                  : Launch<T, 1>(ctx, p, splits, x, dy, dw, partials, what);
  });
}

}  // namespace jaxconv::cuda::conv
