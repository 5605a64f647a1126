// Group-norm forward:
//
//   y = f((x - mean) * rstd * scale + bias), mean and rstd of an image's group
//
// A block sums up an item (Sum): s1 = sum (x - k) and s2 = sum (x - k)^2 of each group, about an element k of the image's
// group, so that  mean = k + s1 / n,  var = s2 / n - (s1 / n)^2  loses 1 + ((k - mean) / std)^2 ulps of the variance, not
// 1 + (mean / std)^2; sums about one k add. k is the median of three elements, of other pixels and channels: one outlier
// (a padded corner) is not taken. A block that writes an item (Normalise) adds up its image's items; the first of an image
// also writes mean and rstd.
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {
namespace {

constexpr int kUnroll = 4;  // loads in flight of a thread

template <typename T>
__device__ __forceinline__ void ReadShifts(const Walk& w, const T* image, float* shifts) {
  for (int group = threadIdx.x; group < w.groups; group += kThreads)
    shifts[group] = Shift(w, image, group);
}

template <typename T, int V>
__device__ __forceinline__ void Sum(const ForwardArgs& p, const Item& item, float* shared) {
  constexpr int U = kUnroll;
  const Walk& w = p.walk;
  float *scratch = shared, *sums = scratch + 2 * kThreads * V, *shifts = sums + 2 * w.channels;
  const T* x = static_cast<const T*>(p.x) + item.image * w.pixels * w.channels;
  const Place at = PlaceOf(w, item.index);
  Raw<T, V> raw[U];
  const auto load = [&](int vector, uint32_t pixel) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (vector < w.row && pixel + u * w.rows < at.end)
        raw[u] = Read<true, T, V>(x, (pixel + u * w.rows) * w.row + vector);
    }
  };
  load(at.lane, at.first);
  ReadShifts(w, x, shifts);
  __syncthreads();
  for (int tile = 0; tile < w.tiles; ++tile) {
    const int vector = tile * w.lanes + at.lane;
    float k[V] = {}, s1[V] = {}, s2[V] = {};
    if (vector < w.row) {
      if (tile > 0) load(vector, at.first);
      ForChannels<V>(w, vector * V, [&](int j, int group) { k[j] = shifts[group]; });
      for (uint32_t pixel = at.first; pixel < at.end; pixel += U * w.rows) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (pixel + u * w.rows < at.end) {
            float v[V];
            Unpack<T, V>(raw[u], v);
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const float d = v[j] - k[j];
              s1[j] += d;
              s2[j] = fmaf(d, d, s2[j]);
            }
          }
        }
        load(vector, pixel + U * w.rows);
      }
    }
    SumRows<V>(w, at, tile, s1, s2, scratch, sums);
  }
  float2* parts = p.parts + item.image * w.groups * w.splits + item.index;
  ForGroups(
      w, w.group_channels,
      [&](int group, int i) {
        const int channel = group * w.group_channels + i;
        return make_float2(sums[channel], sums[w.channels + channel]);
      },
      [&](int group, float2 sum) { parts[int64_t(group) * w.splits] = sum; });
}

