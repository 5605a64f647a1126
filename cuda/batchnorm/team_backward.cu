// Backward with channel groups kept in the shared memory of a team of CTAs (resident_team): one launch, every element of
// x and dy read once where a group fits. team.cuh says how the work is laid out.
//
//   dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), dz = dy * f'(z)
//
// The residual does not stay. With ReLU, the first walk leaves dz in dy's place and writes it, as dresidual; otherwise the
// residual is copied for the second walk too.
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/team.cuh"
#include "cuda/batchnorm/team_launch.h"

namespace jaxconv::cuda::batchnorm {
namespace {

template <typename T>
constexpr int kBackwardStep = TeamStep(BatchNormOp::kBackward, sizeof(T));

// dz = dy * f'(z), in place; x becomes z's input as float32.
template <typename T, int V, Form kForm, int kStats>
__device__ __forceinline__ void ToGradient(const Raw<T, V>& raw_x, const Raw<T, V>& raw_dy,
                                           const Raw<T, V>& residual, bool has_residual,
                                           const Affine (&c)[kStats], Activation activation,
                                           float slope, float (&x)[V], float (&dz)[V]) {
  Unpack<T, V>(raw_x, x);
  Unpack<T, V>(raw_dy, dz);
  if (Knows(kForm, Activation::kNone) && activation == Activation::kNone) return;
  float z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) z[j] = Preactivation<T>(x[j], c[kStats == 1 ? 0 : j]);
  if (has_residual) {
    float r[V];
    Unpack<T, V>(residual, r);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] += r[j];
  }
  Apply<true, kForm, sizeof(T) == 2, V>(activation, slope, z, dz);
}

