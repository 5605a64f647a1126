// d = f'(x * s + t) * sum over k of A[m, k] * B[n, k], with s = scale * rstd and t = bias - mean * s, and of each column of d, as
// rounded, its sum and that of its products with x - mean.
//
// x comes through the ring behind the operands, and stays there until the sums are taken of it and of d, which lies beside it on
// its way out (sm90_columns.cuh). x of 16 bits loses nothing in x * s + t, so its mean need not be subtracted first. Rows beyond
// the last are zeros in A, and so in d.
#include <cstdint>

#include "cuda/gemm/sm90_norm_gradient.cuh"
#include "cuda/gemm/sm90_normalised.cuh"
#include "cuda/gemm/sm90_resident.cuh"

namespace jaxconv::cuda {

// The tile with tables behind its outboxes.
template <typename Base>
struct ResidentNormTile : Base {
  using Table = ColumnTable<Base::kColumns>;
  static constexpr int kTables = Base::kGroups * Table::kBytes;
  static_assert(kTables % 1024 == 0);  // stages follow
  static constexpr int kOutboxes = Base::kOutboxes + kTables;

  static int Stages(int k_blocks) {
    const int left =
        kSm90SharedBytes - Base::kBarrierBytes - kOutboxes - k_blocks * Base::kTileN * 128;
    return std::min(left / (Base::kGroups * Base::kStageBytes), Base::kMostStages);
  }
  static __device__ __forceinline__ uint32_t TableAt(uint32_t outbox, int group) {
    return outbox + (Base::kGroups - group) * Base::kPairs * Base::kPairBytes +
           group * Table::kBytes;
  }
};

// v = f(z, v), z from a box of x, 64 x 64 16-bit elements in shared memory, swizzled, and from the table of the box's columns;
// v in the order of wgmma's registers.
template <typename T, typename Table, typename F>
__device__ __forceinline__ void ThroughNorm(uint32_t box, const Table& table, int first, const F& f,
                                            float (&v)[32]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns
    uint32_t pair[4];
    LoadRows<true>(box, j, pair);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float4 affine = table.Load(first + j * 16 + i * 4 + threadIdx.x % 4 * 2);
      auto& four = reinterpret_cast<float (&)[4]>(v[j * 8 + i * 2]);
      const float2 upper = UnpackPair(pair[i], T()), lower = UnpackPair(pair[i + 1], T());
      four[0] = f(fmaf(upper.x, affine.x, affine.z), four[0]);
      four[1] = f(fmaf(upper.y, affine.y, affine.w), four[1]);
      four[2] = f(fmaf(lower.x, affine.x, affine.z), four[2]);
      four[3] = f(fmaf(lower.y, affine.y, affine.w), four[3]);
      Pin(four);  // or the scheduler runs out of registers
    }
  }
}

// What both loops' epilogues have.
template <typename Tile>
struct NormGradientColumns : Sm90EpilogueDefaults {
  using Args = Sm90NormGradientArgs;
  using T = typename Tile::T;
  static constexpr int kChunks = Tile::kTileN / 64;

  __device__ __forceinline__ NormGradientColumns(const Sm90Product& p, const Args& g,
                                                 uint32_t shared, int group)
      : outbox(shared, group + 1),
        table(Tile::TableAt(shared, group), Sm90OneColumn().template Locate<Tile>(p).n, p.n,
              group + 1,
              [&](int column) {
                const float s = g.scale[column] * g.rstd[column];
                return make_float2(s, fmaf(-g.mean[column], s, g.bias[column]));
              }),
        group(group) {}

  // Boxes of d and x of chunk `chunk`.
  __device__ __forceinline__ void Add(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                      int chunk, uint32_t d_box, uint32_t x_box) {
    const int column = at.n + chunk * 64 + BoxColumns::Column();
    columns.Add(chunk, d_box, x_box, MeansOf(g.mean, column, p.n));
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                      int part) {
    columns.Write(p, at, part, g.parts);
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnSums<T, kChunks, 2> columns;
  typename Tile::Table table;
  int group;
};

template <typename Tile>
struct StreamedNormGradient : NormGradientColumns<Tile> {
  using Base = NormGradientColumns<Tile>;
  using typename Base::Args;
  using Walk = Sm90OneColumn;
  using Stages = Sm90AddendStages<Tile>;
  static constexpr int kChunks = Base::kChunks;
  static constexpr int kProducer = 40, kConsumer = 232;  // as Sm90Gradient's
  static_assert(Stages::kStages == 1);

  static __device__ __forceinline__ int Behind(const Sm90Product&) { return 1; }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args&,
                                                 const Sm90Place& at, Ring& ring) {
    ProduceBoxes<Tile>(ring, [&](uint32_t to, uint32_t full, int chunk) {
      LoadTile(to, p.c, full, at.n + chunk * 64, 0, at.m);
    });
  }

