// What the second kernels of sm90's weight gradients share: blocks of 256 threads add up parts, four outputs a thread,
// kShares threads for the same four.
#pragma once

namespace jaxconv::cuda {

__device__ __forceinline__ void AddFour(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// Adds the shares' sums in order; whether this thread has the result. `shares` holds 256.
template <int kShares>
__device__ __forceinline__ bool AddShares(float4* shares, float4& sum) {
  constexpr int kWidth = 256 / kShares;
  shares[threadIdx.x] = sum;
  __syncthreads();
  if (int(threadIdx.x) / kWidth > 0) return false;
#pragma unroll
  for (int i = 1; i < kShares; ++i) AddFour(sum, shares[i * kWidth + threadIdx.x]);
  return true;
}

}  // namespace jaxconv::cuda
