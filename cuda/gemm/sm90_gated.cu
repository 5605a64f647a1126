// d[m, n] = a[m, n] * f(g[m, n]), where a and g are the halves of h = x op(w) + bias, whose columns are twice d's.
//
// A tile makes the same columns of both halves: the first half of its sums is a, the other one g, so that a thread has
// both numbers of a position in its registers. w comes as two boxes a stage (Sm90Halves). a and g are not rounded before
// they are multiplied; h is, where it is written.
#include <cstdint>

#include "cuda/gemm/sm90_gated.h"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

template <typename Tile>
struct Sm90Gated : Sm90EpilogueDefaults {
  using T = typename Tile::T;
  static constexpr int kHalf = Tile::kTileN / 4;  // a thread's sums of a block that are a's
  using Sums = float[Tile::kBlocks][Tile::kTileN / 2];

  __device__ __forceinline__ Sm90Gated(const Sm90Product&, const Args&, uint32_t shared, int group,
                                       int block0)
      : outbox(shared, group + 1), block0(block0) {}

  // The halves of the bias lie as those of two instances.
  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    const int a = p.phase[0].filter_first;
    bias[0].Load(p.epilogue, a, at.n, p.n);
    bias[1].Load(p.epilogue, a ^ 1, at.n, p.n);
  }

  static __device__ __forceinline__ float (&Part(Sums& acc, int block, int half))
      [kHalf] { return reinterpret_cast<float (&)[kHalf]>(acc[block][half * kHalf]); }

  // a *= f(g), a few at a time, or the scheduler runs out of registers.
  template <typename F>
  static __device__ __forceinline__ void Multiply(Sums& acc, F f) {
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kHalf; i += 8) {
        auto& a = reinterpret_cast<float (&)[8]>(acc[block][i]);
        auto& g = reinterpret_cast<float (&)[8]>(acc[block][kHalf + i]);
        Pin(a);
        Pin(g);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] *= f(g[j]);
        Pin(a);
      }
    }
  }

  // One activation's code runs in a launch: each has its own, without branches inside.
  static __device__ __forceinline__ void Gate(const Sm90Epilogue& e, Sums& acc) {
    const float slope = e.slope;
#define JAXCONV_GATE(kind, expression)                 \
  case Activation::kind:                               \
    Multiply(acc, [](float z) { return expression; }); \
    return;
    static_assert(kActivationCount == 11, "a new activation needs its case below");
    switch (e.activation) {
      JAXCONV_GATE(kNone, z)
      JAXCONV_GATE(kRelu, FastRelu(z))
      JAXCONV_GATE(kRelu6, Activate(Activation::kRelu6, z, 0.f))
      case Activation::kLeakyRelu:
        Multiply(acc, [slope](float z) { return Activate(Activation::kLeakyRelu, z, slope); });
        return;
        JAXCONV_GATE(kTanh, FastTanh(z, T()))
        JAXCONV_GATE(kSigmoid, FastSigmoid(z))
        JAXCONV_GATE(kSilu, z * FastSigmoid(z))
        JAXCONV_GATE(kGelu, FastGelu(z, T()))
        JAXCONV_GATE(kHardSwish, Activate(Activation::kHardSwish, z, 0.f))
      case Activation::kElu:
      case Activation::kGeluExact:
#pragma unroll
        for (int block = 0; block < Tile::kBlocks; ++block) {
          ActivateFast<T>(e.activation, slope, Part(acc, block, 1));
        }
        Multiply(acc, [](float z) { return z; });
        return;
    }
#undef JAXCONV_GATE
  }

  // The first kChunks boxes of each block's sums; store(block, chunk, shared memory).
  template <int kChunks, typename Store>
  __device__ __forceinline__ void Put(Sums& acc, Store&& store) {
    static_assert(Tile::kBlocks * kChunks % 2 == 0);
#pragma unroll
    for (int i = 0; i < Tile::kBlocks * kChunks; i += 2) {
      outbox.Open();
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        outbox.Put(j - i, reinterpret_cast<float (&)[32]>(acc[j / kChunks][j % kChunks * 32]));
      }
      outbox.Close([&](uint32_t pair) {
        store(i / kChunks, i % kChunks, pair);
        store((i + 1) / kChunks, (i + 1) % kChunks, pair + kBlockBytes);
      });
    }
  }

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring&, Sums& acc) {
    constexpr int kChunks = Tile::kColumns / 64;
    const int m_end = p.phase[0].m;
    if (p.epilogue.bias_kind == BiasKind::kColumn) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ScaleAndBias(p.epilogue, 0, 0, 0, bias[half], Part(acc, block, half));
        }
      }
    }
    // h as (n, half, m), or d, whose only half is 0.
    const auto put = [&](const CUtensorMap& map, int half, int block, int chunk, uint32_t box) {
      const int m = at.m + (block0 + block) * 64, n = at.n + chunk * 64;
      if (m < m_end && n < p.n) StoreTile(map, box, n, half, m);
    };
    if (p.epilogue.save_z) {
      const int a = p.phase[0].filter_first;
      Put<2 * kChunks>(acc, [&](int block, int chunk, uint32_t box) {
        put(p.z, chunk / kChunks ^ a, block, chunk % kChunks, box);
      });
    }
    Gate(p.epilogue, acc);
    Put<kChunks>(acc,
                 [&](int block, int chunk, uint32_t box) { put(p.d[0], 0, block, chunk, box); });
  }

  __device__ __forceinline__ void End(const Sm90Product&, const Args&, const Sm90Place&, int) {
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnBias<T, Tile::kColumns> bias[2];
  int block0;
};

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, TileSize tile, int multiprocessors,
                    const std::string& what) {
  return WithTile<kGatedTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile =
        Sm90Halves<Sm90TileOf<T, true, false, decltype(rows)::value, decltype(columns)::value>>;
    return LaunchSm90Streamed<Tile, Sm90Gated<Tile>>(ctx, p, multiprocessors, what);
  });
}

Status LaunchSm90Gated(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                       int multiprocessors, const std::string& what) {
  return dtype == DType::kBF16 ? LaunchByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, what)
                               : LaunchByTile<__half>(ctx, p, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
