// Maxima and minima that keep a NaN, as lax's: fmaxf and fminf drop it.
#pragma once

namespace jaxconv::cuda {

__device__ __forceinline__ float MaxNan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

__device__ __forceinline__ float MinNan(float a, float b) {
  float min;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(min) : "f"(a), "f"(b));
  return min;
}

}  // namespace jaxconv::cuda
