// What rows.cuh and rows_wgrad.cuh share: strips of rows in shared memory, and where a pixel's channels lie in them.
//
// A stage (common/row_stream.cuh) is a row of `images` images, one after another, each of a strip's columns and two more:
// a line of pixels. Products take 16 neighbours of the line; what they make where a row ends is dropped.
#pragma once

#include <algorithm>

#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/narrow/domain.h"
#include "cuda/conv/narrow/kernels.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {

constexpr int kNarrowTaps = 3;             // an axis
constexpr int kNarrowShared = 227 * 1024;  // bytes of a block
constexpr int kNarrowMostStages = 16;
constexpr int kNarrowPixels = 16;  // of a product

// Bytes of a pixel of so many channels in shared memory: a power of two.
constexpr int PixelBytes(int64_t channels, DType dtype) {
  int bytes = 16;
  while (bytes < channels * int64_t(SizeOf(dtype))) bytes *= 2;
  return bytes;
}

// 16-byte chunk `chunk` of pixel `pixel` of a line with kPixel bytes each, in TMA's swizzle of as many bytes.
template <int kPixel>
__device__ __forceinline__ uint32_t ChunkAt(int pixel, int chunk) {
  constexpr int kChunks = kPixel / 16;
  const int turn = kPixel == 16 ? 0 : pixel * kPixel / 128 % kChunks;
  return uint32_t(pixel * kPixel + ((chunk ^ turn) << 4));
}
// The same for `bytes` a pixel.
__device__ __forceinline__ uint32_t ChunkAt(int bytes, int pixel, int chunk) {
  const int turn = bytes == 16 ? 0 : pixel * bytes / 128 % (bytes / 16);
  return uint32_t(pixel * bytes + ((chunk ^ turn) << 4));
}

// Columns of a strip, and images (of `most_images`), that keep the most of `most` products of 16 pixels busy. A strip that
// shares its outer columns with others reads them twice.
inline void ChooseStrips(RowUnits& u, const RowArray& to, int most, int64_t most_images = 256) {
  constexpr int kHalo = kNarrowTaps - 1;
  const int widest = std::min(256, most * kNarrowPixels + kHalo) - kHalo;
  const int fewest = int(CeilDiv(to.w, widest));
  double best = -1;
  for (int strips = fewest; strips <= std::min(fewest + 3, to.w); ++strips) {
    const int width = int(CeilDiv(to.w, strips)), pitch = width + kHalo;
    const int allowed = int(std::clamp<int64_t>(most_images, 1, 256));
    const int fit = std::min({(most * kNarrowPixels + kHalo) / pitch, to.images, allowed});
    for (int images = std::max(1, fit - 8); images <= fit; ++images) {
      const int products = int(CeilDiv(images * pitch - kHalo, kNarrowPixels));
      const double useful = double(images) * to.w / strips / (products * kNarrowPixels);
      const double alone = strips == 1 ? 1.0 : double(width) / (width + 0.5 * kHalo);
      const double full =
          products / (products + 0.05 * most);  // more products hide each other's latencies
      const double value = useful * alone * full;
      if (value <= best) continue;
      best = value;
      u.width = width;
      u.images = images;
    }
  }
}

// Products of a stage.
inline int ProductsOf(const RowUnits& u) {
  const int pixels = u.images * (u.width + kNarrowTaps - 1) - (kNarrowTaps - 1);
  return int(CeilDiv(pixels, kNarrowPixels));
}

// Rows of a strip: `bytes` of each pixel's channels, zeros where there are fewer.
inline Status EncodeRows(DType dtype, const void* base, const RowArray& a, int bytes,
                         const RowUnits& u, const std::string& what, CUtensorMap* map) {
  const int64_t c = a.channels;
  const TmaTensor tensor = {base, 4, {c, a.w, a.h, a.images}, {1, c, c * a.w, c * a.w * a.h}};
  const int box[5] = {bytes / int(SizeOf(dtype)), u.width + kNarrowTaps - 1, 1, u.images, 1};
  const bool tf32 = dtype == DType::kF32;
  return bytes == 16 ? EncodePlain(dtype, tensor, box, what, map, tf32)
                     : EncodeSwizzled(dtype, tensor, box, what, map, tf32);
}

}  // namespace jaxconv::cuda::conv
