// Products of few rows: what they cost is B's way from memory, so every multiprocessor is to fetch
// an equal part of it, and k is cut into parts:
//
//   partials[part, instance, m, n] = sum over the part's k of A[m, k] * B[k, n];  then their sums, in
//   the order of the parts, and the epilogue
//
// 16 bit, sm_90a; the fields of Sm90Product as in sm90_product.cuh, one phase, one tap, a plain A
// and d. Tiles of 64 x kTileN; the two consumer warpgroups take every other stage.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/core/activate.cuh"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// Four neighbouring outputs.
template <typename T>
__device__ __forceinline__ void FinishFour(const Sm90Product& p, int instance, int m, int n,
                                           float (&v)[4]) {
  const Sm90Epilogue& e = p.epilogue;
  const int64_t at = (int64_t(instance) * p.phase[0].m + m) * p.n + n;
  const auto load = [](const T* from, float (&to)[4]) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    const float2 low = UnpackPair(pairs.x, T()), high = UnpackPair(pairs.y, T());
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  };
  const auto store = [&](void* to) {
    *reinterpret_cast<uint2*>(static_cast<T*>(to) + at) =
        make_uint2(PackHalves(v[0], v[1], T()), PackHalves(v[2], v[3], T()));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= e.alpha;
  if (e.c != nullptr) {
    float c[4];
    load(static_cast<const T*>(e.c) + instance * e.stride_c + int64_t(m) * p.n + n, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(e.beta, c[i], v[i]);
  }
  const T* bias = static_cast<const T*>(e.bias) + instance * e.stride_bias;
  if (e.bias_kind == BiasKind::kColumn) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += ToFloat(bias[n + i]);
  } else if (e.bias_kind != BiasKind::kNone) {
    const float b = ToFloat(bias[e.bias_kind == BiasKind::kRow ? m : 0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += b;
  }
  if (e.save_z) store(p.plain_z);
  ActivateGroup(e.activation, e.slope, v);
  store(p.plain_d);
}

// A thread makes four neighbouring outputs.
template <typename T>
__global__ void __launch_bounds__(256) Sm90RowsSumKernel(const __grid_constant__ Sm90Product p) {
  const int64_t size = int64_t(p.instances) * p.phase[0].m * p.n;
  const int64_t at = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (at >= size) return;
  float v[4] = {};
#pragma unroll 4
  for (int part = 0; part < p.splits; ++part) {
    const float4 u = __ldcg(reinterpret_cast<const float4*>(p.partials + part * size + at));
    v[0] += u.x;
    v[1] += u.y;
    v[2] += u.z;
    v[3] += u.w;
  }
  const int64_t row = at / p.n;
  const int instance = int(row / p.phase[0].m), m = int(row - int64_t(instance) * p.phase[0].m);
  FinishFour<T>(p, instance, m, int(at - row * p.n), v);
}

template <typename Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Sm90RowsKernel(const __grid_constant__ Sm90Product p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Sm90Ring<Tile> ring(SharedAddress(shared_bytes));
  Sm90Start(ring);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  const Sm90Place at = LocateTile<Tile>(p, blockIdx.x);
  if (group < 0) {
    if (threadIdx.x == 0) {
      PrefetchMap(p.a[0]);
      PrefetchMap(p.b);
      ProduceTile(p, at, ring);
    }
  } else {
    float acc[1][Tile::kTileN / 2], mine[Tile::kTileN / 4];
    Sm90AlternateLoop(ring, group, at.steps, acc);
    Sm90ShareSums<Tile>(ring.shared + Tile::kUnitOffset, group, acc[0], mine);
    const int m = at.m + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int n = at.n + group * (Tile::kTileN / 2) + threadIdx.x % 4 * 2;
    const int64_t rows =
        int64_t(at.part) * p.instances * p.phase[0].m + int64_t(at.instance) * p.phase[0].m;
    float* to = p.partials + (rows + m) * p.n + n;
#pragma unroll
    for (int j = 0; j < Tile::kTileN / 16; ++j) {
      if (n + j * 8 >= p.n) continue;
      if (m < p.phase[0].m) {
        *reinterpret_cast<float2*>(to + j * 8) = make_float2(mine[j * 4], mine[j * 4 + 1]);
      }
      if (m + 8 < p.phase[0].m) {
        *reinterpret_cast<float2*>(to + 8 * int64_t(p.n) + j * 8) =
            make_float2(mine[j * 4 + 2], mine[j * 4 + 3]);
      }
    }
  }
#endif
}

template <typename Tile>
Status LaunchSm90Rows(const Context& ctx, Sm90Product& p, int multiprocessors,
                      const std::string& what) {
  CountTiles<Tile>(p);
  if (p.tiles == 0) return Status::Ok();
  const auto kernel = Sm90RowsKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(p.tiles), kSm90Threads, Tile::kSharedBytes, ctx.stream>>>(p);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  const int64_t blocks = CeilDiv(int64_t(p.instances) * p.phase[0].m * p.n, 1024);
  Sm90RowsSumKernel<typename Tile::T><<<unsigned(blocks), 256, 0, ctx.stream>>>(p);
  return LaunchStatus(what + " (sum of parts)");
}

}  // namespace jaxconv::cuda
