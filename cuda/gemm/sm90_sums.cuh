// d = [y > 0] * (sum over k of A[m, k] * B[n, k] + c), and of each column of d, as rounded, its sum and that of its products
// with x - mean.
//
// sm90_resident.cuh with more to read behind the products: B's columns stay in shared memory, each consumer warpgroup has a
// ring of its own, and what such a product takes is the time of its bytes: A, c and x once, d once. Of 128 columns at a time
// the ring brings c of the first 64 and of the others, then x of both; y's signs the threads load themselves, from a cache.
// The sums are made as sm90_gradient.cuh makes its own: a CTA keeps to one column of tiles; a warpgroup reads its boxes of
// 64 x 64 outputs back from shared memory while TMA stores them, beside x's, a thread 16 rows of two columns, and keeps its
// sums to the end. Rows beyond the last are zeros in A, c and x, and so in d. A second kernel adds the parts up. The order of
// every addition is fixed by the problem and the number of CTAs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/sm90_resident.cuh"
#include "cuda/gemm/sm90_statistics.cuh"  // ColumnMoments, LoadShared
#include "cuda/gemm/sm90_sums.h"

namespace jaxconv::cuda {

// What a thread of a warpgroup knows of kChunks * 64 columns; which rows and columns are its own is ColumnMoments' choice.
template <typename T, int kChunks>
struct ColumnNormSums {
  using Places = ColumnMoments<T, kChunks>;

  // mean: of the tile's first column, of which there are n_left, an even number.
  __device__ __forceinline__ ColumnNormSums(const float* mean, int n_left)
      : mean(mean + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 8 * 2), n_left(n_left) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum[i] = product[i] = float2{};
  }

  // Boxes of 64 rows of d and x, of chunk `chunk`.
  __device__ __forceinline__ void Add(uint32_t d_box, uint32_t x_box, int chunk) {
    uint32_t d_at[2], x_at[2];
    Places::Begin(d_box, d_at);
    Places::Begin(x_box, x_at);
    // Kept in a cache: there are no registers for all chunks'.
    const float2 centre =
        chunk * 64 < n_left ? __ldg(reinterpret_cast<const float2*>(mean + chunk * 64)) : float2{};
    float2 some[2] = {}, products[2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 d = UnpackPair(LoadShared(d_at[i % 2] + i / 2 * 1024), T());
      const float2 x = UnpackPair(LoadShared(x_at[i % 2] + i / 2 * 1024), T());
      some[i % 2].x += d.x;
      some[i % 2].y += d.y;
      products[i % 2].x = fmaf(d.x, x.x - centre.x, products[i % 2].x);
      products[i % 2].y = fmaf(d.y, x.y - centre.y, products[i % 2].y);
    }
    sum[chunk].x += some[0].x + some[1].x;
    sum[chunk].y += some[0].y + some[1].y;
    product[chunk].x += products[0].x + products[1].x;
    product[chunk].y += products[0].y + products[1].y;
  }

  // `to`: sums, and n further products, of the first column. Lanes 8 and 16 apart have other rows of the same columns.
  __device__ __forceinline__ void Write(float* to, int n, int n_left) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float v[4] = {sum[i].x, sum[i].y, product[i].x, product[i].y};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 8);
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 16);
      }
      const int column = i * 64 + warp * 16 + lane % 8 * 2;
      if (lane < 8 && column < n_left) {
        *reinterpret_cast<float2*>(to + column) = make_float2(v[0], v[1]);
        *reinterpret_cast<float2*>(to + n + column) = make_float2(v[2], v[3]);
      }
    }
  }

  const float* mean;  // of the thread's first column
  int n_left;
  float2 sum[kChunks], product[kChunks];
};

// The signs of y in a thread's two rows of 128 columns, in the order of wgmma's registers.
struct SignBits {
  // m: of the tile's first row, n: the first column. A row of signs is a multiple of 16 bytes.
  __device__ __forceinline__ void Load(const Sm90Sums& s, int m, int m_end, int n, int n_end) {
    const int row = m + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const bool inside = row + below * 8 < m_end && n < n_end;
      const int64_t at = int64_t(row + below * 8) * (n_end / 8) + n / 8;
      bits[below] = inside ? __ldg(reinterpret_cast<const uint4*>(s.signs + at)) : uint4{};
    }
  }
  // v, a thread's outputs of the first or second 64 columns, where the bit is set, else 0.
  __device__ __forceinline__ void Choose(int which, float (&v)[32]) const {
    const int shift = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[2];
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint4& row = bits[below];
        words[below] = (which ? half ? row.w : row.z : half ? row.y : row.x) >> shift;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        auto& some = reinterpret_cast<float (&)[4]>(v[(half * 4 + j) * 4]);
        some[0] = words[0] & (1u << (j * 8)) ? some[0] : 0.f;
        some[1] = words[0] & (2u << (j * 8)) ? some[1] : 0.f;
        some[2] = words[1] & (1u << (j * 8)) ? some[2] : 0.f;
        some[3] = words[1] & (2u << (j * 8)) ? some[3] : 0.f;
        Pin(some);  // or the scheduler runs out of registers
      }
    }
  }
  uint4 bits[2];
};

