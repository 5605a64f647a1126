// Squeeze-and-excitation forward (one_pass.cuh): x is read once. Sums over pixels, mean, the hidden numbers and the gate are
// float32.
#include "cuda/squeeze_excite/one_pass.cuh"
#include "cuda/squeeze_excite/squeeze_excite.h"

namespace jaxconv::cuda::squeeze_excite {
namespace {

template <typename T, bool kStaged>
__global__ void __launch_bounds__(kBound, 1)
    OnePassKernel(const __grid_constant__ ForwardArgs p, const __grid_constant__ Layout t) {
  constexpr int V = kVectorOf<T>, kImages = kStaged ? 1 : kMostImages;
  extern __shared__ __align__(16) char memory[];
  const Place at = PlaceOf<kImages>(t, V);
  const Shared shared(t, memory);
  const Cluster cluster(t.ctas, shared.barriers, Told<V>(t, at).bytes);
  const int64_t first = (at.image + (at.of < at.images ? at.of : 0)) * t.image_vectors;
  const uint4* x = static_cast<const uint4*>(p.x) + first;
  const Gates<V> gates(t, at, shared, cluster);
  const int channel = at.channel + gates.first;  // of all
  Slab slab(t, at, x, memory);
  const Weights<kStaged> weights(t, p.w1 + int64_t(at.channel + at.first_mine) * t.hidden, at.mine,
                                 shared.first, p.w2 + channel, gates.count, shared.second,
                                 t.by_gates);
  const Biases<kStaged> biases(t, p.b1, p.b2 + channel, gates.count, shared.biases);
  if constexpr (kStaged) CopyCommit();

  float sum[V] = {};
  const auto add = [&](const uint4& raw) {
    float v[V];
    Unpack<T, V>(raw, v);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += v[j];
  };
#pragma unroll 2
  for (uint32_t s = 0; s < slab.held(); ++s) add(slab.Await(s));
  for (uint32_t s = slab.held(); s < slab.count(); s += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (s + u < slab.count()) raw[u] = __ldg(x + slab.Offset(s + u));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (s + u < slab.count()) add(raw[u]);
  }
  if constexpr (kStaged) CopyWait<0>();
  SumPixels<V, kImages>(t, at, shared, cluster, sum, [&](int image, int channel, float total) {
    const float mean = total / t.count;
    shared.mine[image * t.own + channel - at.first_mine] = mean;
    p.mean[(at.image + image) * t.channels + at.channel + channel] = mean;
  });

  AddRows<false, kImages, kStaged>(
      t.hidden_product, weights.w1, t.hidden, at.mine, t.hidden, shared.mine, t.own, at.images,
      shared.scratch, [&](int image, int number, float part) {
        const int to = (at.rank * t.images + image) * t.hidden + number;
        cluster.PutToAll(kHidden, shared.hidden_parts + to, part);
      });
  cluster.Await(kHidden);
  SumHidden<kImages>(t, at, shared, [&](int image, int number, float total) {
    const float z = total + biases.b1[number];
    shared.hidden[image * t.hidden + number] = Activate(t.activation, z, t.slope);
    if (at.rank == 0) p.z1[(at.image + image) * t.hidden + number] = z;
  });

  AddRows<true, kImages, kStaged>(
      t.gate_product, weights.w2, weights.w2_stride, t.hidden, gates.count, shared.hidden, t.hidden,
      at.images, shared.scratch, [&](int image, int number, float total) {
        const float gate = Gated(t.gating, total + biases.b2[number]);
        gates.Leave(image, gates.first + number, gate);
        if (t.passes_on || at.share == 0)
          p.gate[(at.image + image) * t.channels + channel + number] = gate;
      });
  gates.Barrier();

  float gate[V];
  gates.Read(gate);
  uint4* y = static_cast<uint4*>(p.y) + first;
  slab.Backwards([&](const uint4& raw, uint32_t place) {
    float v[V];
    Unpack<T, V>(raw, v);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] *= gate[j];
    y[place] = Pack<T, V>(v);
  });
}

}  // namespace

Status Forward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
               const Device& device, const ForwardArgs& args, const std::string& what) {
  const auto kernel_of = [](auto type, auto staged) {
    return OnePassKernel<decltype(type), decltype(staged)::value>;
  };
  return Launch(ctx, p, plan, device, kernel_of, args, what);
}

}  // namespace jaxconv::cuda::squeeze_excite
