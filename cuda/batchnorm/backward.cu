// Batch-norm backward in two walks over the tensors (two_read):
//
//   dz = dy * f'(z), z recomputed from x (and residual) where f needs it
//   dbias = sum dz;  dscale = sum dz * xhat;  dx = scale * rstd * (dz - dbias / n - xhat * dscale /
//   n);  dresidual = dz
//
// First walk: block (tile, split, instance) sums dz and dz * (x - mean) over its positions, which it
// takes in turn with the other splits, into sums (2, batch, channels, splits); dz itself too, where
// WritesGradientFirst says so, for the second walk to read. Second walk,
// channels-last: block (tile, piece, instance), counted from the end, adds its channels' parts up
// (piece 0 writes dscale and dbias) and writes dx and dresidual, last position first. Without dx
// there is none: what is left is to add the parts up. Second walk, channels-first: a pass over
// the sums finishes them, and the tensors are mapped in the order of memory (flat.cuh).
//
// Large channels-last tensors pass through a ring in shared memory on the way (stream.cuh), in both walks.
//
// dx of given sums is the second walk alone.
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/flat.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/parts.cuh"
#include "cuda/batchnorm/stream.cuh"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {
namespace {

// Loads in flight per thread and tensor. Eight channels a thread take the registers of more.
template <int V, bool kLast>
constexpr int kUnroll = kLast && V == 8 ? 3 : 4;

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kThreads, V == 1 ? 3 : 2)
    GradientSumKernel(const __grid_constant__ BackwardArgs p, float* sums) {
  constexpr int U = kUnroll<V, kLast>;
  constexpr int N = kLast   ? V
                    : V < 4 ? V
                            : 4;  // sums a thread keeps; channels-first: chains of one channel
  constexpr int kStats = kLast ? V : 1;
  __shared__ float scratch[kPartsScratch<V, kLast>];

  const Layout& a = p.layout;
  const int64_t splits = p.parts;
  const Place at = Locate(a, blockIdx.x, splits);
  const int lane = kLast ? threadIdx.x % a.lanes : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base =
      kLast ? Base<kLast>(a, at.instance, at.tile, lane) : FirstElement(a, at.instance, at.tile);
  const bool inside = !kLast || (threadIdx.x < step * a.lanes && at.tile * a.lanes + lane < a.row);
  const uint32_t end = inside ? a.positions : 0;
  const Turns turns(at.part, splits, U * step);
  const auto piece_at = [&](uint32_t i) { return PieceOf<V>(a, base, i); };

  const int tile_channels = a.lanes * kStats;
  Affine mine[kStats] = {};
  if (inside) {
    const int64_t first =
        at.instance * a.channels + at.tile * tile_channels + (kLast ? lane * V : 0);
#pragma unroll
    for (int j = 0; j < kStats; ++j) mine[j] = SavedChannel(p, first + j);
  }

  const bool has_residual = p.t.residual != nullptr;
  float s1[N] = {}, s2[N] = {};
  Raw<T, V> x[U], dy[U], residual[U];
  uint32_t i = turns.first + threadIdx.x / a.lanes;
  int64_t next = base + Step<kLast>(a, i);  // channels-last: of the next load
  const int64_t hop = step * a.row, turn = (turns.jump - (U - 1) * step) * a.row,
                ahead = turns.jump * a.row;
  // `place`: among the U of a turn
  const auto load = [&](int u, int place, uint32_t i) {
    if (i < end) {
      const Piece piece = kLast ? Piece{next, 0} : piece_at(i);
      x[u] = ReadPiece<T, V, kLast>(a, p.t.x, piece);
      dy[u] = ReadPiece<T, V, kLast>(a, p.t.dy, piece);
      if (has_residual) residual[u] = ReadPiece<T, V, kLast>(a, p.t.residual, piece);
    }
    next += place + 1 < U ? hop : turn;
  };
#pragma unroll
  for (int u = 0; u < U; ++u) load(u, u, i + u * step);
  for (; i < end; i += turns.jump) {
    // A vector makes room for the one U further on: U of them are on their way all the time. kAny: one copy of the long
    // derivatives instead of U.
#pragma unroll(kForm == Form::kAny ? 1 : U)
    for (int u = 0; u < U; ++u) {
      const int own = kForm == Form::kAny ? 0 : u;
      if (i + u * step < end) {
        float centred[V], dz[V];
        Backpropagate<T, V, kForm>(x[own], dy[own], residual[own], has_residual, mine, p.activation,
                                   p.slope, centred, dz);
        const Piece piece = kLast ? Piece{next - ahead, 0} : piece_at(i + u * step);
        ForOwn<V, kLast>(a, piece, [&](int j) {
          s1[j % N] += dz[j];
          s2[j % N] = fmaf(dz[j], centred[j], s2[j % N]);
        });
        if (p.t.dresidual != nullptr) {
          WritePiece<T, V, kLast, true>(a, p.t.dresidual, piece, Pack<T, V>(dz));
        }
      }
      if constexpr (kForm == Form::kAny) {
#pragma unroll
        for (int q = 1; q < U; ++q) {
          x[q - 1] = x[q];
          dy[q - 1] = dy[q];
          residual[q - 1] = residual[q];
        }
      }
      load(kForm == Form::kAny ? U - 1 : u, u, i + turns.jump + u * step);
    }
  }

  WriteParts<V, kLast>(a, at, splits, s1, s2, scratch, sums);
}

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kThreads, V == 1 ? 3 : 2)
    GradientKernel(const __grid_constant__ BackwardArgs p) {
  constexpr int U = kUnroll<V, kLast>;
  constexpr int kStats = kLast ? V : 1;
  __shared__ Affine affine[kMaxTile];
  __shared__ Gradient gradient[kMaxTile];

  const Layout& a = p.layout;
  const Place at = Locate(a, gridDim.x - 1 - int64_t{blockIdx.x}, p.pieces);
  const int lane = kLast ? threadIdx.x % a.lanes : 0;
  const uint32_t step = kThreads / a.lanes;
  const int64_t base = Base<kLast>(a, at.instance, at.tile, lane);
  const bool inside = !kLast || (threadIdx.x < step * a.lanes && at.tile * a.lanes + lane < a.row);
  const bool writes = p.t.dx != nullptr || p.t.dresidual != nullptr;
  const uint32_t begin = Cut(a.positions, at.part, p.pieces);
  const uint32_t end = Cut(a.positions, at.part + 1, p.pieces);
  const uint32_t count = inside && writes ? end - begin : 0;

  Raw<T, V> x[U], dy[U], residual[U];
  const bool has_residual = p.t.residual != nullptr;
  uint32_t i = threadIdx.x / a.lanes;
  const auto offset_of = [&](uint32_t i) { return base + Step<kLast>(a, end - 1 - i); };
  int64_t next = offset_of(i),
          at_dx = next;  // channels-last: of the next load, and of the next store
  const int64_t hop = step * a.row;
  const auto load = [&](int u, uint32_t i) {
    if (i < count) {
      const int64_t offset = kLast ? next : offset_of(i);
      x[u] = ReadOnce<T, V>(p.t.x, offset);
      dy[u] = ReadOnce<T, V>(p.t.dy, offset);
      if (has_residual) residual[u] = ReadOnce<T, V>(p.t.residual, offset);
    }
    next -= hop;
  };
#pragma unroll
  for (int u = 0; u < U; ++u) load(u, i + u * step);  // on their way while the sums are added up

  const int tile_channels = a.lanes * kStats;
  for (int c = threadIdx.x; c < tile_channels; c += kThreads) {
    const int64_t channel = at.tile * tile_channels + c;
    if (channel >= a.channels) break;
    const int64_t row = at.instance * a.channels + channel;
    affine[c] = SavedChannel(p, row);
    if (p.sums != nullptr) {
      const float s1 = SumParts(p.sums, row, p.parts);
      const float s2 = SumParts(p.sums, a.batch * a.channels + row, p.parts);
      gradient[c] = BackwardChannel(p, row, p.t.rstd[row], s1, s2, at.part == 0);
    } else {
      gradient[c] = GivenGradient(p, row);
    }
  }
  __syncthreads();
  Affine mine[kStats];
  Gradient to_dx[kStats];
#pragma unroll
  for (int j = 0; j < kStats; ++j) {
    mine[j] = affine[lane * kStats + j];
    to_dx[j] = gradient[lane * kStats + j];
  }

  for (; i < count; i += U * step) {
#pragma unroll(kForm == Form::kAny ? 1 : U)
    for (int u = 0; u < U; ++u) {
      const int own = kForm == Form::kAny ? 0 : u;
      if (i + u * step < count) {
        float centred[V], dz[V];
        Backpropagate<T, V, kForm>(x[own], dy[own], residual[own], has_residual, mine, p.activation,
                                   p.slope, centred, dz);
        const int64_t offset = kLast ? at_dx : offset_of(i + u * step);
        if (p.t.dresidual != nullptr) {
          WriteOnce<T, V>(p.t.dresidual, offset, Pack<T, V>(dz));
        }
        if (p.t.dx != nullptr) {
          WriteOnce<T, V>(p.t.dx, offset, InputGradient<T, V>(centred, dz, mine, to_dx));
        }
      }
      at_dx -= hop;
      if constexpr (kForm == Form::kAny) {
#pragma unroll
        for (int q = 1; q < U; ++q) {
          x[q - 1] = x[q];
          dy[q - 1] = dy[q];
          residual[q - 1] = residual[q];
        }
      }
      load(kForm == Form::kAny ? U - 1 : u, i + (U + u) * step);
    }
  }
}

