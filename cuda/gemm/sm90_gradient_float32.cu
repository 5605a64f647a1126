// The same in TF32 (sm90_gradient.h): d = sum * f', computed from c, and of each column of d its sum. As sm90_float32.cuh's,
// the epilogue works in registers: c comes where d goes, in two rows of a thread. Of each box of 64 x 64 outputs the lanes of a
// warp halve what they add up, until each has two columns' sums of the warp's 16 rows; these it keeps to the end
// (Sm90OneColumn). Then each warp writes a part, and a second kernel adds the parts up. The order of every addition is fixed by
// the problem and the number of CTAs.
#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_float32.cuh"
#include "cuda/gemm/sm90_gradient.cuh"
#include "cuda/gemm/sm90_gradient.h"

namespace jaxconv::cuda {

// dy *= f', from `kept` as LoadFloats leaves it. What is not piecewise linear goes through one copy of its code.
__device__ __forceinline__ void BackFloats(const Sm90Epilogue& e, const float2 (&kept)[2][8],
                                           float (&dy)[32]) {
  static_assert(kActivationCount == 11, "a new activation needs its case below");
  float c[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float2 pair = kept[i / 2 % 2][i / 4];
    c[i] = i % 2 == 0 ? pair.x : pair.y;
  }
  if (e.activation <= Activation::kLeakyRelu) {  // the first four
    const LinearPieces f(e);
#pragma unroll
    for (int i = 0; i < 32; ++i) dy[i] = f(c[i], dy[i]);
    return;
  }
  Wheel(c, [&](float (&some)[4]) {
#define JAXCONV_SLOPE(kind)                                                            \
  case Activation::kind:                                                               \
    _Pragma("unroll") for (float& z : some) z = SlopeFrom<Activation::kind, false>(z); \
    break;
    switch (e.activation) {
      case Activation::kNone:
      case Activation::kRelu:
      case Activation::kRelu6:
      case Activation::kLeakyRelu:
        break;
        JAXCONV_SLOPE(kElu)
        JAXCONV_SLOPE(kTanh)
        JAXCONV_SLOPE(kSigmoid)
        JAXCONV_SLOPE(kSilu)
        JAXCONV_SLOPE(kGelu)
        JAXCONV_SLOPE(kGeluExact)
        JAXCONV_SLOPE(kHardSwish)
    }
#undef JAXCONV_SLOPE
  });
#pragma unroll
  for (int i = 0; i < 32; ++i) dy[i] *= c[i];
}

// Lanes 2 kHalf apart have sums of the same 2 kHalf columns: each keeps those of one half.
template <int kHalf>
__device__ __forceinline__ void HalveColumns(float (&sum)[16]) {
  const bool last = threadIdx.x & (2 * kHalf);  // keeps the last half
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float a = sum[i], b = sum[i + kHalf];
    sum[i] = (last ? b : a) + __shfl_xor_sync(0xffffffffu, last ? a : b, 2 * kHalf);
  }
}

// The sums of a warp's columns of a box, v of its rows that are there. Lanes 4, 8 and 16 apart have other rows of the same
// columns. What a lane ends with is columns 8 (lane / 4) + 2 (lane % 4) and the next.
__device__ __forceinline__ float2 SumRows(const float (&v)[32], bool upper, bool lower) {
  float sum[16];  // columns 8j + 2 (lane % 4) and the next
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    sum[i] = (upper ? v[at] : 0.f) + (lower ? v[at + 2] : 0.f);
  }
  HalveColumns<8>(sum);
  HalveColumns<4>(sum);
  HalveColumns<2>(sum);
  return make_float2(sum[0], sum[1]);
}

template <typename Tile>
struct Sm90FloatGradient : Sm90EpilogueDefaults {
  struct Args {
    float* sums;  // (parts, n)
  };
  using Walk = Sm90OneColumn;
  static constexpr int kChunks = Tile::kTileN / 64, kBoxes = Tile::kBlocks * kChunks;

  // A thread's part of a box: two rows, 8 apart.
  struct Part {
    __device__ __forceinline__ Part(const Sm90Product& p, const Sm90Place& at, int block0,
                                    int box) {
      const int lane = threadIdx.x % 32, n = at.n + box % kChunks * 64;
      const int m = at.m + (block0 + box / kChunks) * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
      upper = m < p.phase[0].m;
      lower = m + 8 < p.phase[0].m;
      columns = p.n - n;
      first = int64_t(m) * p.n + n + lane % 4 * 2;
      second = first + int64_t(8) * p.n;
    }
    bool upper, lower;  // whether the row is there
    int columns;        // of the box, those to the last
    int64_t first, second;
  };

  __device__ __forceinline__ Sm90FloatGradient(const Sm90Product&, const Args&, uint32_t, int,
                                               int block0)
      : block0(block0) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum[i] = make_float2(0.f, 0.f);
  }

  __device__ __forceinline__ void Load(const Sm90Product& p, const Sm90Place& at, int box) {
    const Part part(p, at, block0, box);
    LoadFloats(part.upper ? p.out.c + part.first : nullptr,
               part.lower ? p.out.c + part.second : nullptr, part.columns, c);
  }

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    Load(p, at, 0);
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring&, float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      auto& v = reinterpret_cast<float (&)[32]>(acc[box / kChunks][box % kChunks * 32]);
      BackFloats(p.epilogue, c, v);
      // Before the stores, which loads would have to follow.
      if (box + 1 < kBoxes) Load(p, at, box + 1);
      const Part part(p, at, block0, box);
      if (part.upper) StoreFloats(p.out.d + part.first, v, 0, part.columns);
      if (part.lower) StoreFloats(p.out.d + part.second, v, 1, part.columns);
      const float2 more = SumRows(v, part.upper, part.lower);
      sum[box % kChunks].x += more.x;
      sum[box % kChunks].y += more.y;
    }
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& args, const Sm90Place& at,
                                      int part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    float* to = args.sums + (int64_t(part) * 4 + warp) * p.n;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = at.n + i * 64 + lane / 4 * 8 + lane % 4 * 2;
      if (column < p.n) *reinterpret_cast<float2*>(to + column) = sum[i];
    }
  }

  int block0;
  float2 c[2][8];  // of the next box
  float2 sum[kChunks];
};

Status LaunchSm90GradientTf32(const Context& ctx, Sm90Product& p, TileSize tile,
                              int multiprocessors, float* parts, float* sums,
                              const std::string& what) {
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kTf32Tiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90Tf32Tile<decltype(rows)::value, decltype(columns)::value>;
    return LaunchSm90Columns<Tile, Sm90FloatGradient<Tile>>(ctx, p, {parts}, multiprocessors, what,
                                                            &count);
  }));
  return LaunchColumnTotals<32, 1>(ctx, parts, 4 * count, p.n, Sm90GradientTotals<float>{sums},
                                   what);
}

}  // namespace jaxconv::cuda
