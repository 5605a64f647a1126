// d = [y > 0] * (sum over k of A[m, k] * B[n, k] + c), and of each column of d, as rounded, its sum and that of its products
// with x - mean.
//
// An epilogue of sm90_resident.cuh with more to read behind the products: what it takes is the time of its bytes: A, c and x
// once, d once. Of 128 columns at a time the ring brings c of the first 64 and of the others, then x of both; y's signs the
// threads load themselves, from a cache. The sums: sm90_columns.cuh; rows beyond the last are zeros in c and x too.
#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_resident.cuh"
#include "cuda/gemm/sm90_sums.cuh"
#include "cuda/gemm/sm90_sums.h"

namespace jaxconv::cuda {

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

template <typename Tile>
struct Sm90NormSums : Sm90EpilogueDefaults {
  using Args = Sm90Sums;
  using T = typename Tile::T;
  static constexpr int kChunks = Tile::kTileN / 64;
  static_assert(Tile::kMatrices && Tile::kBlocks == 1 && Tile::kPairs == 1 && kChunks % 2 == 0);

  static __device__ __forceinline__ int Behind(const Sm90Product&) { return 2 * kChunks; }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args& s,
                                                 const Sm90Place& at, Ring& ring) {
    const auto load = [&](const CUtensorMap& map, int column) {
      const uint32_t full = ring.Claim();
      LoadTile(ring.A(), map, full, column, 0, at.m);
      ring.Advance();
    };
#pragma unroll 1
    for (int i = at.n; i < at.n + Tile::kTileN; i += 128) {
      load(p.c, i);
      load(p.c, i + 64);
      load(s.x, i);
      load(s.x, i + 64);
    }
  }

  __device__ __forceinline__ Sm90NormSums(const Sm90Product&, const Args&, uint32_t shared,
                                          int group, int)
      : outbox(shared, group + 1), group(group) {}

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args& s, const Sm90Place& at) {
    PrefetchSigns(s, at.m + p.resident_step * Tile::kRows, p.phase[0].m, at.n, p.n);
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& s, const Sm90Place& at,
                                         Ring& ring, float (&acc)[1][Tile::kTileN / 2]) {
    const int m_end = p.phase[0].m;
    const auto release = [&](const int (&stage)[2]) {
      ring.Release(stage[0]);
      ring.Release(stage[1]);
    };
    SignBits signs;
    signs.Load(s, at.m, m_end, at.n, p.n);
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      int stage[2];
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        auto& v = reinterpret_cast<float (&)[32]>(acc[0][(i + box) * 32]);
        stage[box] = ring.stage;
        ring.Await();
        ThroughBox<T, false, false>(ring.A(), PlusAdded(), v);
        signs.Choose(box, v);
        ring.Advance();
      }
      ReadsFirst();
      outbox.Open();  // all have read
      release(stage);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        outbox.Put(box, reinterpret_cast<const float (&)[32]>(acc[0][(i + box) * 32]));
      }
      // Not before: the registers of what is on its way out are free now.
      if (i + 2 < kChunks) signs.Load(s, at.m, m_end, at.n + (i + 2) * 64, p.n);
      const uint32_t closed = outbox.Pair();
      outbox.Close([&](uint32_t boxes) {
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          const int column = at.n + (i + box) * 64;
          if (at.m < m_end && column < p.n)
            StoreTile(p.d[0], boxes + box * kBlockBytes, column, 0, at.m);
        }
      });
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        stage[box] = ring.stage;
        ring.Await();
        // Kept in a cache: there are no registers for all chunks'.
        const int column = at.n + (i + box) * 64 + BoxColumns::Column();
        const float2 centre =
            column < p.n ? __ldg(reinterpret_cast<const float2*>(s.mean + column)) : float2{};
        columns.Add(i + box, closed + box * kBlockBytes, ring.A(), centre);
        ring.Advance();
      }
      ReadsFirst();
      NamedBarrier(group + 1, 128);  // all have read
      release(stage);
    }
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& s, const Sm90Place& at,
                                      int part) {
    columns.Write(p, at, part, s.parts);
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnSums<T, kChunks, 2> columns;
  int group;
};

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, const Sm90Sums& to, TileSize tile,
                    int multiprocessors, const std::string& what) {
  if (p.phase[0].m == 0) return Status::Invalid(what + ": there are no rows to sum up");
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kSumsTiles>(tile, what, [&](auto, auto columns) {
    using Tile = Sm90Resident<T, true, 2, 1, decltype(columns)::value>;
    return LaunchSm90Resident<Tile, Sm90NormSums<Tile>>(ctx, p, to, multiprocessors, what,
                                                        MostColumnParts(p.phase[0].m), &count);
  }));
  return LaunchColumnTotals<32, 2>(ctx, to.parts, count, p.n,
                                   Sm90NormTotals{to.rstd, to.dscale, to.dbias}, what);
}

Status LaunchSm90Sums(const Context& ctx, DType dtype, Sm90Product& p, const Sm90Sums& to,
                      TileSize tile, int multiprocessors, const std::string& what) {
  return dtype == DType::kBF16
             ? LaunchByTile<__nv_bfloat16>(ctx, p, to, tile, multiprocessors, what)
             : LaunchByTile<__half>(ctx, p, to, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
