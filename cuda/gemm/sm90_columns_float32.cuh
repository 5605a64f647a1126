// What the TF32 epilogues that keep sums of d's columns share. As sm90_float32.cuh's they work in registers: a thread has two
// rows, 8 apart, of a box of 64 x 64 outputs, and two neighbouring columns of each eight. What is read beside d comes to where d
// goes. Of each box the lanes of a warp halve what they add up, until each has two columns' sums of the warp's 16 rows; these it
// keeps to the end (Sm90OneColumn). Then each warp writes a part, and a second kernel adds the parts up. The order of every
// addition is fixed by the problem and the number of CTAs.
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_float32.cuh"

namespace jaxconv::cuda {

inline constexpr int kFloatParts = 4;  // of a warpgroup

__device__ __forceinline__ int SumsColumn() {
  return threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4 * 2;
}

// What a lane keeps of kChunks * 64 columns: two sums of columns SumsColumn() and the next of each 64.
template <int kChunks>
struct FloatColumnSums {
  __device__ __forceinline__ FloatColumnSums() {
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      sum[i / kChunks][i % kChunks] = make_float2(0.f, 0.f);
    }
  }

  __device__ __forceinline__ void Add(int which, int chunk, const float2& more) {
    sum[which][chunk].x += more.x;
    sum[which][chunk].y += more.y;
  }

  // The parts of the warps of part `part`, of parts (kFloatParts * parts, 2, p.n).
  __device__ __forceinline__ void Write(const Sm90Product& p, const Sm90Place& at, int part,
                                        float* parts) const {
    const int64_t own = part * kFloatParts + threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = at.n + i * 64 + SumsColumn();
      if (column >= p.n) continue;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        *reinterpret_cast<float2*>(parts + (own * 2 + which) * p.n + column) = sum[which][i];
      }
    }
  }

  float2 sum[2][kChunks];
};

// Both warpgroups make a tile: in turns neither two sums nor what lies ahead would have registers.
template <int kRows, int kColumns>
using Sm90SumsTile = Sm90Tile<float, true, true, kRows / 128, kColumns, false, false>;

// A thread's part of box `box` of a tile's block rows and chunks of columns. d: rows of `pitch` elements, one after the other.
template <typename Tile>
struct FloatPart {
  static constexpr int kChunks = Tile::kTileN / 64;

  __device__ __forceinline__ FloatPart(const Sm90Product& p, const Sm90Place& at, int block0,
                                       int box, int64_t pitch) {
    const int lane = threadIdx.x % 32, n = at.n + box % kChunks * 64;
    const int m = at.m + (block0 + box / kChunks) * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    upper = m < p.phase[0].m;
    lower = m + 8 < p.phase[0].m;
    columns = p.n - n;
    first = int64_t(m) * pitch + n + lane % 4 * 2;
    second = first + int64_t(8) * pitch;
  }

  // What lies there in an array like d.
  __device__ __forceinline__ void Load(const float* from, float2 (&two)[2][8]) const {
    LoadFloats(upper ? from + first : nullptr, lower ? from + second : nullptr, columns, two);
  }

  __device__ __forceinline__ void Store(float* to, const float (&v)[32]) const {
    if (upper) StoreFloats(to + first, v, 0, columns);
    if (lower) StoreFloats(to + second, v, 1, columns);
  }

  bool upper, lower;  // whether the row is there
  int columns;        // of the box, those to the last
  int64_t first, second;
};

// Element i of a thread's 32 of a box, in wgmma's order, of what Load brought.
__device__ __forceinline__ float OfBox(const float2 (&two)[2][8], int i) {
  const float2 pair = two[i / 2 % 2][i / 4];
  return i % 2 == 0 ? pair.x : pair.y;
}

// Lanes 2 kHalf apart have sums of the same 2 kHalf columns: each keeps those of one half.
template <int kHalf>
__device__ __forceinline__ void HalveColumns(float (&sum)[16]) {
  const bool last = threadIdx.x & (2 * kHalf);  // keeps the last half
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float a = sum[i], b = sum[i + kHalf];
    sum[i] = (last ? b : a) + __shfl_xor_sync(0xffffffffu, last ? a : b, 2 * kHalf);
  }
}

// The sums of a warp's columns of a box, v of its rows that are there. Lanes 4, 8 and 16 apart have other rows of the same
// columns. What a lane ends with is columns SumsColumn() and the next.
__device__ __forceinline__ float2 SumRows(const float (&v)[32], bool upper, bool lower) {
  float sum[16];  // columns 8j + 2 (lane % 4) and the next
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    sum[i] = (upper ? v[at] : 0.f) + (lower ? v[at + 2] : 0.f);
  }
  HalveColumns<8>(sum);
  HalveColumns<4>(sum);
  HalveColumns<2>(sum);
  return make_float2(sum[0], sum[1]);
}

}  // namespace jaxconv::cuda
