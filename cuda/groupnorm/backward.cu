// Group-norm backward:
//
//   dz = dy * f'(z), z recomputed from x;  xhat = (x - mean) * rstd
//   dbias = sum dz, dscale = sum dz * xhat, over images and pixels
//   dx = rstd * (scale * dz - (sum scale * dz) / n - xhat * (sum scale * dz * xhat) / n), sums over an image's group
//
// A block sums up an item (Sum): sum dz and sum dz * (x - mean) of each channel, from which it leaves the item's share of
// dbias and dscale and the two sums of each group. A block that writes an item (WriteDx) adds up its image's items. Last
// the shares are added up, in order (AddShares).
#include "cuda/core/mbarrier.cuh"
#include "cuda/groupnorm/affine.cuh"
#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {
namespace {

// Loads in flight of a thread and tensor.
template <int V>
constexpr int kUnroll = V > 1 ? 3 : 4;

// A thread's vectors of x and dy on their way.
template <bool kAgain, typename T, int V>
struct Stream {
  static constexpr int U = kUnroll<V>;

  __device__ __forceinline__ Stream(const BackwardArgs& p, const Item& item)
      : w(p.walk),
        at(PlaceOf(w, item.index)),
        x(static_cast<const T*>(p.x) + item.image * w.pixels * w.channels),
        dy(static_cast<const T*>(p.dy) + item.image * w.pixels * w.channels) {}

  __device__ __forceinline__ void Load(int vector, uint32_t pixel) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (vector < w.row && pixel + u * w.rows < at.end) {
        xs[u] = Read<kAgain, T, V>(x, (pixel + u * w.rows) * w.row + vector);
        dys[u] = Read<kAgain, T, V>(dy, (pixel + u * w.rows) * w.row + vector);
      }
    }
  }

  // use(centred, dz, offset in vectors) for every pixel of the thread; those from at.first on are loaded.
  template <int kActivation, typename Use>
  __device__ __forceinline__ void ForPixels(const Affine<V>& a, int vector, const Use& use) {
    for (uint32_t pixel = at.first; pixel < at.end; pixel += U * w.rows) {
      // One copy of all derivatives instead of U: the queue of loaded vectors moves up instead.
#pragma unroll(kActivation == kAny ? 1 : U)
      for (int u = 0; u < U; ++u) {
        constexpr bool kQueue = kActivation == kAny;
        if (pixel + u * w.rows < at.end) {
          float centred[V], dz[V];
          Backpropagate<T, V, kActivation>(w, a, xs[kQueue ? 0 : u], dys[kQueue ? 0 : u], centred,
                                           dz);
          use(centred, dz, (pixel + u * w.rows) * w.row + vector);
        }
        if constexpr (kQueue) {
#pragma unroll
          for (int q = 1; q < U; ++q) {
            xs[q - 1] = xs[q];
            dys[q - 1] = dys[q];
          }
        }
      }
      Load(vector, pixel + U * w.rows);
    }
  }

  const Walk& w;
  const Place at;
  const T *x, *dy;
  Raw<T, V> xs[U], dys[U];
};

