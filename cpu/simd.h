// What the hot loops of cpu/ share: a vector type and function multiversioning. The library is
// compiled for the portable x86-64 baseline (SSE2); a function marked JAXCONV_MULTIVERSION is
// compiled also for AVX2 + FMA and for AVX-512, and the loader picks one. Helpers that such a
// function calls must be inlined into it (JAXCONV_INLINE), otherwise they stay baseline code.
#pragma once

#include <cstdint>

// Needs ifunc (glibc) and the x86-64-v3/v4 names (g++ 12). Elsewhere the baseline is all there is,
// which on 64-bit Arm already has its vector unit. Sanitizer run-times do not survive being called
// from an ifunc resolver.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if __GNUC__ >= 12
#define JAXCONV_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef JAXCONV_MULTIVERSION
#define JAXCONV_MULTIVERSION
#endif

#define JAXCONV_INLINE inline __attribute__((always_inline))

namespace jaxconv::cpu {

// 32 bytes of T, readable from any address that is aligned for T.
template <typename T>
struct Simd {
  typedef T Vector __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  static constexpr int64_t kLanes = 32 / sizeof(T);
};

template <typename T>
JAXCONV_INLINE typename Simd<T>::Vector& VectorAt(T* p) {
  return *reinterpret_cast<typename Simd<T>::Vector*>(p);
}
template <typename T>
JAXCONV_INLINE const typename Simd<T>::Vector& VectorAt(const T* p) {
  return *reinterpret_cast<const typename Simd<T>::Vector*>(p);
}

// x rounded up to whole vectors.
template <typename T>
constexpr int64_t PadToLanes(int64_t x) {
  return (x + Simd<T>::kLanes - 1) / Simd<T>::kLanes * Simd<T>::kLanes;
}

}  // namespace jaxconv::cpu
