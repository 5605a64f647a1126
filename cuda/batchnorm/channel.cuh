// The arithmetic of one channel: its sums become statistics, and these the coefficients of the walk
// over its elements.
//
// Forward sums are taken about a shift k, a typical element of the channel: s1 = sum (x - k), s2 =
// sum (x - k)^2, so
//   mean = k + s1 / n,  var = s2 / n - (s1 / n)^2
// loses 1 + ((k - mean) / std)^2 ulps of the variance, not 1 + (mean / std)^2. k is the median of
// three elements: one outlier (a padded corner) does not become the shift. Sums about one and the
// same k simply add.
#pragma once

#include "cuda/batchnorm/access.cuh"
#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/layout.h"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {

struct ForwardArgs {
  Layout layout;
  ForwardTensors t;
  const float* sums;  // (2, batch, channels, parts): s1 and s2; null in inference
  int64_t parts;
  int64_t pieces;  // parts per channel tile of the walk that writes
  double
      inv_n;  // 1 / (outer * inner); infinite for an empty channel, whose statistics are then NaN
  double momentum, epsilon;
  Activation activation;
  float slope;
};

struct BackwardArgs {
  Layout layout;
  BackwardTensors t;
  // (2, batch, channels, parts): sum dz and sum dz * (x - mean); null where t.dscale and t.dbias are given
  const float* sums;
  int64_t parts;
  int64_t pieces;
  double inv_n;
  Activation activation;
  float slope;
};

// ReLU's dz is dy or zero, in dy's type too. So the first walk may write it, as dresidual, and the second read that in
// the place of dy and the residual: a pass over the tensor less. Where no dx is wanted there is no second.
inline bool WritesGradientFirst(const BackwardArgs& p) {
  if (p.t.dx == nullptr) return p.t.dresidual != nullptr;
  return p.activation == Activation::kRelu && p.t.residual != nullptr && p.t.dresidual != nullptr;
}

inline ForwardArgs MakeForwardArgs(const BatchNormProblem& p, const ForwardTensors& t) {
  ForwardArgs args{};
  args.t = t;
  args.inv_n = 1.0 / static_cast<double>(p.reduced());
  args.momentum = p.momentum;
  args.epsilon = p.epsilon;
  args.activation = p.activation;
  args.slope = static_cast<float>(p.slope);
  return args;
}

inline BackwardArgs MakeBackwardArgs(const BatchNormProblem& p, const BackwardTensors& t) {
  BackwardArgs args{};
  args.t = t;
  args.inv_n = 1.0 / static_cast<double>(p.reduced());
  args.activation = p.activation;
  args.slope = static_cast<float>(p.slope);
  return args;
}

__device__ __forceinline__ float Median(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// Where three elements of a channel lie, `channel` counting within the tile: one of its first row or image (k = 0), of its
// middle (1) and of its last (2). V does not change which. There are positions.
template <int V, bool kLast>
__device__ __forceinline__ int64_t SampleAt(const Layout& a, int64_t instance, int64_t tile,
                                            int channel, int k) {
  const uint32_t images = kLast ? a.positions : a.positions / a.inner;
  const uint32_t image = k == 0 ? 0 : k == 1 ? images / 2 : images - 1;
  if (kLast) {
    return (Base<kLast>(a, instance, tile, channel / V) + Step<kLast>(a, image)) * V + channel % V;
  }
  return FirstElement(a, instance, tile) + image * a.images + k * (a.image - 1) / 2;
}

template <typename T, int V, bool kLast>
__device__ __forceinline__ float Shift(const Layout& a, const void* x, int64_t instance,
                                       int64_t tile, int channel) {
  if (a.positions == 0) return 0.f;
  float v[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    v[k] = ToFloat(static_cast<const T*>(x)[SampleAt<V, kLast>(a, instance, tile, channel, k)]);
  }
  return Median(v[0], v[1], v[2]);
}

// f(j) for the piece's own elements.
template <int V, bool kLast, typename F>
__device__ __forceinline__ void ForOwn(const Layout& a, const Piece& piece, F&& f) {
  if (kLast || !a.pieces) {
#pragma unroll
    for (int j = 0; j < V; ++j) f(j);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (piece.first + j < a.image) f(j);
    }
  }
}

