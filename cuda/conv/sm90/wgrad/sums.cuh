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

// The sum of parts [begin, end), of which from(part) is the address: a thread adds one of kShares shares of them, in order,
// and then the shares are added in order. Whether this thread has the result. For all of a block's threads.
template <int kShares, typename From>
__device__ __forceinline__ bool SumParts(int begin, int end, From&& from, float4* sum) {
  constexpr int kWidth = 256 / kShares;
  const int share = threadIdx.x / kWidth;
  const int first = begin + (end - begin) * share / kShares;
  const int last = begin + (end - begin) * (share + 1) / kShares;
  *sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int part = first; part < last; ++part) AddFour(*sum, __ldcg(from(part)));
  if constexpr (kShares > 1) {
    __shared__ float4 shares[256];
    __syncthreads();  // the last tile's are read
    shares[threadIdx.x] = *sum;
    __syncthreads();
    if (share > 0) return false;
#pragma unroll
    for (int i = 1; i < kShares; ++i) AddFour(*sum, shares[i * kWidth + threadIdx.x]);
  }
  return true;
}

}  // namespace jaxconv::cuda
