// Training forward with channel groups kept in the shared memory of a team of CTAs (resident_team): one launch, every
// element read once where a group fits. team.cuh says how the work is laid out.
//
//   y = f((x - mean) * rstd * scale + bias + residual)
//
// The residual does not stay: it is copied for the walk that writes.
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/team.cuh"
#include "cuda/batchnorm/team_launch.h"

namespace jaxconv::cuda::batchnorm {
namespace {

template <typename T>
constexpr int kTrainStep = TeamStep(BatchNormOp::kTrain, sizeof(T));

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks)
    TeamTrainKernel(const __grid_constant__ ForwardArgs p, const __grid_constant__ Team q) {
  constexpr int kStats = kLast ? V : 1;
  constexpr int U = kTrainStep<T>, N = kTeamThreads;
  constexpr int kVector = N * 16, kSlot = U * kVector;
  __shared__ float scratch[kTeamScratch];
  __shared__ uint32_t samples[3][kTeamTile];  // words that hold an element of the channel
  __shared__ float scales[kTeamTile], biases[kTeamTile], old_means[kTeamTile], old_vars[kTeamTile];
  __shared__ Affine affine[kTeamTile];

  using R = Raw<T, V>;
  const Layout& a = p.layout;
  const Share s = MyShare<U>(a, q);
  const bool has_residual = p.t.residual != nullptr;
  const int ring = static_cast<int>(q.slots) * kSlot, residual_ring = q.in_flight * kSlot;
  const char* mine_x = reinterpret_cast<const char*>(slab) + threadIdx.x * 16;
  const char* mine_residual = mine_x + ring;
  const uint32_t to_x = SharedAddress(mine_x), to_residual = SharedAddress(mine_residual);
  const int tile_channels = a.lanes * kStats, columns = 2 * tile_channels;
  const uint32_t ahead = q.in_flight * s.jump;
  const int64_t at_ahead = q.in_flight * s.at_jump;
  const uint32_t kept = q.slots - q.in_flight;
  const int stream = static_cast<int>(kept) * kSlot;

  Meeting<9> meeting(q, s, columns);

  uint32_t round = 0;
  for (int64_t group = s.team; group < q.groups; group += q.teams, ++round) {
    Walk<V, kLast, U> walk(a, s, group);
    const auto sample = [&](int k, int c) {
      return static_cast<const T*>(p.t.x) + SampleAt<V, kLast>(a, walk.instance, walk.tile, c, k);
    };
    const int64_t channel = walk.tile * tile_channels + threadIdx.x,
                  row = walk.instance * a.channels + channel;
    const bool has_channel = static_cast<int>(threadIdx.x) < tile_channels && channel < a.channels;
    if (has_channel) {
#pragma unroll
      for (int k = 0; k < 3 && a.positions > 0; ++k) {
        const auto word = reinterpret_cast<uintptr_t>(sample(k, threadIdx.x)) & ~uintptr_t{3};
        CopyWord(&samples[k][threadIdx.x], reinterpret_cast<const void*>(word));
      }
      CopyWord(&scales[threadIdx.x], p.t.scale + row);
      CopyWord(&biases[threadIdx.x], p.t.bias + row);
      if (s.rank == 0) {
        CopyWord(&old_means[threadIdx.x], p.t.old_mean + row);
        CopyWord(&old_vars[threadIdx.x], p.t.old_var + row);
      }
    }
    const auto copy = [&](int slot, uint32_t by, int64_t at_by) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        walk.Visit(a, s, u, by, at_by, [&](const Piece& piece) {
          CopyPiece<T, V, kLast>(a, to_x + slot + u * kVector, p.t.x, piece);
        });
      }
    };
    const auto copy_residual = [&](int slot, uint32_t by, int64_t at_by) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        walk.Visit(a, s, u, by, at_by, [&](const Piece& piece) {
          CopyPiece<T, V, kLast>(a, to_residual + slot + u * kVector, p.t.residual, piece);
        });
      }
    };
#pragma unroll 1
    for (int i = 0; i < q.in_flight; ++i) {
      copy(i * kSlot, i * s.jump, i * s.at_jump);
      CopyCommit();
    }
    CopyWaitFor(q.in_flight);
    __syncthreads();

    // The shift of the tile's channel c. A 16-bit element is one half of its word.
    const auto shift_of = [&](int c) {
      float v[3];
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const uint32_t word = samples[k][c];
        if constexpr (sizeof(T) == 4) {
          v[k] = __uint_as_float(word);
        } else {
          const bool high = reinterpret_cast<uintptr_t>(sample(k, c)) & 2;
          const uint16_t half = static_cast<uint16_t>(high ? word >> 16 : word);
          v[k] = ToFloat(*reinterpret_cast<const T*>(&half));
        }
      }
      return Median(v[0], v[1], v[2]);
    };
    float shift[kStats], total[2 * kStats] = {};  // sums of x - shift, then of its square
#pragma unroll
    for (int j = 0; j < kStats; ++j)
      shift[j] = walk.end > 0 ? shift_of((kLast ? s.lane * kStats : 0) + j) : 0.f;

    int slot = 0, load_slot = q.in_flight * kSlot;
    if (load_slot == ring) load_slot = stream;
