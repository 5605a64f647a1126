// Vectors held as they were read, so that several loads can be in flight, and their float32 contents.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/convert.cuh"

namespace jaxconv::cuda {

// V elements of T: 16 bytes, or one element.
template <typename T, int V>
using Raw = std::conditional_t<V * sizeof(T) == 16, uint4,
                               std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>>;

template <typename T, int V>
__device__ __forceinline__ void Unpack(const Raw<T, V>& raw, float (&v)[V]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> &&
                V == 8) {  // an instruction each, not two for every other one
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[2 * j] = __uint_as_float(w[j] << 16);
      v[2 * j + 1] = __uint_as_float(w[j] & 0xffff0000u);
    }
  } else {
    const T* e = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = ToFloat(e[j]);
  }
}

__device__ __forceinline__ uint32_t PackPair(__nv_bfloat162 v) {
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t PackPair(__half2 v) {
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Rounds to nearest even.
template <typename T, int V>
__device__ __forceinline__ Raw<T, V> Pack(const float (&v)[V]) {
  Raw<T, V> raw;
  if constexpr (V == 8) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (std::is_same_v<T, __half>) {
        w[j] = PackPair(__floats2half2_rn(v[2 * j], v[2 * j + 1]));
      } else {
        w[j] = PackPair(__floats2bfloat162_rn(v[2 * j], v[2 * j + 1]));
      }
    }
    raw = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int j = 0; j < V; ++j) e[j] = FromFloat<T>(v[j]);
  }
  return raw;
}

}  // namespace jaxconv::cuda
