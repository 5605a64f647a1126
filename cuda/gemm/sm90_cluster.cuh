// Products of few rows, in one launch: the CTAs of a cluster share the sum of a tile.
//
//   d[m, n] = f(alpha * sum over (tap, k) of A[m, (tap, k)] * B[(tap, k), n] + beta * c + bias)
//
// 16 bit, sm_90a; the fields of Sm90Product as in sm90_product.cuh, one phase, k-major A, and d, z
// and c as they lie: (m, instance, n).
//
// Grid (splits, tiles), clusters of `splits` CTAs. CTA r of a cluster sums its part of the steps (64 k
// of a tap each), leaves 64 x kTileN or 128 x kTileN float32 sums in its shared memory, and finishes
// every splits-th part of the tile: it reads the others' sums, in the order of the parts, so the bits
// do not depend on who comes first. A CTA has one warp that fetches and one warpgroup that multiplies.
//
// A tile of 49 pixels of a 3x3 convolution of 512 channels is 72 steps: a CTA alone takes 24 us for
// them, eight take 9 steps each, and what is left is the way of the first bytes from memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

inline constexpr int kClusterThreads = 160;

template <typename T_, int kBlocks_, int kTileN_>
struct Sm90ClusterTile {
  using T = T_;
  static constexpr int kBlocks = kBlocks_;  // of 64 rows
  static constexpr int kTileN = kTileN_;
  static constexpr int kRows = kBlocks * 64, kColumns = kTileN;
  static constexpr int kTileK = 64;
  static constexpr int kStageBytes = (kBlocks + kTileN / 64) * kBlockBytes;
  // Most parts have no more steps than stages, so that all that they read is on its way at once.
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  // Floats from a row of sums to the next: rows 8 banks apart, so that a half warp's pairs do not meet.
  static constexpr int kSumStride = kTileN + 8;
  static constexpr int kSumBytes = kRows * kSumStride * 4;  // where the stages were
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;
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

// Eight neighbouring outputs of row m from column n on.
template <typename T>
__device__ __forceinline__ void FinishEight(const Sm90Product& p, int instance, int m, int n,
                                            float (&v)[8]) {
  const Sm90Epilogue& e = p.epilogue;
  const int64_t at = (int64_t(m) * p.instances + instance) * p.n + n;
  const auto pairs = [](const uint4& from, int i) {
    return UnpackPair(i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w, T());
  };
  const auto store = [&](void* to) {
    *reinterpret_cast<uint4*>(static_cast<T*>(to) + at) =
        make_uint4(PackHalves(v[0], v[1], T()), PackHalves(v[2], v[3], T()),
                   PackHalves(v[4], v[5], T()), PackHalves(v[6], v[7], T()));
  };
#pragma unroll
  for (float& one : v) one *= e.alpha;
  if (e.c != nullptr) {
    const uint4 c = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(e.c) + at));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i * 2] = fmaf(e.beta, pairs(c, i).x, v[i * 2]);
      v[i * 2 + 1] = fmaf(e.beta, pairs(c, i).y, v[i * 2 + 1]);
    }
  }
  if (e.bias_kind == BiasKind::kColumn) {
    const T* bias = static_cast<const T*>(e.bias) + instance * e.stride_bias + n;
    const uint4 b = __ldg(reinterpret_cast<const uint4*>(bias));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i * 2] += pairs(b, i).x;
      v[i * 2 + 1] += pairs(b, i).y;
    }
  }
  if (e.save_z) store(p.plain_z);
  if (e.activation == Activation::kRelu) {
#pragma unroll
    for (float& one : v) one = FastRelu(one);
  } else if (e.activation != Activation::kNone) {
    // One copy of the formulas: with eight of them fetching instructions took 0.8 us for eight outputs.
#pragma unroll 1
    for (int turn = 0; turn < 8; ++turn) {
      const float y = Activate(e.activation, v[0], e.slope);
#pragma unroll
      for (int i = 0; i < 7; ++i) v[i] = v[i + 1];
      v[7] = y;
    }
  }
  store(p.plain_d);
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
  int tap = begin / p.k_blocks, block = begin - tap * p.k_blocks;
  int at[3] = {tap % phase.taps[0], tap / phase.taps[0] % phase.taps[1],
               tap / (phase.taps[0] * phase.taps[1])};
  int stage = 0;
  uint32_t parity = 1;  // a fresh barrier's earlier phase has ended
  for (int step = begin; step < end; ++step) {
    const uint32_t full = shared + Tile::kBarriers + stage * 16,
                   to = shared + stage * Tile::kStageBytes;
    BarrierWait(full + 8, parity);
    BarrierExpect(full, Tile::kStageBytes);
    const int k = block * Tile::kTileK;
    if (p.rank_a != 0) {
      const int offset[3] = {at[0] * phase.tap_step[0], at[1] * phase.tap_step[1],
                             at[2] * phase.tap_step[2]};
      LoadColumn(p.rank_a, to, p.a[0], full, instance * p.channels + k, first, image, offset);
    } else {
      LoadTile(to, p.a[0], full, k, instance, m);
    }
    const int element = phase.filter_first + at[0] * phase.filter_step[0] +
                        at[1] * phase.filter_step[1] + at[2] * phase.filter_step[2];
#pragma unroll
    for (int i = 0; i < Tile::kTileN; i += 64) {
      LoadTile(to + (Tile::kBlocks + i / 64) * kBlockBytes, p.b, full, n + i, instance, k, element);
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
                                         float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#pragma unroll
  for (int m = 0; m < Tile::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kTileN / 2; ++i) acc[m][i] = 0.f;
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
    const uint64_t b = OperandDescriptor<false>(at + Tile::kBlocks * kBlockBytes);
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) Pin(acc[m]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < Tile::kBlocks; ++m) {
        Wgmma<typename Tile::T, true, false>(acc[m],
                                             a + m * (kBlockBytes / 16) + k * kOperandStep<true>,
                                             b + k * kOperandStep<false>, 1);
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
  const int all = phase.taps[0] * phase.taps[1] * phase.taps[2] * p.k_blocks;
  const int begin = int(int64_t(all) * part / p.splits);
  const int end = int(int64_t(all) * (part + 1) / p.splits);
  const bool fetches = threadIdx.x >= 128;
  if (threadIdx.x == 128) {
    PrefetchMap(p.a[0]);
    PrefetchMap(p.b);
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(shared + Tile::kBarriers + s * 16, 1);      // full
      BarrierInit(shared + Tile::kBarriers + s * 16 + 8, 1);  // empty
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (fetches) {
    if (threadIdx.x == 128) ProduceSteps<Tile>(p, shared, begin, end, instance, at_m, at_n);
    __syncwarp();
  } else {
    float acc[Tile::kBlocks][Tile::kTileN / 2];
    SumSteps<Tile>(shared, end - begin, acc);
    NamedBarrier(1, 128);  // all stages have been read: sums take their place
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const uint32_t to = shared + uint32_t(row * Tile::kSumStride + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int m = 0; m < Tile::kBlocks; ++m) {
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
  ClusterSync();
  if (!fetches) {
    constexpr int kEights = Tile::kTileN / 8;  // of a row
    const int last = Tile::kRows * kEights * (part + 1) / p.splits;
    for (int i = Tile::kRows * kEights * part / p.splits + int(threadIdx.x); i < last; i += 128) {
      const int row = i / kEights, column8 = i % kEights * 8;
      const int m = at_m + row, n = at_n + column8;
      if (m >= phase.m || n >= p.n) continue;
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

}  // namespace jaxconv::cuda