#pragma unroll 1
    for (uint32_t i = 0; i < q.steps; ++i) {
      CopyWaitFor(q.in_flight);
      R raw[U];
#pragma unroll
      for (int u = 0; u < U; ++u) raw[u] = Slot<R>(mine_x, slot + u * kVector);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        walk.Visit(a, s, u, 0, 0, [&](const Piece& piece) {
          float v[V];
          Unpack<T, V>(raw[u], v);
          ForOwn<V, kLast>(a, piece, [&](int j) {
            const int k = kLast ? j : 0;
            const float d = v[j] - shift[k];
            total[k] += d;
            total[kStats + k] = fmaf(d, d, total[kStats + k]);
          });
        });
      }
      copy(load_slot, ahead, at_ahead);
      CopyCommit();
      walk.Onwards(s);
      slot += kSlot;
      if (slot == ring) slot = stream;
      load_slot += kSlot;
      if (load_slot == ring) load_slot = stream;
    }
    walk.Backwards(s);
    if (has_residual) {
#pragma unroll 1
      for (int i = 0; i < q.in_flight; ++i) {
        copy_residual(i * kSlot, -(i * s.jump), -(i * s.at_jump));
        CopyCommit();
      }
    }
    BlockColumnSums(total, a.lanes, scratch);
    meeting.Sum(round, scratch);
    if (has_channel) {
      const float* sums = scratch + threadIdx.x / kStats * 2 * kStats + threadIdx.x % kStats;
      const Statistics of = TrainStatistics(p, shift_of(threadIdx.x), sums[0], sums[kStats]);
      affine[threadIdx.x] = Fold<T>(ToAffine(of, scales[threadIdx.x], biases[threadIdx.x]));
      if (s.rank == 0) WriteStatistics(p, row, of, old_means[threadIdx.x], old_vars[threadIdx.x]);
    }
    __syncthreads();
    Affine mine[kStats];
#pragma unroll
    for (int j = 0; j < kStats; ++j) mine[j] = affine[(kLast ? s.lane * kStats : 0) + j];

    int residual_slot = 0;
#pragma unroll 1
    for (uint32_t i = q.steps; i-- > 0;) {
      slot -= kSlot;
      if (slot < stream && i >= kept) slot = ring - kSlot;
      CopyWaitFor(q.in_flight);
      R raw[U], extra[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        raw[u] = Slot<R>(mine_x, slot + u * kVector);
        if (has_residual) extra[u] = Slot<R>(mine_residual, residual_slot + u * kVector);
      }
#pragma unroll(kForm == Form::kAny ? 1 : U)
      for (int u = 0; u < U; ++u) {
        // Where the code is long there is one copy of it: the vectors move up.
        walk.Visit(a, s, u, 0, 0, [&](const Piece& piece) {
          float z[V];
          Unpack<T, V>(raw[0], z);
#pragma unroll
          for (int j = 0; j < V; ++j) z[j] = Preactivation<T>(z[j], mine[kLast ? j : 0]);
          if (has_residual) {
            float r[V];
            Unpack<T, V>(extra[0], r);
#pragma unroll
            for (int j = 0; j < V; ++j) z[j] += r[j];
          }
          if constexpr (kForm == Form::kRelu) {
            WritePiece<T, V, kLast>(a, p.t.y, piece, PackRelu<T, V>(z));
          } else {
            Apply<false, kForm, sizeof(T) == 2, V>(p.activation, p.slope, z, z);
            WritePiece<T, V, kLast>(a, p.t.y, piece, Pack<T, V>(z));
          }
        });
#pragma unroll
        for (int k = 1; k < U; ++k) {
          raw[k - 1] = raw[k];
          extra[k - 1] = extra[k];
        }
      }
      if (i >= q.slots) copy(slot, -ahead, -at_ahead);
      if (has_residual) {
        copy_residual(residual_slot, -ahead, -at_ahead);
        residual_slot += kSlot;
        if (residual_slot == residual_ring) residual_slot = 0;
      }
      CopyCommit();
      walk.Backwards(s);
    }
  }
}

}  // namespace

Status TeamTrain(const Context& ctx, const BatchNormProblem& p, const TeamShape& shape,
                 const ForwardTensors& t, Workspace workspace, const std::string& what) {
  ForwardArgs args = MakeForwardArgs(p, t);
  return WithInstance<true>(p, {t.x, t.residual, t.y}, [&](auto instance) {
    using I = decltype(instance);
    if constexpr (I::V == 1) {
      return NeedsVectors(what);
    } else {
      return WithTeamForm<I>(p.activation, [&](auto form) {
        const auto kernel = TeamTrainKernel<typename I::T, I::V, I::kLast, decltype(form)::value>;
        size_t kernel_static = 0;
        JAXCONV_RETURN_IF_ERROR(
            StaticSharedMemory(reinterpret_cast<const void*>(kernel), what, &kernel_static));
        TeamFit fit{};
        JAXCONV_RETURN_IF_ERROR(MakeTeamFit(p, I::kLast, I::V, kTrainStep<typename I::T>, 1,
                                            t.residual != nullptr, kernel_static, shape, workspace,
                                            what, fit));
        args.layout = fit.layout;
        return LaunchTeam(ctx, kernel, args, fit, what);
      });
    }
  });
}

}  // namespace jaxconv::cuda::batchnorm