JAXCONV_HD StreamInput StreamOf(const BackwardTensors& t) {
  return {{t.x, t.dy, t.residual}, t.residual != nullptr ? 3 : 2};
}

// The first walk, through a ring.
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kStreamBlock, 1)
    GradientSumStreamKernel(const __grid_constant__ BackwardArgs p, float* sums,
                            const __grid_constant__ StreamShape s) {
  const Layout& a = p.layout;
  const int64_t channel = int64_t{threadIdx.x % a.lanes} * V;
  Affine mine[V];
#pragma unroll
  for (int j = 0; j < V; ++j) mine[j] = SavedChannel(p, channel + j);
  const bool has_residual = p.t.residual != nullptr;
  float s1[V] = {}, s2[V] = {};
  WalkStream<false, Raw<T, V>>(s, StreamOf(p.t),
                               [&](const Raw<T, V>(&v)[kStreamTensors], int64_t at) {
                                 float centred[V], dz[V];
                                 Backpropagate<T, V, kForm>(v[0], v[1], v[2], has_residual, mine,
                                                            p.activation, p.slope, centred, dz);
#pragma unroll
                                 for (int j = 0; j < V; ++j) {
                                   s1[j] += dz[j];
                                   s2[j] = fmaf(dz[j], centred[j], s2[j]);
                                 }
                                 if (p.t.dresidual != nullptr)
                                   Write<T, V>(p.t.dresidual, at, Pack<T, V>(dz));
                               });
  if (threadIdx.x >= kStreamThreads) return;
  const auto sync = [] { NamedBarrier(kStreamBarrier, kStreamThreads); };
  sync();  // the ring is free
  WriteParts<V, true, kStreamThreads>(a, Place{0, blockIdx.x, 0}, gridDim.x, s1, s2,
                                      reinterpret_cast<float*>(stream_ring), sums, sync);
}