  __device__ __forceinline__ StreamedNormGradient(const Sm90Product& p, const Args& g,
                                                  uint32_t shared, int group, int block0)
      : Base(p, g, shared, group), block0(block0) {}

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                         Ring& ring,
                                         float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    const LinearPieces f(p.epilogue);
    const int stage = ring.stage;
    const uint32_t boxes = ring.A() + block0 * kBlockBytes;
    ring.Await();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        ThroughNorm<typename Base::T>(boxes + chunk * Stages::kChunkBytes + m * kBlockBytes,
                                      this->table, chunk * 64, f,
                                      reinterpret_cast<float (&)[32]>(acc[m][chunk * 32]));
      }
    }
    ring.Advance();
    PutTile<Tile>(p, at, block0, p.d[0], 0, this->outbox, acc, [&](int i, uint32_t pair) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int m = (i + box) / kChunks, chunk = (i + box) % kChunks;
        this->Add(p, g, at, chunk, pair + box * kBlockBytes,
                  boxes + chunk * Stages::kChunkBytes + m * kBlockBytes);
      }
    });
    ReadsFirst();
    NamedBarrier(this->group + 1, 128);  // all have read
    ring.Release(stage);
  }

  int block0;
};

template <typename Tile>
struct ResidentNormGradient : NormGradientColumns<Tile> {
  using Base = NormGradientColumns<Tile>;
  using typename Base::Args;
  static constexpr int kChunks = Base::kChunks;
  static_assert(Tile::kMatrices && Tile::kBlocks == 1 && Tile::kPairs == 1 && kChunks % 2 == 0);

  static __device__ __forceinline__ int Behind(const Sm90Product&) { return kChunks; }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args&,
                                                 const Sm90Place& at, Ring& ring) {
#pragma unroll 1
    for (int i = at.n; i < at.n + Tile::kTileN; i += 64) {
      const uint32_t full = ring.Claim();
      LoadTile(ring.A(), p.c, full, i, 0, at.m);
      ring.Advance();
    }
  }

  __device__ __forceinline__ ResidentNormGradient(const Sm90Product& p, const Args& g,
                                                  uint32_t shared, int group, int)
      : Base(p, g, shared, group) {}

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                         Ring& ring, float (&acc)[1][Tile::kTileN / 2]) {
    const int m_end = p.phase[0].m;
    const LinearPieces f(p.epilogue);
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      int stage[2];
      uint32_t boxes[2];
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        auto& v = reinterpret_cast<float (&)[32]>(acc[0][(i + box) * 32]);
        stage[box] = ring.stage;
        boxes[box] = ring.A();
        ring.Await();
        ThroughNorm<typename Base::T>(boxes[box], this->table, (i + box) * 64, f, v);
        ring.Advance();
      }
      this->outbox.Open();
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        this->outbox.Put(box, reinterpret_cast<const float (&)[32]>(acc[0][(i + box) * 32]));
      }
      const uint32_t closed = this->outbox.Pair();
      this->outbox.Close([&](uint32_t at_boxes) {
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          const int column = at.n + (i + box) * 64;
          if (at.m < m_end && column < p.n)
            StoreTile(p.d[0], at_boxes + box * kBlockBytes, column, 0, at.m);
        }
      });
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        this->Add(p, g, at, i + box, closed + box * kBlockBytes, boxes[box]);
      }
      ReadsFirst();
      NamedBarrier(this->group + 1, 128);  // all have read
      ring.Release(stage[0]);
      ring.Release(stage[1]);
    }
  }
};

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, const Sm90NormGradientArgs& to,
                    TileSize tile, bool resident, int multiprocessors, const std::string& what) {
  if (p.phase[0].m == 0) return Status::Invalid(what + ": there are no rows to sum up");
  int count = 0;
  if (resident) {
    JAXCONV_RETURN_IF_ERROR(WithTile<kSumsTiles>(tile, what, [&](auto, auto columns) {
      using Tile = ResidentNormTile<Sm90Resident<T, true, 2, 1, decltype(columns)::value>>;
      return LaunchSm90Resident<Tile, ResidentNormGradient<Tile>>(
          ctx, p, to, multiprocessors, what, MostColumnParts(p.phase[0].m), &count);
    }));
  } else {
    JAXCONV_RETURN_IF_ERROR(WithTile<kNormGradientTiles>(tile, what, [&](auto rows, auto columns) {
      using Tile = StreamedNormTile<
          Sm90TileOf<T, true, true, decltype(rows)::value, decltype(columns)::value>>;
      return LaunchSm90Columns<Tile, StreamedNormGradient<Tile>>(ctx, p, to, multiprocessors, what,
                                                                 &count);
    }));
  }
  return LaunchColumnTotals<32, 2>(ctx, to.parts, count, p.n,
                                   Sm90NormTotals{to.rstd, to.dscale, to.dbias}, what);
}

Status LaunchSm90NormGradient(const Context& ctx, DType dtype, Sm90Product& p,
                              const Sm90NormGradientArgs& to, TileSize tile, bool resident,
                              int multiprocessors, const std::string& what) {
  return dtype == DType::kBF16
             ? LaunchByTile<__nv_bfloat16>(ctx, p, to, tile, resident, multiprocessors, what)
             : LaunchByTile<__half>(ctx, p, to, tile, resident, multiprocessors, what);
}

}  // namespace jaxconv::cuda
