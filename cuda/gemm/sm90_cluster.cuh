// Products of few rows, in one launch: the CTAs of a cluster share the sum of a tile.
//
//   d[m, n] = f(alpha * sum over (tap, k) of A[m, (tap, k)] * B[(tap, k), n] + beta * c + bias)
//
// 16 bit and TF32, sm_90a; the fields of Sm90Product as in sm90_product.cuh, one phase, k-major A, B
// either way, and d, z and c as they lie: row m of an instance is row_d elements behind row m - 1.
//
// Grid (splits, tiles), clusters of `splits` CTAs. CTA r of a cluster sums its part of the steps (128
// bytes of k of a tap each), leaves 64 x kTileN or 128 x kTileN float32 sums in its shared memory, and
// finishes every splits-th part of the tile: it reads the others' sums, in the order of the parts, so
// the bits do not depend on who comes first. A CTA has one warp that fetches and one warpgroup that
// multiplies.
//
// A tile of 49 pixels of a 3x3 convolution of 512 channels is 72 steps: a CTA alone takes 24 us for
// them, eight take 9 steps each, and what is left is the way of the first bytes from memory. Where
// there are fewer rows than a tile's, no more than box_rows of them are fetched; the stage's others hold
// what was there before, and so do sums that nobody reads.
//
// TF32 takes operands in shared memory k-major only, and a filter of few rows is read once: a transposed
// copy would cost more than the product. So where B is n-major its columns are the tensor cores' rows,
// which come from registers, and A's rows their columns: the sums are d's transpose.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/core/activate.cuh"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

inline constexpr int kClusterThreads = 160;

template <typename T_, bool kMajorB_, int kBlocks_, int kTileN_>
struct Sm90ClusterTile {
  using T = T_;
  static constexpr bool kMajorB = kMajorB_;
  // B's columns are the tensor cores' rows, from registers; the sums are d's transpose.
  static constexpr bool kTurned = std::is_same_v<T, float> && !kMajorB;
  static constexpr int kBlocks = kBlocks_;  // of 64 rows
  static constexpr int kTileN = kTileN_;
  static constexpr int kRows = kBlocks * 64, kColumns = kTileN;
  static constexpr int kTileK = 128 / int(sizeof(T));
  // Of a thread's sums: blocks of 64 of the tensor cores' rows, and what it has of each.
  static constexpr int kSumBlocks = kTurned ? kTileN / 64 : kBlocks;
  static constexpr int kSums = (kTurned ? kRows : kTileN) / 2;
  static constexpr int kBytesA = kBlocks * kBlockBytes, kBytesB = kTileN * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // Arrivals that free a stage. Warps that read B into registers do so at their own pace.
  static constexpr int kReaders = kTurned ? 4 : 1;
  // Most parts have no more steps than stages, so that all that they read is on its way at once.
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  // Floats from a row of sums to the next, so that what is stored together hardly meets: pairs of rows 8
  // banks apart; turned, two or four neighbouring columns of every other row.
  static constexpr int kSumStride = kTileN + (kTurned ? 4 : 8);
  static constexpr int kSumBytes = kRows * kSumStride * 4;  // where the stages were
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;
  static_assert(kTileN == 64 || kTileN == 128);
  static_assert(kSumBytes <= kBarriers && kSharedBytes <= kSm90SharedBytes);
};

__device__ __forceinline__ void LoadFourFrom(uint32_t address, uint32_t cta, float (&v)[4]) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
      : "r"(address), "r"(cta)
      : "memory");
}

// Eight neighbouring elements, 16-byte aligned.
template <typename T>
__device__ __forceinline__ void LoadEight(const void* from, int64_t at, float (&v)[8]) {
  const uint4 c = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at));
  const uint32_t pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = UnpackPair(pairs[i], T());
    v[i * 2] = two.x;
    v[i * 2 + 1] = two.y;
  }
}
template <>
__device__ __forceinline__ void LoadEight<float>(const void* from, int64_t at, float (&v)[8]) {
  const float4* fours = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = __ldg(fours + i);
    v[i * 4] = four.x, v[i * 4 + 1] = four.y, v[i * 4 + 2] = four.z, v[i * 4 + 3] = four.w;
  }
}

