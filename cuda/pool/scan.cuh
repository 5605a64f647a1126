// The taps of V windows that lie side by side in the channels, taken one after another: the maximum, and which tap it is.
//
// For the values v a tap is taken where !(best >= v): of equal ones the first stays, and what follows a NaN takes its
// place, as in lax's select_and_scatter_add with `ge`. The maximum itself keeps a NaN.
#pragma once

#include <cstdint>

#include "cuda/core/extremes.cuh"
#include "cuda/core/vec.cuh"

namespace jaxconv::cuda::pool {

// One element of T in float32, or 16 bytes of float32: an element a register.
template <typename T, int V>
struct Scan {
  using Access = Vec<T, V>;
  static constexpr float kLowest = -__builtin_huge_valf();

  float best[V], max[V];
  unsigned at[V];

  __device__ __forceinline__ Scan() {
#pragma unroll
    for (int i = 0; i < V; ++i) best[i] = max[i] = kLowest, at[i] = 0;
  }
  static __device__ __forceinline__ Access Padding() {
    Access v;
#pragma unroll
    for (int i = 0; i < V; ++i) v.v[i] = FromFloat<T>(kLowest);
    return v;
  }
  template <bool kSave>
  __device__ __forceinline__ void Take(const Access& in, unsigned tap) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float v = ToFloat(in.v[i]);
      max[i] = MaxNan(max[i], v);
      if constexpr (kSave) {
        const bool stays = best[i] >= v;
        best[i] = stays ? best[i] : v;
        at[i] = stays ? at[i] : tap;
      }
    }
  }
  __device__ __forceinline__ Access Max() const {
    Access y;
#pragma unroll
    for (int i = 0; i < V; ++i) y.v[i] = FromFloat<T>(max[i]);
    return y;
  }
  __device__ __forceinline__ Vec<uint8_t, V> Positions() const {
    Vec<uint8_t, V> p;
#pragma unroll
    for (int i = 0; i < V; ++i) p.v[i] = static_cast<uint8_t>(at[i]);
    return p;
  }
};

template <typename T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr unsigned kLowest = 0xff80ff80u;  // -inf, twice
};
template <>
struct PairOf<__half> {
  using type = __half2;
  static constexpr unsigned kLowest = 0xfc00fc00u;
};

// 16 bytes of a 16-bit type: two elements a register, compared and chosen together. (Hopper has the comparison for both
// types; before it bfloat16's is two of float32.)
template <typename T>
struct PairScan {
  using Pair = typename PairOf<T>::type;
  struct alignas(16) Access {
    unsigned v[4];
  };

  unsigned best[4], max[4], at[4];

  __device__ __forceinline__ PairScan() {
#pragma unroll
    for (int i = 0; i < 4; ++i) best[i] = max[i] = PairOf<T>::kLowest, at[i] = 0;
  }
  static __device__ __forceinline__ Access Padding() {
    const unsigned v = PairOf<T>::kLowest;
    return {{v, v, v, v}};
  }
  template <bool kSave>
  __device__ __forceinline__ void Take(const Access& in, unsigned tap) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned v = in.v[i];
      max[i] = Bits(__hmax2_nan(ToPair(max[i]), ToPair(v)));
      if constexpr (kSave) {
        const unsigned stays = __hge2_mask(ToPair(best[i]), ToPair(v));
        best[i] = (best[i] & stays) | (v & ~stays);
        at[i] = (at[i] & stays) | (tap * 0x10001u & ~stays);
      }
    }
  }
  __device__ __forceinline__ Access Max() const { return {{max[0], max[1], max[2], max[3]}}; }
  __device__ __forceinline__ uint2 Positions() const {
    return {__byte_perm(at[0], at[1], 0x6420), __byte_perm(at[2], at[3], 0x6420)};
  }

 private:
  static __device__ __forceinline__ Pair ToPair(unsigned bits) {
    return *reinterpret_cast<const Pair*>(&bits);
  }
  static __device__ __forceinline__ unsigned Bits(Pair pair) {
    return *reinterpret_cast<const unsigned*>(&pair);
  }
};

template <typename T, int V>
struct ScanOf {
  using type = Scan<T, V>;
};
template <>
struct ScanOf<__nv_bfloat16, 8> {
  using type = PairScan<__nv_bfloat16>;
};
template <>
struct ScanOf<__half, 8> {
  using type = PairScan<__half>;
};

}  // namespace jaxconv::cuda::pool
