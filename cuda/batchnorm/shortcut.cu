// The backward pass of two batch-norms that an addition joins, as a residual block's last and its shortcut's:
//
//   z = (x - mean) * rstd * scale + bias + (r - mean_r) * rstd_r * scale_r + bias_r;  y = f(z);  dz = dy * f'(z)
//   dbias = sum dz;  dscale = sum dz * xhat;  dscale_r = sum dz * rhat
//   dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), dr with r's
//
// in two walks, each of which reads x, dy and r through a ring (stream.cuh): z, dz and the second batch-norm's result are in
// no memory. Alone, one after the other, the two batch-norms' backward passes take 12 passes over a tensor, this takes 8.
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/parts.cuh"
#include "cuda/batchnorm/stream.cuh"

namespace jaxconv::cuda::batchnorm {
namespace {

struct ShortcutArgs {
  Layout layout;
  ShortcutTensors t;
  const float* sums;  // (3, channels) of the second walk: dz, dz * (x - mean), dz * (r - mean_r)
  float inv_n;
  Activation activation;
  float slope;
};

// Numbers of a thread's channels. Two of five are in shared memory: in 16 bits registers for all of eight channels' spill.
template <int V>
struct Joined {
  float4 (*held)[V / 4][kStreamThreads];  // scale_r, offset
  int lane;
  float mean[V], scale[V], mean_r[V];

  // By all threads of the block; `held` has two. WalkStream's first barrier is what makes them seen.
  __device__ __forceinline__ Joined(const ShortcutTensors& t, int lanes,
                                    float4 (*held)[V / 4][kStreamThreads])
      : held(held), lane(threadIdx.x % lanes) {
    float scale_r[V], offset[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int64_t c = int64_t{lane} * V + j;
      mean[j] = t.of_x.mean[c];
      scale[j] = t.of_x.scale[c] * t.of_x.rstd[c];
      mean_r[j] = t.of_r.mean[c];
      scale_r[j] = t.of_r.scale[c] * t.of_r.rstd[c];
      offset[j] = t.of_x.bias[c] + t.of_r.bias[c];
    }
    if (threadIdx.x >= lanes) return;
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      held[0][i][lane] = reinterpret_cast<const float4*>(scale_r)[i];
      held[1][i][lane] = reinterpret_cast<const float4*>(offset)[i];
    }
  }

  __device__ __forceinline__ void Read(int which, float (&v)[V]) const {
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      const float4 four = held[which][i][lane];
      v[4 * i] = four.x;
      v[4 * i + 1] = four.y;
      v[4 * i + 2] = four.z;
      v[4 * i + 3] = four.w;
    }
  }

  // dz, and x and r less their means.
  template <typename T, Form kForm>
  __device__ __forceinline__ void Backpropagate(const Raw<T, V> (&v)[kStreamTensors],
                                                const ShortcutArgs& p, const float (&scale_r)[V],
                                                float (&x)[V], float (&r)[V],
                                                float (&dz)[V]) const {
    float z[V];
    Read(1, z);
    Unpack<T, V>(v[0], x);
    Unpack<T, V>(v[1], dz);
    Unpack<T, V>(v[2], r);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[j] -= mean[j];
      r[j] -= mean_r[j];
      z[j] = fmaf(x[j], scale[j], fmaf(r[j], scale_r[j], z[j]));
    }
    Apply<true, kForm, sizeof(T) == 2, V>(p.activation, p.slope, z, dz);
  }
};

__device__ __forceinline__ StreamInput StreamOf(const ShortcutTensors& t) {
  return {{t.x, t.dy, t.r}, 3};
}

// The first walk: parts of the sums, (4, channels, blocks). The last of the four is the third once more.
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kStreamBlock, 1)
    ShortcutSumKernel(const __grid_constant__ ShortcutArgs p, float* sums,
                      const __grid_constant__ StreamShape s) {
  const Layout& a = p.layout;
  __shared__ float4 held[2][V / 4][kStreamThreads];
  const Joined<V> joined(p.t, a.lanes, held);
  float s1[V] = {}, s2[V] = {}, s3[V] = {};
  WalkStream<false, Raw<T, V>>(s, StreamOf(p.t), [&](const Raw<T, V>(&v)[kStreamTensors], int64_t) {
    float scale_r[V], x[V], r[V], dz[V];
    joined.Read(0, scale_r);
    joined.template Backpropagate<T, kForm>(v, p, scale_r, x, r, dz);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      s1[j] += dz[j];
      s2[j] = fmaf(dz[j], x[j], s2[j]);
      s3[j] = fmaf(dz[j], r[j], s3[j]);
    }
  });
  if (threadIdx.x >= kStreamThreads) return;
  const auto sync = [] { NamedBarrier(kStreamBarrier, kStreamThreads); };
  const Place at = {0, blockIdx.x, 0};
  float* scratch = reinterpret_cast<float*>(stream_ring);
  sync();  // the ring is free
  WriteParts<V, true, kStreamThreads>(a, at, gridDim.x, s1, s2, scratch, sums, sync);
  sync();
  WriteParts<V, true, kStreamThreads>(a, at, gridDim.x, s3, s3, scratch,
                                      sums + 2 * a.channels * gridDim.x, sync);
}