// A piece of base, zeros beyond the array.
template <typename T, int V, bool kLast>
__device__ __forceinline__ Raw<T, V> ReadPiece(const Layout& a, const void* base,
                                               const Piece& piece) {
  if (kLast || !a.pieces || (piece.at + 1) * V <= a.elements) return Read<T, V>(base, piece.at);
  Raw<T, V> raw{};
  T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (piece.at * V + j < a.elements) e[j] = static_cast<const T*>(base)[piece.at * V + j];
  }
  return raw;
}

// The piece's own elements of v. kAgain: they will be read again.
template <typename T, int V, bool kLast, bool kAgain = false>
__device__ __forceinline__ void WritePiece(const Layout& a, void* base, const Piece& piece,
                                           const Raw<T, V>& v) {
  if (kLast || !a.pieces || (piece.first < a.image && piece.first + V - 1 < a.image)) {
    kAgain ? Write<T, V>(base, piece.at, v) : WriteOnce<T, V>(base, piece.at, v);
    return;
  }
  const T* e = reinterpret_cast<const T*>(&v);
  ForOwn<V, kLast>(a, piece, [&](int j) { static_cast<T*>(base)[piece.at * V + j] = e[j]; });
}

// z = (x - mean) * scale + offset. x - mean comes first: it is exact where mean / std is large.
struct Affine {
  float mean, scale, offset;
};

// A channel's statistics from its sums about `shift`.
struct Statistics {
  double mean, var;
  float rstd;
};

__device__ __forceinline__ Statistics TrainStatistics(const ForwardArgs& p, float shift, float s1,
                                                      float s2) {
  const double offset = s1 * p.inv_n;
  double var = s2 * p.inv_n - offset * offset;
  if (var < 0) var = 0;  // NaN stays
  return {shift + offset, var, static_cast<float>(1.0 / sqrt(var + p.epsilon))};
}

// What rounding took from the mean goes into the offset.
__device__ __forceinline__ Affine ToAffine(const Statistics& s, float scale, float bias) {
  const float rounded = static_cast<float>(s.mean);
  scale *= s.rstd;
  return {rounded, scale, bias - static_cast<float>(s.mean - rounded) * scale};
}

// `at` = instance * channels + channel.
__device__ __forceinline__ void WriteStatistics(const ForwardArgs& p, int64_t at,
                                                const Statistics& s, float old_mean,
                                                float old_var) {
  p.t.mean[at] = static_cast<float>(s.mean);
  p.t.rstd[at] = s.rstd;
  const double keep = p.momentum, take = 1 - p.momentum;
  p.t.new_mean[at] = static_cast<float>(keep * old_mean + take * s.mean);
  p.t.new_var[at] = static_cast<float>(keep * old_var + take * s.var);
}

// Writes the channel's statistics where `write` says so.
__device__ __forceinline__ Affine TrainChannel(const ForwardArgs& p, int64_t at, float shift,
                                               float s1, float s2, bool write) {
  const Statistics s = TrainStatistics(p, shift, s1, s2);
  if (write) WriteStatistics(p, at, s, p.t.old_mean[at], p.t.old_var[at]);
  return ToAffine(s, p.t.scale[at], p.t.bias[at]);
}

__device__ __forceinline__ Affine InferChannel(const ForwardArgs& p, int64_t at) {
  const float rstd = 1.f / sqrtf(p.t.old_var[at] + static_cast<float>(p.epsilon));
  return {p.t.old_mean[at], p.t.scale[at] * rstd, p.t.bias[at]};
}

// The same affine map from the statistics that the forward pass kept. The offset counts only where
// f needs z.
__device__ __forceinline__ Affine SavedChannel(const BackwardArgs& p, int64_t at) {
  const bool needs_z = p.activation != Activation::kNone;
  return {p.t.mean[at], p.t.scale[at] * p.t.rstd[at], needs_z ? p.t.bias[at] : 0.f};
}

// dx = scale * (dz + offset + slope * (x - mean)), scale being Affine's. dz - mean(dz) comes first: with the scale
// multiplied in, its cancellation would be of rounded products.
struct Gradient {
  float slope, offset;
};

