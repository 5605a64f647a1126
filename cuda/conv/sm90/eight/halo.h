// 3x3 convolutions of 8-bit numbers of few channels on the sm_90a main loop, as the host fills them in; halo.cuh computes them
// and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/sm90/eight/domain.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_eight.h"

namespace jaxconv::cuda {

struct EightHalo {
  CUtensorMap x, w;
  Sm90EightEpilogue epilogue;
  HaloLine line;
  int made[3];                  // extents of the images that are made
  int row_shift, column_shift;  // places from a tap to the next
  int n;                        // output channels
  int tiles;
  // Filled in by the launch.
  int ctas;     // that share a block of 64 output channels
  int buffers;  // of x, at least 2
  int buffer_bytes;
  FastDiv by_extent[3];
  int plane, image;  // pixels that are made
};

// `row`: bytes of a pixel's channels in shared memory, 64 or 128.
#define JAXCONV_DECLARE_EIGHT_HALO(X, W)                                                           \
  Status LaunchEightHalo##X##W(const Context& ctx, EightHalo& p, int64_t row, int multiprocessors, \
                               const std::string& what);
JAXCONV_EIGHT_PAIRS(JAXCONV_DECLARE_EIGHT_HALO)
#undef JAXCONV_DECLARE_EIGHT_HALO

}  // namespace jaxconv::cuda
