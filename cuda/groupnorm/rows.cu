// Group-norms of one group and one pixel an image, that is layer-norms over the channels: "rows".
//
//   y = (x - mean) * rstd * scale + bias;   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * scale
//
// Some lanes of a warp take a row, each a few vectors of it, which stay in registers: everything is read once. The mean of
// what is left after subtracting the rounded mean is subtracted too, so that the statistics are right to float32 whatever
// mean / std is. Backward a thread keeps its channels' shares of dscale and dbias over all of its rows; a CTA leaves one
// share (AddShares). CTAs are as many as run at once.
#include <algorithm>

#include "cuda/core/device.h"
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {
namespace {

// A thread's place: its row among those of a block, its first vector, and the vectors from one of its to the next.
struct RowPlace {
  int row, first, lanes;
};

__device__ __forceinline__ RowPlace RowPlaceOf(int lanes) {
  return {int(threadIdx.x) / lanes, int(threadIdx.x) % lanes, lanes};
}

// The sum over a row's lanes, in all of them.
__device__ __forceinline__ float SumLanes(float v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// 1 / sqrt(v), right to float32 but for the last bit.
__device__ __forceinline__ float ReciprocalRoot(float v) {
  if (!(v > 1e-30f && v < 1e30f)) return 1.f / sqrtf(v);
  const float r = rsqrtf(v);
  return fmaf(0.5f * r, fmaf(-v * r, r, 1.f), r);
}

// A thread's vectors of row `row` of x; zeros beyond the channels and the rows.
template <typename T, int V, int P>
__device__ __forceinline__ void ReadRow(const T* x, int64_t row, bool exists, const RowPlace& at,
                                        int vectors, Raw<T, V> (&raw)[P]) {
  const Raw<T, V>* from = reinterpret_cast<const Raw<T, V>*>(x) + row * vectors;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int vector = at.first + i * at.lanes;
    raw[i] = exists && vector < vectors ? __ldcs(from + vector) : Raw<T, V>{};
  }
}

template <int V, int P>
__device__ __forceinline__ void ReadChannels(const float* from, const RowPlace& at, int vectors,
                                             float (&v)[P][V]) {
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int vector = at.first + i * at.lanes;
    if (vector < vectors) {
      ReadNumbers<V>(from + vector * V, v[i]);
    } else {
#pragma unroll
      for (float& number : v[i]) number = 0.f;
    }
  }
}

// Blocks of a multiprocessor, by the numbers of a thread (and in float32 addresses, of which there are twice as many).
template <typename T, int P>
constexpr int kForwardBlocks = P * 16 <= 8 * int(sizeof(T))    ? 4
                               : P * 16 <= 24 * int(sizeof(T)) ? 2
                                                               : 1;
template <typename T, int P>
constexpr int kBackwardBlocks = sizeof(T) == 4 && P > 4 ? 1 : kForwardBlocks<T, P>;

template <typename T, int P>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T, P>)
    RowsForwardKernel(const __grid_constant__ ForwardArgs p, int lanes) {
  constexpr int V = 16 / sizeof(T);
  const Walk& w = p.walk;
  const RowPlace at = RowPlaceOf(lanes);
  const int64_t rows = w.per_instance,
                before = rows * blockIdx.y;  // of an instance; of those before
  const T* x = static_cast<const T*>(p.x) + before * w.channels;
  T* y = static_cast<T*>(p.y) + before * w.channels;
  const int each = kThreads / lanes;
  const int64_t step = int64_t(gridDim.x) * each;
  const float inv_n = static_cast<float>(w.inv_n), epsilon = static_cast<float>(w.epsilon);
  float scale[P][V], bias[P][V];
  ReadChannels<V, P>(p.scale + int64_t(blockIdx.y) * w.channels, at, w.row, scale);
  ReadChannels<V, P>(p.bias + int64_t(blockIdx.y) * w.channels, at, w.row, bias);
  Raw<T, V> next[P];
  int64_t row = int64_t(blockIdx.x) * each + at.row;
  ReadRow<T, V, P>(x, row, row < rows, at, w.row, next);
  // The block's first row is in all of its threads: none leaves before the others' exchanges.
  for (int64_t block = int64_t(blockIdx.x) * each; block < rows; block += step, row += step) {
    float v[P][V];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      Unpack<T, V>(next[i], v[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) sum += v[i][j];
    }
    ReadRow<T, V, P>(x, row + step, row + step < rows, at, w.row, next);
    const float mean = SumLanes(sum, lanes) * inv_n;
    float s1 = 0.f, s2 = 0.f;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const bool own = at.first + i * at.lanes < w.row;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[i][j] = own ? v[i][j] - mean : 0.f;
        s1 += v[i][j];
        s2 = fmaf(v[i][j], v[i][j], s2);
      }
    }
    const float rest = SumLanes(s1, lanes) * inv_n;
    const float var = fmaf(-rest, rest, SumLanes(s2, lanes) * inv_n);
    const float rstd = ReciprocalRoot((var < 0.f ? 0.f : var) + epsilon);
    if (row >= rows) continue;
    if (at.first == 0) {
      p.mean[before + row] = mean + rest;
      p.rstd[before + row] = rstd;
    }
    Raw<T, V>* to = reinterpret_cast<Raw<T, V>*>(y) + row * w.row;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const int vector = at.first + i * at.lanes;
      if (vector >= w.row) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[i][j] = fmaf((v[i][j] - rest) * rstd, scale[i][j], bias[i][j]);
      }
      __stcs(to + vector, Pack<T, V>(v[i]));
    }
  }
}

