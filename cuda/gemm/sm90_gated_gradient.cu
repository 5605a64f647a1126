// da = dy * f(g), dg = dy * a * f'(g), where dy is a product and a and g are the halves of z; and of each column of da and dg,
// as rounded to 16 bits, its sum in float32.
//
// A tile of dy has the same columns of both halves. z's boxes come through the ring behind the operands, a stage for each 64
// columns of a block of rows: a's boxes of both warpgroups, then g's. A warpgroup makes two boxes of it, da in the place
// of its sums, and stores both. The sums: sm90_columns.cuh.
#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_gated.h"
#include "cuda/gemm/sm90_gradient.cuh"

namespace jaxconv::cuda {

// A thread's part of 16 columns, from 16 j on, of a box of 64 x 64 16-bit elements in shared memory, swizzled; in the order
// of wgmma's registers. As ThroughBox and Sm90Outbox::Put, which take whole boxes: of two boxes at a time there are no registers
// for that.
struct ColumnsOfBox {
  __device__ __forceinline__ ColumnsOfBox(int j) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // [0, 64)
    offset = row * 128 + (((j * 2 + lane / 16) ^ (row % 8)) * 16);
  }
  __device__ __forceinline__ void Load(uint32_t box, uint32_t (&pair)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                 : "r"(box + offset)
                 : "memory");
  }
  template <typename T>
  __device__ __forceinline__ void Store(uint32_t box, const float (&v)[8], T) const {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(box + offset),
        "r"(PackHalves(v[0], v[1], T())), "r"(PackHalves(v[2], v[3], T())),
        "r"(PackHalves(v[4], v[5], T())), "r"(PackHalves(v[6], v[7], T()))
        : "memory");
  }
  uint32_t offset;
};

// f(z) and f'(z).
struct ValueAndSlope {
  float value, slope;
};

template <typename T, Activation kActivation>
__device__ __forceinline__ ValueAndSlope BothOf(float z, float slope) {
  const float given = z;  // GateAndRest clamps it
  if constexpr (kActivation == Activation::kTanh) {
    const float y = FastTanh(z, T());
    return {y, SlopeFrom<kActivation, true>(y)};
  } else if constexpr (kActivation == Activation::kSigmoid) {
    const float y = FastSigmoid(z);
    return {y, SlopeFrom<kActivation, true>(y)};
  } else if constexpr (kActivation == Activation::kSilu) {
    const auto [gate, rest] = GateAndRest<false, float, true>(z);
    return {fmaxf(given, z) * gate, gate * fmaf(z, rest, 1.f)};
  } else if constexpr (kActivation == Activation::kGelu) {
    const auto [gate, rest] = GateAndRest<true, float, true>(z);
    const float argument = fmaf(3 * 0.071354816f * z, z, 1.5957691216f);  // its derivative
    return {fmaxf(given, z) * gate, fmaf(z * gate * rest, argument, gate)};
  } else if constexpr (kActivation == Activation::kGeluExact) {
    return {FastGeluExact(z), SlopeFrom<kActivation, true>(z)};
  } else if constexpr (kActivation == Activation::kHardSwish) {
    return {Activate(kActivation, z, 0.f), SlopeFrom<kActivation, true>(z)};
  } else if constexpr (kActivation == Activation::kElu) {
    const float y = Activate(kActivation, z, 0.f);
    return {y, SlopeFrom<kActivation, true>(y)};
  } else {
    return {Activate(kActivation, z, slope), ActivateGrad<float, true>(kActivation, z, slope)};
  }
}

template <typename Tile>
struct Sm90GatedGradient : Sm90EpilogueDefaults {
  struct Args {
    float* sums;  // (parts, halves, n)
    int a;        // which half is a
  };
  using Walk = Sm90OneColumn;
  using T = typename Tile::T;
  using Sums = float[Tile::kBlocks][Tile::kTileN / 2];
  static constexpr int kChunks = Tile::kTileN / 64, kBehind = Tile::kBlocks * kChunks;
  static constexpr int kProducer = 40, kConsumer = 232;
  static_assert(!Tile::kPingPong && 4 * kBlockBytes <= Tile::kStageBytes);

