// The statistics of what a product writes: of each column of d, as rounded,
//
//   mean = sum d / rows;  m2 = sum (d - mean)^2
//
// in float32 (sm90_columns.cuh). Of its 16 rows of two columns a thread makes two passes over registers, then Chan's
// merging with what it has of these columns; so what is exact in the sums stays exact, whatever the
// mean is. A warpgroup makes one part of all its rows.
//
// Products to which a matrix or a bias is added have a kernel of their own: as a branch in one kernel, its code and its
// registers would be the bare product's too.
//
// What it costs is shared memory, not issue slots: each output is read once more, half of what the
// epilogue moves without. (Exchanging accumulators by shuffles instead moves as much.) On an H200 3x3
// products take 2 to 7 % longer with it, the combining included. A part of each box with its own
// exchange of lanes took 13 to 120 %, a part of each tile up to 25 %.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/gemm/moments.cuh"
#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_plain.cuh"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda {

// What a thread of a warpgroup knows of kChunks * 64 columns, those of BoxColumns.
template <typename T, int kChunks>
struct ColumnMoments {
  __device__ __forceinline__ ColumnMoments() { Clear(); }

  __device__ __forceinline__ void Clear() {
    count = 0.f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      mean[i][0] = mean[i][1] = m2[i][0] = m2[i][1] = 0.f;
    }
  }

  // kCount boxes of 64 whole rows at `box` and after it, of chunks `chunk` and after it.
  template <int kCount>
  __device__ __forceinline__ void AddWhole(uint32_t box, int chunk) {
    const float part = __fdividef(16.f, count + 16.f);
    float2 v[kCount][16];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      const BoxColumns columns(box + b * kBlockBytes);
#pragma unroll
      for (int i = 0; i < 16; ++i) v[b][i] = columns.Load<T>(i);
    }
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      float2 sum[2] = {v[b][0], v[b][1]}, square[2] = {};
#pragma unroll
      for (int i = 2; i < 16; ++i) {
        sum[i % 2].x += v[b][i].x;
        sum[i % 2].y += v[b][i].y;
      }
      const float x = (sum[0].x + sum[1].x) * (1.f / 16), y = (sum[0].y + sum[1].y) * (1.f / 16);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float dx = v[b][i].x - x, dy = v[b][i].y - y;
        square[i % 2].x = fmaf(dx, dx, square[i % 2].x);
        square[i % 2].y = fmaf(dy, dy, square[i % 2].y);
      }
      Join(mean[chunk + b][0], m2[chunk + b][0], x, square[0].x + square[1].x, part);
      Join(mean[chunk + b][1], m2[chunk + b][1], y, square[0].y + square[1].y, part);
    }
  }

  __device__ __forceinline__ void Join(float& old_mean, float& old_m2, float new_mean, float new_m2,
                                       float part) const {
    const float d = new_mean - old_mean;
    old_mean = fmaf(d, part, old_mean);
    old_m2 = fmaf(d * d, count * part, old_m2 + new_m2);
  }

  // The first `rows` rows of a box, one after the other: the ragged end of d.
  __device__ __forceinline__ float AddRagged(uint32_t box, int chunk, int rows) {
    const BoxColumns columns(box);
    float n = count;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (BoxColumns::Row(i) >= rows) continue;
      const float2 v = columns.Load<T>(i);
      const float part = 1.f / (n + 1.f), x = v.x - mean[chunk][0], y = v.y - mean[chunk][1];
      mean[chunk][0] = fmaf(x, part, mean[chunk][0]);
      mean[chunk][1] = fmaf(y, part, mean[chunk][1]);
      m2[chunk][0] = fmaf(x * x, n * part, m2[chunk][0]);
      m2[chunk][1] = fmaf(y * y, n * part, m2[chunk][1]);
      n += 1.f;
    }
    return n;
  }

  // Writes the part: `moments` of its first column, of which there are n_left; `rows` where it is
  // this warpgroup's to write, otherwise null.
  __device__ __forceinline__ void Write(float2* moments, int n_left, float* rows) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // Lanes 8 apart exchange a column each, then lanes 16 apart hold halves of the same one.
    const bool second = lane / 8 % 2;
    const float other_count = __shfl_xor_sync(0xffffffffu, count, 8);
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      Moments all = {count, mean[i][0], m2[i][0]};
      Moments other = {count, mean[i][1], m2[i][1]};
      if (second) {
        const Moments swap = all;
        all = other;
        other = swap;
      }
      other.mean = __shfl_xor_sync(0xffffffffu, other.mean, 8);
      other.m2 = __shfl_xor_sync(0xffffffffu, other.m2, 8);
      other.count = other_count;
      all = Merge(all, other);
      other.mean = __shfl_xor_sync(0xffffffffu, all.mean, 16);
      other.m2 = __shfl_xor_sync(0xffffffffu, all.m2, 16);
      other.count = __shfl_xor_sync(0xffffffffu, all.count, 16);
      all = Merge(all, other);
      const int column = i * 64 + warp * 16 + lane % 8 * 2 + second;
      if (lane < 16 && column < n_left) moments[column] = make_float2(all.mean, all.m2);
      total = all.count;
    }
    if (rows != nullptr && threadIdx.x % 128 == 0) *rows = total;
  }

  float count;  // of rows, the same for all columns
  float mean[kChunks][2], m2[kChunks][2];
};

