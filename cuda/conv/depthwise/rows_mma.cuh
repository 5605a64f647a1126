// What rows_mma.cu and rows_mma_wgrad.cu share: strips of 16 streams whose rows TMA
// brings one after another (common/row_stream.cuh), transposed on their way so that the tensor cores can
// read a channel's pixels.
//
// As in mma.cuh, 8 neighbouring pixels of 8 channels (an octet) are a cell of 128 bytes;
// a stream is one of `segs` runs of 8 output columns of one of `images` images, at most 16 in all;
// here it goes down all rows of the strip. An image has a cell more than outputs in a row of the
// source, which a run of 8 outputs reaches into.
//
// TMA writes a row as pixels x channels (64 bytes a pixel, in the swizzle of that many
// bytes, so that the 8 chunks of a cell lie in different banks). ldmatrix.trans and stmatrix turn
// each cell into channels x pixels: slot i ^ phase of cell c of an octet, 16 bytes at
//
//   ((c * kBandOctets + octet) * 8 + (i ^ phase)) * 16,
//
// is channel i, and `phase` counts cells along the streams, so that one channel of 8 neighbouring
// streams lies in different banks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/depthwise/domain.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {

constexpr int kBandOctets = 4;  // of a slab: 32 channels, two a warp
constexpr int kBandStreams = depthwise::kStreams;

// Has the compiler keep a value instead of working it out again at each use.
__device__ __forceinline__ void Keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Strips for (images, w) outputs.
inline int BandSegs(RowUnits& u, int images, int w) {
  const int all = int(CeilDiv(w, 8));
  const int segs = int(CeilDiv(all, CeilDiv(all, kBandStreams)));
  u.images = std::min(kBandStreams / segs, images);
  u.width = segs * 8;
  return segs;
}

// Rows of `width` pixels x a slab's channels of `images` images, in the swizzle of a pixel's bytes.
inline Status EncodeBands(DType dtype, const void* base, const RowArray& a, int width, int images,
                          const std::string& what, CUtensorMap* map) {
  const int64_t c = a.channels;
  const TmaTensor tensor = {base, 4, {c, a.w, a.h, a.images}, {1, c, c * a.w, c * a.w * a.h}};
  return EncodeSwizzled(dtype, tensor, {kBandOctets * 8, width, 1, images, 1}, what, map);
}

}  // namespace jaxconv::cuda::conv