// Brings the signs of a tile's 64 rows nearer, a tile early: the products leave no registers for them, and where there are
// few they take less time than memory.
__device__ __forceinline__ void PrefetchSigns(const Sm90Sums& s, int m, int m_end, int n,
                                              int n_end) {
  const int row = m + threadIdx.x % 128;
  if (threadIdx.x % 128 >= 64 || row >= m_end) return;
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(s.signs + int64_t(row) * (n_end / 8) + n / 8));
}

// A tile's rows of c and x at column n, behind its A.
template <typename Tile>
__device__ __forceinline__ void ProduceSumsTile(const Sm90Product& p, const Sm90Sums& s, int m,
                                                int n, ResidentRing<Tile>& ring) {
  const auto load = [&](const CUtensorMap& map, int column) {
    BarrierWait(ring.Empty(), ring.parity ^ 1);
    BarrierExpect(ring.Full(), Tile::kStageBytes);
    LoadTile(ring.A(), map, ring.Full(), column, 0, m);
    ring.Advance();
  };
#pragma unroll 1
  for (int i = n; i < n + Tile::kTileN; i += 128) {
    load(p.c, i);
    load(p.c, i + 64);
    load(s.x, i);
    load(s.x, i + 64);
  }
}

// d of a warpgroup's tile from the sums of its products, written and added to `columns`.
template <typename Tile>
__device__ __forceinline__ void FinishSumsTile(
    const Sm90Product& p, int m, int n, int group, const Sm90Sums& s, ResidentRing<Tile>& ring,
    Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
    ColumnNormSums<typename Tile::T, Tile::kTileN / 64>& columns, float (&acc)[Tile::kTileN / 2]) {
  using T = typename Tile::T;
  const bool leader = threadIdx.x % 128 == 0;
  SignBits signs;
  signs.Load(s, m, p.phase[0].m, n, p.n);
#pragma unroll
  for (int i = 0; i < Tile::kTileN / 64; i += 2) {
    uint32_t empty[2];
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      auto& v = reinterpret_cast<float (&)[32]>(acc[(i + box) * 32]);
      empty[box] = ring.Empty();
      BarrierWait(ring.Full(), ring.parity);
      AddBox<T>(ring.A(), v);
      signs.Choose(box, v);
      ring.Advance();
    }
    ReadsFirst();
    outbox.Open();  // all have read
    if (leader) {
      BarrierArrive(empty[0]);
      BarrierArrive(empty[1]);
    }
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      outbox.Put(box, reinterpret_cast<const float (&)[32]>(acc[(i + box) * 32]));
    }
    // Not before: the registers of what is on its way out are free now.
    if (i + 2 < Tile::kTileN / 64) signs.Load(s, m, p.phase[0].m, n + (i + 2) * 64, p.n);
    const uint32_t closed = outbox.Pair();
    outbox.Close([&](uint32_t boxes) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int column = n + (i + box) * 64;
        if (m < p.phase[0].m && column < p.n)
          StoreTile(p.d[0], boxes + box * kBlockBytes, column, 0, m);
      }
    });
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      empty[box] = ring.Empty();
      BarrierWait(ring.Full(), ring.parity);
      columns.Add(closed + box * kBlockBytes, ring.A(), i + box);
      ring.Advance();
    }
    ReadsFirst();
    NamedBarrier(group + 1, 128);  // all have read
    if (leader) {
      BarrierArrive(empty[0]);
      BarrierArrive(empty[1]);
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90SumsKernel(const __grid_constant__ Sm90Product p, const __grid_constant__ Sm90Sums s,
                   const int stages) {
#ifdef JAXCONV_SM90A
  static_assert(Tile::kBlocks == 1 && Tile::kPairs == 1 && Tile::kTileN % 128 == 0);
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = SharedAddress(shared_bytes);
  const ResidentParts<Tile> at(shared, p.k_blocks, stages);
  const int n = int(blockIdx.x) * Tile::kTileN;
  const int first = int(blockIdx.y) * Tile::kGroups, step = int(gridDim.y) * Tile::kGroups;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (warp < 4) {
    RegistersDown<Tile::kProducerRegisters>();
    if (warp < Tile::kGroups && threadIdx.x % 32 == 0) {
      ResidentRing<Tile> ring = at.Ring(warp);
      if (warp == 0) {
        PrefetchMap(p.a[0]);
        BarrierExpect(at.b_full, p.k_blocks * Tile::kTileN * 128);
        for (int k = 0; k < p.k_blocks; ++k) {
          LoadTile(shared + k * Tile::kTileN * 128, p.b, at.b_full, k * 64, 0, n, 0);
        }
      }
      for (int tile = first + warp; tile < p.phase[0].tiles_m; tile += step) {
        for (int k = 0; k < p.k_blocks; ++k) {
          BarrierWait(ring.Empty(), ring.parity ^ 1);
          BarrierExpect(ring.Full(), Tile::kStageBytes);
          LoadTile(ring.A(), p.a[0], ring.Full(), k * 64, 0, tile * Tile::kRows);
          ring.Advance();
        }
        ProduceSumsTile(p, s, tile * Tile::kRows, n, ring);
      }
    }
  } else {
    RegistersUp<Tile::kConsumerRegisters>();
    const int group = warp / 4 - 1;
    ResidentRing<Tile> ring = at.Ring(group);
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(at.Outbox(group), group + 1);
    ColumnNormSums<typename Tile::T, Tile::kTileN / 64> columns(s.mean + n, p.n - n);
    BarrierWait(at.b_full, 0);
    for (int tile = first + group; tile < p.phase[0].tiles_m; tile += step) {
      PrefetchSigns(s, (tile + step) * Tile::kRows, p.phase[0].m, n, p.n);
      float acc[1][Tile::kTileN / 2];
      ResidentProducts<Tile>(p, shared, ring, acc);
      FinishSumsTile<Tile>(p, tile * Tile::kRows, n, group, s, ring, outbox, columns, acc[0]);
    }
    columns.Write(s.parts + int64_t(first + group) * 2 * p.n + n, p.n, p.n - n);
    outbox.Drain();
  }
#endif
}

// dbias and dscale from their parts, a warp 32 columns of every 32nd part: what it takes is the time of a few loads in a row.
constexpr int kTotalWarps = 32;
static __global__ void __launch_bounds__(kTotalWarps * 32)
    Sm90SumsTotalKernel(const __grid_constant__ Sm90Sums s, int count, int n) {
  __shared__ float shared[2][kTotalWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = int(blockIdx.x) * 32 + lane;
  float sum = 0.f, product = 0.f;
  if (column < n) {
#pragma unroll 4
    for (int part = warp; part < count; part += kTotalWarps) {
      const float* from = s.parts + int64_t(part) * 2 * n + column;
      sum += __ldcg(from);
      product += __ldcg(from + n);
    }
  }
  shared[0][warp][lane] = sum;
  shared[1][warp][lane] = product;
  __syncthreads();
  if (warp != 0 || column >= n) return;
#pragma unroll
  for (int i = 1; i < kTotalWarps; ++i) {
    sum += shared[0][i][lane];
    product += shared[1][i][lane];
  }
  s.dbias[column] = sum;
  s.dscale[column] = product * s.rstd[column];
}

template <typename Tile>
Status LaunchSm90Sums(const Context& ctx, Sm90Product& p, const Sm90Sums& to, int multiprocessors,
                      const std::string& what) {
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Invalid(what + ": there are no rows to sum up");
  const int stages = Tile::Stages(p.k_blocks);
  // CTAs that share a column of tiles, and two parts of each.
  const unsigned rows = unsigned(
      std::min<int64_t>({CeilDiv(p.phase[0].tiles_m, Tile::kGroups), multiprocessors / p.tiles_n,
                         MostColumnParts(p.phase[0].m) / Tile::kGroups}));
  const auto kernel = Sm90SumsKernel<Tile>;
  const int bytes = ResidentBytes<Tile>(p.k_blocks);
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<dim3(p.tiles_n, rows), Tile::kThreads, bytes, ctx.stream>>>(p, to, stages);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  Sm90SumsTotalKernel<<<unsigned((p.n + 31) / 32), kTotalWarps * 32, 0, ctx.stream>>>(
      to, int(rows) * Tile::kGroups, p.n);
  return LaunchStatus(what + " (sum of parts)");
}

template <typename T>
Status LaunchSm90SumsByTile(const Context& ctx, Sm90Product& p, const Sm90Sums& to, TileSize tile,
                            int multiprocessors, const std::string& what) {
  if (tile == kSumsTiles[0])
    return LaunchSm90Sums<Sm90Resident<T, true, 2, 1, 256>>(ctx, p, to, multiprocessors, what);
  if (tile == kSumsTiles[1])
    return LaunchSm90Sums<Sm90Resident<T, true, 2, 1, 128>>(ctx, p, to, multiprocessors, what);
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
