// Channels-last, a filter of S taps (2 to 4) along one axis, stride 1:
//
//   fprop, dgrad   dst[i, c] = sum over s of  src[i - pad + s * dilation, c] * w[s, c]
//                  (dgrad: src = dy, the filter reversed, pad = (S - 1) * dilation - pad)
//   wgrad          dw[s, c] = sum over lines and i of  x[i - pad + s * dilation, c] * dy[i, c]
//
// A line is what the filter runs along: the elements of an array with the same other coordinates. A
// thread owns V channels (16 bytes) of a line and walks down a chunk of it in steps of the dilation. It
// keeps the last S - 1 inputs and the filter (wgrad: the sums) in registers, and the next kAhead vectors
// of each array are always on their way: each is read once, but for S - 1 at the start of a chunk.
// Neighbouring threads own neighbouring channels, then lines, then residues of the dilation, then
// chunks. No shared memory but for the sums at wgrad's end, which are added in a fixed order.
#include "cuda/conv/depthwise/domain.h"
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/core/device.h"

#include <algorithm>
#include <type_traits>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/row_stream.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kBlocks = 2;  // of them fit a multiprocessor
constexpr int kThreads = 256, kThreadsWgrad = 192;
// Vectors of 16 bytes of each array on their way to a thread. 8 for fprop, with 192 threads, took 6% more.
constexpr int kAhead = 4;
constexpr int kPlaces = 128;  // of a chunk, about

// An array's lines: (outer, length, inner, channels) in memory.
struct Lines {
  int from, to;  // lengths: of src or x, and of dst or dy
  int64_t step;  // elements from one place to the next: inner * channels
  int pad, dilation;
  int vecs;       // of 16 bytes, of a pixel
  int chunk;      // places of a chunk, in steps of the dilation
  int64_t units;  // (inner, residues, chunks, outer), the first fastest
  FastDiv by_inner, by_dilation, by_chunks;
};

struct Unit {
  int64_t from, to;  // the elements that the line starts with
  int first, count;  // places of dst: first, first + dilation, ...
};

template <int V>
__device__ __forceinline__ Unit UnitOf(const Lines& g, int64_t unit, int vec) {
  const QuotRem inner = DivMod(unit, g.by_inner);
  const QuotRem residue = DivMod(inner.quot, g.by_dilation);
  const QuotRem chunk = DivMod(residue.quot, g.by_chunks);
  const int64_t in_pixel = int64_t(inner.rem) * (g.vecs * V) + vec * V;
  Unit u;
  u.from = chunk.quot * g.from * g.step + in_pixel;
  u.to = chunk.quot * g.to * g.step + in_pixel;
  const int places = int(g.by_dilation.Div(g.to - residue.rem + g.dilation - 1));  // of the residue
  const int begin = chunk.rem * g.chunk;
  u.first = residue.rem + begin * g.dilation;
  u.count = min(g.chunk, places - begin);
  return u;
}

// Places at, at + dilation, ... of a line, zero outside of it.
template <typename T, int V>
struct Walk {
  const T* p;
  int at, length, dilation;
  int64_t step;

  __device__ __forceinline__ Walk(const T* line, int at, int length, int dilation, int64_t step)
      : p(line + at * step), at(at), length(length), dilation(dilation), step(step * dilation) {}
  __device__ __forceinline__ void Next(uint4& v) {
    v = make_uint4(0, 0, 0, 0);
    if (unsigned(at) < unsigned(length)) v = *reinterpret_cast<const uint4*>(p);
    at += dilation;
    p += step;
  }
};

template <typename T, int V>
__device__ __forceinline__ void Unpack(const uint4& v, float (&to)[V]) {
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (V == 4) {
      to[i] = __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      to[2 * i] = __uint_as_float(word[i] << 16);
      to[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    } else {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
      to[2 * i] = both.x;
      to[2 * i + 1] = both.y;
    }
  }
}

// window[0] drops out, `last` comes in.
template <int kCount, int V>
__device__ __forceinline__ void Push(float (&window)[kCount][V], const float (&last)[V]) {
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
#pragma unroll
    for (int i = 0; i < V; ++i) window[s][i] = s + 1 < kCount ? window[s + 1][i] : last[i];
  }
}

template <typename T>
struct LinesArgs {
  const T* src;
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  Lines lines;
  FastDiv by_vecs;
  bool reverse;
};

