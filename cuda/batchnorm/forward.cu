// Batch-norm forward in two walks over the tensor (two_read), and inference in one.
//
//   y = f((x - mean) * rstd * scale + bias + residual)
//
// First walk: block (tile, split, instance) sums x - k and (x - k)^2 per channel (channel.cuh) over
// its positions and writes them to sums (2, batch, channels, splits). Second walk: block (tile,
// piece, instance), counted from the end, adds its channels' parts up, turns them into statistics
// (piece 0 writes those) and maps its positions, last one first: what the first walk read last is
// still in the L2 cache. Inference is the second walk with given statistics.
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {
namespace {

template <typename T, int V, bool kLast>
__global__ void __launch_bounds__(kThreads, 4)
    SumKernel(const __grid_constant__ Layout a, const void* x, int64_t splits, float* sums) {
  constexpr int U = V == 1 ? 8 : 4;  // loads in flight per thread
  constexpr int N = kLast   ? V
                    : V < 4 ? V
                            : 4;  // sums a thread keeps; channels-first: chains of one channel
  constexpr int kStats = kLast ? V : 1;
  __shared__ float scratch[kThreads / 32 * kMaxTile * 2];

  const Place at = Locate(a, blockIdx.x, splits);
  const int lane = kLast ? threadIdx.x & (a.lanes - 1) : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || at.tile * a.lanes + lane < a.row;
  const uint32_t begin = Cut(a.positions, at.part, splits);
  const uint32_t end = inside ? Cut(a.positions, at.part + 1, splits) : begin;

  float shift[kStats] = {}, s1[N] = {}, s2[N] = {};
  if (begin < end) {
#pragma unroll
    for (int j = 0; j < kStats; ++j) {
      shift[j] = Shift<T, V, kLast>(a, x, at.instance, at.tile, kLast ? lane * V + j : 0);
    }
  }
  for (uint32_t i = begin + threadIdx.x / a.lanes; i < end; i += U * step) {
    Raw<T, V> raw[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < end) raw[u] = Read<T, V>(x, base + Step<kLast>(a, i + u * step));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < end) {
        float v[V];
        Unpack<T, V>(raw[u], v);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = v[j] - shift[kLast ? j : 0];
          s1[j % N] += d;
          s2[j % N] = fmaf(d, d, s2[j % N]);
        }
      }
    }
  }

  float total[2 * kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) {
    total[j] = s1[j];
    total[kStats + j] = s2[j];
  }
  if constexpr (!kLast) {
#pragma unroll
    for (int j = 1; j < N; ++j) {
      total[0] += s1[j];
      total[1] += s2[j];
    }
  }
  BlockColumnSums(total, a.lanes, scratch);

  const int tile_channels = a.lanes * kStats;
  for (int i = threadIdx.x; i < tile_channels; i += kThreads) {
    const int64_t channel = at.tile * tile_channels + i;
    if (channel >= a.channels) break;
    const float* s = scratch + i / kStats * 2 * kStats + i % kStats;
    const int64_t row = at.instance * a.channels + channel;
    sums[row * splits + at.part] = s[0];
    sums[(a.batch * a.channels + row) * splits + at.part] = s[kStats];
  }
}

// A warp per row.
__global__ void __launch_bounds__(kThreads)
    AddPartsKernel(int64_t rows, int64_t parts, const float* sums, float* totals) {
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (row >= rows) return;
  float sum = 0.f;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32; i < parts; i += 32) sum += sums[row * parts + i];
  sum = WarpColumnSum(sum);
  if (threadIdx.x % 32 == 0) totals[row] = sum;
}

