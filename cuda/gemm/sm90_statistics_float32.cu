// The same in TF32 (sm90_statistics.h), from registers (sm90_columns_float32.cuh): of a warp's 16 rows of a box the lanes sum up
// d, give each other the means, sum up the squares about these, and merge both with what they have of their two columns
// (Chan). So what is exact in the sums stays exact, whatever the mean is. A warp makes one part of all its rows.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/gemm/sm90_columns_float32.cuh"
#include "cuda/gemm/sm90_statistics.h"

namespace jaxconv::cuda {

// kAffine: d = sum + c + bias, either of which may be null.
template <typename Tile, bool kAffine>
struct Sm90FloatMoments : Sm90EpilogueDefaults {
  using Args = StatisticsParts;
  using Walk = Sm90OneColumn;
  using Part = FloatPart<Tile>;
  static constexpr int kChunks = Part::kChunks, kBoxes = Tile::kBlocks * kChunks;

  // d, c and the bias are of all instances.
  static __device__ __forceinline__ Part PartOf(const Sm90Product& p, const Sm90Place& at,
                                                int block0, int box) {
    return Part(p, at, block0, box, p.out.stride[0]);
  }

  __device__ __forceinline__ Sm90FloatMoments(const Sm90Product&, const Args&, uint32_t, int,
                                              int block0)
      : block0(block0), count(0.f) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) mean[i] = m2[i] = make_float2(0.f, 0.f);
  }

  __device__ __forceinline__ void Load(const Sm90Product& p, const Sm90Place& at, int box) {
    if constexpr (kAffine) {
      if (p.out.c == nullptr) return;
      PartOf(p, at, block0, box).Load(p.out.c + at.instance * p.out.instance, c);
    }
  }

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    Load(p, at, 0);
  }

  __device__ __forceinline__ void Add(const Sm90Product& p, const Sm90Place& at, int box,
                                      int columns, float (&v)[32]) const {
    const float* bias = static_cast<const float*>(p.epilogue.bias);
    if (bias != nullptr) {
      bias +=
          at.instance * p.epilogue.stride_bias + at.n + box % kChunks * 64 + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j * 8 >= columns) continue;
        const float2 b = __ldg(reinterpret_cast<const float2*>(bias + j * 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) v[j * 4 + i] += i % 2 == 0 ? b.x : b.y;
      }
    }
    if (p.out.c != nullptr) {
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] += OfBox(c, i);
    }
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring&, float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    float* const d = p.out.d + at.instance * p.out.instance;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int m = at.m + (block0 + box / kChunks) * 64 + warp * 16;
      const float rows = float(max(min(p.phase[0].m - m, 16), 0));
      auto& v = reinterpret_cast<float (&)[32]>(acc[box / kChunks][box % kChunks * 32]);
      const Part part = PartOf(p, at, block0, box);
      if constexpr (kAffine) {
        Add(p, at, box, part.columns, v);
        // Before the stores, which loads would have to follow.
        if (box + 1 < kBoxes) Load(p, at, box + 1);
      }
      part.Store(d, v);
      const float inverse = rows > 0.f ? __fdividef(1.f, rows) : 0.f;
      const float share = rows > 0.f ? __fdividef(rows, count + rows) : 0.f;
      float2 own = SumRows(v, part.upper, part.lower);
      own.x *= inverse;
      own.y *= inverse;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = __shfl_sync(0xffffffffu, own.x, j * 4 + lane % 4);
        const float y = __shfl_sync(0xffffffffu, own.y, j * 4 + lane % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float off = v[j * 4 + i] - (i % 2 == 0 ? x : y);
          v[j * 4 + i] = off * off;
        }
      }
      const float2 squares = SumRows(v, part.upper, part.lower);
      const int chunk = box % kChunks;
      Join(mean[chunk].x, m2[chunk].x, own.x, squares.x, share);
      Join(mean[chunk].y, m2[chunk].y, own.y, squares.y, share);
      if (chunk + 1 == kChunks) count += rows;
    }
  }

  __device__ __forceinline__ void Join(float& old_mean, float& old_m2, float new_mean, float new_m2,
                                       float share) const {
    const float off = new_mean - old_mean;
    old_mean = fmaf(off, share, old_mean);
    old_m2 = fmaf(off * off, count * share, old_m2 + new_m2);
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& to, const Sm90Place& at,
                                      int part) {
    const int own = part * kFloatParts + threadIdx.x % 128 / 32;
    float2* moments = to.moments + (int64_t(own) * p.instances + at.instance) * p.n + at.n;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = i * 64 + SumsColumn();
      if (at.n + column >= p.n) continue;
      *reinterpret_cast<float4*>(moments + column) =
          make_float4(mean[i].x, m2[i].x, mean[i].y, m2[i].y);
    }
    if (at.n == 0 && at.instance == 0 && threadIdx.x % 32 == 0) to.counts[own] = count;
  }

  int block0;
  float count;  // of rows, the same for all columns
  float2 mean[kChunks], m2[kChunks];
  float2 c[2][8];  // of the next box
};

Status LaunchSm90StatisticsTf32(const Context& ctx, Sm90Product& p, TileSize tile,
                                int multiprocessors, StatisticsParts* to, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(WithTile<kTf32StatisticsTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90Tf32Tile<decltype(rows)::value, decltype(columns)::value>;
    const auto launch = [&](auto affine) {
      return LaunchSm90Columns<Tile, Sm90FloatMoments<Tile, decltype(affine)::value>>(
          ctx, p, *to, multiprocessors, what, &to->parts);
    };
    const bool bare = p.out.c == nullptr && p.epilogue.bias_kind == BiasKind::kNone;
    return bare ? launch(std::false_type()) : launch(std::true_type());
  }));
  to->parts *= kFloatParts;
  return Status::Ok();
}

}  // namespace jaxconv::cuda
