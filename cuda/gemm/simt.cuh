// The float32 product of two tiles in shared memory by fused multiply-adds: full float32 accuracy,
// no TF32.
//
// A thread owns kRowsM x kRowsN sums. A warp is 4 (m) x 8 (n) threads, so that a read of A meets 4
// and one of B 8 different rows. Of a k-major tile a thread takes rows kThreadsM apart (a read
// holds kDepth k of one row), of an mn-major tile runs of 4 rows (a 16-byte read holds 4 rows of
// one k).
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile.h"

namespace jaxconv::cuda {

// Row in the tile of a thread's i-th value; `thread` counts along this operand's axis, [0,
// kThreadsAlong).
template <bool kMajorK, int kThreadsAlong>
JAXCONV_HD int SimtRow(int thread, int i) {
  return kMajorK ? thread + i * kThreadsAlong : (i / 4 * kThreadsAlong + thread) * 4 + i % 4;
}

// Byte offset in the tile of (that row, k), from the thread's base: the swizzle's bits are disjoint
// from the others.
template <int kExtent, bool kMajorK>
JAXCONV_HD int SimtBase(int thread) {
  return TileOffset<float, kExtent, kMajorK>(kMajorK ? thread : thread * 4, 0);
}
template <int kExtent, bool kMajorK, int kThreadsAlong>
JAXCONV_HD int SimtOffset(int base, int i, int k) {
  if constexpr (kMajorK) {
    return (base ^ (k / 4 * 16)) + k % 4 * 4 + i * kThreadsAlong * kTileKBytes;
  } else {
    return (base ^ (Swizzle<float, false>(k) * 16)) + i / 4 * kThreadsAlong * 16 + i % 4 * 4 +
           k * kRowBytes<float, kExtent, false>;
  }
}

#ifdef __CUDACC__

template <typename T_, int kTileM_, int kTileN_, bool kMajorA, bool kMajorB>
struct SimtMath {
  using T = T_;
  static_assert(sizeof(T) == 4);
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kRowsM = 8;
  static constexpr int kRowsN = kTileM == 128 && kTileN == 128 ? 8 : 4;
  static constexpr int kThreadsM = kTileM / kRowsM, kThreadsN = kTileN / kRowsN;
  static constexpr int kThreads = kThreadsM * kThreadsN;
  // k read at a time. 4 (16-byte reads of k-major tiles) spills at two CTAs of 256 threads an SM.
  static constexpr int kDepth = 2;
  // Steps of kDepth unrolled. Unrolling all eight spills at two CTAs of 256 threads an SM (8 to 48
  // bytes): ptxas reads too far ahead.
  static constexpr int kUnroll = kThreads == 256 ? 1 : 8;

  __device__ __forceinline__ SimtMath() : sum{} {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    thread_m = warp / (kThreadsN / 8) * 4 + lane / 8;
    thread_n = warp % (kThreadsN / 8) * 8 + lane % 8;
    base_a = SimtBase<kTileM, kMajorA>(thread_m);
    base_b = SimtBase<kTileN, kMajorB>(thread_n);
  }

  // out[k][row]: kDepth values of k from k0, the thread's kRows rows.
  template <int kExtent, bool kMajorK, int kThreadsAlong, int kRows>
  static __device__ __forceinline__ void ReadBlock(uint32_t tile, int base, int k0,
                                                   float (&out)[kDepth][kRows]) {
    const auto address = [&](int row, int k) {
      return tile + SimtOffset<kExtent, kMajorK, kThreadsAlong>(base, row, k0 + k);
    };
    if constexpr (kMajorK) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                     : "=f"(out[0][r]), "=f"(out[1][r])
                     : "r"(address(r, 0))
                     : "memory");
      }
    } else {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
#pragma unroll
        for (int r = 0; r < kRows; r += 4) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                       : "=f"(out[k][r]), "=f"(out[k][r + 1]), "=f"(out[k][r + 2]),
                         "=f"(out[k][r + 3])
                       : "r"(address(r, k))
                       : "memory");
        }
      }
    }
  }

  __device__ __forceinline__ void Multiply(uint32_t a_tile, uint32_t b_tile) {
#pragma unroll kUnroll
    for (int k0 = 0; k0 < kTileK<float>; k0 += kDepth) {
      float a[kDepth][kRowsM], b[kDepth][kRowsN];
      ReadBlock<kTileM, kMajorA, kThreadsM>(a_tile, base_a, k0, a);
      ReadBlock<kTileN, kMajorB, kThreadsN>(b_tile, base_b, k0, b);
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
#pragma unroll
        for (int i = 0; i < kRowsM; ++i) {
#pragma unroll
          for (int j = 0; j < kRowsN; ++j) sum[i][j] = fmaf(a[k][i], b[k][j], sum[i][j]);
        }
      }
    }
  }

  __device__ __forceinline__ void Store(float* stage) const {
#pragma unroll
    for (int i = 0; i < kRowsM; ++i) {
      float* row = stage + SimtRow<kMajorA, kThreadsM>(thread_m, i) * kStagePitch<kTileN>;
#pragma unroll
      for (int j = 0; j < kRowsN; ++j) row[SimtRow<kMajorB, kThreadsN>(thread_n, j)] = sum[i][j];
    }
  }

  int thread_m, thread_n;
  int base_a, base_b;  // bytes
  float sum[kRowsM][kRowsN];
};

#endif  // __CUDACC__

}  // namespace jaxconv::cuda
