// 16-byte vectors of T and their float32 contents.
#pragma once

#include "cuda/core/convert.cuh"

namespace jaxconv::cuda {

template <typename T>
inline constexpr int kVecWidth = 16 / int(sizeof(T));  // elements in 16 bytes

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Vec {
  T v[kCount];
};

// `p` is aligned to kCount * sizeof(T).
template <typename T, int kCount>
__device__ __forceinline__ void LoadVec(const T* p, float (&out)[kCount]) {
  static_assert(kCount * sizeof(T) <= 16 || kCount * sizeof(T) % 16 == 0);
  constexpr int kPart = kCount * sizeof(T) <= 16 ? kCount : kVecWidth<T>;
#pragma unroll
  for (int part = 0; part < kCount; part += kPart) {
    const Vec<T, kPart> in = *reinterpret_cast<const Vec<T, kPart>*>(p + part);
#pragma unroll
    for (int i = 0; i < kPart; ++i) out[part + i] = ToFloat(in.v[i]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreVec(T* p, const float (&in)[kCount]) {
  static_assert(kCount * sizeof(T) <= 16 || kCount * sizeof(T) % 16 == 0);
  constexpr int kPart = kCount * sizeof(T) <= 16 ? kCount : kVecWidth<T>;
#pragma unroll
  for (int part = 0; part < kCount; part += kPart) {
    Vec<T, kPart> out;
#pragma unroll
    for (int i = 0; i < kPart; ++i) out.v[i] = FromFloat<T>(in[part + i]);
    *reinterpret_cast<Vec<T, kPart>*>(p + part) = out;
  }
}

}  // namespace jaxconv::cuda