// What a bare product has in the place of Sm90Affine: nothing.
struct Sm90Bare {
  __device__ __forceinline__ Sm90Bare(const Sm90Product&, int, int) {}
};

// kAffine: d = sum + added + bias, as Sm90Plain's.
template <typename Tile, bool kAffine>
struct Sm90Moments : Sm90EpilogueDefaults {
  using Args = StatisticsParts;
  using Walk = Sm90OneColumn;
  using Affine = std::conditional_t<kAffine, Sm90Affine<Tile>, Sm90Bare>;
  using T = typename Tile::T;
  static constexpr int kChunks = Tile::kTileN / 64;
  // Boxes of a pair that are of the same rows
  static constexpr int kTogether = kChunks > 1 ? 2 : 1;
  static_assert(Tile::kBlocks * kChunks % 2 == 0);

  static __device__ __forceinline__ int Behind(const Sm90Product& p) {
    if constexpr (kAffine) return Affine::Behind(p);
    return 0;
  }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args&,
                                                 const Sm90Place& at, Ring& ring) {
    if constexpr (kAffine) Affine::template Produce<false>(p, at, ring);
  }

  __device__ __forceinline__ Sm90Moments(const Sm90Product& p, const Args&, uint32_t shared,
                                         int group, int block0)
      : outbox(shared, group + 1), affine(p, group, block0), block0(block0) {}

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    if constexpr (kAffine) affine.Begin(p, at);
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring& ring,
                                         float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    if constexpr (kAffine) {
      affine.Add(ring, acc);
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        affine.Scale(p, at, p.phase[0].m, block, acc[block]);
      }
    }
    PutTile<Tile>(p, at, block0, p.d[0], 0, outbox, acc, [&](int i, uint32_t pair) {
#pragma unroll
      for (int first = 0; first < 2; first += kTogether) {
        const int block = (i + first) / kChunks, chunk = (i + first) % kChunks;
        const int rows = p.phase[0].m - (at.m + (block0 + block) * 64);
        const uint32_t box = pair + first * kBlockBytes;
        const bool last = chunk + kTogether == kChunks;
        if (rows >= 64) {
          columns.template AddWhole<kTogether>(box, chunk);
          if (last) columns.count += 16.f;
        } else if (rows > 0) {
          float n = 0.f;
#pragma unroll
          for (int b = 0; b < kTogether; ++b) {
            n = columns.AddRagged(box + b * kBlockBytes, chunk + b, rows);
          }
          if (last) columns.count = n;
        }
      }
    });
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& to, const Sm90Place& at,
                                      int part) {
    columns.Write(to.moments + (int64_t(part) * p.instances + at.instance) * p.n + at.n, p.n - at.n,
                  at.n == 0 && at.instance == 0 ? to.counts + part : nullptr);
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnMoments<T, kChunks> columns;
  Affine affine;
  int block0;
};

}  // namespace jaxconv::cuda
