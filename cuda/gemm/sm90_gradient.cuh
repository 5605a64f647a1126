// d = sum * f', computed from c, and of each column of d, as rounded to 16 bits, its sum in float32.
//
// c comes through the ring behind the operands (Sm90AddendStages), so that it is on its way while
// the products run. The sums are made as statistics are (sm90_statistics.cuh): all tiles of a CTA
// have the same columns; a warpgroup reads its boxes of 64 x 64 outputs back from shared memory while
// TMA stores them, a thread 16 rows of two columns, and keeps its sums to the end. Rows beyond the
// last are zeros in A, and so in d. A second kernel adds the parts up. The order of every addition is
// fixed by the problem and the number of CTAs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/sm90_gradient.h"
#include "cuda/gemm/sm90_product.cuh"
#include "cuda/gemm/sm90_statistics.cuh"  // LocateStatisticsTile, LoadShared

namespace jaxconv::cuda {

// What a thread of a warpgroup knows of kChunks * 64 columns; which rows and columns are its own is
// ColumnMoments' choice.
template <typename T, int kChunks>
struct ColumnSums {
  using Places = ColumnMoments<T, kChunks>;

  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum[i][0] = sum[i][1] = 0.f;
  }

  // A box of 64 rows of chunk `chunk`.
  __device__ __forceinline__ void Add(uint32_t box, int chunk) {
    uint32_t at[2];
    Places::Begin(box, at);
    float2 part[2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 v = UnpackPair(LoadShared(at[i % 2] + i / 2 * 1024), T());
      part[i % 2].x += v.x;
      part[i % 2].y += v.y;
    }
    sum[chunk][0] += part[0].x + part[1].x;
    sum[chunk][1] += part[0].y + part[1].y;
  }

  // `to`: of the first column, of which there are n_left, an even number. Lanes 8 and 16 apart have
  // other rows of the same columns.
  __device__ __forceinline__ void Write(float* to, int n_left) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float v[2] = {sum[i][0], sum[i][1]};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 8);
        v[j] += __shfl_xor_sync(0xffffffffu, v[j], 16);
      }
      const int column = i * 64 + warp * 16 + lane % 8 * 2;
      if (lane < 8 && column < n_left) {
        *reinterpret_cast<float2*>(to + column) = make_float2(v[0], v[1]);
      }
    }
  }

  float sum[kChunks][2];
};

// v = back(z, v), z a box of 64 x 64 in shared memory, swizzled; v in the order of wgmma's registers.
template <typename T, typename F>
__device__ __forceinline__ void BackThroughBox(uint32_t box, F back, float (&v)[32]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 columns
    uint32_t pair[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                 : "r"(box + row * 128 + (((j * 2 + lane / 16) ^ (row % 8)) * 16))
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      auto& some = reinterpret_cast<float (&)[4]>(v[j * 8 + i * 2]);
      const float2 left = UnpackPair(pair[i], T()), right = UnpackPair(pair[i + 1], T());
      some[0] = back(left.x, some[0]);
      some[1] = back(left.y, some[1]);
      some[2] = back(right.x, some[2]);
      some[3] = back(right.y, some[3]);
      Pin(some);  // or the scheduler runs out of registers
    }
  }
}

// acc = back(z, acc), z a warpgroup's part of the boxes in the next stages.
template <typename Tile, typename F>
__device__ __forceinline__ void BackThroughRing(Sm90Ring<Tile>& ring, int group, int block0, F back,
                                                float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll
  for (int s = 0; s < Stages::kStages; ++s) {
    ring.Await();
#pragma unroll
    for (int i = 0; i < Stages::kEach; ++i) {
      const int chunk = s * Stages::kEach + i;
      if (chunk >= Stages::kChunks) continue;
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        BackThroughBox<typename Tile::T>(
            ring.A() + (i * Stages::kRowBoxes + block0 + m) * kBlockBytes, back,
            reinterpret_cast<float (&)[32]>(acc[m][chunk * 32]));
      }
    }
    ReadsFirst();
    NamedBarrier(group + 1, 128);  // all have read
    ring.Release(ring.stage);
    ring.Advance();
  }
}