// The second walk.
template <typename T, int V, Form kForm>
__global__ void __launch_bounds__(kStreamBlock, 1)
    ShortcutGradientKernel(const __grid_constant__ ShortcutArgs p,
                           const __grid_constant__ StreamShape s) {
  const Layout& a = p.layout;
  __shared__ float4 held[2][V / 4][kStreamThreads];
  const Joined<V> joined(p.t, a.lanes, held);
  const bool writes = blockIdx.x == 0 && threadIdx.x < a.lanes;
  // dx = scale * (dz + shift + slope * (x - mean)), as Gradient (channel.cuh); dr has the same shift.
  float shift[V], slope[V], slope_r[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t c = int64_t{joined.lane} * V + j;
    const float s1 = p.sums[c], s2 = p.sums[a.channels + c], s3 = p.sums[2 * a.channels + c];
    const float rstd = p.t.of_x.rstd[c], rstd_r = p.t.of_r.rstd[c];
    if (writes) {
      p.t.dbias[c] = s1;
      p.t.dscale[c] = s2 * rstd;
      p.t.dscale_r[c] = s3 * rstd_r;
    }
    shift[j] = -s1 * p.inv_n;
    slope[j] = -rstd * rstd * (s2 * p.inv_n);
    slope_r[j] = -rstd_r * rstd_r * (s3 * p.inv_n);
  }
  WalkStream<true, Raw<T, V>>(s, StreamOf(p.t),
                              [&](const Raw<T, V>(&v)[kStreamTensors], int64_t at) {
                                float scale_r[V], x[V], r[V], dz[V];
                                joined.Read(0, scale_r);
                                joined.template Backpropagate<T, kForm>(v, p, scale_r, x, r, dz);
#pragma unroll
                                for (int j = 0; j < V; ++j) {
                                  dz[j] += shift[j];
                                  x[j] = joined.scale[j] * fmaf(slope[j], x[j], dz[j]);
                                  r[j] = scale_r[j] * fmaf(slope_r[j], r[j], dz[j]);
                                }
                                WriteOnce<T, V>(p.t.dx, at, Pack<T, V>(x));
                                WriteOnce<T, V>(p.t.dr, at, Pack<T, V>(r));
                              });
}

// f(FormConstant<...>{}) of the activations that RefuseShortcut lets pass. Those of the other forms would spill.
template <typename F>
Status WithShortcutForm(Activation activation, F&& f) {
  if (activation == Activation::kSilu) return f(FormConstant<Form::kSilu>{});
  if (activation == Activation::kGelu) return f(FormConstant<Form::kGelu>{});
  return f(FormConstant<Form::kRelu>{});
}

}  // namespace

Status ShortcutBackward(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                        const ShortcutTensors& t, Workspace workspace, const std::string& what) {
  ShortcutArgs args{};
  args.t = t;
  args.inv_n = static_cast<float>(1.0 / static_cast<double>(p.reduced()));
  args.activation = p.activation;
  args.slope = static_cast<float>(p.slope);
  return WithInstance(p, {t.x, t.dy, t.r, t.dx, t.dr}, [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    StreamShape stream{};
    args.layout = BlockLayout(p, I::kLast, I::V);
    JAXCONV_RETURN_IF_ERROR(MakeStream<I>(p, 3, splits, what, args.layout, stream));
    if constexpr (I::kLast && I::V > 1) {
      if (stream.blocks > 0) {
        float* sums = static_cast<float*>(workspace.data);
        float* totals = sums + 4 * p.channels * int64_t{stream.blocks};
        return WithShortcutForm(p.activation, [&](auto form) {
          constexpr Form kForm = decltype(form)::value;
          JAXCONV_RETURN_IF_ERROR(LaunchStream(ctx, stream, what + " sums",
                                               ShortcutSumKernel<T, I::V, kForm>, args, sums));
          JAXCONV_RETURN_IF_ERROR(
              AddParts(ctx, 3 * p.channels, stream.blocks, sums, totals, what + " parts"));
          args.sums = totals;
          return LaunchStream(ctx, stream, what + " dx", ShortcutGradientKernel<T, I::V, kForm>,
                              args);
        });
      }
    }
    return Status::Invalid(what + ": its arrays are not at multiples of 16 bytes");
  });
}

}  // namespace jaxconv::cuda::batchnorm