  static __device__ __forceinline__ int Behind(const Sm90Product&) { return kBehind; }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args& args,
                                                 const Sm90Place& at, Ring& ring) {
#pragma unroll 1
    for (int i = 0; i < kBehind; ++i) {
      const uint32_t full = ring.Claim(4 * kBlockBytes);
      const int n = at.n + i % kChunks * 64, m = at.m + i / kChunks * 64;
#pragma unroll
      for (int box = 0; box < 4; ++box) {
        LoadTile(ring.A() + box * kBlockBytes, p.c, full, n, box / 2 ^ args.a,
                 m + box % 2 * Tile::kBlocks * 64);
      }
      ring.Advance();
    }
  }

  __device__ __forceinline__ Sm90GatedGradient(const Sm90Product&, const Args&, uint32_t shared,
                                               int group, int block0)
      : outbox(shared, group + 1), group(group), block0(block0) {}

  // Of dy da and dg, into the outbox; `boxes`: a's, and g's behind those of both warpgroups. kDrops: where f' is 0 dg is, also of
  // an infinity.
  template <bool kDrops, typename F>
  __device__ __forceinline__ void Back(uint32_t boxes, F both, float (&dy)[32]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const ColumnsOfBox columns(j);
      uint32_t a[4], g[4];
      columns.Load(boxes, a);
      columns.Load(boxes + 2 * kBlockBytes, g);
      auto& da = reinterpret_cast<float (&)[8]>(dy[j * 8]);
      float dg[8];
      Pin(da);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 of_a = UnpackPair(a[i], T()), of_g = UnpackPair(g[i], T());
        const ValueAndSlope left = both(of_g.x), right = both(of_g.y);
        dg[2 * i] = kDrops && left.slope == 0.f ? 0.f : da[2 * i] * of_a.x * left.slope;
        dg[2 * i + 1] = kDrops && right.slope == 0.f ? 0.f : da[2 * i + 1] * of_a.y * right.slope;
        da[2 * i] *= left.value;
        da[2 * i + 1] *= right.value;
      }
      Pin(da);
      Pin(dg);
      columns.Store(outbox.Pair(), da, T());
      columns.Store(outbox.Pair() + kBlockBytes, dg, T());
    }
  }

  template <bool kDrops, typename Ring, typename F>
  __device__ __forceinline__ void Through(const Sm90Product& p, const Args& args,
                                          const Sm90Place& at, Ring& ring, Sums& acc, F both) {
    const int m_end = p.phase[0].m;
#pragma unroll
    for (int i = 0; i < kBehind; ++i) {
      const int block = i / kChunks, chunk = i % kChunks;
      outbox.Open();
      ring.Await();
      Back<kDrops>(ring.A() + group * kBlockBytes, both,
                   reinterpret_cast<float (&)[32]>(acc[block][chunk * 32]));
      const uint32_t pair = outbox.Pair();
      ReadsFirst();
      outbox.Close([&](uint32_t boxes) {  // all have read
        const int m = at.m + (block0 + block) * 64, n = at.n + chunk * 64;
        if (m >= m_end || n >= p.n) return;
        StoreTile(p.z, boxes, n, args.a, m);
        StoreTile(p.z, boxes + kBlockBytes, n, args.a ^ 1, m);
      });
      ring.Release(ring.stage);
      ring.Advance();
      sums[0].Add(chunk, pair);
      sums[1].Add(chunk, pair + kBlockBytes);
    }
  }

  // One activation's code runs in a launch: each has its own, without branches inside.
  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args& args,
                                         const Sm90Place& at, Ring& ring, Sums& acc) {
    const float slope = p.epilogue.slope;
#define JAXCONV_BOTH(kind)                                                                    \
  case Activation::kind:                                                                      \
    Through<Activation::kind == Activation::kRelu || Activation::kind == Activation::kRelu6>( \
        p, args, at, ring, acc,                                                               \
        [slope](float z) { return BothOf<T, Activation::kind>(z, slope); });                  \
    return;
    static_assert(kActivationCount == 11, "a new activation needs its case below");
    switch (p.epilogue.activation) {
      JAXCONV_BOTH(kNone)
      JAXCONV_BOTH(kRelu)
      JAXCONV_BOTH(kRelu6)
      JAXCONV_BOTH(kLeakyRelu)
      JAXCONV_BOTH(kElu)
      JAXCONV_BOTH(kTanh)
      JAXCONV_BOTH(kSigmoid)
      JAXCONV_BOTH(kSilu)
      JAXCONV_BOTH(kGelu)
      JAXCONV_BOTH(kGeluExact)
      JAXCONV_BOTH(kHardSwish)
    }
#undef JAXCONV_BOTH
  }

  __device__ __forceinline__ void End(const Sm90Product& p, const Args& args, const Sm90Place& at,
                                      int part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half].Write(p, at, 2 * part + (half ^ args.a), args.sums);
    }
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  ColumnSums<T, kChunks, 1> sums[2];
  int group, block0;
};

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, TileSize tile, bool first,
                    int multiprocessors, float* parts, void* sums, const std::string& what) {
  int count = 0;
  JAXCONV_RETURN_IF_ERROR(WithTile<kGatedGradientTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90TileOf<T, true, true, decltype(rows)::value, decltype(columns)::value>;
    return LaunchSm90Columns<Tile, Sm90GatedGradient<Tile>>(ctx, p, {parts, first ? 1 : 0},
                                                            multiprocessors, what, &count);
  }));
  return LaunchColumnTotals<8, 1>(ctx, parts, count, 2 * p.n,
                                  Sm90GradientTotals<T>{static_cast<T*>(sums)}, what);
}

Status LaunchSm90GatedGradient(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                               bool first, int multiprocessors, float* parts, void* sums,
                               const std::string& what) {
  const auto launch = dtype == DType::kBF16 ? LaunchByTile<__nv_bfloat16> : LaunchByTile<__half>;
  return launch(ctx, p, tile, first, multiprocessors, parts, sums, what);
}

}  // namespace jaxconv::cuda
