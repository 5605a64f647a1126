// What the epilogues that keep sums of d's columns share. A warpgroup reads its boxes of 64 x 64 outputs, as rounded, back
// from shared memory while TMA stores them, a thread 16 rows of two columns, and keeps its sums to the end (Sm90OneColumn).
// Rows beyond the last are zeros in A, and so in d. Then each warpgroup writes a part, and a second kernel adds the parts up.
// The order of every addition is fixed by the problem and the number of CTAs.
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(address));
  return word;
}

// A thread's part of each 64 columns: warp w takes columns 16w to 16w + 15, lane l of it two of them, 16w + 2 (l % 8) and
// the next, in rows 8j + 2 (l / 8) and the next of each box: a load of a warp meets every bank once.
struct BoxColumns {
  static __device__ __forceinline__ int Row(int i) {
    return threadIdx.x % 32 / 8 * 2 + i % 2 + i / 2 * 8;
  }
  static __device__ __forceinline__ int Column() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 8 * 2;
  }
  __device__ __forceinline__ explicit BoxColumns(uint32_t box) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x % 128 / 32 * 2 + lane % 8 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) at[i] = box + Row(i) * 128 + (chunk ^ Row(i)) * 16 + lane % 4 * 4;
  }
  // Row i's two columns.
  template <typename T>
  __device__ __forceinline__ float2 Load(int i) const {
    return UnpackPair(LoadShared((i % 2 == 0 ? at[0] : at[1]) + i / 2 * 1024), T());
  }
  uint32_t at[2];  // of rows 0 and 1
};

// What a thread of a warpgroup knows of kChunks * 64 columns of d: their sums, and where kSums is 2 those of d's products with
// what lies in other boxes.
template <typename T, int kChunks, int kSums>
struct ColumnSums {
  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int i = 0; i < kSums * kChunks; ++i) sum[i / kChunks][i % kChunks] = float2{};
  }

  // Boxes of 64 rows of chunk `chunk`: d, and x, of which centre is subtracted.
  __device__ __forceinline__ void Add(int chunk, uint32_t d_box, uint32_t x_box = 0,
                                      float2 centre = {}) {
    const BoxColumns d_columns(d_box), x_columns(x_box);
    float2 part[kSums][2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 d = d_columns.Load<T>(i);
      part[0][i % 2].x += d.x;
      part[0][i % 2].y += d.y;
      if constexpr (kSums > 1) {
        const float2 x = x_columns.Load<T>(i);
        part[1][i % 2].x = fmaf(d.x, x.x - centre.x, part[1][i % 2].x);
        part[1][i % 2].y = fmaf(d.y, x.y - centre.y, part[1][i % 2].y);
      }
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sum[s][chunk].x += part[s][0].x + part[s][1].x;
      sum[s][chunk].y += part[s][0].y + part[s][1].y;
    }
  }

  // Part `part` of parts (parts, kSums, p.n). Lanes 8 and 16 apart have other rows of the same columns.
  __device__ __forceinline__ void Write(const Sm90Product& p, const Sm90Place& at, int part,
                                        float* parts) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float v[2 * kSums];
#pragma unroll
      for (int j = 0; j < 2 * kSums; ++j) {
        v[j] = j % 2 == 0 ? sum[j / 2][i].x : sum[j / 2][i].y;
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 8);
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 16);
      }
      const int column = at.n + i * 64 + BoxColumns::Column();
      if (threadIdx.x % 32 >= 8 || column >= p.n) continue;
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        *reinterpret_cast<float2*>(parts + (int64_t(part) * kSums + s) * p.n + column) =
            make_float2(v[2 * s], v[2 * s + 1]);
      }
    }
  }

  float2 sum[kSums][kChunks];
};

// store(column, sums) of the parts, (count, kSums, n): a warp takes 32 columns of every kWarps-th part, what it takes is the
// time of a few loads in a row.
template <int kWarps, int kSums, typename Store>
__global__ void __launch_bounds__(kWarps * 32)
    ColumnTotalsKernel(const float* parts, int count, int n, const Store store) {
  __shared__ float shared[kSums][kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = int(blockIdx.x) * 32 + lane;
  float sum[kSums] = {};
  if (column < n) {
#pragma unroll 4
    for (int part = warp; part < count; part += kWarps) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        sum[s] += __ldcg(parts + (int64_t(part) * kSums + s) * n + column);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) shared[s][warp][lane] = sum[s];
  __syncthreads();
  if (warp != 0 || column >= n) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sum[s] += shared[s][i][lane];
  }
  store(column, sum);
}

template <int kWarps, int kSums, typename Store>
Status LaunchColumnTotals(const Context& ctx, const float* parts, int count, int n, Store store,
                          const std::string& what) {
  ColumnTotalsKernel<kWarps, kSums>
      <<<unsigned((n + 31) / 32), kWarps * 32, 0, ctx.stream>>>(parts, count, n, store);
  return LaunchStatus(what + " (sum of parts)");
}

}  // namespace jaxconv::cuda
