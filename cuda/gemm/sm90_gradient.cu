// d = sum * f', computed from c, and of each column of d, as rounded to 16 bits, its sum in float32.
//
// c comes through the ring behind the operands (Sm90AddendStages), so that it is on its way while
// the products run. The sums: sm90_columns.cuh.
#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_gradient.cuh"
#include "cuda/gemm/sm90_gradient.h"

namespace jaxconv::cuda {

template <typename Tile>
struct Sm90Gradient : Sm90EpilogueDefaults {
  struct Args {
    float* sums;  // (parts, n)
  };
  using Walk = Sm90OneColumn;
  using T = typename Tile::T;
  static constexpr int kChunks = Tile::kTileN / 64;
  static constexpr int kProducer = 40, kConsumer = 232;  // or a sum has no register

  static __device__ __forceinline__ int Behind(const Sm90Product&) {
    return Sm90AddendStages<Tile>::kStages;
  }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args&,
                                                 const Sm90Place& at, Ring& ring) {
    ProduceBoxes<Tile>(ring, [&](uint32_t to, uint32_t full, int chunk) {
      LoadTile(to, p.c, full, at.n + chunk * 64, 0, at.m);
    });
  }

  __device__ __forceinline__ Sm90Gradient(const Sm90Product&, const Args&, uint32_t shared,
                                          int group, int block0)
      : outbox(shared, group + 1), group(group), block0(block0) {}

  // One activation's code runs in a launch: each has its own, without branches inside.
  template <typename Ring>
  __device__ __forceinline__ void Back(const Sm90Epilogue& e, Ring& ring,
                                       float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    const auto through = [&](auto f) { ThroughRing<Tile, true>(ring, group, block0, f, acc); };
#define JAXCONV_BACK(kind)                                                                \
  case Activation::kind:                                                                  \
    through([](float c, float dy) { return dy * SlopeFrom<Activation::kind, true>(c); }); \
    return;
    static_assert(kActivationCount == 11, "a new activation needs its case below");
    switch (e.activation) {
      case Activation::kNone:
      case Activation::kRelu:
      case Activation::kRelu6:
      case Activation::kLeakyRelu:
        through(LinearPieces(e));
        return;
        JAXCONV_BACK(kElu)
        JAXCONV_BACK(kTanh)
        JAXCONV_BACK(kSigmoid)
        JAXCONV_BACK(kSilu)
        JAXCONV_BACK(kGelu)
        JAXCONV_BACK(kGeluExact)
        JAXCONV_BACK(kHardSwish)
    }
#undef JAXCONV_BACK
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring& ring,
                                         float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    Back(p.epilogue, ring, acc);
    PutTile<Tile>(p, at, block0, p.d[0], 0, outbox, acc, [&](int i, uint32_t pair) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        columns.Add((i + box) % kChunks, pair + box * kBlockBytes);
      }
    });
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& args, const Sm90Place& at,
                                      int part) {
    columns.Write(p, at, part, args.sums);
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnSums<T, kChunks, 1> columns;
  int group, block0;
};

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, TileSize tile, int multiprocessors,
                    float* parts, void* sums, const std::string& what) {
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kDgradGradientTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90TileOf<T, true, true, decltype(rows)::value, decltype(columns)::value>;
    return LaunchSm90Columns<Tile, Sm90Gradient<Tile>>(ctx, p, {parts}, multiprocessors, what,
                                                       &count);
  }));
  return LaunchColumnTotals<8, 1>(ctx, parts, count, p.n,
                                  Sm90GradientTotals<T>{static_cast<T*>(sums)}, what);
}

Status LaunchSm90Gradient(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                          int multiprocessors, float* parts, void* sums, const std::string& what) {
  return dtype == DType::kBF16
             ? LaunchByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, parts, sums, what)
             : LaunchByTile<__half>(ctx, p, tile, multiprocessors, parts, sums, what);
}

}  // namespace jaxconv::cuda
