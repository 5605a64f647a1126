// The same in TF32 (sm90_norm_gradient.h), from registers (sm90_columns_float32.cuh): x comes where d goes, a box of 64 x 64
// ahead. z is of x less its mean, which float32 could lose.
#include <cstdint>

#include "cuda/gemm/sm90_columns_float32.cuh"
#include "cuda/gemm/sm90_norm_gradient.cuh"

namespace jaxconv::cuda {

template <typename Tile>
struct Sm90FloatNormGradient : Sm90EpilogueDefaults {
  using Args = Sm90NormGradientArgs;
  using Walk = Sm90OneColumn;
  using Part = FloatPart<Tile>;
  static constexpr int kChunks = Part::kChunks, kBoxes = Tile::kBlocks * kChunks;

  // The table has a column's scale * rstd and bias.
  __device__ __forceinline__ Sm90FloatNormGradient(const Sm90Product& p, const Args& g,
                                                   uint32_t shared, int group, int block0)
      : table(Tile::TableAt(shared, group), Walk().template Locate<Tile>(p).n, p.n, group + 1,
              [&](int column) {
                return make_float2(g.scale[column] * g.rstd[column], g.bias[column]);
              }),
        block0(block0) {}

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    Part(p, at, block0, 0, p.n).Load(p.out.c, x);
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                         Ring&, float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    const LinearPieces f(p.epilogue);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      auto& v = reinterpret_cast<float (&)[32]>(acc[box / kChunks][box % kChunks * 32]);
      const Part part(p, at, block0, box, p.n);
      const int first = box % kChunks * 64 + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // x becomes x - mean
        const float2 mean = MeansOf(g.mean, at.n + first + j * 8, p.n);
        const float4 affine = table.Load(first + j * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2& two = x[half][j];
          two.x -= mean.x;
          two.y -= mean.y;
          float& left = v[j * 4 + half * 2];
          float& right = v[j * 4 + half * 2 + 1];
          left = f(fmaf(two.x, affine.x, affine.z), left);
          right = f(fmaf(two.y, affine.y, affine.w), right);
        }
        Pin(reinterpret_cast<float (&)[4]>(v[j * 4]));  // or the scheduler runs out of registers
      }
      part.Store(p.out.d, v);
      sums.Add(0, box % kChunks, SumRows(v, part.upper, part.lower));
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] *= OfBox(x, i);
      if (box + 1 < kBoxes) Part(p, at, block0, box + 1, p.n).Load(p.out.c, x);
      sums.Add(1, box % kChunks, SumRows(v, part.upper, part.lower));
    }
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& g, const Sm90Place& at,
                                      int part) {
    sums.Write(p, at, part, g.parts);
  }

  typename Tile::Table table;
  int block0;
  float2 x[2][8];  // of the next box
  FloatColumnSums<kChunks> sums;
};

Status LaunchSm90NormGradientTf32(const Context& ctx, Sm90Product& p,
                                  const Sm90NormGradientArgs& to, TileSize tile,
                                  int multiprocessors, const std::string& what) {
  if (p.phase[0].m == 0) return Status::Invalid(what + ": there are no rows to sum up");
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kNormGradientTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = StreamedNormTile<Sm90SumsTile<decltype(rows)::value, decltype(columns)::value>>;
    return LaunchSm90Columns<Tile, Sm90FloatNormGradient<Tile>>(ctx, p, to, multiprocessors, what,
                                                                &count);
  }));
  return LaunchColumnTotals<32, 2>(ctx, to.parts, kFloatParts * count, p.n,
                                   Sm90NormTotals{to.rstd, to.dscale, to.dbias}, what);
}

}  // namespace jaxconv::cuda