template <typename T, int S>
__global__ void __launch_bounds__(kThreads, kBlocks) LinesKernel(const LinesArgs<T> g) {
  constexpr int V = kVecWidth<T>;
  const QuotRem id = DivMod(int64_t(blockIdx.x) * kThreads + threadIdx.x, g.by_vecs);
  if (id.quot >= g.lines.units) return;
  const Unit u = UnitOf<V>(g.lines, id.quot, id.rem);
  const int channel = id.rem * V, channels = g.lines.vecs * V;

  float w[S][V], bias[V] = {};
#pragma unroll
  for (int s = 0; s < S; ++s) {
    LoadVec<T, V>(g.w + (g.reverse ? S - 1 - s : s) * int64_t(channels) + channel, w[s]);
  }
  if (g.epilogue.bias != nullptr) LoadVec<T, V>(g.epilogue.bias + channel, bias);

  Walk<T, V> walk(g.src + u.from, u.first - g.lines.pad, g.lines.from, g.lines.dilation,
                  g.lines.step);
  uint4 ahead[kAhead];
  float window[S - 1][V];
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    walk.Next(ahead[0]);
    Unpack<T>(ahead[0], window[s]);
  }
#pragma unroll
  for (int a = 0; a < kAhead; ++a) walk.Next(ahead[a]);
  const int64_t to_step = g.lines.step * g.lines.dilation;
  int64_t to = u.to + u.first * g.lines.step;
  for (int j = 0; j < u.count; j += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      float last[V], sum[V];
      Unpack<T>(ahead[a], last);
      walk.Next(ahead[a]);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        sum[i] = fmaf(last[i], w[S - 1][i], bias[i]);
#pragma unroll
        for (int s = 0; s < S - 1; ++s) sum[i] = fmaf(window[s][i], w[s][i], sum[i]);
      }
      Push(window, last);
      if (j + a < u.count) {
        if (g.epilogue.z != nullptr) StorePacked<T, V>(g.epilogue.z + to, sum);
        ApplyActivation(g.epilogue.activation, sum, g.epilogue.slope);
        StorePacked<T, V>(g.dst + to, sum);
      }
      to += to_step;
    }
  }
}

template <typename T>
struct LinesWgradArgs {
  const T* x;
  const T* dy;
  T* dw;            // with one split
  float* partials;  // (splits, taps, K) otherwise; null with one
  Lines lines;
  int64_t splits;
  int tile_vecs, channel_tiles;  // vectors of a block
};

template <typename T, int S>
__global__ void __launch_bounds__(kThreadsWgrad, kBlocks)
    LinesWgradKernel(const LinesWgradArgs<T> g) {
  constexpr int V = kVecWidth<T>;
  __shared__ Vec<float, V> sums[kThreadsWgrad];
  const int tile = int(blockIdx.x % unsigned(g.channel_tiles));
  const int64_t split = blockIdx.x / unsigned(g.channel_tiles);
  const int lanes = kThreadsWgrad / g.tile_vecs, lane = int(threadIdx.x) / g.tile_vecs;
  const int vec = tile * g.tile_vecs + int(threadIdx.x) % g.tile_vecs;
  const bool live = lane < lanes && vec < g.lines.vecs;

  float acc[S][V] = {};
  if (live) {
    for (int64_t unit = split * lanes + lane; unit < g.lines.units; unit += g.splits * lanes) {
      const Unit u = UnitOf<V>(g.lines, unit, vec);
      Walk<T, V> x(g.x + u.from, u.first - g.lines.pad, g.lines.from, g.lines.dilation,
                   g.lines.step);
      // Past the chunk's end dy is as good as zero.
      const int end = u.first + u.count * g.lines.dilation;
      Walk<T, V> dy(g.dy + u.to, u.first, min(end, g.lines.to), g.lines.dilation, g.lines.step);
      uint4 x_ahead[kAhead], dy_ahead[kAhead];
      float window[S - 1][V];
#pragma unroll
      for (int s = 0; s < S - 1; ++s) {
        x.Next(x_ahead[0]);
        Unpack<T>(x_ahead[0], window[s]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        x.Next(x_ahead[a]);
        dy.Next(dy_ahead[a]);
      }
      for (int j = 0; j < u.count; j += kAhead) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          float last[V], grad[V];
          Unpack<T>(x_ahead[a], last);
          Unpack<T>(dy_ahead[a], grad);
          x.Next(x_ahead[a]);
          dy.Next(dy_ahead[a]);
#pragma unroll
          for (int i = 0; i < V; ++i) {
#pragma unroll
            for (int s = 0; s < S - 1; ++s) acc[s][i] = fmaf(window[s][i], grad[i], acc[s][i]);
            acc[S - 1][i] = fmaf(last[i], grad[i], acc[S - 1][i]);
          }
          Push(window, last);
        }
      }
    }
  }

  // The lanes of a vector, halved until one is left; an odd one out waits for the next step.
