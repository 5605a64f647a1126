// z again, from x and the statistics of a forward pass, and dz.
#pragma once

#include "cuda/groupnorm/groupnorm.h"
#include "cuda/groupnorm/walk.cuh"

namespace jaxconv::cuda::groupnorm {

// z = (x - mean) * factor + offset, of a vector's channels.
template <int V>
struct Affine {
  float mean[V], factor[V], offset[V];
};

template <int V>
__device__ __forceinline__ Affine<V> ReadAffine(const BackwardArgs& p, int64_t image, int channel) {
  const Walk& w = p.walk;
  const int64_t row = int64_t(uint32_t(image) / w.per_instance) * w.channels + channel;
  Affine<V> a;
  ReadNumbers<V>(p.scale + row, a.factor);
  ReadNumbers<V>(p.bias + row, a.offset);
  ForChannels<V>(w, channel, [&](int j, int group) {
    const int64_t at = image * w.groups + group;
    a.mean[j] = p.mean[at];
    a.factor[j] *= p.rstd[at];
  });
  return a;
}

// x - mean and dz of a vector.
template <typename T, int V, int kActivation>
__device__ __forceinline__ void Backpropagate(const Walk& w, const Affine<V>& a, const Raw<T, V>& x,
                                              const Raw<T, V>& dy, float (&centred)[V],
                                              float (&dz)[V]) {
  Unpack<T, V>(x, centred);
  Unpack<T, V>(dy, dz);
  float z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    centred[j] -= a.mean[j];
    z[j] = fmaf(centred[j], a.factor[j], a.offset[j]);
  }
  Apply<true, kActivation, T>(w.activation, w.slope, z, dz);
}

}  // namespace jaxconv::cuda::groupnorm
