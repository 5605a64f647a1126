// Batch-norm with a channel tile kept in shared memory (resident_block): one launch, every element
// read once.
//
//   train:     y = f((x - mean) * rstd * scale + bias + residual)                           1 read
//   + 1 write backward:  dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), dz = dy * f'(z)
//   2 reads + 1 write
//
// Block (tile, instance) reads all positions of its channels into `slab`, summing on the way; adds
// the block's sums up; and writes the outputs from the slab. A thread reads back only what it
// stored itself, so the slab needs no barrier. The residual, which need not stay, is read in the
// walk that uses it (in backward both, where f needs z).
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/domain.h"
#include "cuda/batchnorm/launch.h"
#include "cuda/core/device.h"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {
namespace {

constexpr int kResidentTileBytes = 128;  // of neighbouring channels, channels-last
constexpr int kResidentTile = 64;        // channels in them: 8 bf16 * 8 lanes
constexpr int kScratch = kMaxThreads / 32 * kResidentTile * 2;

// 16 bytes to a slot in vector instances, one element in scalar ones: slot[i * blockDim.x +
// threadIdx.x] is the i-th vector of the thread.
extern __shared__ uint4 slab[];

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kMaxThreads, kLast ? 1 : 2)
    ResidentTrainKernel(const __grid_constant__ ForwardArgs p) {
  constexpr int U = kForm == Form::kPiecewise ? 8 : 4;  // loads in flight per thread
  constexpr int kStats = kLast ? V : 1;
  __shared__ float scratch[kScratch];
  __shared__ Affine affine[kResidentTile];
  Raw<T, V>* slot = reinterpret_cast<Raw<T, V>*>(slab) + threadIdx.x;

  const Layout& a = p.layout;
  const Place at = Locate(a, blockIdx.x, 1);
  const int lane = kLast ? threadIdx.x & (a.lanes - 1) : 0;
  const uint32_t step = blockDim.x / a.lanes, first = threadIdx.x / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || at.tile * a.lanes + lane < a.row;
  const uint32_t count = inside ? a.positions : 0;

  float shift[kStats] = {}, total[2 * kStats] = {};  // sums of x - shift, then of its square
  if (count > 0) {
#pragma unroll
    for (int j = 0; j < kStats; ++j) {
      shift[j] = Shift<T, V, kLast>(a, p.t.x, at.instance, at.tile, kLast ? lane * V + j : 0);
    }
  }
  uint32_t s = 0;
  for (uint32_t i = first; i < count; i += U * step) {
    Raw<T, V> x[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        x[u] = ReadOnce<T, V>(p.t.x, base + Step<kLast>(a, i + u * step));
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        slot[s++ * blockDim.x] = x[u];
        float v[V];
        Unpack<T, V>(x[u], v);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = kLast ? j : 0;
          const float d = v[j] - shift[k];
          total[k] += d;
          total[kStats + k] = fmaf(d, d, total[kStats + k]);
        }
      }
    }
  }
  BlockColumnSums(total, a.lanes, scratch);

  const int tile_channels = a.lanes * kStats;
  for (int c = threadIdx.x; c < tile_channels; c += blockDim.x) {
    const int64_t channel = at.tile * tile_channels + c;
    if (channel >= a.channels) break;
    const float* sum = scratch + c / kStats * 2 * kStats + c % kStats;
    const float k = Shift<T, V, kLast>(a, p.t.x, at.instance, at.tile, c);
    affine[c] = TrainChannel(p, at.instance * a.channels + channel, k, sum[0], sum[kStats], true);
  }
  __syncthreads();
  Affine mine[kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) mine[j] = affine[lane * kStats + j];

  const bool has_residual = p.t.residual != nullptr;
  s = 0;