template <typename T, int V, bool kLast, Form kForm>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks)
    TeamBackwardKernel(const __grid_constant__ BackwardArgs p, const __grid_constant__ Team q) {
  constexpr int kStats = kLast ? V : 1;
  constexpr int U = kBackwardStep<T>, N = kTeamThreads;
  constexpr int kVector = N * 16, kSlot = U * 2 * kVector, kResidualSlot = U * kVector;
  __shared__ float scratch[kTeamScratch];
  __shared__ float scales[kTeamTile], biases[kTeamTile], means[kTeamTile], rstds[kTeamTile];
  __shared__ Gradient gradient[kTeamTile];

  using R = Raw<T, V>;
  const Layout& a = p.layout;
  const Share s = MyShare<U>(a, q);
  const bool has_residual = p.t.residual != nullptr,
             needs_z = !Knows(kForm, Activation::kNone) || p.activation != Activation::kNone;
  // WritesGradientFirst
  const bool dz_first = kForm == Form::kRelu && has_residual && p.t.dresidual != nullptr;
  const int ring = static_cast<int>(q.slots) * kSlot, residual_ring = q.in_flight * kResidualSlot;
  char* mine_x = reinterpret_cast<char*>(slab) + threadIdx.x * 16;
  const char* mine_residual = mine_x + ring;
  const uint32_t to_x = SharedAddress(mine_x), to_residual = SharedAddress(mine_residual);
  const int tile_channels = a.lanes * kStats, columns = 2 * tile_channels;
  const uint32_t ahead = q.in_flight * s.jump;
  const int64_t at_ahead = q.in_flight * s.at_jump;
  const uint32_t kept = q.slots - q.in_flight;
  const int stream = static_cast<int>(kept) * kSlot;

  Meeting<5> meeting(q, s, columns);

  uint32_t round = 0;
  for (int64_t group = s.team; group < q.groups; group += q.teams, ++round) {
    Walk<V, kLast, U> walk(a, s, group);
    const int64_t channel = walk.tile * tile_channels + threadIdx.x,
                  row = walk.instance * a.channels + channel;
    const bool has_channel = static_cast<int>(threadIdx.x) < tile_channels && channel < a.channels;
    if (has_channel) {
      CopyWord(&means[threadIdx.x], p.t.mean + row);
      CopyWord(&rstds[threadIdx.x], p.t.rstd + row);
      CopyWord(&scales[threadIdx.x], p.t.scale + row);
      if (needs_z) CopyWord(&biases[threadIdx.x], p.t.bias + row);
    }
    const void* dy = p.t.dy;  // of the walk
    const auto copy = [&](int slot, uint32_t by, int64_t at_by) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        walk.Visit(a, s, u, by, at_by, [&](const Piece& piece) {
          CopyPiece<T, V, kLast>(a, to_x + slot + 2 * u * kVector, p.t.x, piece);
          CopyPiece<T, V, kLast>(a, to_x + slot + (2 * u + 1) * kVector, dy, piece);
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
      if (has_residual) copy_residual(i * kResidualSlot, i * s.jump, i * s.at_jump);
      CopyCommit();
    }
    CopyWaitFor(q.in_flight);
    __syncthreads();

    Affine mine[kStats];
    // For either walk anew: in between, the meeting needs the registers.
    const auto set_mine = [&] {
#pragma unroll
      for (int j = 0; j < kStats; ++j) {
        const int c = (kLast ? s.lane * kStats : 0) + j;
        mine[j] = Fold<T>({means[c], scales[c] * rstds[c], needs_z ? biases[c] : 0.f});
      }
    };
    set_mine();
    float total[2 * kStats] = {};  // sums of dz, then of dz * (x - mean)
    int slot = 0, load_slot = q.in_flight * kSlot, residual_slot = 0;
    if (load_slot == ring) load_slot = stream;
#pragma unroll 1
    for (uint32_t i = 0; i < q.steps; ++i) {
      CopyWaitFor(q.in_flight);
      R x_raw[U], dy_raw[U], extra[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        x_raw[u] = Slot<R>(mine_x, slot + 2 * u * kVector);
        dy_raw[u] = Slot<R>(mine_x, slot + (2 * u + 1) * kVector);
        if (has_residual) extra[u] = Slot<R>(mine_residual, residual_slot + u * kVector);
      }
#pragma unroll(kForm == Form::kAny ? 1 : U)
      for (int u = 0; u < U; ++u) {
        // Where the code is long there is one copy of it: the vectors move up.
        walk.Visit(a, s, u, 0, 0, [&](const Piece& piece) {
          float v[V], dz[V];
          ToGradient<T, V, kForm>(x_raw[0], dy_raw[0], extra[0], has_residual, mine, p.activation,
                                  p.slope, v, dz);
          ForOwn<V, kLast>(a, piece, [&](int j) {
            const int k = kLast ? j : 0;
            total[k] += dz[j];
            total[kStats + k] = fmaf(dz[j], v[j] - mine[k].mean, total[kStats + k]);
          });
          if (dz_first) {
            const R packed = Pack<T, V>(dz);
            WritePiece<T, V, kLast, true>(a, p.t.dresidual, piece, packed);
            // Not where the copy below goes.
            if (slot < stream || i + q.in_flight >= q.steps) {
              *reinterpret_cast<R*>(mine_x + slot + (2 * u + 1) * kVector) = packed;
            }
          }
        });
#pragma unroll
        for (int k = 1; k < U; ++k) {
          x_raw[k - 1] = x_raw[k];
          dy_raw[k - 1] = dy_raw[k];
          extra[k - 1] = extra[k];
        }
      }
      copy(load_slot, ahead, at_ahead);
      if (has_residual) {
        copy_residual(residual_slot, ahead, at_ahead);
        residual_slot += kResidualSlot;
        if (residual_slot == residual_ring) residual_slot = 0;
      }
      CopyCommit();
      walk.Onwards(s);
      slot += kSlot;
      if (slot == ring) slot = stream;
      load_slot += kSlot;
      if (load_slot == ring) load_slot = stream;
    }
    walk.Backwards(s);
    const bool residual_again = has_residual && !dz_first;
    if (dz_first) {
      dy = p.t.dresidual;
      __threadfence_block();  // this thread's copies read what it wrote
    }
    if (residual_again) {
      residual_slot = 0;
#pragma unroll 1
      for (int i = 0; i < q.in_flight; ++i) {
        copy_residual(i * kResidualSlot, -(i * s.jump), -(i * s.at_jump));
        CopyCommit();
      }
    }
    BlockColumnSums(total, a.lanes, scratch);
    meeting.Sum(round, scratch);
    set_mine();  // before the barrier: behind it, others may copy the next group's parameters
    if (has_channel) {
      const float* sums = scratch + threadIdx.x / kStats * 2 * kStats + threadIdx.x % kStats;
      Gradient g = BackwardChannel(p, row, rstds[threadIdx.x], sums[0], sums[kStats], s.rank == 0);
      if (sizeof(T) ==
          2) {  // dx = scale * dz + slope * x + offset: of x instead of x - mean, see Fold
        const double scale = scales[threadIdx.x] * rstds[threadIdx.x];
        g.offset = static_cast<float>(
            scale * (g.offset - static_cast<double>(g.slope) * means[threadIdx.x]));
        g.slope = static_cast<float>(scale * g.slope);
      }
      gradient[threadIdx.x] = g;
    }
    __syncthreads();
    Gradient to_dx[kStats];
#pragma unroll
    for (int j = 0; j < kStats; ++j) to_dx[j] = gradient[(kLast ? s.lane * kStats : 0) + j];

#pragma unroll 1
    for (uint32_t i = q.steps; i-- > 0;) {
      slot -= kSlot;
      if (slot < stream && i >= kept) slot = ring - kSlot;
      CopyWaitFor(q.in_flight);
      R x_raw[U], dy_raw[U], extra[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        x_raw[u] = Slot<R>(mine_x, slot + 2 * u * kVector);
        dy_raw[u] = Slot<R>(mine_x, slot + (2 * u + 1) * kVector);
        if (residual_again) extra[u] = Slot<R>(mine_residual, residual_slot + u * kVector);
      }
#pragma unroll(kForm == Form::kAny ? 1 : U)
      for (int u = 0; u < U; ++u) {
        walk.Visit(a, s, u, 0, 0, [&](const Piece& piece) {
          float v[V], dz[V];
          if (dz_first) {
            Unpack<T, V>(x_raw[0], v);
            Unpack<T, V>(dy_raw[0], dz);
          } else {
            ToGradient<T, V, kForm>(x_raw[0], dy_raw[0], extra[0], has_residual, mine, p.activation,
                                    p.slope, v, dz);
            if (p.t.dresidual != nullptr)
              WritePiece<T, V, kLast>(a, p.t.dresidual, piece, Pack<T, V>(dz));
          }
          if (p.t.dx != nullptr) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const int k = kLast ? j : 0;
              if constexpr (sizeof(T) == 2) {
                dz[j] = fmaf(mine[k].scale, dz[j], fmaf(to_dx[k].slope, v[j], to_dx[k].offset));
              } else {
                dz[j] = mine[k].scale *
                        (dz[j] + fmaf(to_dx[k].slope, v[j] - mine[k].mean, to_dx[k].offset));
              }
            }
            WritePiece<T, V, kLast>(a, p.t.dx, piece, Pack<T, V>(dz));
          }
        });
#pragma unroll
        for (int k = 1; k < U; ++k) {
          x_raw[k - 1] = x_raw[k];
          dy_raw[k - 1] = dy_raw[k];
          extra[k - 1] = extra[k];
        }
      }
      if (i >= q.slots) copy(slot, -ahead, -at_ahead);
      if (residual_again) {
        copy_residual(residual_slot, -ahead, -at_ahead);
        residual_slot += kResidualSlot;
        if (residual_slot == residual_ring) residual_slot = 0;
      }
      CopyCommit();
      walk.Backwards(s);
    }
  }
}

}  // namespace

