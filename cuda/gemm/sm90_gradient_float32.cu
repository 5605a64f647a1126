// The same in TF32 (sm90_gradient.h): d = sum * f', computed from c, and of each column of d its sum (sm90_columns_float32.cuh).
#include <cstdint>

#include "cuda/gemm/sm90_columns_float32.cuh"
#include "cuda/gemm/sm90_gradient.cuh"
#include "cuda/gemm/sm90_gradient.h"

namespace jaxconv::cuda {

// dy *= f', from `kept` as LoadFloats leaves it. What is not piecewise linear goes through one copy of its code.
__device__ __forceinline__ void BackFloats(const Sm90Epilogue& e, const float2 (&kept)[2][8],
                                           float (&dy)[32]) {
  static_assert(kActivationCount == 11, "a new activation needs its case below");
  float c[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] = OfBox(kept, i);
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

template <typename Tile>
struct Sm90FloatGradient : Sm90EpilogueDefaults {
  struct Args {
    float* sums;  // (parts, n)
  };
  using Walk = Sm90OneColumn;
  static constexpr int kChunks = Tile::kTileN / 64, kBoxes = Tile::kBlocks * kChunks;

  using Part = FloatPart<Tile>;

  __device__ __forceinline__ Sm90FloatGradient(const Sm90Product&, const Args&, uint32_t, int,
                                               int block0)
      : block0(block0) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum[i] = make_float2(0.f, 0.f);
  }

  __device__ __forceinline__ void Load(const Sm90Product& p, const Sm90Place& at, int box) {
    Part(p, at, block0, box, p.n).Load(p.out.c, c);
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
      const Part part(p, at, block0, box, p.n);
      part.Store(p.out.d, v);
      const float2 more = SumRows(v, part.upper, part.lower);
      sum[box % kChunks].x += more.x;
      sum[box % kChunks].y += more.y;
    }
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& args, const Sm90Place& at,
                                      int part) {
    const int warp = threadIdx.x % 128 / 32;
    float* to = args.sums + (int64_t(part) * kFloatParts + warp) * p.n;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = at.n + i * 64 + SumsColumn();
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
  return LaunchColumnTotals<32, 1>(ctx, parts, kFloatParts * count, p.n,
                                   Sm90GradientTotals<float>{sums}, what);
}

}  // namespace jaxconv::cuda