#pragma unroll(kForm == Form::kAny ? 1 : 2)
  for (uint32_t i = first; i < count; i += step) {
    const int64_t offset = base + Step<kLast>(a, i);
    const Raw<T, V> x = slot[s++ * blockDim.x];
    Raw<T, V> residual{};
    if (has_residual) residual = ReadOnce<T, V>(p.t.residual, offset);
    WriteOnce<T, V>(p.t.y, offset,
                    Normalise<T, V, kForm>(x, residual, has_residual, mine, p.activation, p.slope));
  }
}

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kMaxThreads, 1)
    ResidentBackwardKernel(const __grid_constant__ BackwardArgs p, uint32_t slots) {
  constexpr int U =
      kForm == Form::kAny && kLast && V == 8 ? 3 : 4;  // a fourth spills 4 bytes on sm_80
  constexpr int kStats = kLast ? V : 1;
  __shared__ float scratch[kScratch];
  __shared__ Affine affine[kResidentTile];
  __shared__ Gradient gradient[kResidentTile];
  Raw<T, V>* x_slot = reinterpret_cast<Raw<T, V>*>(slab) + threadIdx.x;
  Raw<T, V>* dy_slot = x_slot + slots;

  const Layout& a = p.layout;
  const Place at = Locate(a, blockIdx.x, 1);
  const int lane = kLast ? threadIdx.x & (a.lanes - 1) : 0;
  const uint32_t step = blockDim.x / a.lanes, first = threadIdx.x / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || at.tile * a.lanes + lane < a.row;
  const uint32_t count = inside ? a.positions : 0;

  const int tile_channels = a.lanes * kStats;
  for (int c = threadIdx.x; c < tile_channels; c += blockDim.x) {
    const int64_t channel = at.tile * tile_channels + c;
    if (channel < a.channels) affine[c] = SavedChannel(p, at.instance * a.channels + channel);
  }
  __syncthreads();
  Affine mine[kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) mine[j] = affine[lane * kStats + j];

  const bool has_residual = p.t.residual != nullptr;
  float total[2 * kStats] = {};  // sums of dz, then of dz * (x - mean)
  uint32_t s = 0;
  for (uint32_t i = first; i < count; i += U * step) {
    Raw<T, V> x[U], dy[U], residual[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        const int64_t offset = base + Step<kLast>(a, i + u * step);
        x[u] = ReadOnce<T, V>(p.t.x, offset);
        dy[u] = ReadOnce<T, V>(p.t.dy, offset);
        if (has_residual) residual[u] = Read<T, V>(p.t.residual, offset);
      }
    }
    // kAny: one copy of the long derivatives instead of U; the queue of loaded vectors moves up
    // instead.
#pragma unroll(kForm == Form::kAny ? 1 : U)
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        x_slot[s * blockDim.x] = x[0];
        dy_slot[s++ * blockDim.x] = dy[0];
        float centred[V], dz[V];
        Backpropagate<T, V, kForm>(x[0], dy[0], residual[0], has_residual, mine, p.activation,
                                   p.slope, centred, dz);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = kLast ? j : 0;
          total[k] += dz[j];
          total[kStats + k] = fmaf(dz[j], centred[j], total[kStats + k]);
        }
      }
#pragma unroll
      for (int q = 1; q < U; ++q) {
        x[q - 1] = x[q];
        dy[q - 1] = dy[q];
        residual[q - 1] = residual[q];
      }
    }
  }
  BlockColumnSums(total, a.lanes, scratch);

  for (int c = threadIdx.x; c < tile_channels; c += blockDim.x) {
    const int64_t channel = at.tile * tile_channels + c;
    if (channel >= a.channels) break;
    const float* sum = scratch + c / kStats * 2 * kStats + c % kStats;
    const int64_t row = at.instance * a.channels + channel;
    gradient[c] = BackwardChannel(p, row, p.t.rstd[row], sum[0], sum[kStats], true);
  }
  __syncthreads();
  if (p.t.dx == nullptr && p.t.dresidual == nullptr) return;
  Gradient to_dx[kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) to_dx[j] = gradient[lane * kStats + j];

  s = 0;
#pragma unroll 1
  for (uint32_t i = first; i < count; i += step) {
    const int64_t offset = base + Step<kLast>(a, i);
    Raw<T, V> residual{};
    if (has_residual) residual = ReadOnce<T, V>(p.t.residual, offset);
    const Raw<T, V> x = x_slot[s * blockDim.x], dy = dy_slot[s * blockDim.x];
    ++s;
    float centred[V], dz[V];
    Backpropagate<T, V, kForm>(x, dy, residual, has_residual, mine, p.activation, p.slope, centred,
                               dz);
    if (p.t.dresidual != nullptr) WriteOnce<T, V>(p.t.dresidual, offset, Pack<T, V>(dz));
    if (p.t.dx != nullptr) {
      WriteOnce<T, V>(p.t.dx, offset, InputGradient<T, V>(centred, dz, mine, to_dx));
    }
  }
}