template <typename T, int V, bool kLast, bool kSmooth>
__global__ void __launch_bounds__(kThreads, 3)
    NormaliseKernel(const __grid_constant__ ForwardArgs p) {
  // Loads in flight per thread and tensor; a fourth one of eight channels and a long activation
  // spills 4 bytes.
  constexpr int U = kSmooth && kLast && V == 8 ? 3 : V == 1 && !kSmooth ? 8 : 4;
  constexpr int kStats = kLast ? V : 1;
  __shared__ Affine affine[kMaxTile];

  const Layout& a = p.layout;
  const Place at = Locate(a, gridDim.x - 1 - int64_t{blockIdx.x}, p.pieces);
  const int lane = kLast ? threadIdx.x & (a.lanes - 1) : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || at.tile * a.lanes + lane < a.row;
  const uint32_t begin = Cut(a.positions, at.part, p.pieces);
  const uint32_t end = Cut(a.positions, at.part + 1, p.pieces);
  const uint32_t count = inside ? end - begin : 0;

  Raw<T, V> x[U], residual[U];
  const bool has_residual = p.t.residual != nullptr;
  const auto load = [&](uint32_t i) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        x[u] = ReadOnce<T, V>(p.t.x, base + Step<kLast>(a, end - 1 - (i + u * step)));
      }
    }
    if (has_residual) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (i + u * step < count) {
          residual[u] =
              ReadOnce<T, V>(p.t.residual, base + Step<kLast>(a, end - 1 - (i + u * step)));
        }
      }
    }
  };
  uint32_t i = threadIdx.x / a.lanes;
  load(i);  // on its way while the statistics are made

  const int tile_channels = a.lanes * kStats;
  for (int c = threadIdx.x; c < tile_channels; c += kThreads) {
    const int64_t channel = at.tile * tile_channels + c;
    if (channel >= a.channels) break;
    const int64_t row = at.instance * a.channels + channel;
    if (p.sums != nullptr) {
      const float s1 = SumParts(p.sums, row, p.parts);
      const float s2 = SumParts(p.sums, a.batch * a.channels + row, p.parts);
      const float shift = Shift<T, V, kLast>(a, p.t.x, at.instance, at.tile, c);
      affine[c] = TrainChannel(p, row, shift, s1, s2, at.part == 0);
    } else {
      affine[c] = InferChannel(p, row);
    }
  }
  __syncthreads();
  Affine mine[kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) mine[j] = affine[lane * kStats + j];

  while (i < count) {
    // kSmooth: one copy of the long activations instead of U; the queue of loaded vectors moves up
    // instead.
#pragma unroll(kSmooth ? 1 : U)
    for (int u = 0; u < U; ++u) {
      if (i + u * step < count) {
        WriteOnce<T, V>(
            p.t.y, base + Step<kLast>(a, end - 1 - (i + u * step)),
            Normalise<T, V, kSmooth>(x[0], residual[0], has_residual, mine, p.activation, p.slope));
      }
#pragma unroll
      for (int q = 1; q < U; ++q) {
        x[q - 1] = x[q];
        residual[q - 1] = residual[q];
      }
    }
    i += U * step;
    load(i);
  }
}

Status LaunchNormalise(const Context& ctx, const BatchNormProblem& p, ForwardArgs args,
                       const std::string& what) {
  const ForwardTensors& t = args.t;
  return WithInstance(p, {t.x, t.residual, t.y}, [&](auto instance) {
    using I = decltype(instance);
    args.layout = MakeLayout(p, I::kLast, I::V, kTileBytes);
    args.pieces = Pieces(args.layout, Bytes(p));
    JAXCONV_RETURN_IF_ERROR(CheckGrid(args.layout.tiles, args.pieces, p.batch, what));
    const unsigned blocks = static_cast<unsigned>(args.layout.tiles * args.pieces * p.batch);
    return WithActivation(p.activation, [&](auto smooth) {
      NormaliseKernel<typename I::T, I::V, I::kLast, decltype(smooth)::value>
          <<<blocks, kThreads, 0, ctx.stream>>>(args);
      return LaunchStatus(what);
    });
  });
}

}  // namespace

Status AddParts(const Context& ctx, int64_t rows, int64_t parts, const float* sums, float* totals,
                const std::string& what) {
  const int64_t per_block = kThreads / 32;
  const int64_t blocks = (rows + per_block - 1) / per_block;
  JAXCONV_RETURN_IF_ERROR(CheckGrid(blocks, 1, 1, what));
  AddPartsKernel<<<static_cast<unsigned>(blocks), kThreads, 0, ctx.stream>>>(rows, parts, sums,
                                                                             totals);
  return LaunchStatus(what);
}

Status TwoReadTrain(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                    const ForwardTensors& t, Workspace workspace, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckWorkspace(p, splits, workspace, what));
  float* sums = static_cast<float*>(workspace.data);
  // The shift's element must be the same in both walks: both take the vectors that all tensors
  // allow.
  JAXCONV_RETURN_IF_ERROR(WithInstance(p, {t.x, t.residual, t.y}, [&](auto instance) {
    using I = decltype(instance);
    const Layout layout = MakeLayout(p, I::kLast, I::V, kTileBytes);
    JAXCONV_RETURN_IF_ERROR(CheckGrid(layout.tiles, splits, p.batch, what));
    const unsigned blocks = static_cast<unsigned>(layout.tiles * splits * p.batch);
    SumKernel<typename I::T, I::V, I::kLast>
        <<<blocks, kThreads, 0, ctx.stream>>>(layout, t.x, splits, sums);
    return LaunchStatus(what + " sums");
  }));
  ForwardArgs args = MakeForwardArgs(p, t);
  args.sums = sums;
  args.parts = splits;
  if (splits > kInlineParts) {
    const int64_t rows = 2 * p.batch * p.channels;
    float* totals = sums + rows * splits;
    JAXCONV_RETURN_IF_ERROR(AddParts(ctx, rows, splits, sums, totals, what + " parts"));
    args.sums = totals;
    args.parts = 1;
  }
  return LaunchNormalise(ctx, p, args, what + " normalise");
}

Status Infer(const Context& ctx, const BatchNormProblem& p, const ForwardTensors& t,
             const std::string& what) {
  if (p.reduced() == 0) return Status::Ok();
  return LaunchNormalise(ctx, p, MakeForwardArgs(p, t), what);
}

}  // namespace jaxconv::cuda::batchnorm