template <typename T, int V, int kActivation>
__device__ __forceinline__ void Sum(const BackwardArgs& p, const Item& item, float* shared) {
  const Walk& w = p.walk;
  float *scratch = shared, *sums = scratch + 2 * kThreads * V;
  Stream<true, T, V> stream(p, item);
  stream.Load(stream.at.lane, stream.at.first);
  for (int tile = 0; tile < w.tiles; ++tile) {
    const int vector = tile * w.lanes + stream.at.lane;
    float s1[V] = {}, s2[V] = {};
    if (vector < w.row) {
      if (tile > 0) stream.Load(vector, stream.at.first);
      const Affine<V> a = ReadAffine<V>(p, item.image, vector * V);
      stream.template ForPixels<kActivation>(
          a, vector, [&](const float (&centred)[V], const float (&dz)[V], uint32_t) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
              s1[j] += dz[j];
              s2[j] = fmaf(dz[j], centred[j], s2[j]);
            }
          });
    }
    SumRows<V>(w, stream.at, tile, s1, s2, scratch, sums);
  }
  const float* rstd = p.rstd + item.image * w.groups;
  const float* scale = p.scale + int64_t(uint32_t(item.image) / w.per_instance) * w.channels;
  float* shares = p.sums + (item.image * w.splits + item.index) * 2 * w.channels;
  for (int channel = threadIdx.x; channel < w.channels; channel += kThreads) {
    shares[channel] = sums[channel];
    shares[w.channels + channel] = sums[w.channels + channel] * rstd[channel / w.group_channels];
  }
  float2* parts = p.parts + item.image * w.groups * w.splits + item.index;
  ForGroups(
      w, w.group_channels,
      [&](int group, int i) {
        const int channel = group * w.group_channels + i;
        const float s = scale[channel];
        return make_float2(s * sums[channel], s * sums[w.channels + channel]);
      },
      [&](int group, float2 sum) { parts[int64_t(group) * w.splits] = sum; });
}

// `await` returns when the image's items are summed up.
template <typename T, int V, int kActivation, typename Await>
__device__ __forceinline__ void WriteDx(const BackwardArgs& p, const Item& item, float* shared,
                                        const Await& await) {
  const Walk& w = p.walk;
  float *constants = shared, *slopes = constants + w.groups;
  Stream<false, T, V> stream(p, item);
  T* dx = static_cast<T*>(p.dx) + item.image * w.pixels * w.channels;
  stream.Load(stream.at.lane, stream.at.first);
  await();
  // dx = factor * dz + constant + slope * (x - mean)
  const float inv_n = static_cast<float>(w.inv_n);
  MergeParts(w, p.parts, item.image, [&](int group, float2 sum) {
    const float rstd = p.rstd[item.image * w.groups + group];
    constants[group] = -rstd * (sum.x * inv_n);
    // From left to right: about 1, then rstd, then its square. Its cube may be below float32's numbers.
    slopes[group] = -(rstd * (sum.y * inv_n)) * rstd * rstd;
  });
  __syncthreads();
  for (int tile = 0; tile < w.tiles; ++tile) {
    const int vector = tile * w.lanes + stream.at.lane;
    if (vector >= w.row) continue;
    if (tile > 0) stream.Load(vector, stream.at.first);
    const Affine<V> a = ReadAffine<V>(p, item.image, vector * V);
    float constant[V], slope[V];
    ForChannels<V>(w, vector * V, [&](int j, int group) {
      constant[j] = constants[group];
      slope[j] = slopes[group];
    });
    stream.template ForPixels<kActivation>(
        a, vector, [&](const float (&centred)[V], const float (&dz)[V], uint32_t place) {
          float out[V];
#pragma unroll
          for (int j = 0; j < V; ++j)
            out[j] = fmaf(dz[j], a.factor[j], fmaf(slope[j], centred[j], constant[j]));
          Write<T, V>(dx, place, out);
        });
  }
}

template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kThreads, V == 8 ? 2 : 3)
    SumKernel(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  Sum<T, V, kActivation>(p, ItemOf(p.walk, blockIdx.x), shared);
}

// The items from the last on: the end of x and dy is what the L2 cache still holds.
template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kThreads, V == 8 ? 2 : 3)
    DxKernel(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  WriteDx<T, V, kActivation>(p, ItemOf(p.walk, gridDim.x - 1 - blockIdx.x), shared, [] {});
}

template <typename T, int V, int kActivation>
__global__ void __launch_bounds__(kThreads, 2)
    InterleavedKernel(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) float shared[];
  const Turn turn = TakeTurn(p.walk, p.counters);
  const Item item = ItemOf(p.walk, turn.item);
  if (turn.writes) {
    WriteDx<T, V, kActivation>(p, item, shared, [&] { AwaitSums(p.walk, p.counters, item.image); });
  } else {
    Sum<T, V, kActivation>(p, item, shared);
    SayItIsSummed(p.counters, item.image);
  }
}

