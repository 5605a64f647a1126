// The channels-first walk that writes: vectors in the order of memory, whatever channels they are of. A block takes
// kFlatSpan neighbouring elements; the coefficients of the images that they lie in wait in shared memory. An image holds
// more than a vector, so that a vector is of two images at most.
#pragma once

#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/launch.h"

namespace jaxconv::cuda::batchnorm {

constexpr int kFlatVectors = 4;  // of a thread and tensor, on their way together
constexpr int kFlatPairs = 2;    // the same where two tensors are read

// Images of a block that takes U vectors a thread, at most.
template <int U>
constexpr int kFlatImages = kThreads * U + 2;

// A block's place. `a` is of scalar positions. Blocks count from the end: what the first walk read last is in the L2 cache.
template <int V, int U>
struct FlatPlace {
  int64_t first;    // element
  int64_t left;     // elements from there on
  int64_t image;    // that `first` is in, counted over the array
  uint32_t offset;  // of `first` in that image
  int images;       // that the block touches

  __device__ __forceinline__ explicit FlatPlace(const Layout& a) {
    constexpr int kSpan = kThreads * U * V;
    first = (gridDim.x - 1 - int64_t{blockIdx.x}) * kSpan;
    left = a.elements - first;
    image = first / a.image;
    offset = static_cast<uint32_t>(first - image * a.image);
    const uint32_t span = static_cast<uint32_t>(left < kSpan ? left : kSpan);
    images = (offset + span - 1) / a.image + 1;
  }
  // Of the thread's u-th vector: its first element in the block, and the vector.
  __device__ __forceinline__ int Element(int u) const { return (u * kThreads + threadIdx.x) * V; }
  __device__ __forceinline__ int64_t Vector(int u) const {
    return first / V + u * kThreads + threadIdx.x;
  }
  // instance * channels + channel of the block's i-th image.
  __device__ __forceinline__ int64_t Row(const Layout& a, int i) const {
    const int64_t at = image + i;
    const int64_t channel = at % a.channels;
    if (a.batch == 1) return channel;
    return at / (a.channels * (a.positions / a.inner)) * a.channels + channel;
  }
  // own[j] = all[the image of the vector's element j]
  template <typename C>
  __device__ __forceinline__ void Choose(const Layout& a, int u, const C* all, C (&own)[V]) const {
    const uint32_t from_image = offset + Element(u);
    const uint32_t i = OuterOf(a, from_image);
    const uint32_t rest = (i + 1) * a.image - from_image;
#pragma unroll
    for (int j = 0; j < V; ++j) own[j] = all[i + (j >= rest)];
  }
};

template <typename T, int V, int U>
__device__ __forceinline__ Raw<T, V> ReadFlat(const FlatPlace<V, U>& at, const void* base, int u) {
  if (at.Element(u) + V <= at.left) return ReadOnce<T, V>(base, at.Vector(u));
  Raw<T, V> raw{};
  T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (at.Element(u) + j < at.left) e[j] = static_cast<const T*>(base)[at.Vector(u) * V + j];
  }
  return raw;
}

template <typename T, int V, int U>
__device__ __forceinline__ void WriteFlat(const FlatPlace<V, U>& at, void* base, int u,
                                          const Raw<T, V>& v) {
  if (at.Element(u) + V <= at.left) {
    WriteOnce<T, V>(base, at.Vector(u), v);
    return;
  }
  const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (at.Element(u) + j < at.left) static_cast<T*>(base)[at.Vector(u) * V + j] = e[j];
  }
}

}  // namespace jaxconv::cuda::batchnorm
