// wgrad of a 1x1 convolution of what a batch-norm and its activation make of x, which is in no memory:
//
//   dw[c, k] = sum over pixels of f(x[pixel, c] * s[c] + t[c]) * dy[pixel, k]
//
// As wgrad.cuh, with A, the transpose of x, from registers (gemm/sm90_normalised.cuh): ldmatrix turns x on its way. A thread has
// two channels of each block of 64, and keeps their s and t as long as it makes a tile. Pixels beyond the last are f(t), and
// meet zeros of dy.
//
// 128x128 is made in pairs, which share x: half of the sums of 128x256, but each CTA normalises what both read.
#include <cstdint>
#include <type_traits>

#include "cuda/conv/sm90/wgrad/wgrad.cuh"
#include "cuda/gemm/sm90_normalised.cuh"

namespace jaxconv::cuda {

template <typename Tile, bool kSilu>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Sm90NormalisedWgradKernel(const __grid_constant__ WgradLaunch p,
                              const __grid_constant__ Sm90Normalisation n) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int rank = Tile::kPair ? int(blockIdx.x) % 2 : 0;
  const int part = int(blockIdx.x) / WgradUnit<Tile>::kTiles;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      PrefetchMap(p.dy);
      ForRun(p, part, [&](int64_t tile, int first, int steps) {
        ProduceWgrad(p, LocateWgradTile<Tile>(p, tile, rank), first, steps, ring);
      });
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const int block0 = group * Tile::kBlocks;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    ForRun(p, part, [&](int64_t tile, int first, int steps) {
      const WgradPlace at = LocateWgradTile<Tile>(p, tile, rank);
      float4 affine[Tile::kBlocks][2];  // of rows `row` and `row + 8` of each block
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 v = AffineOf(n, (at.block_m + block0 + m) * 64 + row + i * 8);
          affine[m][i] = make_float4(v.x, v.x, v.y, v.y);
        }
      }
      const auto take = [&](int, Sm90Rows<Tile>& a) {
        ring.Await();
#pragma unroll
        for (int m = 0; m < Tile::kBlocks; ++m) {
          const bool fetched = at.block_m + block0 + m < p.channel_blocks;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (fetched) {
              LoadRows<false>(ring.A() + (block0 + m) * kBlockBytes, j, a[m][j]);
            } else {
#pragma unroll
              for (uint32_t& pair : a[m][j]) pair = 0;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[m][j][i] = NormalisePair<typename Tile::T, kSilu>(a[m][j][i], affine[m][i % 2], n);
            }
          }
        }
      };
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90RowsLoop(ring, steps, take, acc);
      PutWgrad<Tile>(p, at, part, rank, first, steps, block0, 0, acc);
    });
    if constexpr (Tile::kPair) AllowLaunchAfter();
  }
  if constexpr (Tile::kPair) {  // nobody leaves before the other's last arrival
    __syncwarp();
    ClusterSync();
  }
#endif
}

template <typename T>
Status LaunchByTile(const Context& ctx, WgradLaunch& p, Sm90Normalisation& n, TileSize tile,
                    int multiprocessors, const std::string& what) {
  return ForNormalisation<T>(n, [&](auto silu) {
    const auto launch = [&](auto made) {
      using Tile = decltype(made);
      return LaunchWgradPasses<Tile>(ctx, Sm90NormalisedWgradKernel<Tile, decltype(silu)::value>, p,
                                     multiprocessors, what, n);
    };
    if (tile == TileSize{128, 256}) return launch(Sm90NormalisedTile<WgradTile<T, 1, 256>, 0>());
    if (tile == TileSize{256, 64}) return launch(Sm90NormalisedTile<WgradTile<T, 2, 64>, 0>());
    if (tile == kNormalisedPair)
      return launch(Sm90Pair<Sm90NormalisedTile<WgradTile<T, 1, 128>, 0>, false>());
    return Status::Internal(what + ": no launcher");
  });
}

Status LaunchSm90NormalisedWgrad(const Context& ctx, DType dtype, WgradLaunch& p,
                                 Sm90Normalisation n, TileSize tile, int multiprocessors,
                                 const std::string& what) {
  return dtype == DType::kBF16 ? LaunchByTile<__nv_bfloat16>(ctx, p, n, tile, multiprocessors, what)
                               : LaunchByTile<__half>(ctx, p, n, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