template <typename T>
__device__ __forceinline__ void StoreEight(void* to, int64_t at, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(static_cast<T*>(to) + at) =
      make_uint4(PackHalves(v[0], v[1], T()), PackHalves(v[2], v[3], T()),
                 PackHalves(v[4], v[5], T()), PackHalves(v[6], v[7], T()));
}
template <>
__device__ __forceinline__ void StoreEight<float>(void* to, int64_t at, const float (&v)[8]) {
  float4* fours = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
  fours[0] = make_float4(v[0], v[1], v[2], v[3]);
  fours[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Eight neighbouring outputs of row m from column n on.
template <typename T>
__device__ __forceinline__ void FinishEight(const Sm90Product& p, int instance, int m, int n,
                                            float (&v)[8]) {
  const Sm90Epilogue& e = p.epilogue;
  const int64_t in_instance = m * p.row_d + n, at = instance * p.instance_d + in_instance;
#pragma unroll
  for (float& one : v) one *= e.alpha;
  if (e.c != nullptr) {
    float c[8];
    LoadEight<T>(e.c, instance * e.stride_c + in_instance, c);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fmaf(e.beta, c[i], v[i]);
  }
  if (e.bias_kind == BiasKind::kColumn) {
    float b[8];
    LoadEight<T>(e.bias, instance * e.stride_bias + n, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += b[i];
  } else if (e.bias_kind != BiasKind::kNone) {
    const float b = ToFloat(static_cast<const T*>(
        e.bias)[instance * e.stride_bias + (e.bias_kind == BiasKind::kRow ? m : 0)]);
#pragma unroll
    for (float& one : v) one += b;
  }
  if (e.save_z) StoreEight<T>(p.plain_z, at, v);
  ActivateAll(e.activation, e.slope, v);
  StoreEight<T>(p.plain_d, at, v);
}

// The steps [begin, end) of a tile, counted over all taps.
template <typename Tile>
__device__ __forceinline__ void ProduceSteps(const Sm90Product& p, uint32_t shared, int begin,
                                             int end, int instance, int m, int n) {
  const Sm90Phase& phase = p.phase[0];
  int first[3] = {}, image = 0;
  if (p.rank_a != 0) {
    const Digits4 pixel = PixelOf(phase, m);
    image = pixel.digit[0];
    for (int i = 0; i < 3; ++i) first[i] = pixel.digit[3 - i] * phase.step[i] + phase.first[i];
  }
  const int instance_a = p.shared_a ? 0 : instance, instance_b = p.shared_b ? 0 : instance;
  const uint32_t bytes = uint32_t(p.box_rows * 128 + Tile::kBytesB);
  int tap = begin / p.k_blocks, block = begin - tap * p.k_blocks;
  int at[3] = {tap % phase.taps[0], tap / phase.taps[0] % phase.taps[1],
               tap / (phase.taps[0] * phase.taps[1])};
  int stage = 0;
  uint32_t parity = 1;  // a fresh barrier's earlier phase has ended
  for (int step = begin; step < end; ++step) {
    const uint32_t full = shared + Tile::kBarriers + stage * 16,
                   to = shared + stage * Tile::kStageBytes;
    BarrierWait(full + 8, parity);
    BarrierExpect(full, bytes);
    const int k = block * Tile::kTileK;
    if (p.rank_a != 0) {
      const int offset[3] = {at[0] * phase.tap_step[0], at[1] * phase.tap_step[1],
                             at[2] * phase.tap_step[2]};
      LoadColumn(p.rank_a, to, p.a[0], full, instance * p.channels + k, first, image, offset);
    } else {
      LoadTile(to, p.a[0], full, k, instance_a, m);
    }
    const int element = phase.filter_first + at[0] * phase.filter_step[0] +
                        at[1] * phase.filter_step[1] + at[2] * phase.filter_step[2];
    const uint32_t to_b = to + Tile::kBytesA;
    if constexpr (Tile::kMajorB) {
      LoadTile(to_b, p.b, full, k, instance_b, n, element);
    } else {
      constexpr int kBox = Tile::kTileK;  // of a box: so many columns, 128 bytes, of so many k
#pragma unroll
      for (int i = 0; i < Tile::kTileN; i += kBox) {
        LoadTile(to_b + i * 128, p.b, full, n + i, instance_b, k, element);
      }
    }
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (++block == p.k_blocks) {
      block = 0;
      if (++at[0] == phase.taps[0]) {
        at[0] = 0;
        if (++at[1] == phase.taps[1]) {
          at[1] = 0;
          ++at[2];
        }
      }
    }
  }
}

// The sums of so many steps.
template <typename Tile>
__device__ __forceinline__ void SumSteps(uint32_t shared, int steps,
                                         float (&acc)[Tile::kSumBlocks][Tile::kSums]) {
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) acc[m][i] = 0.f;
  }
  int stage = 0, before = -1;  // before: the stage whose products may still run
  uint32_t parity = 0;
  const auto release = [&](int which) {
    if (threadIdx.x == 0) BarrierArrive(shared + Tile::kBarriers + which * 16 + 8);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    BarrierWait(shared + Tile::kBarriers + stage * 16, parity);
    const uint32_t at = shared + stage * Tile::kStageBytes;
    const uint64_t a = OperandDescriptor<true>(at);
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(at + Tile::kBytesA);
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        Wgmma<typename Tile::T, true, Tile::kMajorB>(
            acc[m], a + m * (kBlockBytes / 16) + k * kOperandStep<true>,
            b + k * kOperandStep<Tile::kMajorB>, 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (before >= 0) release(before);
    before = stage;
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
  WgmmaWait<0>();
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
}

// A thread's part of eight k of B's columns, which are the tensor cores' rows. Which column is which row is
// free: it has kEach neighbouring columns at k and k + 4, one or two loads of 8 or 16 bytes, and eight (16)
// lanes that load together meet in no bank.
template <typename Tile>
struct Sm90ClusterColumns {
  static constexpr int kEach = Tile::kTileN / 32;

  // The first column that a thread of the tile has.
  static __device__ __forceinline__ int First() {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4;
    if constexpr (kEach == 4) return warp * 32 + (group / 2 + group % 2 * 4) * 4;
    return warp / 2 * 32 + (warp % 2 * 2 + group / 4 + group / 2 % 2 * 4) * 4 + group % 2 * 2;
  }

  // Offsets of its places at k = lane % 4, and four further, in B's boxes of 32 columns x 32 k.
  __device__ __forceinline__ Sm90ClusterColumns() {
    const uint32_t k = threadIdx.x % 4, n = uint32_t(First());
    const uint32_t chunk = n % 32 / 4, rest = n / 32 * 4096 + n % 4 * 4;
    low = rest + k * 128 + (chunk ^ k) * 16;
    high = rest + (k + 4) * 128 + (chunk ^ (k + 4)) * 16;
  }

  // Of the eight k whose first row lies at `from`.
  __device__ __forceinline__ void Load(uint32_t from) {
    LoadRow(from + low, v[0]);
    LoadRow(from + high, v[1]);
  }
  static __device__ __forceinline__ void LoadRow(uint32_t from, uint32_t (&to)[kEach]) {
    if constexpr (kEach == 4) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from)
                   : "memory");
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
                   : "=r"(to[0]), "=r"(to[1])
                   : "r"(from)
                   : "memory");
    }
  }
  // The tensor cores' rows lane / 4 and eight further of a block are columns 2 * block and the next.
  __device__ __forceinline__ void Take(int block, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = v[i / 2][block * 2 + i % 2];
  }

  uint32_t low, high;
  uint32_t v[2][kEach];
};

