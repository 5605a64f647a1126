// Batch-norm forward in two walks over the tensor (two_read), and inference in one.
//
//   y = f((x - mean) * rstd * scale + bias + residual)
//
// First walk: block (tile, split, instance) sums x - k and (x - k)^2 per channel (channel.cuh) over
// its positions, which it takes in turn with the other splits, and writes them to sums (2, batch,
// channels, splits). Second walk, channels-last: block (tile, piece, instance), counted from the end,
// adds its channels' parts up, turns them into statistics (piece 0 writes those) and maps its
// positions, last one first: what the first walk read last is still in the L2 cache. Second walk,
// channels-first: a pass over the sums finishes the statistics, and the tensor is mapped in the order
// of memory (flat.cuh). Inference is the second walk with given statistics; statistics alone are the first and a pass
// over its sums. Large channels-last tensors pass through a ring in shared memory where y is written (stream.cuh).
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/flat.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/parts.cuh"
#include "cuda/batchnorm/stream.cuh"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {
namespace {

template <typename T, int V, bool kLast>
__global__ void __launch_bounds__(kThreads, 4)
    SumKernel(const __grid_constant__ Layout a, const void* x, int64_t splits, float* sums) {
  constexpr int U = V == 1 ? 8 : kLast && V == 8 ? 3 : 4;  // loads in flight per thread
  constexpr int N = kLast   ? V
                    : V < 4 ? V
                            : 4;  // sums a thread keeps; channels-first: chains of one channel
  constexpr int kStats = kLast ? V : 1;
  __shared__ float scratch[kPartsScratch<V, kLast>];

  const Place at = Locate(a, blockIdx.x, splits);
  const int lane = kLast ? threadIdx.x % a.lanes : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base =
      kLast ? Base<kLast>(a, at.instance, at.tile, lane) : FirstElement(a, at.instance, at.tile);
  const bool inside = !kLast || (threadIdx.x < step * a.lanes && at.tile * a.lanes + lane < a.row);
  const uint32_t end = inside ? a.positions : 0;
  const Turns turns(at.part, splits, U * step);
  const auto piece_at = [&](uint32_t i) { return PieceOf<V>(a, base, i); };

  float shift[kStats] = {}, s1[N] = {}, s2[N] = {};
  if (turns.first < end) {
#pragma unroll
    for (int j = 0; j < kStats; ++j) {
      shift[j] = Shift<T, V, kLast>(a, x, at.instance, at.tile, kLast ? lane * V + j : 0);
    }
  }
  // A vector makes room for the one U further on: U of them are on their way all the time.
  Raw<T, V> raw[U];
  uint32_t i = turns.first + threadIdx.x / a.lanes;
  int64_t next = base + Step<kLast>(a, i);  // channels-last: of the next load
  const int64_t hop = step * a.row, turn = (turns.jump - (U - 1) * step) * a.row;
  const auto load = [&](int u, uint32_t i) {
    if (i < end) raw[u] = ReadPiece<T, V, kLast>(a, x, kLast ? Piece{next, 0} : piece_at(i));
    next += u + 1 < U ? hop : turn;
  };
#pragma unroll
  for (int u = 0; u < U; ++u) load(u, i + u * step);
  for (; i < end; i += turns.jump) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < end) {
        const Piece piece = kLast ? Piece{} : piece_at(i + u * step);
        float v[V];
        Unpack<T, V>(raw[u], v);
        ForOwn<V, kLast>(a, piece, [&](int j) {
          const float d = v[j] - shift[kLast ? j : 0];
          s1[j % N] += d;
          s2[j % N] = fmaf(d, d, s2[j % N]);
        });
      }
      load(u, i + turns.jump + u * step);
    }
  }

  WriteParts<V, kLast>(a, at, splits, s1, s2, scratch, sums);
}

