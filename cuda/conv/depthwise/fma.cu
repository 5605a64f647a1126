// fprop, and dgrad as the same kernel with source and destination exchanged:
//
//   dst[n, i, k] = sum over taps t, j of  src[n, at(i, t), s(k) + j] * w[t, .]
//   fprop:  dst = y, src = x,  at = i * stride - pad + t * dilation,                  s(k) = k /
//   (K/C), one j dgrad:  dst = dx, src = dy, at = (i + pad - t * dilation) / stride where exact,
//   s(c) = c * (K/C), K/C of j
//
// A thread computes kRun = 4 adjacent pixels along W (with a dilation, pixels that are as far apart) for
// V channels (16 bytes of them channels-last, 4 where 8 do not fit, otherwise one), reading each source
// vector once per tap row: kRun + S - 1 loads for kRun * S products. A block of 256 (or 192) threads is
// (channels) x (runs); it stages its channels' filter in shared memory as float32, then walks over
// `steps` x (runs) consecutive runs, down the rows of the image, so that the rows that neighbouring outputs share come from L1. Reads:
// src about once from DRAM, w once per block. Writes dst once.
//
// What tensor cores can do is in mma.cu, wgrad in fma_wgrad.cu.
#include <algorithm>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/depthwise/kernels.h"

namespace jaxconv::cuda::conv {
namespace {

// 7 taps of 8 channels spill at 2 * 256 threads an SM (128 registers).
JAXCONV_HD constexpr int BlockThreads(int filter_w, int vector) {
  return filter_w * vector > 48 ? 192 : 256;
}

// Whether threads of 4 channels of 16 bits take a problem, of those that threads of 8 or 1 also take:
// kUnit only, where channels do not divide into eights or a dilation leaves those of 8 without a map
// (bf16 3x3 of dilation 2: 0.077 ms instead of 0.133, H200). Their filter fits shared memory.
bool Fours(const ConvProblem& p, bool dgrad) {
  const bool unit = p.stride[2] == 1 && p.dilation[2] <= MostDilation(dgrad ? p.in[2] : p.out[2]) &&
                    (p.filter[2] == 3 || p.filter[2] == 5 || p.filter[2] == 7);
  return unit && p.c % 4 == 0 && (p.c % 8 != 0 || p.dilation[2] > 1) && p.filter_size() <= 512;
}

constexpr int kRun = 4;                      // adjacent destination pixels of a thread
constexpr int kFilterBytes = 40 * 1024;      // of shared memory for the filter, at most
constexpr int64_t kTargetBlocks = 132 * 16;  // enough for several waves of the largest device

// How W coordinates relate. In all but kAny the filter width S and this map are known at compile
// time, and dilation is 1 but for kUnit (not of 8 channels).
enum class Map {
  kUnit,         // src = dst + const + s * dilation: stride 1; in dgrad with the filter reversed
  kStride2,      // src = 2 * dst + const + s: fprop of stride 2
  kTransposed2,  // src = (dst + pad - s) / 2: dgrad of stride 2
  kAny,
};

// One dimension: src = (dst * mul + off + t * step) / div where exact.
struct Line {
  int src, dst, filter;  // extents
  int mul, off, step, div;
};

// The source coordinate of tap t, or -1.
JAXCONV_HD int SourceAt(const Line& line, int dst, int t) {
  int at = dst * line.mul + line.off + t * line.step;
  if (line.div != 1) {
    if (at % line.div != 0) return -1;
    at /= line.div;
  }
  return unsigned(at) < unsigned(line.src) ? at : -1;
}

template <typename T>
struct DepthwiseArgs {
  const T* src;
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  Line line[3];
  int64_t runs, block_runs;    // images * dst rows * runs of a row; a block's part of them
  FastDiv by_row, by_h, by_d;  // runs of a row, dst extents H and D
  int run_shift;               // run r of a row starts at 4 * r - run_shift
  int run_source;              // its source coordinates start at (4 * r * mul) / div + run_source
  FastDiv run_step;            // kUnit: the dilation; runs start at its residues first. Else 1
  int64_t src_image, src_row, src_pixel, src_channel;  // strides in elements
  int64_t dst_image, dst_row, dst_pixel, dst_channel;
  int64_t w_tap, w_channel;
  int channels, src_per_dst, dst_per_src;  // channels of dst; see the formula
  int tile_vecs, channel_tiles;            // V-channel vectors of a block
  bool filter_staged, reverse_w,
      vector_run;  // vector_run: channels-first stores of kRun pixels may be aligned
};

template <typename T, int V, int S, Map kMap>
__global__ void __launch_bounds__(BlockThreads(S, V), 2) DepthwiseKernel(const DepthwiseArgs<T> g) {
  constexpr int kThreads = BlockThreads(S, V);
  constexpr bool kSteps = kMap == Map::kUnit && V != 8;
  extern __shared__ float4 shared[];
  float* filter = reinterpret_cast<float*>(shared);  // [taps][tile_vecs * V * src_per_dst]

  const int tile = int(blockIdx.x % unsigned(g.channel_tiles));
  const int64_t part = blockIdx.x / unsigned(g.channel_tiles);
  const int tile_channel0 = tile * g.tile_vecs * V;
  const int tile_channels = min(g.tile_vecs * V, g.channels - tile_channel0);
  const Line d_line = g.line[0], h_line = g.line[1], w_line = g.line[2];
  const int width = kMap == Map::kAny ? w_line.filter : S;
  const int pitch = g.tile_vecs * V * g.src_per_dst;
  const int filter_channel0 = tile_channel0 * g.src_per_dst;

  if (g.filter_staged) {
    const int taps = d_line.filter * h_line.filter * width;
    const int live = tile_channels * g.src_per_dst;
    for (int e = threadIdx.x; e < taps * pitch; e += kThreads) {
      const int tap = e / pitch, channel = e - tap * pitch;
      const int s = tap % width, from = g.reverse_w ? tap - s + (width - 1 - s) : tap;
      filter[e] = channel < live
                      ? ToFloat(g.w[from * g.w_tap + (filter_channel0 + channel) * g.w_channel])
                      : 0.f;
    }
    __syncthreads();
  }

  const int lanes = kThreads / g.tile_vecs;  // runs in flight
  const int vec = int(threadIdx.x) % g.tile_vecs, lane = int(threadIdx.x) / g.tile_vecs;
  if (lane >= lanes || vec * V >= tile_channels) return;
  const int channel = tile_channel0 + vec * V;
  const int src_channel0 = channel / g.dst_per_src * g.src_per_dst;

  const int64_t end = min(g.runs, (part + 1) * g.block_runs);
  for (int64_t run = part * g.block_runs + lane; run < end; run += lanes) {
    const QuotRem r = DivMod(run, g.by_row);
    const QuotRem h = DivMod(r.quot, g.by_h);
    const QuotRem d = DivMod(h.quot, g.by_d);
    const int step = kSteps ? int(g.run_step.d) : 1;
    // First destination pixel; < 0 by at most 1.
    int w0 = r.rem * kRun - g.run_shift;
    if (kSteps && step > 1) {
      const int chunk = int(g.run_step.Div(r.rem));
      w0 = r.rem - chunk * step + chunk * kRun * step;
    }

    float acc[kRun][V] = {};
    for (int j = 0; j < g.src_per_dst; ++j) {
      const T* image = g.src + d.quot * g.src_image + (src_channel0 + j) * g.src_channel;
      const int local = vec * V * g.src_per_dst + j;
      for (int t = 0; t < d_line.filter; ++t) {
        const int sd = SourceAt(d_line, d.rem, t);
        if (sd < 0) continue;
        for (int rr = 0; rr < h_line.filter; ++rr) {
          const int sh = SourceAt(h_line, h.rem, rr);
          if (sh < 0) continue;
          const T* row = image + (int64_t(sd) * h_line.src + sh) * g.src_row;
          const int tap0 = (t * h_line.filter + rr) * width;
          if constexpr (kMap != Map::kAny) {
            constexpr int kCols = kMap == Map::kUnit      ? kRun + S - 1
                                  : kMap == Map::kStride2 ? 2 * (kRun - 1) + S
                                                          : kRun / 2 + (S - 1) / 2;
            const int from = g.run_source + (kSteps                  ? w0
                                             : kMap == Map::kUnit    ? r.rem * kRun
                                             : kMap == Map::kStride2 ? r.rem * (2 * kRun)
                                                                     : r.rem * (kRun / 2));
            Vec<T, V> in[kCols];
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
              const int at = from + c * step;
              LoadOrZero<T, V>(unsigned(at) < unsigned(w_line.src), row + int64_t(at) * g.src_pixel,
                               in[c]);
            }
#pragma unroll
            for (int s = 0; s < S; ++s) {
              float f[V];
              LoadVec<float, V>(filter + (tap0 + s) * pitch + local, f);
#pragma unroll
              for (int e = 0; e < kRun; ++e) {
                if (kMap == Map::kTransposed2 && (e - s) % 2 != 0) continue;
                const int c = kMap == Map::kUnit      ? e + s
                              : kMap == Map::kStride2 ? 2 * e + s
                                                      : (e - s + (S - 1)) / 2;
#pragma unroll
                for (int i = 0; i < V; ++i) acc[e][i] += ToFloat(in[c].v[i]) * f[i];
              }
            }
          } else {
            for (int s = 0; s < width; ++s) {
              float f[V];
#pragma unroll
              for (int i = 0; i < V; ++i) {
                f[i] = g.filter_staged ? filter[(tap0 + s) * pitch + local + i]
                                       : ToFloat(g.w[(tap0 + s) * g.w_tap +
                                                     (filter_channel0 + local + i) * g.w_channel]);
              }
#pragma unroll
              for (int e = 0; e < kRun; ++e) {
                const int sw = SourceAt(w_line, w0 + e, s);
                Vec<T, V> in;
                LoadOrZero<T, V>(sw >= 0, row + int64_t(sw) * g.src_pixel, in);
#pragma unroll
                for (int i = 0; i < V; ++i) acc[e][i] += ToFloat(in.v[i]) * f[i];
              }
            }
          }
        }
      }
    }

    const int64_t at = d.quot * g.dst_image + (int64_t(d.rem) * h_line.dst + h.rem) * g.dst_row +
                       int64_t(w0) * g.dst_pixel + channel * g.dst_channel;
    if (g.epilogue.bias != nullptr) {
      float bias[V];
      LoadVec<T, V>(g.epilogue.bias + channel, bias);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int i = 0; i < V; ++i) acc[e][i] += bias[i];
      }
    }
    const auto store = [&](T* to) {
      if constexpr (V == 1) {
        if (g.vector_run && step == 1 && w0 >= 0 && w0 + kRun <= w_line.dst && at % kRun == 0) {
          const float v[kRun] = {acc[0][0], acc[1][0], acc[2][0], acc[3][0]};
          StorePacked<T, kRun>(to + at, v);
          return;
        }
      }
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (unsigned(w0 + e * step) < unsigned(w_line.dst)) {
          StorePacked<T, V>(to + at + e * step * g.dst_pixel, acc[e]);
        }
      }
    };
    if (g.epilogue.z != nullptr) store(g.epilogue.z);
    if (g.epilogue.activation != Activation::kNone) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          acc[e][i] = ApplyActivation(g.epilogue.activation, acc[e][i], g.epilogue.slope);
        }
      }
    }
    store(g.dst);
  }
}