template <typename T, int P, bool kWantDx>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T, P>)
    RowsBackwardKernel(const __grid_constant__ BackwardArgs p, int lanes) {
  constexpr int V = 16 / sizeof(T);
  extern __shared__ __align__(16) float shared[];  // (2, channels)
  const Walk& w = p.walk;
  const RowPlace at = RowPlaceOf(lanes);
  const int64_t rows = w.per_instance, before = rows * blockIdx.y;
  const T* x = static_cast<const T*>(p.x) + before * w.channels;
  const T* dy = static_cast<const T*>(p.dy) + before * w.channels;
  T* dx = static_cast<T*>(p.dx) + (kWantDx ? before * w.channels : 0);
  const int each = kThreads / lanes;
  const int64_t step = int64_t(gridDim.x) * each;
  const float inv_n = static_cast<float>(w.inv_n);
  float scale[P][V], dscale[P][V] = {}, dbias[P][V] = {};
  if constexpr (kWantDx)
    ReadChannels<V, P>(p.scale + int64_t(blockIdx.y) * w.channels, at, w.row, scale);
  int64_t row = int64_t(blockIdx.x) * each + at.row;
  for (int64_t block = int64_t(blockIdx.x) * each; block < rows; block += step, row += step) {
    const bool exists = row < rows;
    Raw<T, V> xs[P], dys[P];
    ReadRow<T, V, P>(x, row, exists, at, w.row, xs);
    ReadRow<T, V, P>(dy, row, exists, at, w.row, dys);
    const float mean = exists ? p.mean[before + row] : 0.f;
    const float rstd = exists ? p.rstd[before + row] : 0.f;
    // Elements that do not exist have xhat = -mean * rstd, but dy = 0, and are not written.
    float m1 = 0.f, m2 = 0.f;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float xhat[V], g[V];
      Unpack<T, V>(xs[i], xhat);
      Unpack<T, V>(dys[i], g);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        xhat[j] = (xhat[j] - mean) * rstd;
        dbias[i][j] += g[j];
        dscale[i][j] = fmaf(g[j], xhat[j], dscale[i][j]);
        if constexpr (kWantDx) {
          const float scaled = g[j] * scale[i][j];
          m1 += scaled;
          m2 = fmaf(scaled, xhat[j], m2);
        }
      }
    }
    if constexpr (kWantDx) {
      // dx = rstd * scale * dy - rstd * m1 - xhat * rstd * m2
      const float constant = -rstd * (SumLanes(m1, lanes) * inv_n);
      const float slope = -rstd * rstd * (SumLanes(m2, lanes) * inv_n);
      if (!exists) continue;
      Raw<T, V>* to = reinterpret_cast<Raw<T, V>*>(dx) + row * w.row;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const int vector = at.first + i * at.lanes;
        if (vector >= w.row) continue;
        float centred[V], out[V];
        Unpack<T, V>(xs[i], centred);
        Unpack<T, V>(dys[i], out);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float slid = fmaf(slope, centred[j] - mean, constant);
          out[j] = fmaf(out[j] * scale[i][j], rstd, slid);
        }
        __stcs(to + vector, Pack<T, V>(out));
      }
    }
  }
  // The block's share: lanes of other rows first, then warp by warp.
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      for (int other = lanes; other < kWarp; other *= 2) {
        dbias[i][j] += __shfl_xor_sync(0xffffffffu, dbias[i][j], other);
        dscale[i][j] += __shfl_xor_sync(0xffffffffu, dscale[i][j], other);
      }
    }
  }
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    if (int(threadIdx.x) / kWarp == warp && int(threadIdx.x) % kWarp < lanes) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const int vector = at.first + i * at.lanes;
        if (vector >= w.row) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          float* to = shared + vector * V + j;
          to[0] = (warp == 0 ? 0.f : to[0]) + dbias[i][j];
          to[w.channels] = (warp == 0 ? 0.f : to[w.channels]) + dscale[i][j];
        }
      }
    }
    __syncthreads();
  }
  float* share = p.sums + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * 2 * w.channels;
  for (int i = threadIdx.x; i < 2 * w.channels; i += kThreads) share[i] = shared[i];
}