// A warp per row.
__global__ void __launch_bounds__(kThreads)
    AddPartsKernel(int64_t rows, int64_t parts, const float* sums, float* totals) {
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (row >= rows) return;
  const float sum = WarpSumParts(sums, row, parts);
  if (threadIdx.x % 32 == 0) totals[row] = sum;
}

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kThreads, 3)
    NormaliseKernel(const __grid_constant__ ForwardArgs p) {
  constexpr int U = kLast && V == 8 ? 3 : 4;  // loads in flight per thread and tensor
  constexpr int kStats = kLast ? V : 1;
  __shared__ Affine affine[kMaxTile];

  const Layout& a = p.layout;
  const Place at = Locate(a, gridDim.x - 1 - int64_t{blockIdx.x}, p.pieces);
  const int lane = kLast ? threadIdx.x % a.lanes : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || (threadIdx.x < step * a.lanes && at.tile * a.lanes + lane < a.row);
  const uint32_t begin = Cut(a.positions, at.part, p.pieces);
  const uint32_t end = Cut(a.positions, at.part + 1, p.pieces);
  const uint32_t count = inside ? end - begin : 0;

  Raw<T, V> x[U], residual[U];
  const bool has_residual = p.t.residual != nullptr;
  uint32_t i = threadIdx.x / a.lanes;
  const auto offset_of = [&](uint32_t i) { return base + Step<kLast>(a, end - 1 - i); };
  int64_t next = offset_of(i),
          at_y = next;  // channels-last: of the next load, and of the next store
  const int64_t hop = step * a.row;
  const auto load = [&](int u, uint32_t i) {
    if (i < count) {
      const int64_t offset = kLast ? next : offset_of(i);
      x[u] = ReadOnce<T, V>(p.t.x, offset);
      if (has_residual) residual[u] = ReadOnce<T, V>(p.t.residual, offset);
    }
    next -= hop;
  };
#pragma unroll
  for (int u = 0; u < U; ++u) load(u, i + u * step);  // on their way while the statistics are made

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

  for (; i < count; i += U * step) {
    // A vector makes room for the one U further on. kAny: one copy of the long activations instead of U.
#pragma unroll(kForm == Form::kAny ? 1 : U)
    for (int u = 0; u < U; ++u) {
      const int own = kForm == Form::kAny ? 0 : u;
      if (i + u * step < count) {
        WriteOnce<T, V>(p.t.y, kLast ? at_y : offset_of(i + u * step),
                        Normalise<T, V, kForm>(x[own], residual[own], has_residual, mine,
                                               p.activation, p.slope));
      }
      at_y -= hop;
      if constexpr (kForm == Form::kAny) {
#pragma unroll
        for (int q = 1; q < U; ++q) {
          x[q - 1] = x[q];
          residual[q - 1] = residual[q];
        }
      }
      load(kForm == Form::kAny ? U - 1 : u, i + (U + u) * step);
    }
  }
}

JAXCONV_HD StreamInput StreamOf(const ForwardTensors& t) {
  return {{t.x, t.residual, nullptr}, t.residual != nullptr ? 2 : 1};
}

// The signs of y, vector `at`, a bit an element. Of vectors of four, two neighbours of a warp have a byte: stages and rows are
// of even numbers of these.
template <typename T, int V>
__device__ __forceinline__ void WriteSigns(uint8_t* signs, int64_t at, const Raw<T, V>& y) {
  float z[V];
  Unpack<T, V>(y, z);
  unsigned bits = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) bits |= unsigned{z[j] > 0.f} << j;
  if constexpr (V == 4) {
    const unsigned pair = 3u << (threadIdx.x % 32 & ~1u);
    bits |= __shfl_xor_sync(pair, bits, 1) << 4;
    if (at % 2 != 0) return;
    at /= 2;
  }
  signs[at] = static_cast<uint8_t>(bits);
}

// The second walk, through a ring (stream.cuh).
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kStreamBlock, 1)
    NormaliseStreamKernel(const __grid_constant__ ForwardArgs p,
                          const __grid_constant__ StreamShape s) {
  const Layout& a = p.layout;
  const int lane = threadIdx.x % a.lanes;
  const bool writes = blockIdx.x == 0 && threadIdx.x < a.lanes;
  Affine mine[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t row = int64_t{lane} * V + j;
    if (p.sums != nullptr) {
      const float s1 = SumParts(p.sums, row, p.parts);
      const float s2 = SumParts(p.sums, a.channels + row, p.parts);
      const float shift = Shift<T, V, true>(a, p.t.x, 0, 0, static_cast<int>(row));
      mine[j] = TrainChannel(p, row, shift, s1, s2, writes);
    } else {
      mine[j] = InferChannel(p, row);
    }
  }
  const bool has_residual = p.t.residual != nullptr;
  WalkStream<true, Raw<T, V>>(
      s, StreamOf(p.t), [&](const Raw<T, V>(&v)[kStreamTensors], int64_t at) {
        const Raw<T, V> y =
            Normalise<T, V, kForm>(v[0], v[1], has_residual, mine, p.activation, p.slope);
        WriteOnce<T, V>(p.t.y, at, y);
        if constexpr (V >= 4) {
          if (p.t.signs != nullptr) WriteSigns<T, V>(p.t.signs, at, y);
        }
      });
}