// The piecewise linear activations: f' is 1 in [from, to]; outside it is `below`, or dy is dropped.
struct LinearPieces {
  float from, to, below;
  bool drops;
  __device__ __forceinline__ explicit LinearPieces(const Sm90Epilogue& e)
      : from(e.activation == Activation::kLeakyRelu ? 0.f : 1.4e-45f),   // relu and relu6: z > 0
        to(e.activation == Activation::kRelu6 ? 5.9999995f : INFINITY),  // the last below 6
        below(e.activation == Activation::kLeakyRelu ? e.slope : 1.f),
        drops(e.activation == Activation::kRelu || e.activation == Activation::kRelu6) {}
  __device__ __forceinline__ float operator()(float z, float dy) const {
    return z >= from && z <= to ? dy : drops ? 0.f : dy * below;
  }
};

// One activation's code runs in a launch: each has its own, without branches inside.
template <typename Tile>
__device__ __forceinline__ void BackThroughActivation(
    Sm90Ring<Tile>& ring, int group, int block0, const Sm90Epilogue& e,
    float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#define JAXCONV_BACK(kind, expression)                                                  \
  case Activation::kind:                                                                \
    BackThroughRing(                                                                    \
        ring, group, block0, [](float c, float dy) { return dy * (expression); }, acc); \
    return;
  static_assert(kActivationCount == 10, "a new activation needs its case below");
  switch (e.activation) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kRelu6:
    case Activation::kLeakyRelu:
      BackThroughRing(ring, group, block0, LinearPieces(e), acc);
      return;
      JAXCONV_BACK(kElu, c > 0.f ? 1.f : 1.f + c)
      JAXCONV_BACK(kTanh, fmaf(-c, c, 1.f))
      JAXCONV_BACK(kSigmoid, fmaf(-c, c, c))
      JAXCONV_BACK(kSilu, (ActivateGrad<float, true>(Activation::kSilu, c, 0.f)))
      JAXCONV_BACK(kGelu, (ActivateGrad<float, true>(Activation::kGelu, c, 0.f)))
      JAXCONV_BACK(kGeluExact, (ActivateGrad<float, true>(Activation::kGeluExact, c, 0.f)))
  }
#undef JAXCONV_BACK
}

// The operands of a tile, plain matrices, and c behind them.
template <typename Tile>
__device__ __forceinline__ void ProduceGradientTile(const Sm90Product& p, int m, int n,
                                                    Sm90Ring<Tile>& ring) {
  using Stages = Sm90AddendStages<Tile>;
#pragma unroll 1
  for (int k = 0; k < p.k_blocks; ++k) {
    const uint32_t full = ring.Claim();
    LoadTile(ring.A(), p.a[0], full, k * Tile::kTileK, 0, m);
    LoadB(ring, p.b, full, k * Tile::kTileK, n, 0, 0);
    ring.Advance();
  }
#pragma unroll
  for (int chunk = 0; chunk < Stages::kChunks; chunk += Stages::kEach) {
    constexpr int kBytes = Stages::kEach * Stages::kChunkBytes;
    static_assert(Stages::kChunks % Stages::kEach == 0);
    const uint32_t full = ring.Claim(kBytes);
#pragma unroll
    for (int i = 0; i < Stages::kEach; ++i) {
      LoadTile(ring.A() + i * Stages::kChunkBytes, p.c, full, n + (chunk + i) * 64, 0, m);
    }
    ring.Advance();
  }
}

