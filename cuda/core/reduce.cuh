// Sums over the threads of a warp or a block, in an order that depends on the launch shape only.
#pragma once

namespace jaxconv::cuda {

// Every lane gets the sum over the lanes l with l % lanes equal to its own; `lanes` is a power of
// two in [1, 32], so 1 sums the whole warp and 32 sums nothing.
__device__ __forceinline__ float WarpColumnSum(float v, int lanes = 1) {
  for (int o = 16; o >= lanes; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// The block as a matrix of threads with `lanes` columns (a power of two in [1, 32]; the block is
// whole warps): sums each of v[0, N) down the columns. On return, after a barrier, scratch[column *
// N + i] holds the total of v[i] over the threads with threadIdx.x % lanes == column. `scratch` is
// shared memory of (warps * lanes * N) floats.
template <int N>
__device__ __forceinline__ void BlockColumnSums(float (&v)[N], int lanes, float* scratch) {
  // All values at each distance: one after the other they would wait for each other's shuffles.
#pragma unroll 1
  for (int o = 16; o >= lanes; o >>= 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], o);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int columns = lanes * N;
  if (lane < lanes) {
#pragma unroll
    for (int i = 0; i < N; ++i) scratch[warp * columns + lane * N + i] = v[i];
  }
  __syncthreads();
  // Entry c of warp 0's row is read and then overwritten by one and the same thread.
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float total = scratch[c];
#pragma unroll 7
    for (int w = 1; w < warps; ++w) total += scratch[w * columns + c];
    scratch[c] = total;
  }
  __syncthreads();
}

}  // namespace jaxconv::cuda
