// The epilogue of a plain product, in either loop: z = alpha * (sum + added) + beta * c + bias; d = f(z). What is added (a
// matrix, or what d holds) comes through the ring behind the operands, so that it is on its way while the products run; in
// the epilogue each thread would wait for memory.
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// An epilogue's part up to z, but for an addend that threads read themselves: an object of a consumer warpgroup, with the
// producer's side of it.
template <typename Tile>
struct Sm90Affine {
  using T = typename Tile::T;
  // Convolutions have addends; their rows' operand is k-major.
  static constexpr bool kAdds = Tile::kSwapped ? Tile::kMajorB : Tile::kMajorA;

  static __device__ __forceinline__ int Behind(const Sm90Product& p) {
    return kAdds && p.added != Sm90Added::kNothing ? Sm90AddendStages<Tile>::kStages : 0;
  }

  // kInPlace: also where d holds the addend.
  template <bool kInPlace, typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Sm90Place& at,
                                                 Ring& ring) {
    using Stages = Sm90AddendStages<Tile>;
    ProduceBoxes<Tile>(ring, [&](uint32_t to, uint32_t full, int chunk) {
      const int n = at.n + chunk * 64;
      if (!kInPlace || p.added == Sm90Added::kMatrix) {
        LoadTile(to, p.c, full, n, at.instance, at.m);
        return;
      }
      if constexpr (kInPlace) {
        for (int box = 0; box < Stages::kRowBoxes; ++box) {
          const Digits4 pixel = PixelOf(p.phase[at.phase], at.m + box * 64);
          const int from[3] = {pixel.digit[3], pixel.digit[2], pixel.digit[1]}, none[3] = {};
          LoadColumn(p.rank_d, to + box * kBlockBytes, p.d[at.phase], full, at.instance * p.n + n,
                     from, pixel.digit[0], none);
        }
      }
    });
  }

  __device__ __forceinline__ Sm90Affine(const Sm90Product& p, int group, int block0)
      : group(group), block0(block0), behind(Behind(p)) {}

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Sm90Place& at) {
    bias.Load(p.epilogue, at.instance, at.n, p.n);
  }

  template <typename Ring>
  __device__ __forceinline__ void Add(Ring& ring,
                                      float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) const {
    if constexpr (kAdds) {
      if (behind > 0) ThroughRing<Tile, false>(ring, group, block0, PlusAdded(), acc);
    }
  }

  // A thread's first row of a block of the sums.
  __device__ __forceinline__ int Row(const Sm90Place& at, int block) const {
    return (Tile::kSwapped ? at.n : at.m) + (block0 + block) * 64 + threadIdx.x % 128 / 32 * 16 +
           threadIdx.x % 32 / 4;
  }

  // m_end: of d's rows.
  __device__ __forceinline__ void Scale(const Sm90Product& p, const Sm90Place& at, int m_end,
                                        int block, float (&v)[Tile::kTileN / 2]) const {
    ScaleAndBias(p.epilogue, at.instance, Row(at, block), Tile::kSwapped ? p.n : m_end, bias, v);
  }

  // Wide tiles have no registers for it, nor have four warpgroups.
  ColumnBias<T, Tile::kTileN, Tile::kTileN <= 256 && !Tile::kMatrices> bias;
  int group, block0, behind;
};

template <typename Tile>
struct Sm90Plain : Sm90EpilogueDefaults {
  using T = typename Tile::T;
  using Affine = Sm90Affine<Tile>;

  static __device__ __forceinline__ int Behind(const Sm90Product& p) { return Affine::Behind(p); }

  template <typename Ring>
  static __device__ __forceinline__ void Produce(const Sm90Product& p, const Args&,
                                                 const Sm90Place& at, Ring& ring) {
    Affine::template Produce<!Tile::kMatrices>(p, at, ring);
  }

  __device__ __forceinline__ Sm90Plain(const Sm90Product& p, const Args&, uint32_t shared,
                                       int group, int block0)
      : outbox(shared, group + 1), affine(p, group, block0) {}

  __device__ __forceinline__ void Begin(const Sm90Product& p, const Args&, const Sm90Place& at) {
    affine.Begin(p, at);
  }

  // Each step goes over all sums before the next begins, so that what a problem does not ask for is
  // skipped once, and the code that runs lies together: box by box, jumping over formulas that were
  // not wanted cost more than half of the epilogue in instruction cache misses.
  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring& ring,
                                         float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    affine.Add(ring, acc);
    const int m_end = p.phase[at.phase].m;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      affine.Scale(p, at, m_end, block, acc[block]);
      if constexpr (!Tile::kSwapped) {
        AddAddend<T>(p.epilogue, at.instance, affine.Row(at, block), m_end, at.n, p.n, acc[block]);
      }
    }
    const auto nothing = [](int, uint32_t) {};
    const int block0 = affine.block0;
    if (p.epilogue.save_z) PutTile<Tile>(p, at, block0, p.z, 0, outbox, acc, nothing);
    ActivateFast<T>(p.epilogue.activation, p.epilogue.slope,
                    reinterpret_cast<float (&)[Tile::kBlocks * Tile::kTileN / 2]>(acc[0][0]));
    PutTile<Tile>(p, at, block0, p.d[at.phase], Tile::kMatrices ? 0 : p.rank_d, outbox, acc,
                  nothing);
  }

  __device__ __forceinline__ void End(const Sm90Product&, const Args&, const Sm90Place&, int) {
    outbox.Drain();
  }

  Sm90Outbox<T, Tile::kPairs> outbox;
  Affine affine;
};

}  // namespace jaxconv::cuda
