// Products of what a batch-norm and its activation make of A, which is in no memory (sm90_normalised.cuh):
//
//   d[m, n] = sum over k of f(A[m, k] * s[k] + t[k]) * B[k, n]
//
// The streamed loop of sm90_product.cuh with A from registers. s and t of all k lie in shared memory, made once a CTA. A thread
// has 4 of 16 k: it reads theirs as two vectors for each 16 k, whatever its rows are. Rows beyond the last are f(t), and are not
// stored. A is read once for each column of tiles, d is written once.
#include "cuda/gemm/sm90_normalised.cuh"

#include <cstdint>
#include <type_traits>

#include "cuda/gemm/sm90_moments.cuh"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// d as it is.
template <typename Tile>
struct Sm90Written : Sm90EpilogueDefaults {
  __device__ __forceinline__ Sm90Written(const Sm90Product&, const Args&, uint32_t shared,
                                         int group, int block0)
      : outbox(shared, group + 1), block0(block0) {}

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring&, float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    PutTile<Tile>(p, at, block0, p.d[0], 0, outbox, acc, [](int, uint32_t) {});
  }

  __device__ __forceinline__ void End(const Sm90Product&, const Args&, const Sm90Place&, int) {
    outbox.Drain();
  }

  Sm90Outbox<typename Tile::T, Tile::kPairs> outbox;
  int block0;
};

template <typename Tile, bool kSilu, typename Epilogue>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90NormalisedKernel(const __grid_constant__ Sm90Product p,
                         const __grid_constant__ typename Epilogue::Args args,
                         const __grid_constant__ Sm90Normalisation n) {
#ifdef JAXCONV_SM90A
  using Walk = typename Epilogue::Walk;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.a[0]);
      PrefetchMap(p.b);
      for (Walk walk; walk.More(p); ++walk.round) {
        ProduceTile(p, walk.template Locate<Tile>(p), ring);
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    // (s, s, t, t) of two channels a vector.
    float4* table = reinterpret_cast<float4*>(shared_bytes + Tile::kTableOffset);
    for (int i = int(threadIdx.x) - 128; i < p.k_blocks * 32; i += 256) {
      const float2 first = AffineOf(n, 2 * i), second = AffineOf(n, 2 * i + 1);
      table[i] = make_float4(first.x, second.x, first.y, second.y);
    }
    NamedBarrier(3, 256);
    const int block0 = group * Tile::kBlocks;
    Epilogue epilogue(p, args,
                      ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes,
                      group, block0);
    const auto take = [&](int step, Sm90Rows<Tile>& a) {
      const float4* of_stage = table + step * 32 + threadIdx.x % 4;
      ring.Await();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          LoadRows<true>(ring.A() + (block0 + m) * kBlockBytes, j, a[m][j]);
        }
        const float4 low = of_stage[j * 8], high = of_stage[j * 8 + 4];
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[m][j][i] = NormalisePair<typename Tile::T, kSilu>(a[m][j][i], i < 2 ? low : high, n);
          }
        }
      }
    };
    for (Walk walk; walk.More(p); ++walk.round) {
      const Sm90Place at = walk.template Locate<Tile>(p);
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90RowsLoop(ring, at.steps, take, acc);
      epilogue.Finish(p, args, at, ring, acc);
    }
    epilogue.End(p, args, Walk().template Locate<Tile>(p),
                 int(p.by_columns.Div(blockIdx.x)) * 2 + group);
  }
#endif
}

template <typename Tile, bool kSilu>
Status LaunchWritten(const Context& ctx, Sm90Product& p, const Sm90Normalisation& n,
                     int multiprocessors, const std::string& what) {
  using Epilogue = Sm90Written<Tile>;
  return LaunchSm90Product<Tile>(ctx, Sm90NormalisedKernel<Tile, kSilu, Epilogue>, p,
                                 multiprocessors, what, typename Epilogue::Args(), n);
}

// LaunchSm90Columns with what is normalised.
template <typename Tile, bool kSilu>
Status LaunchMoments(const Context& ctx, Sm90Product& p, const Sm90Normalisation& n,
                     int multiprocessors, StatisticsParts* to, const std::string& what) {
  CountTiles<Tile>(p);
  const int ctas = CtasOfColumn(p, 1, MostColumnParts(p.phase[0].m) / 2, multiprocessors);
  to->parts = 2 * ctas;
  const auto kernel = Sm90NormalisedKernel<Tile, kSilu, Sm90Moments<Tile, false>>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(ctas * p.tiles_n), kSm90Threads, Tile::kSharedBytes, ctx.stream>>>(p, *to, n);
  return LaunchStatus(what);
}

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, Sm90Normalisation& n, TileSize tile,
                    int multiprocessors, StatisticsParts* to, const std::string& what) {
  return ForNormalisation<T>(n, [&](auto silu) {
    return WithTile<kNormalisedTiles>(tile, what, [&](auto rows, auto columns) {
      constexpr bool kSilu = decltype(silu)::value;
      // Both warpgroups make a tile: in turns at 128x128 they would not have the registers.
      using Tile = Sm90NormalisedTile<Sm90Tile<T, true, false, decltype(rows)::value / 128,
                                               decltype(columns)::value, false, true>,
                                      kNormalisedTable>;
      return to != nullptr ? LaunchMoments<Tile, kSilu>(ctx, p, n, multiprocessors, to, what)
                           : LaunchWritten<Tile, kSilu>(ctx, p, n, multiprocessors, what);
    });
  });
}

Status LaunchSm90Normalised(const Context& ctx, DType dtype, Sm90Product& p, Sm90Normalisation n,
                            TileSize tile, int multiprocessors, StatisticsParts* to,
                            const std::string& what) {
  return dtype == DType::kBF16
             ? LaunchByTile<__nv_bfloat16>(ctx, p, n, tile, multiprocessors, to, what)
             : LaunchByTile<__half>(ctx, p, n, tile, multiprocessors, to, what);
}

}  // namespace jaxconv::cuda
