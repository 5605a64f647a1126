// The statistics of what a product writes: of each column of d, as rounded,
//
//   mean = sum d / rows;  m2 = sum (d - mean)^2
//
// in float32. A warpgroup reads its boxes of 64 x 64 outputs back from shared memory while TMA
// stores them. A thread takes 16 rows of two columns: two passes over registers, then Chan's
// merging with what it has of these columns; so what is exact in the sums stays exact, whatever the
// mean is. All tiles of a CTA have the same columns, so that the threads keep their moments to the
// end, and a warpgroup makes one part of all its rows. The order of every merging is fixed by the
// problem and the number of CTAs.
//
// What it costs is shared memory, not issue slots: each output is read once more, half of what the
// epilogue moves without. (Exchanging accumulators by shuffles instead moves as much.) On an H200 3x3
// products take 2 to 7 % longer with it, the combining included. A part of each box with its own
// exchange of lanes took 13 to 120 %, a part of each tile up to 25 %.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/moments.cuh"
#include "cuda/gemm/sm90_product.cuh"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda {

__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(address));
  return word;
}

// What a thread of a warpgroup knows of kChunks * 64 columns. Warp w takes columns 16w to 16w + 15
// of each 64, lane l of it two of them, 16w + 2 (l % 8) and the next, in rows 8j + 2 (l / 8) and the
// next of each box: a load of a warp meets every bank once.
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

  static __device__ __forceinline__ int Row(int i) {
    return threadIdx.x % 32 / 8 * 2 + i % 2 + i / 2 * 8;
  }
  // Where rows i % 2 == 0 and 1 begin.
  static __device__ __forceinline__ void Begin(uint32_t box, uint32_t (&at)[2]) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x % 128 / 32 * 2 + lane % 8 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) at[i] = box + Row(i) * 128 + (chunk ^ Row(i)) * 16 + lane % 4 * 4;
  }

  // kCount boxes of 64 whole rows at `box` and after it, of chunks `chunk` and after it.
  template <int kCount>
  __device__ __forceinline__ void AddWhole(uint32_t box, int chunk) {
    const float part = __fdividef(16.f, count + 16.f);
    uint32_t at[2];
    Begin(box, at);
    float2 v[kCount][16];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        v[b][i] = UnpackPair(LoadShared(at[i % 2] + b * kBlockBytes + i / 2 * 1024), T());
      }
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
    uint32_t at[2];
    Begin(box, at);
    float n = count;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (Row(i) >= rows) continue;
      const float2 v = UnpackPair(LoadShared((i % 2 ? at[1] : at[0]) + i / 2 * 1024), T());
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

// Writes the warpgroup's rows of a tile, and adds them to `columns`.
template <typename Tile>
__device__ __forceinline__ void FinishStatisticsTile(
    const Sm90Product& p, const Sm90Place& at, int block0,
    Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
    ColumnMoments<typename Tile::T, Tile::kTileN / 64>& columns,
    const float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  constexpr int kChunks = Tile::kTileN / 64;
  constexpr int kTogether = kChunks > 1 ? 2 : 1;  // boxes of a pair that are of the same rows
  const int m_end = p.phase[0].m;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks * kChunks; ++i) {
    const int block = i / kChunks, chunk = i % kChunks;
    float v[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) v[j] = acc[block][chunk * 32 + j];
    if (i % 2 == 0) outbox.Open();
    outbox.Put(i % 2, v);
    if (i % 2 == 0) continue;
    const uint32_t closed = outbox.Pair();
    outbox.Close([&](uint32_t boxes) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int m = at.m + (block0 + (i - 1 + box) / kChunks) * 64;
        const int n = at.n + (i - 1 + box) % kChunks * 64;
        if (m < m_end && n < p.n) {
          StoreTile(p.d[0], boxes + box * kBlockBytes, n, at.instance, m);
        }
      }
    });
#pragma unroll
    for (int first = 0; first < 2; first += kTogether) {
      const int of = (i - 1 + first) / kChunks, to = (i - 1 + first) % kChunks;
      const int rows = m_end - (at.m + (block0 + of) * 64);
      const uint32_t box = closed + first * kBlockBytes;
      if (rows >= 64) {
        columns.template AddWhole<kTogether>(box, to);
        if (to + kTogether == kChunks) columns.count += 16.f;
      } else if (rows > 0) {
        float n = 0.f;
#pragma unroll
        for (int b = 0; b < kTogether; ++b) {
          n = columns.AddRagged(box + b * kBlockBytes, to + b, rows);
        }
        if (to + kTogether == kChunks) columns.count = n;
      }
    }
  }
}

