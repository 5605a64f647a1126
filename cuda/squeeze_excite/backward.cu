// Squeeze-and-excitation backward (one_pass.cuh):
//
//   dz2 = (sum dy * x) * g'(z2);  dz1 = (dz2 @ w2^T) * f'(z1);  dx = dy * gate + (dz1 @ w1^T) / pixels
//
// dy stays, x is needed for the sums alone: both are read once.
#include "cuda/squeeze_excite/one_pass.cuh"
#include "cuda/squeeze_excite/squeeze_excite.h"

namespace jaxconv::cuda::squeeze_excite {
namespace {

template <typename T, bool kStaged>
__global__ void __launch_bounds__(kBound, 1)
    OnePassKernel(const __grid_constant__ BackwardArgs p, const __grid_constant__ Layout t) {
  constexpr int V = kVectorOf<T>, kImages = kStaged ? 1 : kMostImages;
  extern __shared__ __align__(16) char memory[];
  const Place at = PlaceOf<kImages>(t, V);
  const Shared shared(t, memory);
  const Cluster cluster(t.ctas, shared.barriers, Told<V>(t, at).bytes);
  const int64_t first = (at.image + (at.of < at.images ? at.of : 0)) * t.image_vectors;
  const uint4* x = static_cast<const uint4*>(p.x) + first;
  const uint4* dy = static_cast<const uint4*>(p.dy) + first;
  const Gates<V> gates(t, at, shared, cluster);
  Slab slab(t, at, dy, memory);
  const Weights<kStaged> weights(
      t, p.w1 + int64_t(at.channel + gates.first) * t.hidden, p.dx == nullptr ? 0 : gates.count,
      shared.second, p.w2 + at.channel + at.first_mine, at.mine, shared.first, t.by_sums);
  if constexpr (kStaged) CopyCommit();

  float sum[V] = {};
  const auto add = [&](const uint4& raw_x, const uint4& raw_dy) {
    float a[V], b[V];
    Unpack<T, V>(raw_x, a);
    Unpack<T, V>(raw_dy, b);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = fmaf(a[j], b[j], sum[j]);
  };
  for (uint32_t s = 0; s < slab.held(); s += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (s + u < slab.held()) raw[u] = __ldcs(x + slab.Offset(s + u));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (s + u < slab.held()) add(raw[u], slab.Await(s + u));
  }
  constexpr int kPairs = kAtOnce / 2;
  for (uint32_t s = slab.held(); s < slab.count(); s += kPairs) {
    uint4 raw_x[kPairs], raw_dy[kPairs];
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      if (s + u < slab.count()) {
        raw_x[u] = __ldcs(x + slab.Offset(s + u));
        raw_dy[u] = __ldg(dy + slab.Offset(s + u));
      }
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u)
      if (s + u < slab.count()) add(raw_x[u], raw_dy[u]);
  }
  if constexpr (kStaged) CopyWait<0>();
  SumPixels<V, kImages>(t, at, shared, cluster, sum, [&](int image, int channel, float total) {
    const int64_t place = (at.image + image) * t.channels + at.channel + channel;
    const float dz = total * GatedGrad(t.gating, p.gate[place]);
    shared.mine[image * t.own + channel - at.first_mine] = dz;
    p.dz2[place] = dz;
  });

  DotRows<true, kImages, kStaged>(weights.w2, weights.w2_stride, t.hidden, at.mine, shared.mine,
                                  t.own, at.images, [&](int image, int number, float part) {
                                    const int to = (at.rank * t.images + image) * t.hidden + number;
                                    cluster.PutToAll(kHidden, shared.hidden_parts + to, part);
                                  });
  cluster.Await(kHidden);
  SumHidden<kImages>(t, at, shared, [&](int image, int number, float total) {
    const int64_t place = (at.image + image) * t.hidden + number;
    const float dz = total * ActivateGrad(t.activation, p.z1[place], t.slope);
    shared.hidden[image * t.hidden + number] = dz;
    if (at.rank == 0) p.dz1[place] = dz;
  });
  if (p.dx == nullptr) return;

  DotRows<false, kImages, kStaged>(weights.w1, t.hidden, gates.count, t.hidden, shared.hidden,
                                   t.hidden, at.images, [&](int image, int channel, float total) {
                                     gates.Leave(image, gates.first + channel, total / t.count);
                                   });
  gates.Barrier();
  if (slab.count() == 0) return;

  float gate[V], constant[V];
  gates.Read(constant);
  const int64_t row = (at.image + at.of) * t.channels + at.channel + at.lane * V;
#pragma unroll
  for (int j = 0; j < V; ++j) gate[j] = __ldg(p.gate + row + j);
  uint4* dx = static_cast<uint4*>(p.dx) + first;
  slab.Backwards([&](const uint4& raw, uint32_t place) {
    float v[V];
    Unpack<T, V>(raw, v);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = fmaf(v[j], gate[j], constant[j]);
    dx[place] = Pack<T, V>(v);
  });
}

}  // namespace

Status Backward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                const Device& device, const BackwardArgs& args, const std::string& what) {
  const auto kernel_of = [](auto type, auto staged) {
    return OnePassKernel<decltype(type), decltype(staged)::value>;
  };
  return Launch(ctx, p, plan, device, kernel_of, args, what);
}

}  // namespace jaxconv::cuda::squeeze_excite