// The same where B's columns come from registers. At most one group of products runs while the next eight
// k are loaded.
template <typename Tile>
__device__ __forceinline__ void SumTurnedSteps(uint32_t shared, int steps,
                                               float (&acc)[Tile::kSumBlocks][Tile::kSums]) {
#pragma unroll
  for (int b = 0; b < Tile::kSumBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) acc[b][i] = 0.f;
  }
  Sm90ClusterColumns<Tile> columns[2];
  int stage = 0, before = -1;  // before: the stage whose last products may still run
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    BarrierWait(shared + Tile::kBarriers + stage * 16, parity);
    const uint32_t at = shared + stage * Tile::kStageBytes;
    const uint64_t rows = OperandDescriptor<true>(at);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      columns[k % 2].Load(at + Tile::kBytesA + k * 1024);
#pragma unroll
      for (int b = 0; b < Tile::kSumBlocks; ++b) Pin(acc[b]);
      WgmmaFence();
#pragma unroll
      for (int b = 0; b < Tile::kSumBlocks; ++b) {
        uint32_t a[4];
        columns[k % 2].Take(b, a);
        WgmmaRows(acc[b], a, rows + k * kOperandStep<true>);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (k == 0 && before >= 0 && threadIdx.x % 32 == 0) {
        BarrierArrive(shared + Tile::kBarriers + before * 16 + 8);
      }
    }
    __syncwarp();
    before = stage;
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
#pragma unroll
  for (int b = 0; b < Tile::kSumBlocks; ++b) Pin(acc[b]);
  WgmmaWait<0>();
#pragma unroll
  for (int b = 0; b < Tile::kSumBlocks; ++b) Pin(acc[b]);
}