// What LocateTile takes for the tile in row `row` of column `column`, instance by instance.
__device__ __forceinline__ unsigned TileNumber(unsigned tiles_n, unsigned tiles_m, unsigned column,
                                               unsigned row) {
  const unsigned band = row / kBand * kBand;
  const unsigned height = tiles_m - band < kBand ? tiles_m - band : kBand;
  return column / tiles_n * (tiles_m * tiles_n) + band * tiles_n + column % tiles_n * height + row -
         band;
}

// The CTA's `i`th tile; false behind its last one. CTA c has the column of tiles c % columns, and of
// it the rows c / columns, c / columns + to.rows, ...
template <typename Tile>
__device__ __forceinline__ bool LocateStatisticsTile(const Sm90Product& p, const Sm90Parts& to,
                                                     int i, Sm90Place* at) {
  const unsigned columns = unsigned(p.tiles_n * p.instances),
                 tiles_m = unsigned(p.phase[0].tiles_m);
  const unsigned column = blockIdx.x % columns, row = blockIdx.x / columns + unsigned(i * to.rows);
  if (row >= tiles_m) return false;
  *at = LocateTile<Tile>(p, int(TileNumber(unsigned(p.tiles_n), tiles_m, column, row)));
  return true;
}

// Sm90ProductKernel with these statistics.
template <typename Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90StatisticsKernel(const __grid_constant__ Sm90Product p, const Sm90Parts to) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  Sm90Place at;
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.a[0]);
      PrefetchMap(p.b);
      for (int i = 0; LocateStatisticsTile<Tile>(p, to, i, &at); ++i) ProduceTile(p, at, ring);
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(
        ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes, group + 1);
    const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
    ColumnMoments<typename Tile::T, Tile::kTileN / 64> columns;
    for (int i = 0; LocateStatisticsTile<Tile>(p, to, i, &at); ++i) {
      if (Tile::kPingPong && i % 2 != group) {
        ring.Skip(at.steps);
        continue;
      }
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90MainLoop(ring, group, at.steps, acc);
      FinishStatisticsTile<Tile>(p, at, block0, outbox, columns, acc);
    }
    LocateStatisticsTile<Tile>(p, to, 0, &at);
    const int part = int(blockIdx.x) / (p.tiles_n * p.instances) * 2 + group;
    columns.Write(to.moments + (int64_t(part) * p.instances + at.instance) * p.n + at.n, p.n - at.n,
                  at.n == 0 && at.instance == 0 ? to.counts + part : nullptr);
    outbox.Drain();
  }
#endif
}

template <typename Tile>
Status LaunchSm90Statistics(const Context& ctx, Sm90Product& p, int multiprocessors, Sm90Parts* to,
                            const std::string& what) {
  CountTiles<Tile>(p);
  const int64_t columns = int64_t(p.tiles_n) * p.instances;  // at most the multiprocessors
  const int64_t each = std::min<int64_t>(p.phase[0].tiles_m, multiprocessors / columns);
  to->rows = int(std::min(each, MostStatisticsParts(p.phase[0].m) / 2));
  to->parts = 2 * to->rows;
  auto kernel = Sm90StatisticsKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(to->rows * columns), kSm90Threads, Tile::kSharedBytes, ctx.stream>>>(p, *to);
  return LaunchStatus(what);
}

template <typename T>
Status LaunchSm90StatisticsByTile(const Context& ctx, Sm90Product& p, TileSize tile,
                                  int multiprocessors, Sm90Parts* to, const std::string& what) {
#define JAXCONV_SM90_CASE(rows, columns, blocks, ping_pong)                                  \
  if (tile == TileSize{rows, columns}) {                                                     \
    return LaunchSm90Statistics<Sm90Tile<T, true, false, blocks, columns, ping_pong, true>>( \
        ctx, p, multiprocessors, to, what);                                                  \
  }
  JAXCONV_SM90_CASE(128, 256, 1, false)
  JAXCONV_SM90_CASE(256, 128, 2, false)
  JAXCONV_SM90_CASE(128, 128, 2, true)
  JAXCONV_SM90_CASE(256, 64, 2, false)
#undef JAXCONV_SM90_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