template <typename T, int V>
inline constexpr bool kFours = sizeof(T) == 2 && V == 4;

template <typename T, int V>
using Kernel = void (*)(const DepthwiseArgs<T>);

// Null where no instance is specialised for the map.
template <typename T, int V>
Kernel<T, V> Specialised(Map map, int64_t filter_w) {
  switch (map) {
    case Map::kUnit:
      if (filter_w == 3) return DepthwiseKernel<T, V, 3, Map::kUnit>;
      if (filter_w == 5) return DepthwiseKernel<T, V, 5, Map::kUnit>;
      if (filter_w == 7) return DepthwiseKernel<T, V, 7, Map::kUnit>;
      break;
    case Map::kStride2:
      if constexpr (!kFours<T, V>) {
        if (filter_w == 3) return DepthwiseKernel<T, V, 3, Map::kStride2>;
      }
      break;
    case Map::kTransposed2:
      if constexpr (!kFours<T, V>) {
        if (filter_w == 3) return DepthwiseKernel<T, V, 3, Map::kTransposed2>;
      }
      break;
    case Map::kAny:
      break;
  }
  return nullptr;
}

template <typename T, int V>
Status Launch(const Context& ctx, const ConvProblem& p, bool dgrad, const void* src, const void* w,
              void* dst, const EpilogueArgs<T>& epilogue, const std::string& what) {
  DepthwiseArgs<T> g{};
  g.src = static_cast<const T*>(src);
  g.w = static_cast<const T*>(w);
  g.dst = static_cast<T*>(dst);
  g.epilogue = epilogue;
  const int64_t* src_ext = dgrad ? p.out : p.in;
  const int64_t* dst_ext = dgrad ? p.in : p.out;
  for (int d = 0; d < 3; ++d) {
    Line& line = g.line[d];
    line.src = int(src_ext[d]);
    line.dst = int(dst_ext[d]);
    line.filter = int(p.filter[d]);
    line.mul = dgrad ? 1 : int(p.stride[d]);
    line.off = int(dgrad ? p.pad[d] : -p.pad[d]);
    line.step = int(dgrad ? -p.dilation[d] : p.dilation[d]);
    line.div = dgrad ? int(p.stride[d]) : 1;
  }

  const int64_t multiplier = p.k / p.c;
  const bool last = p.channels_last;
  const int64_t src_channels = dgrad ? p.k : p.c, dst_channels = dgrad ? p.c : p.k;
  const int64_t src_size = dgrad ? p.out_size() : p.in_size();
  const int64_t dst_size = dgrad ? p.in_size() : p.out_size();
  g.src_image = src_channels * src_size;
  g.src_pixel = last ? src_channels : 1;
  g.src_row = src_ext[2] * g.src_pixel;
  g.src_channel = last ? 1 : src_size;
  g.dst_image = dst_channels * dst_size;
  g.dst_pixel = last ? dst_channels : 1;
  g.dst_row = dst_ext[2] * g.dst_pixel;
  g.dst_channel = last ? 1 : dst_size;
  g.w_tap = last ? p.k : 1;
  g.w_channel = last ? 1 : p.filter_size();
  g.channels = int(dst_channels);
  g.src_per_dst = dgrad ? int(multiplier) : 1;
  g.dst_per_src = dgrad ? 1 : int(multiplier);
  g.vector_run = !last;

  // Channels of a block: 256 bytes at most, cut evenly; channels-first one, so that threads lie
  // along W.
  const int64_t vecs = CeilDiv(dst_channels, V);
  const int64_t most = last ? (V == 1 ? 64 : 128 / V) : 1;
  g.tile_vecs = int(CeilDiv(vecs, CeilDiv(vecs, most)));
  const auto filter_bytes = [&] {
    return p.filter_size() * g.tile_vecs * V * g.src_per_dst * int64_t(sizeof(float));
  };

  // A filter too large for shared memory narrows the block to a 32-byte sector of channels, then
  // goes through L1.
  const int64_t sector = std::max<int64_t>(1, 32 / int64_t(V * sizeof(T)));
  while (filter_bytes() > kFilterBytes && g.tile_vecs > sector) {
    g.tile_vecs = int(std::max<int64_t>(sector, g.tile_vecs / 2));
  }
  g.filter_staged = filter_bytes() <= kFilterBytes;
  g.channel_tiles = int(CeilDiv(vecs, g.tile_vecs));

  Map map = Map::kAny;
  if (g.filter_staged) {
    if (p.stride[2] == 1 && p.dilation[2] <= (V == 8 ? 1 : MostDilation(dst_ext[2])))
      map = Map::kUnit;
    if (p.stride[2] == 2 && p.dilation[2] == 1) map = dgrad ? Map::kTransposed2 : Map::kStride2;
  }
  Kernel<T, V> kernel = Specialised<T, V>(map, p.filter[2]);
  if (kernel == nullptr) {
    if constexpr (kFours<T, V>) {
      return Status::Internal(what + ": no kernel for fours of channels");
    } else {
      map = Map::kAny;
      kernel = DepthwiseKernel<T, V, 0, Map::kAny>;
    }
  }
  g.reverse_w = dgrad && map == Map::kUnit;
  const int pad = int(p.pad[2]), filter_w = int(p.filter[2]);
  const int step = map == Map::kUnit ? int(p.dilation[2]) : 1;
  g.run_step = FastDiv(step);
  switch (map) {
    case Map::kUnit:
      g.run_source = dgrad ? pad - (filter_w - 1) * step : -pad;
      break;
    case Map::kStride2:
      g.run_source = -pad;
      break;
    case Map::kTransposed2:
      // Runs start at even i + pad, so tap s reaches pixel e of a run exactly when e - s is even.
      g.run_shift = pad & 1;
      g.run_source = (pad - g.run_shift) / 2 - (filter_w - 1) / 2;
      break;
    case Map::kAny:
      break;
  }

  const int64_t row_runs = step * CeilDiv(CeilDiv(dst_ext[2] + g.run_shift, step), kRun);
  g.by_row = FastDiv(row_runs);
  g.by_h = FastDiv(dst_ext[1]);
  g.by_d = FastDiv(dst_ext[0]);
  g.runs = p.n * dst_ext[0] * dst_ext[1] * row_runs;
  const int threads = BlockThreads(map == Map::kAny ? 0 : filter_w, V);
  const int64_t lanes = threads / g.tile_vecs;
  const int64_t steps =
      std::clamp<int64_t>(g.runs * g.channel_tiles / (lanes * kTargetBlocks), 1, 16);
  g.block_runs = lanes * steps;

  const int64_t blocks = CeilDiv(g.runs, g.block_runs) * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const size_t smem = g.filter_staged ? size_t(filter_bytes()) : 0;
  kernel<<<unsigned(blocks), threads, smem, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status DepthwiseFma(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                    const void* src, const void* w, const void* bias, void* dst, void* z,
                    const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kVecWidth<T>;
    const EpilogueArgs<T> epilogue = MakeEpilogue<T>(e, bias, z);
    const bool vectors = p.channels_last && p.k == p.c;
    if constexpr (sizeof(T) == 2) {
      if (vectors && Fours(p, dgrad))
        return Launch<T, 4>(ctx, p, dgrad, src, w, dst, epilogue, what);
    }
    return vectors && p.c % V == 0 ? Launch<T, V>(ctx, p, dgrad, src, w, dst, epilogue, what)
                                   : Launch<T, 1>(ctx, p, dgrad, src, w, dst, epilogue, what);
  });
}

}  // namespace jaxconv::cuda::conv