// A thread's sums, as rows of d; of the tile's `rows` first rows.
template <typename Tile>
__device__ __forceinline__ void LeaveSums(uint32_t shared, int rows,
                                          const float (&acc)[Tile::kSumBlocks][Tile::kSums]) {
  if constexpr (Tile::kTurned) {
    const int m = threadIdx.x % 4 * 2;
    const uint32_t to =
        shared + uint32_t(m * Tile::kSumStride + Sm90ClusterColumns<Tile>::First()) * 4;
#pragma unroll
    for (int i = 0; i < Tile::kSums; i += 4) {
      if (i * 2 >= rows) continue;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t there = to + uint32_t((i * 2 + odd) * Tile::kSumStride) * 4;
        if constexpr (Tile::kSumBlocks == 2) {
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(there),
                       "f"(acc[0][i + odd]), "f"(acc[0][i + 2 + odd]), "f"(acc[1][i + odd]),
                       "f"(acc[1][i + 2 + odd])
                       : "memory");
        } else {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(there), "f"(acc[0][i + odd]),
                       "f"(acc[0][i + 2 + odd])
                       : "memory");
        }
      }
    }
  } else {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const uint32_t to = shared + uint32_t(row * Tile::kSumStride + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
      if (m * 64 + int(threadIdx.x) / 32 * 16 >= rows) continue;  // a warp's 16 rows
#pragma unroll
      for (int i = 0; i < Tile::kTileN / 2; i += 2) {  // i / 2 % 2: the row eight below
        const uint32_t offset =
            uint32_t((m * 64 + i / 2 % 2 * 8) * Tile::kSumStride + i / 4 * 8) * 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to + offset), "f"(acc[m][i]),
                     "f"(acc[m][i + 1])
                     : "memory");
      }
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(kClusterThreads, 1)
    Sm90ClusterKernel(const __grid_constant__ Sm90Product p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = SharedAddress(shared_bytes);
  const Sm90Phase& phase = p.phase[0];
  const int part = int(blockIdx.x), number = int(blockIdx.y);
  const int column = number / phase.tiles_m, instance = column / p.tiles_n;
  const int at_m = (number - column * phase.tiles_m) * Tile::kRows;
  const int at_n = (column - instance * p.tiles_n) * Tile::kColumns;
  const int rows = min(Tile::kRows, phase.m - at_m);  // that there are
  const int all = phase.taps[0] * phase.taps[1] * phase.taps[2] * p.k_blocks;
  const int begin = int(int64_t(all) * part / p.splits);
  const int end = int(int64_t(all) * (part + 1) / p.splits);
  const bool fetches = threadIdx.x >= 128;
  if (threadIdx.x == 128) {
    PrefetchMap(p.a[0]);
    PrefetchMap(p.b);
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(shared + Tile::kBarriers + s * 16, 1);                   // full
      BarrierInit(shared + Tile::kBarriers + s * 16 + 8, Tile::kReaders);  // empty
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (fetches) {
    if (threadIdx.x == 128) ProduceSteps<Tile>(p, shared, begin, end, instance, at_m, at_n);
    __syncwarp();
  } else {
    float acc[Tile::kSumBlocks][Tile::kSums];
    if constexpr (Tile::kTurned) {
      SumTurnedSteps<Tile>(shared, end - begin, acc);
    } else {
      SumSteps<Tile>(shared, end - begin, acc);
    }
    NamedBarrier(1, 128);  // all stages have been read: sums take their place
    LeaveSums<Tile>(shared, rows, acc);
  }
  ClusterSync();
  if (!fetches) {
    constexpr int kEights = Tile::kTileN / 8;  // of a row
    const int last = rows * kEights * (part + 1) / p.splits;
    for (int i = rows * kEights * part / p.splits + int(threadIdx.x); i < last; i += 128) {
      const int row = i / kEights, column8 = i % kEights * 8;
      const int m = at_m + row, n = at_n + column8;
      if (n >= p.n) continue;
      const uint32_t from = shared + uint32_t(row * Tile::kSumStride + column8) * 4;
      float v[8] = {};
#pragma unroll 8
      for (int other = 0; other < p.splits; ++other) {
        float low[4], high[4];
        LoadFourFrom(from, uint32_t(other), low);
        LoadFourFrom(from + 16, uint32_t(other), high);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] += low[j];
          v[4 + j] += high[j];
        }
      }
      FinishEight<typename Tile::T>(p, instance, m, n, v);
    }
  }
  ClusterSync();  // nobody leaves before its sums are read
#endif
}

template <typename Tile>
Status LaunchSm90Cluster(const Context& ctx, Sm90Product& p, const std::string& what) {
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  const auto kernel = Sm90ClusterKernel<Tile>;
  const void* address = reinterpret_cast<const void*>(kernel);
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(address, what));
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  config.gridDim = dim3(unsigned(p.splits), unsigned(p.tiles / p.splits));
  config.blockDim = dim3(kClusterThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = ctx.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(p.splits), 1, 1};
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, p), what);
}

template <typename T, bool kMajorB>
Status LaunchSm90ClusterByTile(const Context& ctx, Sm90Product& p, TileSize tile,
                               const std::string& what) {
#define JAXCONV_SM90_CASE(rows, columns)                                                     \
  if (tile == TileSize{rows, columns}) {                                                     \
    return LaunchSm90Cluster<Sm90ClusterTile<T, kMajorB, rows / 64, columns>>(ctx, p, what); \
  }
  JAXCONV_SM90_CASE(64, 64)
  JAXCONV_SM90_CASE(64, 128)
  JAXCONV_SM90_CASE(128, 128)
#undef JAXCONV_SM90_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
