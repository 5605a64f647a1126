// The same in TF32 (sm90_sums.h), from registers (sm90_columns_float32.cuh). c and x come where d goes, a box of 64 x 64 ahead;
// y's signs are 8 bytes of each row and box. What it takes is the time of its bytes: A, c and x once, d once.
#include <cstdint>

#include "cuda/gemm/sm90_columns_float32.cuh"
#include "cuda/gemm/sm90_sums.cuh"
#include "cuda/gemm/sm90_sums.h"

namespace jaxconv::cuda {

template <typename Tile>
struct Sm90FloatNormSums : Sm90EpilogueDefaults {
  using Args = Sm90FloatSums;
  using Walk = Sm90OneColumn;
  using Part = FloatPart<Tile>;
  static constexpr int kChunks = Part::kChunks, kBoxes = Tile::kBlocks * kChunks;

  __device__ __forceinline__ Sm90FloatNormSums(const Sm90Product&, const Args&, uint32_t, int,
                                               int block0)
      : block0(block0) {}

  // The signs of a thread's two rows of a box, 64 columns each; of rows that are not there none.
  __device__ __forceinline__ void LoadSigns(const Args& s, const Part& part) {
    const int64_t shift = threadIdx.x % 4 * 2;
    const auto row = [&](bool there, int64_t at) {
      const uint8_t* from = s.signs + (at - shift) / 8;
      return there && part.columns > 0 ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
    };
    bits[0] = row(part.upper, part.first);
    bits[1] = row(part.lower, part.second);
  }

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args& s, const Sm90Place& at) {
    const Part part(p, at, block0, 0, p.n);
    part.Load(p.out.c, c);
    part.Load(s.x, x);
    LoadSigns(s, part);
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& s, const Sm90Place& at,
                                         Ring&, float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      auto& v = reinterpret_cast<float (&)[32]>(acc[box / kChunks][box % kChunks * 32]);
      const Part part(p, at, block0, box, p.n);
      const float* const means = s.mean + at.n + box % kChunks * 64 + threadIdx.x % 4 * 2;
      const int shift = threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const uint2& row = bits[i / 2 % 2];
        const uint32_t word = (i < 16 ? row.x : row.y) >> (i / 4 % 4 * 8 + shift + i % 2);
        v[i] = word & 1u ? v[i] + OfBox(c, i) : 0.f;
      }
      // Before the stores, which loads would have to follow.
      const bool more = box + 1 < kBoxes;
      const Part next(p, at, block0, more ? box + 1 : box, p.n);
      if (more) {
        next.Load(p.out.c, c);
        LoadSigns(s, next);
      }
      part.Store(p.out.d, v);
      sums.Add(0, box % kChunks, SumRows(v, part.upper, part.lower));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 mean = j * 8 < part.columns
                                ? __ldg(reinterpret_cast<const float2*>(means + j * 8))
                                : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[j * 4 + i] *= OfBox(x, j * 4 + i) - (i % 2 == 0 ? mean.x : mean.y);
        }
      }
      if (more) next.Load(s.x, x);
      sums.Add(1, box % kChunks, SumRows(v, part.upper, part.lower));
    }
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& s, const Sm90Place& at,
                                      int part) {
    sums.Write(p, at, part, s.parts);
  }

  int block0;
  float2 c[2][8], x[2][8];  // of the next box
  uint2 bits[2];
  FloatColumnSums<kChunks> sums;
};

Status LaunchSm90SumsTf32(const Context& ctx, Sm90Product& p, const Sm90FloatSums& to,
                          TileSize tile, int multiprocessors, const std::string& what) {
  if (p.phase[0].m == 0) return Status::Invalid(what + ": there are no rows to sum up");
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kSumsTf32Tiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90SumsTile<decltype(rows)::value, decltype(columns)::value>;
    return LaunchSm90Columns<Tile, Sm90FloatNormSums<Tile>>(ctx, p, to, multiprocessors, what,
                                                            &count);
  }));
  return LaunchColumnTotals<32, 2>(ctx, to.parts, kFloatParts * count, p.n,
                                   Sm90NormTotals{to.rstd, to.dscale, to.dbias}, what);
}

}  // namespace jaxconv::cuda