// sums: (batch, rows, 2, channels) -> dbias, dscale (batch, channels). Block (eight of the 2 * channels columns, instance):
// a thread adds up every 128th row, then the threads of a column add theirs up in pairs.
constexpr int kColumns = 8, kShares = 128;

__global__ void __launch_bounds__(kColumns* kShares)
    AddSharesKernel(const float* sums, int64_t rows, int channels, float* dbias, float* dscale) {
  __shared__ float scratch[kShares][kColumns];
  AwaitLaunchBefore();
  const int column = int(threadIdx.x) % kColumns, share = int(threadIdx.x) / kColumns;
  const int at = int(blockIdx.x) * kColumns + column;
  const int64_t instance = blockIdx.y;
  float total = 0.f;
  if (at < 2 * channels) {
    const float* mine = sums + instance * rows * 2 * channels + at;
#pragma unroll 8
    for (int64_t row = share; row < rows; row += kShares) total += mine[row * 2 * channels];
  }
  scratch[share][column] = total;
  for (int half = kShares / 2; half > 0; half /= 2) {
    __syncthreads();
    if (share < half) scratch[share][column] += scratch[share + half][column];
  }
  if (share > 0 || at >= 2 * channels) return;
  (at < channels ? dbias + at : dscale + at - channels)[instance * channels] = scratch[0][column];
}

}  // namespace

Status Backward(const Context& ctx, const GroupNormProblem& p, bool interleaved, bool aligned,
                BackwardArgs args, const std::string& what) {
  const unsigned items = static_cast<unsigned>(args.walk.images * args.walk.splits);
  if (items == 0) return Status::Ok();
  return WithInstance(p, aligned, [&](auto element, auto vector, auto activation) {
    using T = decltype(element);
    constexpr int V = decltype(vector)::value, kActivation = decltype(activation)::value;
    const size_t shared = static_cast<size_t>(SharedBytes(p, V));
    if constexpr (V > 1) {
      if (interleaved && args.dx != nullptr) {
        const size_t counters = static_cast<size_t>(1 + args.walk.images) * sizeof(unsigned);
        JAXCONV_RETURN_IF_ERROR(
            CudaStatus(cudaMemsetAsync(args.counters, 0, counters, ctx.stream), what));
        InterleavedKernel<T, V, kActivation><<<2 * items, kThreads, shared, ctx.stream>>>(args);
        return LaunchStatus(what);
      }
    }
    SumKernel<T, V, kActivation><<<items, kThreads, shared, ctx.stream>>>(args);
    JAXCONV_RETURN_IF_ERROR(LaunchStatus(what + " sums"));
    if (args.dx != nullptr) {
      DxKernel<T, V, kActivation><<<items, kThreads, shared, ctx.stream>>>(args);
      JAXCONV_RETURN_IF_ERROR(LaunchStatus(what + " dx"));
    }
    return Status::Ok();
  });
}

Status AddShares(const Context& ctx, const GroupNormProblem& p, int64_t rows, bool early,
                 const BackwardArgs& args, const std::string& what) {
  constexpr int64_t kMost = 65535;  // instances of a launch
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kColumns * kShares);
  config.stream = ctx.stream;
  config.attrs = &attribute;
  for (int64_t first = 0; first < p.batch; first += kMost) {
    config.gridDim = dim3(static_cast<unsigned>(CeilDivide(2 * p.channels, kColumns)),
                          static_cast<unsigned>(std::min(kMost, p.batch - first)));
    // Only the first follows what it waits for.
    config.numAttrs = early && first == 0 ? 1 : 0;
    const float* sums = args.sums + first * rows * 2 * p.channels;
    JAXCONV_RETURN_IF_ERROR(CudaStatus(
        cudaLaunchKernelEx(&config, AddSharesKernel, sums, rows, args.walk.channels,
                           args.dbias + first * p.channels, args.dscale + first * p.channels),
        what + " shares"));
  }
  return Status::Ok();
}

}  // namespace jaxconv::cuda::groupnorm