// How a problem is laid on blocks: the widest tile that fits, and enough threads for four positions
// each.
struct Fit {
  Layout layout;
  int threads;
  uint32_t slots;  // of one tensor
  size_t bytes;    // of slab
};

// `held` tensors stay. kernel_static: the kernel's own shared memory, bytes.
Status MakeFit(const BatchNormProblem& p, bool channels_last, int vec, int held,
               size_t kernel_static, const std::string& what, Fit& fit) {
  int device = 0, limit = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), what));
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), what));
  const size_t slot = static_cast<size_t>(vec) * SizeOf(p.dtype);
  fit.layout = MakeLayout(p, channels_last, vec, kResidentTileBytes);
  Layout& a = fit.layout;
  for (;;) {
    const int64_t vectors = int64_t{a.positions} * a.lanes;
    fit.threads = 64;
    while (fit.threads < kMaxThreads && fit.threads * 4 < vectors) fit.threads *= 2;
    const int64_t slots = (vectors + fit.threads - 1) / fit.threads * fit.threads;
    const int64_t bytes = slots * static_cast<int64_t>(slot) * held;
    if (bytes + static_cast<int64_t>(kernel_static) <= limit) {
      fit.slots = static_cast<uint32_t>(slots);
      fit.bytes = static_cast<size_t>(bytes);
      return CheckGrid(a.tiles, 1, p.batch, what);
    }
    if (a.lanes <= 2) {
      return Status::Invalid(what + ": a channel tile takes " + std::to_string(bytes) +
                             " bytes, a block of this device holds " +
                             std::to_string(limit - static_cast<int64_t>(kernel_static)));
    }
    a.lanes /= 2;
    a.tiles = (a.row + a.lanes - 1) / a.lanes;
  }
}

}  // namespace

Status ResidentTrain(const Context& ctx, const BatchNormProblem& p, const ForwardTensors& t,
                     const std::string& what) {
  ForwardArgs args = MakeForwardArgs(p, t);
  return WithInstance(p, {t.x, t.residual, t.y}, [&](auto instance) {
    using I = decltype(instance);
    return WithForm<I, false>(p.activation, [&](auto form) {
      const auto kernel = ResidentTrainKernel<typename I::T, I::V, I::kLast, decltype(form)::value>;
      size_t kernel_static = 0;
      JAXCONV_RETURN_IF_ERROR(
          StaticSharedMemory(reinterpret_cast<const void*>(kernel), what, &kernel_static));
      Fit fit{};
      JAXCONV_RETURN_IF_ERROR(MakeFit(p, I::kLast, I::V, 1, kernel_static, what, fit));
      JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
      args.layout = fit.layout;
      const unsigned blocks = static_cast<unsigned>(fit.layout.tiles * p.batch);
      kernel<<<blocks, fit.threads, fit.bytes, ctx.stream>>>(args);
      return LaunchStatus(what);
    });
  });
}

Status ResidentBackward(const Context& ctx, const BatchNormProblem& p, const BackwardTensors& t,
                        const std::string& what) {
  BackwardArgs args = MakeBackwardArgs(p, t);
  return WithInstance(p, {t.x, t.dy, t.residual, t.dx, t.dresidual}, [&](auto instance) {
    using I = decltype(instance);
    return WithForm<I, false>(p.activation, [&](auto form) {
      const auto kernel =
          ResidentBackwardKernel<typename I::T, I::V, I::kLast, decltype(form)::value>;
      size_t kernel_static = 0;
      JAXCONV_RETURN_IF_ERROR(
          StaticSharedMemory(reinterpret_cast<const void*>(kernel), what, &kernel_static));
      Fit fit{};
      JAXCONV_RETURN_IF_ERROR(MakeFit(p, I::kLast, I::V, 2, kernel_static, what, fit));
      JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
      args.layout = fit.layout;
      const unsigned blocks = static_cast<unsigned>(fit.layout.tiles * p.batch);
      kernel<<<blocks, fit.threads, fit.bytes, ctx.stream>>>(args, fit.slots);
      return LaunchStatus(what);
    });
  });
}

}  // namespace jaxconv::cuda::batchnorm
