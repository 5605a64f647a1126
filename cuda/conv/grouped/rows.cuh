// Rows that a filter of 3x3 and stride 2 reads, as a stage of common/row_stream.cuh, for the 16-bit kernels
// rows.cu and rows_wgrad.cu.
//
// Tap s reads column 2 q - pad + s for column q: those of s = 0 and 2 are neighbours, for neighbouring
// q, among the columns of pad's parity, those of s = 1 among the others. So the columns of each parity
// are an array of their own to TMA, and fragments of 16 pixels are read as with stride 1,
// without bank conflicts. A stage has two rows, 2 p - pad - 1 and the next: with those of stage p + 1
// the rows that row p of dy, or y, meets.
#pragma once

#include <algorithm>

#include "cuda/conv/common/row_stream.cuh"

namespace jaxconv::cuda::conv {

constexpr int kGroupedSlab = 64;          // channels: 128 bytes of a pixel
constexpr int kSharedOfAll = 228 * 1024;  // bytes of a multiprocessor; each block takes 1 KiB more

struct StridedColumns {
  CUtensorMap outer, middle;    // taps 0 and 2; tap 1
  int outer_from, middle_from;  // the index of q = 0 among them
  uint32_t middle_at;           // in a stage
};

// Pixels of a stage, [image][row][column].
JAXCONV_HD int OuterPixels(const RowUnits& u) { return u.images * 2 * (u.width + 1); }
JAXCONV_HD int MiddlePixels(const RowUnits& u) { return u.images * 2 * u.width; }
JAXCONV_HD uint32_t StridedBytes(const RowUnits& u) {
  return uint32_t(OuterPixels(u) + MiddlePixels(u)) * 128;
}

// Rows `row` and the next, the columns of u.width ones of y from q on.
__device__ __forceinline__ void LoadStrided(uint32_t to, const StridedColumns& x, uint32_t full,
                                            int channel, int q, int row, int image) {
  LoadTile(to, x.outer, full, channel, q + x.outer_from, row, image);
  LoadTile(to + x.middle_at, x.middle, full, channel, q + x.middle_from, row, image);
}

// Where 8 channels of what tap s reads for column `col` of an image lie in a stage. Columns past the unit's
// last, of pixels that do not exist, repeat it.
__device__ __forceinline__ uint32_t StridedAt(const RowUnits& u, const StridedColumns& x, int image,
                                              int half, int col, int s, int octet) {
  const bool middle = s == 1;
  const int row = min((image * 2 + half) * (u.width + !middle) + col + s / 2,
                      (middle ? MiddlePixels(u) : OuterPixels(u)) - 1);
  return (middle ? x.middle_at : 0) + uint32_t(row * 128 + ((octet ^ (row & 7)) << 4));
}

inline Status EncodeStrided(DType dtype, const void* base, const RowArray& a, int pad,
                            const RowUnits& u, const std::string& what, StridedColumns* x) {
  const int64_t c = a.channels;
  const auto encode = [&](int parity, int width, CUtensorMap* map) {
    const int64_t columns = std::max(1, (a.w + 1 - parity) / 2);
    const TmaTensor tensor = {
        static_cast<const char*>(base) + (a.w > 1 ? parity * c * int64_t(SizeOf(dtype)) : 0),
        4,
        {c, columns, a.h, a.images},
        {1, 2 * c, c * a.w, c * a.w * a.h}};
    return EncodeTiled(dtype, tensor, {0, width, 2, u.images, 1}, what, map);
  };
  const int odd = pad % 2;
  x->outer_from = -(pad + 1) / 2;
  x->middle_from = -(pad / 2);
  // A single column has no odd ones: these are read past its array's end.
  if (a.w == 1) (odd ? x->outer_from : x->middle_from) = 1;
  x->middle_at = uint32_t(CeilDiv(OuterPixels(u) * 128, 1024) * 1024);
  JAXCONV_RETURN_IF_ERROR(encode(odd, u.width + 1, &x->outer));
  return encode(1 - odd, u.width, &x->middle);
}

// Bytes of a stage.
inline int StridedStage(const RowUnits& u, const StridedColumns& x) {
  return int(x.middle_at + CeilDiv(MiddlePixels(u) * 128, 1024) * 1024);
}

}  // namespace jaxconv::cuda::conv