// Writes the warpgroup's rows of a tile, and adds them to `columns`.
template <typename Tile>
__device__ __forceinline__ void FinishGradientTile(
    const Sm90Product& p, const Sm90Place& at, int block0,
    Sm90Outbox<typename Tile::T, Tile::kPairs>& outbox,
    ColumnSums<typename Tile::T, Tile::kTileN / 64>& columns,
    const float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
  constexpr int kChunks = Tile::kTileN / 64;
  static_assert(Tile::kBlocks * kChunks % 2 == 0);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks * kChunks; i += 2) {
    outbox.Open();
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      outbox.Put(box, reinterpret_cast<const float (&)[32]>(
                          acc[(i + box) / kChunks][(i + box) % kChunks * 32]));
    }
    const uint32_t closed = outbox.Pair();
    outbox.Close([&](uint32_t boxes) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int m = at.m + (block0 + (i + box) / kChunks) * 64;
        const int n = at.n + (i + box) % kChunks * 64;
        if (m < p.phase[0].m && n < p.n) StoreTile(p.d[0], boxes + box * kBlockBytes, n, 0, m);
      }
    });
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      columns.Add(closed + box * kBlockBytes, (i + box) % kChunks);
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90GradientKernel(const __grid_constant__ Sm90Product p, const Sm90Parts to, float* sums) {
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
      PrefetchMap(p.c);
      for (int i = 0; LocateStatisticsTile<Tile>(p, to, i, &at); ++i) {
        ProduceGradientTile(p, at.m, at.n, ring);
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    Sm90Outbox<typename Tile::T, Tile::kPairs> outbox(
        ring.shared + Tile::kStages * Tile::kStageBytes + group * Tile::kOutboxBytes, group + 1);
    const int block0 = Tile::kPingPong ? 0 : group * Tile::kBlocks;
    ColumnSums<typename Tile::T, Tile::kTileN / 64> columns;
    for (int i = 0; LocateStatisticsTile<Tile>(p, to, i, &at); ++i) {
      if (Tile::kPingPong && i % 2 != group) {
        ring.Skip(at.steps + Sm90AddendStages<Tile>::kStages);
        continue;
      }
      float acc[Tile::kBlocks][Tile::kTileN / 2];
      Sm90MainLoop(ring, group, at.steps, acc, [&] {
        if (Tile::kPingPong) ring.Await();
      });
      BackThroughActivation(ring, group, block0, p.epilogue, acc);
      FinishGradientTile<Tile>(p, at, block0, outbox, columns, acc);
    }
    LocateStatisticsTile<Tile>(p, to, 0, &at);
    const int64_t part = int64_t(blockIdx.x) / p.tiles_n * 2 + group;
    columns.Write(sums + part * p.n + at.n, p.n - at.n);
    outbox.Drain();
  }
#endif
}

// sums[n] = the parts of it, a warp 32 columns of every eighth part.
template <typename T>
__global__ void __launch_bounds__(256)
    Sm90GradientSumKernel(const float* parts, int count, int n, T* sums) {
  __shared__ float shared[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = int(blockIdx.x) * 32 + lane;
  float sum = 0.f;
  if (column < n) {
#pragma unroll 4
    for (int part = warp; part < count; part += 8)
      sum += __ldcg(parts + int64_t(part) * n + column);
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= n) return;
  for (int i = 1; i < 8; ++i) sum += shared[i][lane];
  sums[column] = FromFloat<T>(sum);
}

template <typename Tile>
Status LaunchSm90Gradient(const Context& ctx, Sm90Product& p, int multiprocessors, float* parts,
                          void* sums, const std::string& what) {
  CountTiles<Tile>(p);
  const int columns = p.tiles_n;  // at most the multiprocessors
  Sm90Parts to = {};
  to.rows = int(std::min<int64_t>(
      {p.phase[0].tiles_m, multiprocessors / columns, MostColumnParts(p.phase[0].m) / 2}));
  to.parts = 2 * to.rows;
  auto kernel = Sm90GradientKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(to.rows * columns), kSm90Threads, Tile::kSharedBytes, ctx.stream>>>(p, to,
                                                                                        parts);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  using T = typename Tile::T;
  Sm90GradientSumKernel<T><<<unsigned((p.n + 31) / 32), 256, 0, ctx.stream>>>(
      parts, to.parts, p.n, static_cast<T*>(sums));
  return LaunchStatus(what + " (sum of parts)");
}

template <typename T>
Status LaunchSm90GradientByTile(const Context& ctx, Sm90Product& p, TileSize tile,
                                int multiprocessors, float* parts, void* sums,
                                const std::string& what) {
#define JAXCONV_SM90_CASE(rows, columns, blocks, ping_pong)                               \
  if (tile == TileSize{rows, columns}) {                                                  \
    return LaunchSm90Gradient<Sm90Tile<T, true, true, blocks, columns, ping_pong, true>>( \
        ctx, p, multiprocessors, parts, sums, what);                                      \
  }
  JAXCONV_SM90_CASE(128, 256, 1, false)
  JAXCONV_SM90_CASE(256, 128, 2, false)
  JAXCONV_SM90_CASE(128, 128, 2, true)
#undef JAXCONV_SM90_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
