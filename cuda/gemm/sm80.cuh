// The tensor-core product of two tiles in shared memory (sm_80 and later): bfloat16 and float16 by
// mma.m16n8k16, float32 by mma.m16n8k8 with operands rounded to TF32, all summed in float32.
//
// A warp owns kWarpM x kWarpN of the CTA's tile: 4 x 4 (or 2 x 4) mma tiles. A k-tile is two mma
// steps deep, so per step a warp of 64 x 32 reads 6 x 512 bytes of shared memory for 16 mma.
#pragma once

#include "cuda/core/mma.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile.h"

namespace jaxconv::cuda {

// One operand's fragments: where lane `lane` of a warp finds them in a tile, 16 rows (one m16 of A,
// two n8 of B) at a time.
//
// k-major tiles and 16-bit mn-major tiles are read by ldmatrix, four 8 x 8 matrices at a time. A's
// come in the order (m lo, k lo) (m hi, k lo) (m lo, k hi) (m hi, k hi), which is a[0..3]; B's in
// the order (n lo, k lo) (n lo, k hi) (n hi, k lo) (n hi, k hi), which is b[0..1] of two
// neighbouring n8 tiles. float32 mn-major tiles are read word by word, since a transposing ldmatrix
// moves 16-bit elements.
template <typename T, int kExtent, bool kMajorK, bool kIsA>
struct Fragments {
  static constexpr bool kWordwise = !kMajorK && sizeof(T) == 4;
  static constexpr int kStepK = kTileK<T> / 2;  // k per mma

  // mn_warp: the warp's first row in the tile, a multiple of 32.
  JAXCONV_HD Fragments(int mn_warp, int lane) {
    if constexpr (kWordwise) {
      base = TileOffset<T, kExtent, kMajorK>(mn_warp + lane / 4, lane % 4);
    } else {
      const int matrix = lane / 8;
      const int mn_hi = kIsA ? matrix & 1 : matrix >> 1;
      const int k_hi = kIsA ? matrix >> 1 : matrix & 1;
      base =
          kMajorK
              ? TileOffset<T, kExtent, true>(mn_warp + mn_hi * 8 + lane % 8, k_hi * (kStepK / 2))
              : TileOffset<T, kExtent, false>(mn_warp + mn_hi * 8, k_hi * (kStepK / 2) + lane % 8);
    }
  }

  // Byte offset of this lane's row for the 16 rows `block` of the warp, mma step `step`. The
  // swizzle leaves the bits that block and step change free of carries, so they go in by xor or by
  // a constant sum.
  JAXCONV_HD int MatrixOffset(int block, int step) const {
    if constexpr (kMajorK) {
      return (base ^ (step * 32)) + block * 16 * kTileKBytes;
    } else {
      return (base ^ (block * 32)) + step * kStepK * kRowBytes<T, kExtent, false>;
    }
  }

  // Wordwise: element (row `mn` of the warp, a multiple of 8, plus lane / 4; k half `k_hi` plus
  // lane % 4) of step `step`.
  JAXCONV_HD int WordOffset(int mn, int step, int k_hi) const {
    return (base ^ (mn * 4)) + (step * kStepK + k_hi * 4) * kRowBytes<T, kExtent, false>;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ void Load(uint32_t (&r)[4], uint32_t tile, int block, int step) const {
    if constexpr (kWordwise) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int mn_hi = kIsA ? i & 1 : i >> 1;
        const int k_hi = kIsA ? i >> 1 : i & 1;
        asm volatile("ld.shared.b32 %0, [%1];\n"
                     : "=r"(r[i])
                     : "r"(tile + WordOffset(block * 16 + mn_hi * 8, step, k_hi))
                     : "memory");
      }
    } else if constexpr (kMajorK) {
      LoadMatrix(r, tile + MatrixOffset(block, step));
    } else {
      LoadMatrixTransposed(r, tile + MatrixOffset(block, step));
    }
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = RoundToTf32(r[i]);
    }
  }
#endif

  int base;  // bytes
};

#ifdef __CUDACC__

template <typename T_, int kTileM_, int kTileN_, bool kMajorA, bool kMajorB>
struct TensorMath {
  using T = T_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kWarpN = 32;
  static constexpr int kWarpM = kTileM == 128 && kTileN == 128 ? 64 : 32;
  static constexpr int kWarpsN = kTileN / kWarpN;
  static constexpr int kThreads = 32 * (kTileM / kWarpM) * kWarpsN;
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 16;

  __device__ __forceinline__ TensorMath()
      : m_warp(threadIdx.x / 32 / kWarpsN * kWarpM),
        n_warp(threadIdx.x / 32 % kWarpsN * kWarpN),
        a(m_warp, threadIdx.x % 32),
        b(n_warp, threadIdx.x % 32),
        sum{} {}

  __device__ __forceinline__ void Multiply(uint32_t a_tile, uint32_t b_tile) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t fa[kBlocksM][4], fb[kBlocksN][4];
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) a.Load(fa[i], a_tile, i, step);
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) b.Load(fb[j], b_tile, j, step);
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          Mma<T>(sum[i][2 * j], fa[i], fb[j][0], fb[j][1]);
          Mma<T>(sum[i][2 * j + 1], fa[i], fb[j][2], fb[j][3]);
        }
      }
    }
  }

  // The sums, to stage[m][n].
  __device__ __forceinline__ void Store(float* stage) const {
    const int lane = threadIdx.x % 32;
    float* corner = stage + (m_warp + lane / 4) * kStagePitch<kTileN> + n_warp + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kBlocksN; ++j) {
        float* p = corner + i * 16 * kStagePitch<kTileN> + j * 8;
        *reinterpret_cast<float2*>(p) = make_float2(sum[i][j][0], sum[i][j][1]);
        *reinterpret_cast<float2*>(p + 8 * kStagePitch<kTileN>) =
            make_float2(sum[i][j][2], sum[i][j][3]);
      }
    }
  }

  int m_warp, n_warp;
  Fragments<T, kTileM, kMajorA, true> a;
  Fragments<T, kTileN, kMajorB, false> b;
  float sum[kBlocksM][2 * kBlocksN][4];
};

#endif  // __CUDACC__

}  // namespace jaxconv::cuda