Status TeamBackward(const Context& ctx, const BatchNormProblem& p, const TeamShape& shape,
                    const BackwardTensors& t, Workspace workspace, const std::string& what) {
  BackwardArgs args = MakeBackwardArgs(p, t);
  return WithInstance<true>(p, {t.x, t.dy, t.residual, t.dx, t.dresidual}, [&](auto instance) {
    using I = decltype(instance);
    if constexpr (I::V == 1) {
      return NeedsVectors(what);
    } else {
      return WithTeamForm<I>(p.activation, [&](auto form) {
        const auto kernel =
            TeamBackwardKernel<typename I::T, I::V, I::kLast, decltype(form)::value>;
        size_t kernel_static = 0;
        JAXCONV_RETURN_IF_ERROR(
            StaticSharedMemory(reinterpret_cast<const void*>(kernel), what, &kernel_static));
        TeamFit fit{};
        JAXCONV_RETURN_IF_ERROR(MakeTeamFit(p, I::kLast, I::V, kBackwardStep<typename I::T>, 2,
                                            t.residual != nullptr, kernel_static, shape, workspace,
                                            what, fit));
        args.layout = fit.layout;
        return LaunchTeam(ctx, kernel, args, fit, what);
      });
    }
  });
}

}  // namespace jaxconv::cuda::batchnorm
