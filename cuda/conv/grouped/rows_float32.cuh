// What rows_float32.cu and rows_float32_wgrad.cu share: who owns what of a strip.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/conv/common/row_stream.cuh"

namespace jaxconv::cuda::conv {

constexpr int kFloatTaps = 3;           // an axis
constexpr int kRingBytes = 128 * 1024;  // of fprop and dgrad; what the ring has, L1 has not

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// A strip is cut into threads: `lanes` on a pixel, fastest; then `col_tiles` runs of columns; then
// images.
struct FloatThreads {
  int lanes, col_tiles, threads;
  FastDiv by_tiles;
};

// Strips that give a block up to `most` threads, and leave few of them without work. Columns that
// strips share cost a little.
inline FloatThreads ChooseFloatThreads(RowUnits& u, const RowArray& to, int slab, int lanes,
                                       int run, int most, int stride) {
  FloatThreads best{};
  double score = -1;
  const int tiles_all = int(CeilDiv(to.w, run)), runs = most / lanes;
  // Boxes are at most 256 pixels wide and images deep.
  const int widest = std::min(runs, (256 - (kFloatTaps - 1)) / (run * stride));
  const int fewest = int(CeilDiv(tiles_all, widest));
  for (int strips = fewest; strips <= std::min(fewest + 4, tiles_all); ++strips) {
    const int tiles = int(CeilDiv(tiles_all, strips)), width = tiles * run;
    const int images = std::min({runs / tiles, to.images, 256});
    const double busy = double(tiles * images) / runs;
    const double useful = double(to.w) / (strips * width);
    const double alone = double(width) / (width + 0.25 * (kFloatTaps - 1));
    const double value = busy * useful * alone;
    if (value <= score) continue;
    score = value;
    best.lanes = lanes;
    best.col_tiles = tiles;
    best.threads = int(CeilDiv(lanes * tiles * images, 32) * 32);
    best.by_tiles = FastDiv(tiles);
    u.images = images;
    u.width = width;
  }
  u.slabs = int(CeilDiv(to.channels, slab));
  return best;
}

// Rows of `width` pixels of a slab, of `images` images.
inline Status EncodeFloatRows(const void* base, const RowArray& a, int slab, int width, int images,
                              const std::string& what, CUtensorMap* map) {
  const int64_t c = a.channels;
  const TmaTensor tensor = {base, 4, {c, a.w, a.h, a.images}, {1, c, c * a.w, c * a.w * a.h}};
  return EncodePlain(DType::kF32, tensor, {slab, width, 1, images, 1}, what, map);
}

// Whether runs of `wide` leave no more of their columns (or slabs of their channels) without work than
// runs of `narrow` do.
inline bool FillsRuns(int extent, int wide, int narrow) {
  return CeilDiv(extent, wide) * wide == CeilDiv(extent, narrow) * narrow;
}

// kCount floats of shared memory.
template <int kCount>
__device__ __forceinline__ void LoadFloats(uint32_t at, float* v) {
  if constexpr (kCount == 1) {
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v[0]) : "r"(at));
  } else if constexpr (kCount == 2) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(v[0]), "=f"(v[1]) : "r"(at));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                   : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                   : "r"(at + i * 4));
    }
  }
}

}  // namespace jaxconv::cuda::conv