// f(T(), std::integral_constant<int, P>()), P a number of a thread's vectors that there are instances for.
template <typename T, typename F>
Status WithVectors(int vectors, const F& f) {
  if (vectors <= 1) return f(T(), std::integral_constant<int, 1>());
  if (vectors <= 2) return f(T(), std::integral_constant<int, 2>());
  if (vectors <= 3) return f(T(), std::integral_constant<int, 3>());
  if constexpr (sizeof(T) == 2) {
    return f(T(), std::integral_constant<int, 4>());
  } else {
    if (vectors <= 4) return f(T(), std::integral_constant<int, 4>());
    if (vectors <= 6) return f(T(), std::integral_constant<int, 6>());
    return f(T(), std::integral_constant<int, 8>());
  }
}

template <typename F>
Status WithRows(const GroupNormProblem& p, const F& f) {
  const int vectors = static_cast<int>(CeilDivide(p.channels / Vector(p), RowLanes(p)));
  if (p.dtype == DType::kF32) return WithVectors<float>(vectors, f);
  if (p.dtype == DType::kBF16) return WithVectors<__nv_bfloat16>(vectors, f);
  return WithVectors<__half>(vectors, f);
}

dim3 RowsGrid(const GroupNormProblem& p, int blocks, const Device& device) {
  return dim3(
      static_cast<unsigned>(std::min<int64_t>(RowBlocks(p), blocks * device.multiprocessors)),
      static_cast<unsigned>(p.batch));
}

}  // namespace

Status RowsForward(const Context& ctx, const GroupNormProblem& p, const Device& device,
                   const ForwardArgs& args, const std::string& what) {
  const int lanes = static_cast<int>(RowLanes(p));
  return WithRows(p, [&](auto element, auto vectors) {
    using T = decltype(element);
    constexpr int P = decltype(vectors)::value;
    const dim3 grid = RowsGrid(p, kForwardBlocks<T, P>, device);
    RowsForwardKernel<T, P><<<grid, kThreads, 0, ctx.stream>>>(args, lanes);
    return LaunchStatus(what);
  });
}

Status RowsBackward(const Context& ctx, const GroupNormProblem& p, const Device& device,
                    const BackwardArgs& args, const std::string& what) {
  const int lanes = static_cast<int>(RowLanes(p));
  const size_t shared = static_cast<size_t>(2 * p.channels) * sizeof(float);
  return WithRows(p, [&](auto element, auto vectors) {
    using T = decltype(element);
    constexpr int P = decltype(vectors)::value;
    const dim3 grid = RowsGrid(p, kBackwardBlocks<T, P>, device);
    if (args.dx != nullptr) {
      RowsBackwardKernel<T, P, true><<<grid, kThreads, shared, ctx.stream>>>(args, lanes);
    } else {
      RowsBackwardKernel<T, P, false><<<grid, kThreads, shared, ctx.stream>>>(args, lanes);
    }
    JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
    return AddShares(ctx, p, grid.x, device.sm90(), args, what);
  });
}

}  // namespace jaxconv::cuda::groupnorm