// `await` returns when the image's items are summed up.
template <typename T, int V, int kActivation, typename Await>
__device__ __forceinline__ void Normalise(const ForwardArgs& p, const Item& item, float* shared,
                                          const Await& await) {
  constexpr int U = kUnroll;
  const Walk& w = p.walk;
  float *shifts = shared, *means = shifts + w.groups, *rests = means + w.groups,
        *rstds = rests + w.groups;
  const int64_t first = item.image * w.pixels * w.channels;
  const T* x = static_cast<const T*>(p.x) + first;
  T* y = static_cast<T*>(p.y) + first;
  const Place at = PlaceOf(w, item.index);
  Raw<T, V> raw[U];
  const auto load = [&](int vector, uint32_t pixel) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (vector < w.row && pixel + u * w.rows < at.end)
        raw[u] = Read<false, T, V>(x, (pixel + u * w.rows) * w.row + vector);
    }
  };
  load(at.lane, at.first);
  ReadShifts(w, x, shifts);
  await();
  __syncthreads();
  MergeParts(w, p.parts, item.image, [&](int group, float2 sum) {
    const Moments m = MomentsOf(w, shifts[group], sum);
    means[group] = m.mean;
    rests[group] = m.rest;
    rstds[group] = m.rstd;
    if (item.index == 0) {
      p.mean[item.image * w.groups + group] = m.mean;
      p.rstd[item.image * w.groups + group] = m.rstd;
    }
  });
  __syncthreads();
  const int64_t instance = uint32_t(item.image) / w.per_instance;
  const float *scale = p.scale + instance * w.channels, *bias = p.bias + instance * w.channels;
  for (int tile = 0; tile < w.tiles; ++tile) {
    const int vector = tile * w.lanes + at.lane;
    if (vector >= w.row) continue;
    if (tile > 0) load(vector, at.first);
    // x - mean comes first: it is exact where mean / std is large. What rounding took from the mean goes into the offset.
    float mean[V], factor[V], offset[V];
    ReadNumbers<V>(scale + vector * V, factor);
    ReadNumbers<V>(bias + vector * V, offset);
    ForChannels<V>(w, vector * V, [&](int j, int group) {
      mean[j] = means[group];
      factor[j] *= rstds[group];
      offset[j] -= rests[group] * factor[j];
    });
    for (uint32_t pixel = at.first; pixel < at.end; pixel += U * w.rows) {
      // One copy of all activations instead of U: the queue of loaded vectors moves up instead.
#pragma unroll(kActivation == kAny ? 1 : U)
      for (int u = 0; u < U; ++u) {
        if (pixel + u * w.rows < at.end) {
          float z[V];
          Unpack<T, V>(raw[kActivation == kAny ? 0 : u], z);
#pragma unroll
          for (int j = 0; j < V; ++j) z[j] = fmaf(z[j] - mean[j], factor[j], offset[j]);
          Apply<false, kActivation, T>(w.activation, w.slope, z, z);
          Write<T, V>(y, (pixel + u * w.rows) * w.row + vector, z);
        }
        if constexpr (kActivation == kAny) {
#pragma unroll
          for (int q = 1; q < U; ++q) raw[q - 1] = raw[q];
        }
      }
      load(vector, pixel + U * w.rows);
    }
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, V == 8 ? 3 : 4)
    SumKernel(const __grid_constant__ ForwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  Sum<T, V>(p, ItemOf(p.walk, blockIdx.x), shared);
}

// The items from the last on: the end of x is what the L2 cache still holds.
template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kThreads, V == 8 ? 3 : 4)
    NormaliseKernel(const __grid_constant__ ForwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  Normalise<T, V, kActivation>(p, ItemOf(p.walk, gridDim.x - 1 - blockIdx.x), shared, [] {});
}

template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kThreads, V == 8 ? 3 : 4)
    InterleavedKernel(const __grid_constant__ ForwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  const Turn turn = TakeTurn(p.walk, p.counters);
  const Item item = ItemOf(p.walk, turn.item);
  if (turn.writes) {
    Normalise<T, V, kActivation>(p, item, shared,
                                 [&] { AwaitSums(p.walk, p.counters, item.image); });
  } else {
    Sum<T, V>(p, item, shared);
    SayItIsSummed(p.counters, item.image);
  }
}

}  // namespace

Status Forward(const Context& ctx, const GroupNormProblem& p, bool interleaved, bool aligned,
               ForwardArgs args, const std::string& what) {
  return WithInstance(p, aligned, [&](auto element, auto vector, auto activation) {
    using T = decltype(element);
    constexpr int V = decltype(vector)::value, kActivation = decltype(activation)::value;
    const unsigned items = static_cast<unsigned>(args.walk.images * args.walk.splits);
    const size_t shared = static_cast<size_t>(SharedBytes(p, V));
    if constexpr (V > 1) {
      if (interleaved) {
        const size_t counters = static_cast<size_t>(1 + args.walk.images) * sizeof(unsigned);
        JAXCONV_RETURN_IF_ERROR(
            CudaStatus(cudaMemsetAsync(args.counters, 0, counters, ctx.stream), what));
        InterleavedKernel<T, V, kActivation><<<2 * items, kThreads, shared, ctx.stream>>>(args);
        return LaunchStatus(what);
      }
    }
    SumKernel<T, V><<<items, kThreads, shared, ctx.stream>>>(args);
    JAXCONV_RETURN_IF_ERROR(LaunchStatus(what + " sums"));
    NormaliseKernel<T, V, kActivation><<<items, kThreads, shared, ctx.stream>>>(args);
    return LaunchStatus(what);
  });
}

}  // namespace jaxconv::cuda::groupnorm
