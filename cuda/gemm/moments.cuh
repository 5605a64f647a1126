// Count, mean and sum of squares about it of a set of numbers, and those of two sets together.
#pragma once

namespace jaxconv::cuda {

struct Moments {
  float count, mean, m2;
};

// Chan, Golub and LeVeque 1983. A count may be 0.
__device__ __forceinline__ Moments Merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float part = count > 0.f ? __fdividef(b.count, count) : 0.f;
  const float d = b.mean - a.mean;
  return {count, fmaf(d, part, a.mean), fmaf(d * d, a.count * part, a.m2 + b.m2)};
}

}  // namespace jaxconv::cuda