// The second walk, through a ring. kAdds: the third tensor is added to dx, and there is no residual.
template <typename T, int V, Form kForm, bool kAdds>
__global__ void __launch_bounds__(kStreamBlock, 1)
    GradientStreamKernel(const __grid_constant__ BackwardArgs p,
                         const __grid_constant__ StreamShape s) {
  const Layout& a = p.layout;
  const int64_t channel = int64_t{threadIdx.x % a.lanes} * V;
  const bool writes = blockIdx.x == 0 && threadIdx.x < a.lanes;
  Affine mine[V];
  Gradient to_dx[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t row = channel + j;
    mine[j] = SavedChannel(p, row);
    if (p.sums != nullptr) {
      const float s1 = SumParts(p.sums, row, p.parts);
      const float s2 = SumParts(p.sums, a.channels + row, p.parts);
      to_dx[j] = BackwardChannel(p, row, p.t.rstd[row], s1, s2, writes);
    } else {
      to_dx[j] = GivenGradient(p, row);
    }
  }
  const bool has_residual = !kAdds && p.t.residual != nullptr;
  const StreamInput in = kAdds ? StreamInput{{p.t.x, p.t.dy, p.t.addend}, 3} : StreamOf(p.t);
  WalkStream<true, Raw<T, V>>(s, in, [&](const Raw<T, V>(&v)[kStreamTensors], int64_t at) {
    float centred[V], dz[V];
    Backpropagate<T, V, kForm>(v[0], v[1], v[2], has_residual, mine, p.activation, p.slope, centred,
                               dz);
    if constexpr (kAdds) {
      float dx[V], c[V];
      InputGradientOf(centred, dz, mine, to_dx, dx);
      Unpack<T, V>(v[2], c);
#pragma unroll
      for (int j = 0; j < V; ++j) dx[j] += c[j];
      WriteOnce<T, V>(p.t.dx, at, Pack<T, V>(dx));
      return;
    }
    if (p.t.dresidual != nullptr) WriteOnce<T, V>(p.t.dresidual, at, Pack<T, V>(dz));
    if (p.t.dx != nullptr) {
      WriteOnce<T, V>(p.t.dx, at, InputGradient<T, V>(centred, dz, mine, to_dx));
    }
  });
}