#pragma unroll
  for (int s = 0; s < S; ++s) {
    Vec<float, V>& mine = sums[threadIdx.x];
#pragma unroll
    for (int i = 0; i < V; ++i) mine.v[i] = acc[s][i];
    __syncthreads();
    for (int count = lanes; count > 1;) {
      const int half = (count + 1) / 2;
      if (lane + half < count) {
        const Vec<float, V> other = sums[threadIdx.x + half * g.tile_vecs];
#pragma unroll
        for (int i = 0; i < V; ++i) mine.v[i] += other.v[i];
      }
      count = half;
      __syncthreads();
    }
    if (live && lane == 0) {
      const int64_t channels = int64_t(g.lines.vecs) * V, at = s * channels + vec * V;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (g.partials != nullptr) {
          g.partials[split * S * channels + at + i] = mine.v[i];
        } else {
          g.dw[at + i] = FromFloat<T>(mine.v[i]);
        }
      }
    }
  }
}

// All but pad, from, to and the chunks.
int64_t DescribeLines(const ConvProblem& p, int vector, Lines& g) {
  const int axis = depthwise::Conv1dAxis(p);
  int64_t outer = p.n, inner = 1;
  for (int d = 0; d < axis; ++d) outer *= p.in[d];
  for (int d = axis + 1; d < 3; ++d) inner *= p.in[d];
  g.step = inner * p.c;
  g.dilation = int(p.dilation[axis]);
  g.pad = int(p.pad[axis]);
  g.vecs = int(p.c / vector);
  g.from = int(p.in[axis]);
  g.to = int(p.out[axis]);
  g.by_inner = FastDiv(inner);
  g.by_dilation = FastDiv(g.dilation);
  return outer * inner * g.dilation;
}

// Cuts each of `lines` (times residues) into chunks so that `threads` of them at a time have whole
// rounds of chunks, of about `places` or more.
void Cut(Lines& g, int64_t lines, int64_t threads, int64_t places) {
  const int64_t length = CeilDiv(g.to, g.dilation);
  const int64_t wanted = lines * CeilDiv(length, places);
  const int64_t rounds = std::max<int64_t>(1, wanted / threads);
  const int64_t chunks = std::clamp<int64_t>(rounds * threads / lines, 1, CeilDiv(length, 16));
  g.chunk = int(CeilDiv(length, chunks));
  const int64_t cut = CeilDiv(length, g.chunk);
  g.by_chunks = FastDiv(cut);
  g.units = lines * cut;
}

template <typename T, int S>
Status Launch(const Context& ctx, const ConvProblem& p, LinesArgs<T> g, bool dgrad,
              const std::string& what) {
  Lines& l = g.lines;
  const int64_t lines = DescribeLines(p, kVecWidth<T>, l);
  if (dgrad) {
    std::swap(l.from, l.to);
    l.pad = (S - 1) * l.dilation - l.pad;
  }
  g.reverse = dgrad;
  g.by_vecs = FastDiv(l.vecs);
  Cut(l, lines, std::max<int64_t>(1, int64_t(Multiprocessors()) * kBlocks * kThreads / l.vecs),
      kPlaces);
  const int64_t blocks = CeilDiv(l.units * l.vecs, kThreads);
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  LinesKernel<T, S><<<unsigned(blocks), kThreads, 0, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T, int S>
Status LaunchWgrad(const Context& ctx, const ConvProblem& p, LinesWgradArgs<T> g,
                   const std::string& what) {
  Lines& l = g.lines;
  const int64_t lines = DescribeLines(p, kVecWidth<T>, l);
  g.tile_vecs = int(CeilDiv(l.vecs, CeilDiv(l.vecs, 32)));
  g.channel_tiles = int(CeilDiv(l.vecs, g.tile_vecs));
  Cut(l, lines, g.splits * (kThreadsWgrad / g.tile_vecs), 2 * kPlaces);
  const int64_t blocks = g.splits * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  LinesWgradKernel<T, S><<<unsigned(blocks), kThreadsWgrad, 0, ctx.stream>>>(g);
  return LaunchStatus(what);
}

// f(std::integral_constant<int, S>{}) of the filter's taps.
template <typename F>
Status ForTaps(int64_t taps, F&& f) {
  if (taps == 2) return f(std::integral_constant<int, 2>{});
  if (taps == 3) return f(std::integral_constant<int, 3>{});
  return f(std::integral_constant<int, 4>{});
}

}  // namespace

Status DepthwiseConv1d(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                       const void* src, const void* w, const void* bias, void* dst, void* z,
                       const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LinesArgs<T> g{};
    g.src = static_cast<const T*>(src);
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    return ForTaps(p.filter_size(), [&](auto taps) {
      return Launch<T, decltype(taps)::value>(ctx, p, g, dgrad, what);
    });
  });
}

Status DepthwiseConv1dWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                            const void* dy, void* dw, float* partials, const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LinesWgradArgs<T> g{};
    g.x = static_cast<const T*>(x);
    g.dy = static_cast<const T*>(dy);
    g.dw = static_cast<T*>(dw);
    g.partials = partials;
    g.splits = splits;
    return ForTaps(p.filter_size(), [&](auto taps) {
      return LaunchWgrad<T, decltype(taps)::value>(ctx, p, g, what);
    });
  });
}

}  // namespace jaxconv::cuda::conv