// s1 = sum dz, s2 = sum dz * (x - mean).
__device__ __forceinline__ Gradient BackwardChannel(const BackwardArgs& p, int64_t at, float rstd,
                                                    float s1, float s2, bool write) {
  if (write) {
    p.t.dbias[at] = s1;
    p.t.dscale[at] = p.layout.positions > 0 ? s2 * rstd : 0.f;  // an empty channel has no rstd
  }
  const float inv_n = static_cast<float>(p.inv_n);
  return {-rstd * rstd * (s2 * inv_n), -s1 * inv_n};
}

// The same by dscale and dbias over 1 / inv_n elements.
__device__ __forceinline__ Gradient GivenGradient(const BackwardArgs& p, int64_t at) {
  const float inv_n = static_cast<float>(p.inv_n);
  return {-p.t.rstd[at] * (p.t.dscale[at] * inv_n), -p.t.dbias[at] * inv_n};
}

// Adds up one channel's parts, in order.
__device__ __forceinline__ float SumParts(const float* sums, int64_t row, int64_t parts) {
  float sum = 0.f;
  for (int64_t i = 0; i < parts; ++i) sum += sums[row * parts + i];
  return sum;
}

// By a warp.
__device__ __forceinline__ float WarpSumParts(const float* sums, int64_t row, int64_t parts) {
  float sum = 0.f;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32; i < parts; i += 32) sum += sums[row * parts + i];
  return WarpColumnSum(sum);
}

// y's vector from x's: both kernels that write y. kStats = V (channels-last) or 1.
template <typename T, int V, Form kForm, int kStats>
__device__ __forceinline__ Raw<T, V> Normalise(const Raw<T, V>& x, const Raw<T, V>& residual,
                                               bool has_residual, const Affine (&c)[kStats],
                                               Activation activation, float slope) {
  float z[V];
  Unpack<T, V>(x, z);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const Affine& k = c[kStats == 1 ? 0 : j];
    z[j] = fmaf(z[j] - k.mean, k.scale, k.offset);
  }
  if (has_residual) {
    float r[V];
    Unpack<T, V>(residual, r);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] += r[j];
  }
  Apply<false, kForm, sizeof(T) == 2, V>(activation, slope, z, z);
  return Pack<T, V>(z);
}

// dz = dy * f'(z) and the centred x, from which z is recomputed.
template <typename T, int V, Form kForm, int kStats>
__device__ __forceinline__ void Backpropagate(const Raw<T, V>& x, const Raw<T, V>& dy,
                                              const Raw<T, V>& residual, bool has_residual,
                                              const Affine (&c)[kStats], Activation activation,
                                              float slope, float (&centred)[V], float (&dz)[V]) {
  Unpack<T, V>(x, centred);
  Unpack<T, V>(dy, dz);
#pragma unroll
  for (int j = 0; j < V; ++j) centred[j] -= c[kStats == 1 ? 0 : j].mean;
  if (Knows(kForm, Activation::kNone) && activation == Activation::kNone) return;
  float z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const Affine& k = c[kStats == 1 ? 0 : j];
    z[j] = fmaf(centred[j], k.scale, k.offset);
  }
  if (has_residual) {
    float r[V];
    Unpack<T, V>(residual, r);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] += r[j];
  }
  Apply<true, kForm, sizeof(T) == 2, V>(activation, slope, z, dz);
}

template <int V, int kStats>
__device__ __forceinline__ void InputGradientOf(const float (&centred)[V], const float (&dz)[V],
                                                const Affine (&c)[kStats],
                                                const Gradient (&g)[kStats], float (&dx)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int k = kStats == 1 ? 0 : j;
    dx[j] = c[k].scale * fmaf(g[k].slope, centred[j], dz[j] + g[k].offset);
  }
}

template <typename T, int V, int kStats>
__device__ __forceinline__ Raw<T, V> InputGradient(const float (&centred)[V], const float (&dz)[V],
                                                   const Affine (&c)[kStats],
                                                   const Gradient (&g)[kStats]) {
  float dx[V];
  InputGradientOf(centred, dz, c, g, dx);
  return Pack<T, V>(dx);
}

}  // namespace jaxconv::cuda::batchnorm