// A channel a warp: dscale, dbias, and what the flat walk needs of them.
__global__ void __launch_bounds__(kThreads)
    FinishGradientKernel(const __grid_constant__ BackwardArgs p, Gradient* gradients) {
  const int64_t rows = p.layout.batch * p.layout.channels;
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (row >= rows) return;
  const float s1 = WarpSumParts(p.sums, row, p.parts);
  const float s2 = WarpSumParts(p.sums, rows + row, p.parts);
  if (threadIdx.x % 32 == 0) gradients[row] = BackwardChannel(p, row, p.t.rstd[row], s1, s2, true);
}

// `gradients` as FinishGradientKernel leaves them; null where the sums are given.
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kThreads, V == 8 ? 2 : 3)
    GradientFlatKernel(const __grid_constant__ BackwardArgs p, const Gradient* gradients) {
  constexpr int U = kFlatPairs;
  __shared__ Affine affine[kFlatImages<U>];
  __shared__ Gradient gradient[kFlatImages<U>];
  const Layout& a = p.layout;
  const FlatPlace<V, U> at(a);
  const bool has_residual = p.t.residual != nullptr;
  Raw<T, V> x[U], dy[U], residual[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (at.Element(u) < at.left) {
      x[u] = ReadFlat<T>(at, p.t.x, u);
      dy[u] = ReadFlat<T>(at, p.t.dy, u);
      if (has_residual) residual[u] = ReadFlat<T>(at, p.t.residual, u);
    }
  }
  for (int i = threadIdx.x; i < at.images; i += kThreads) {
    const int64_t row = at.Row(a, i);
    affine[i] = SavedChannel(p, row);
    gradient[i] = gradients != nullptr ? gradients[row] : GivenGradient(p, row);
  }
  __syncthreads();
#pragma unroll(kForm == Form::kAny ? 1 : U)
  for (int u = 0; u < U; ++u) {
    if (at.Element(u) < at.left) {
      Affine mine[V];
      Gradient to_dx[V];
      at.Choose(a, u, affine, mine);
      at.Choose(a, u, gradient, to_dx);
      float centred[V], dz[V];
      Backpropagate<T, V, kForm>(x[0], dy[0], residual[0], has_residual, mine, p.activation,
                                 p.slope, centred, dz);
      if (p.t.dresidual != nullptr) WriteFlat<T>(at, p.t.dresidual, u, Pack<T, V>(dz));
      if (p.t.dx != nullptr) {
        WriteFlat<T>(at, p.t.dx, u, InputGradient<T, V>(centred, dz, mine, to_dx));
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

// dscale and dbias, and the coefficients of the walk over the elements.
Status FinishGradient(const Context& ctx, const BackwardArgs& args, Gradient* gradients,
                      const std::string& what) {
  unsigned blocks = 0;
  const int64_t rows = args.layout.batch * args.layout.channels;
  JAXCONV_RETURN_IF_ERROR(Blocks(rows, kThreads / 32, what, blocks));
  FinishGradientKernel<<<blocks, kThreads, 0, ctx.stream>>>(args, gradients);
  return LaunchStatus(what + " sums");
}

// The second walk in the order of memory. `gradients` as GradientFlatKernel's.
template <typename I, Form kForm>
Status LaunchGradientFlat(const Context& ctx, const BatchNormProblem& p, BackwardArgs args,
                          const Gradient* gradients, const std::string& what) {
  args.layout = MakeLayout(p, false, 1, 0);
  if (args.layout.elements == 0) return Status::Ok();
  constexpr int64_t kSpan = int64_t{kThreads} * kFlatPairs * I::V;
  unsigned blocks = 0;
  JAXCONV_RETURN_IF_ERROR(Blocks(args.layout.elements, kSpan, what, blocks));
  GradientFlatKernel<typename I::T, I::V, kForm>
      <<<blocks, kThreads, 0, ctx.stream>>>(args, gradients);
  return LaunchStatus(what + " dx");
}

// The second walk, channels last or element by element, of the grid that args.layout and args.pieces say.
template <typename I, Form kForm>
Status LaunchGradient(const Context& ctx, const BatchNormProblem& p, BackwardArgs args,
                      const std::string& what) {
  using T = typename I::T;
  if constexpr (I::kLast && I::V > 1) {
    StreamShape stream{};
    if (args.t.dx != nullptr || args.t.dresidual != nullptr) {
      const int tensors = StreamOf(args.t).count + (args.t.addend != nullptr);
      JAXCONV_RETURN_IF_ERROR(MakeStream<I>(p, tensors, kMaxPositions, what, args.layout, stream));
    }
    if (stream.blocks > 0 && args.t.addend != nullptr) {
      return LaunchStream(ctx, stream, what, GradientStreamKernel<T, I::V, kForm, true>, args);
    }
    if (stream.blocks > 0) {
      return LaunchStream(ctx, stream, what, GradientStreamKernel<T, I::V, kForm, false>, args);
    }
  }
  if (args.t.addend != nullptr) return Status::Internal(what + ": only walks through a ring add");
  const unsigned blocks = static_cast<unsigned>(args.layout.tiles * args.pieces * p.batch);
  GradientKernel<T, I::V, I::kLast, kForm><<<blocks, kThreads, 0, ctx.stream>>>(args);
  return LaunchStatus(what);
}

}  // namespace

Status TwoReadBackward(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                       const BackwardTensors& t, Workspace workspace, const std::string& what) {
  float* sums = static_cast<float*>(workspace.data);
  const int64_t rows = p.batch * p.channels;
  float* totals = sums + 2 * rows * splits;
  BackwardArgs args = MakeBackwardArgs(p, t);
  args.parts = splits;
  BackwardArgs sum_args = args;
  if (WritesGradientFirst(args)) {
    args.t.dy = t.dresidual;
    args.t.residual = args.t.dresidual = nullptr;
    args.activation = Activation::kNone;
  } else {
    sum_args.t.dresidual = nullptr;
  }
  const bool writes = args.t.dx != nullptr || args.t.dresidual != nullptr;
  const auto arrays = {t.x,
                       t.dy,
                       t.residual,
                       t.addend,
                       static_cast<const void*>(t.dx),
                       static_cast<const void*>(t.dresidual)};
  return WithInstance<true>(p, arrays, [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    args.layout = sum_args.layout = BlockLayout(p, I::kLast, I::V);
    const Layout& a = args.layout;
    args.pieces = writes ? Pieces(a, 2 * Bytes(p)) : 1;
    JAXCONV_RETURN_IF_ERROR(CheckGrid(a.tiles, splits, p.batch, what));
    JAXCONV_RETURN_IF_ERROR(CheckGrid(a.tiles, args.pieces, p.batch, what));
    const unsigned sum_blocks = static_cast<unsigned>(a.tiles * splits * p.batch);
    return WithForm<I>(p.activation, [&](auto form) {
      constexpr Form kForm = decltype(form)::value;
      int64_t parts = splits;
      StreamShape stream{};
      if constexpr (I::kLast && I::V > 1) {
        const int tensors = StreamOf(sum_args.t).count;
        JAXCONV_RETURN_IF_ERROR(MakeStream<I>(p, tensors, splits, what, sum_args.layout, stream));
        if (stream.blocks > 0) {
          parts = stream.blocks;
          JAXCONV_RETURN_IF_ERROR(LaunchStream(ctx, stream, what + " sums",
                                               GradientSumStreamKernel<T, I::V, kForm>, sum_args,
                                               sums));
        }
      }
      if (stream.blocks == 0) {
        GradientSumKernel<T, I::V, I::kLast, kForm>
            <<<sum_blocks, kThreads, 0, ctx.stream>>>(sum_args, sums);
        JAXCONV_RETURN_IF_ERROR(LaunchStatus(what + " sums"));
      }
      args.sums = sums;
      args.parts = parts;
      // `totals` has room for two floats a channel.
      Gradient* gradients = reinterpret_cast<Gradient*>(totals);
      // Up to kInlineParts are added up in the order of the second walk, which a gradient without dx has the bits of.
      if (!writes && parts > kInlineParts) return FinishGradient(ctx, args, gradients, what);
      if constexpr (I::V > 1 && !I::kLast) {
        JAXCONV_RETURN_IF_ERROR(FinishGradient(ctx, args, gradients, what));
        if (!writes) return Status::Ok();
        return LaunchGradientFlat<I, kForm>(ctx, p, args, gradients, what);
      } else {
        if (parts > kInlineParts) {
          JAXCONV_RETURN_IF_ERROR(AddParts(ctx, 2 * rows, parts, sums, totals, what + " parts"));
          args.sums = totals;
          args.parts = 1;
        }
        return LaunchGradient<I, kForm>(ctx, p, args, what + " dx");
      }
    });
  });
}

Status DxOfSums(const Context& ctx, const BatchNormProblem& p, int64_t count,
                const BackwardTensors& t, const std::string& what) {
  if (p.reduced() == 0) return Status::Ok();
  BackwardArgs args = MakeBackwardArgs(p, t);
  args.inv_n = 1.0 / static_cast<double>(count);
  return WithInstance<true>(p, {t.x, t.dy, t.residual, t.dx}, [&](auto instance) {
    using I = decltype(instance);
    return WithForm<I>(p.activation, [&](auto form) {
      constexpr Form kForm = decltype(form)::value;
      if constexpr (I::V > 1 && !I::kLast) {
        return LaunchGradientFlat<I, kForm>(ctx, p, args, nullptr, what);
      } else {
        args.layout = BlockLayout(p, I::kLast, I::V);
        args.pieces = Pieces(args.layout, 2 * Bytes(p));
        JAXCONV_RETURN_IF_ERROR(CheckGrid(args.layout.tiles, args.pieces, p.batch, what));
        return LaunchGradient<I, kForm>(ctx, p, args, what + " dx");
      }
    });
  });
}

}  // namespace jaxconv::cuda::batchnorm
