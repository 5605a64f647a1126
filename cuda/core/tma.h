// Descriptors of TMA (sm_90), made on the host for each call and passed as
// a kernel parameter: they hold addresses, so they are never kept. The driver is asked for the two
// encoding functions at the first use; a machine without one gets a Status, and nothing links to
// libcuda.
//
// Tensors are 16-bit or float32, which can be rounded to TF32 on its way; dimension 0 is contiguous;
// strides are in elements. Shared memory holds rows of 128 bytes (64 elements, 32 of float32) in the
// 128-byte swizzle: 16-byte chunk j of row r lies at
// j ^ (r % 8). Reads outside the tensor give zeros, writes are dropped.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/status.h"
#include "cuda/core/tma_walk.h"

namespace jaxconv::cuda {

struct TmaTensor {
  const void* base;  // 16-byte aligned
  int rank;          // in [3, 5]
  int64_t extent[5];
  int64_t stride[5];  // stride[0] is 1; the others are multiples of 16 bytes
};

// Boxes of 128 bytes x rows[1] x rows[2] x ...
Status EncodeTiled(DType dtype, const TmaTensor& tensor, const int (&rows)[5],
                   const std::string& what, CUtensorMap* map, bool tf32 = false);

// Boxes of any extents up to 256, not swizzled; a row of a box is a multiple of 16 bytes.
Status EncodePlain(DType dtype, const TmaTensor& tensor, const int (&box)[5],
                   const std::string& what, CUtensorMap* map, bool tf32 = false);

// The same in the swizzle of a row's bytes, 32, 64 or 128: of each 128 bytes k of shared memory, 16-byte
// chunk j of a row lies at j ^ (k % chunks of a row).
Status EncodeSwizzled(DType dtype, const TmaTensor& tensor, const int (&box)[5],
                      const std::string& what, CUtensorMap* map, bool tf32 = false);

// Columns of `pixels` pixels x 128 bytes of channels; the tensor's dimensions are (channels, W, [H, [D,]] N), RefuseWalk has
// nothing against the walk.
// row_bytes: of a pixel's channels, 32, 64 or 128, in the swizzle of as many bytes (wgmma.cuh).
Status EncodeIm2col(DType dtype, const TmaTensor& tensor, const TmaWalk& walk, int pixels,
                    const std::string& what, CUtensorMap* map, bool tf32 = false,
                    int row_bytes = 128);

// The same two of 8-bit elements, whose strides are in bytes: EncodeSwizzled and EncodeIm2col.
Status EncodeBytes(const TmaTensor& tensor, const int (&box)[5], const std::string& what,
                   CUtensorMap* map);
Status EncodeBytesIm2col(const TmaTensor& tensor, const TmaWalk& walk, int pixels,
                         const std::string& what, CUtensorMap* map, int row_bytes = 128);

}  // namespace jaxconv::cuda