// A channel a warp: its statistics, and what the flat walk applies besides the mean: (2, batch * channels) scales and offsets.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(const __grid_constant__ ForwardArgs p, float* scales) {
  const Layout& a = p.layout;
  const int64_t rows = a.batch * a.channels;
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (row >= rows) return;
  const float s1 = WarpSumParts(p.sums, row, p.parts);
  const float s2 = WarpSumParts(p.sums, rows + row, p.parts);
  if (threadIdx.x % 32 != 0) return;
  const float shift = Shift<T, 1, false>(a, p.t.x, row / a.channels, row % a.channels, 0);
  const Affine k = TrainChannel(p, row, shift, s1, s2, true);
  scales[row] = k.scale;
  scales[rows + row] = k.offset;
}

// `scales` as FinishKernel leaves them; null in inference.
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kThreads, kForm == Form::kAny || V == 8 ? 3 : 4)
    NormaliseFlatKernel(const __grid_constant__ ForwardArgs p, const float* scales) {
  constexpr int U = kFlatVectors;
  __shared__ Affine affine[kFlatImages<U>];
  const Layout& a = p.layout;
  const FlatPlace<V, U> at(a);
  const bool has_residual = p.t.residual != nullptr;
  Raw<T, V> x[U], residual[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.Element(u) < at.left) {
      x[u] = ReadFlat<T>(at, p.t.x, u);
      if (has_residual) residual[u] = ReadFlat<T>(at, p.t.residual, u);
    }
  }
  for (int i = threadIdx.x; i < at.images; i += kThreads) {
    const int64_t row = at.Row(a, i);
    affine[i] = scales != nullptr
                    ? Affine{p.t.mean[row], scales[row], scales[a.batch * a.channels + row]}
                    : InferChannel(p, row);
  }
  __syncthreads();
#pragma unroll(kForm == Form::kAny ? 1 : U)
  for (int u = 0; u < U; ++u) {
    if (at.Element(u) < at.left) {
      Affine mine[V];
      at.Choose(a, u, affine, mine);
      WriteFlat<T>(
          at, p.t.y, u,
          Normalise<T, V, kForm>(x[0], residual[0], has_residual, mine, p.activation, p.slope));
    }
#pragma unroll
    for (int q = 1; q < U; ++q) {
      x[q - 1] = x[q];
      residual[q - 1] = residual[q];
    }
  }
}

// A channel a warp: what its sums say of it.
template <typename T, int V, bool kLast>
__global__ void __launch_bounds__(kThreads)
    MomentsKernel(const __grid_constant__ Layout a, const __grid_constant__ MomentTensors t,
                  int64_t parts, double inv_n, const float* sums) {
  const int64_t rows = a.batch * a.channels;
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (row >= rows) return;
  const float s1 = WarpSumParts(sums, row, parts);
  const float s2 = WarpSumParts(sums, rows + row, parts);
  if (threadIdx.x % 32 != 0) return;
  const int64_t instance = row / a.channels, channel = row % a.channels;
  const int tile_channels = a.lanes * (kLast ? V : 1);
  const int64_t tile = channel / tile_channels;
  const double shift = s1 * inv_n;
  double var = s2 * inv_n - shift * shift;
  if (var < 0) var = 0;  // NaN stays
  t.k[row] = Shift<T, V, kLast>(a, t.x, instance, tile, channel - tile * tile_channels);
  t.shift[row] = static_cast<float>(shift);
  t.var[row] = static_cast<float>(var);
}

// Signs are written by the walk through the ring alone.
Status CheckSigns(const ForwardArgs& args, const std::string& what) {
  if (args.t.signs == nullptr) return Status::Ok();
  return Status::Invalid(what + ": expected x, residual and y aligned to 16 bytes, to write signs");
}

// args.sums and args.parts: of the first walk, null in inference. `totals`: 2 * batch * channels.
template <typename I>
Status LaunchNormalise(const Context& ctx, const BatchNormProblem& p, ForwardArgs args,
                       float* totals, const std::string& what) {
  using T = typename I::T;
  const int64_t rows = p.batch * p.channels;
  if constexpr (I::V > 1 && !I::kLast) {
    args.layout = MakeLayout(p, false, 1, 0);
    if (args.sums != nullptr) {
      unsigned blocks = 0;
      JAXCONV_RETURN_IF_ERROR(Blocks(rows, kThreads / 32, what, blocks));
      FinishKernel<T><<<blocks, kThreads, 0, ctx.stream>>>(args, totals);
      JAXCONV_RETURN_IF_ERROR(LaunchStatus(what + " statistics"));
    }
    if (args.layout.elements == 0) return Status::Ok();
    JAXCONV_RETURN_IF_ERROR(CheckSigns(args, what));
    unsigned blocks = 0;
    JAXCONV_RETURN_IF_ERROR(
        Blocks(args.layout.elements, int64_t{kThreads} * kFlatVectors * I::V, what, blocks));
    return WithForm<I>(p.activation, [&](auto form) {
      NormaliseFlatKernel<T, I::V, decltype(form)::value>
          <<<blocks, kThreads, 0, ctx.stream>>>(args, args.sums != nullptr ? totals : nullptr);
      return LaunchStatus(what);
    });
  } else {
    if (args.parts > kInlineParts) {
      JAXCONV_RETURN_IF_ERROR(
          AddParts(ctx, 2 * rows, args.parts, args.sums, totals, what + " parts"));
      args.sums = totals;
      args.parts = 1;
    }
    args.layout = BlockLayout(p, I::kLast, I::V);
    args.pieces = Pieces(args.layout, Bytes(p));
    JAXCONV_RETURN_IF_ERROR(CheckGrid(args.layout.tiles, args.pieces, p.batch, what));
    const unsigned blocks = static_cast<unsigned>(args.layout.tiles * args.pieces * p.batch);
    return WithForm<I>(p.activation, [&](auto form) {
      if constexpr (I::kLast && I::V > 1) {
        StreamShape stream;
        const int tensors = StreamOf(args.t).count;
        JAXCONV_RETURN_IF_ERROR(
            MakeStream<I>(p, tensors, kMaxPositions, what, args.layout, stream));
        if (stream.blocks > 0) {
          return LaunchStream(ctx, stream, what,
                              NormaliseStreamKernel<T, I::V, decltype(form)::value>, args);
        }
      }
      JAXCONV_RETURN_IF_ERROR(CheckSigns(args, what));
      NormaliseKernel<T, I::V, I::kLast, decltype(form)::value>
          <<<blocks, kThreads, 0, ctx.stream>>>(args);
      return LaunchStatus(what);
    });
  }
}

// The first walk.
template <typename I>
Status LaunchSums(const Context& ctx, const BatchNormProblem& p, const Layout& layout,
                  const void* x, int64_t splits, float* sums, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckGrid(layout.tiles, splits, p.batch, what));
  const unsigned blocks = static_cast<unsigned>(layout.tiles * splits * p.batch);
  SumKernel<typename I::T, I::V, I::kLast>
      <<<blocks, kThreads, 0, ctx.stream>>>(layout, x, splits, sums);
  return LaunchStatus(what + " sums");
}

}  // namespace

Status AddParts(const Context& ctx, int64_t rows, int64_t parts, const float* sums, float* totals,
                const std::string& what) {
  unsigned blocks = 0;
  JAXCONV_RETURN_IF_ERROR(Blocks(rows, kThreads / 32, what, blocks));
  AddPartsKernel<<<blocks, kThreads, 0, ctx.stream>>>(rows, parts, sums, totals);
  return LaunchStatus(what);
}

Status TwoReadTrain(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                    const ForwardTensors& t, Workspace workspace, const std::string& what) {
  float* sums = static_cast<float*>(workspace.data);
  ForwardArgs args = MakeForwardArgs(p, t);
  args.sums = sums;
  args.parts = splits;
  return WithInstance<true>(p, {t.x, t.residual, t.y}, [&](auto instance) {
    using I = decltype(instance);
    JAXCONV_RETURN_IF_ERROR(
        LaunchSums<I>(ctx, p, BlockLayout(p, I::kLast, I::V), t.x, splits, sums, what));
    float* totals = sums + 2 * p.batch * p.channels * splits;
    return LaunchNormalise<I>(ctx, p, args, totals, what + " normalise");
  });
}

Status TwoReadMoments(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                      const MomentTensors& t, Workspace workspace, const std::string& what) {
  float* sums = static_cast<float*>(workspace.data);
  return WithInstance<true>(p, {t.x}, [&](auto instance) {
    using I = decltype(instance);
    const Layout layout = BlockLayout(p, I::kLast, I::V);
    JAXCONV_RETURN_IF_ERROR(LaunchSums<I>(ctx, p, layout, t.x, splits, sums, what));
    unsigned blocks = 0;
    JAXCONV_RETURN_IF_ERROR(Blocks(p.batch * p.channels, kThreads / 32, what, blocks));
    MomentsKernel<typename I::T, I::V, I::kLast><<<blocks, kThreads, 0, ctx.stream>>>(
        layout, t, splits, 1.0 / static_cast<double>(p.reduced()), sums);
    return LaunchStatus(what + " statistics");
  });
}

Status Infer(const Context& ctx, const BatchNormProblem& p, const ForwardTensors& t,
             const std::string& what) {
  if (p.reduced() == 0) return Status::Ok();
  return WithInstance<true>(p, {t.x, t.residual, t.y}, [&](auto instance) {
    return LaunchNormalise<decltype(instance)>(ctx, p, MakeForwardArgs(p, t), nullptr, what);
  });
}

}  // namespace jaxconv::cuda::batchnorm
