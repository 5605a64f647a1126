// 3-D convolutions of few channels on the sm_90a tensor cores, as the host fills them in;
// halo_3d.cuh computes them and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/halo_3d/domain.h"
#include "cuda/core/context.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// fprop, and dgrad of stride 1. Axes are W, H, D.
struct Halo3dProduct {
  CUtensorMap x[kHalo3dStrips];  // of a strip of the planes
  const void* w;  // (3, R, S, channels, n); dgrad: (3, R, S, n, channels), taps backwards
  bool dgrad;
  void *d, *z;  // z: null unless saved
  Sm90Epilogue epilogue;
  int images;
  int strips;                 // of columns, strip i from made[0] * i / strips on
  int pitch;                  // places of a strip's row, gap included
  int column[kHalo3dStrips];  // coordinate of a strip's place 0 in its planes that are read
  int row;                    // of place 0, likewise
  int planes;                 // D of the images that are read
  int ahead;                  // output plane o reads planes o - ahead, o - ahead + 1, o - ahead + 2
  int made[3];                // extents of the images that are made
  int taps;                   // of a plane
  int shift[kHalo3dTaps];     // places from an output's to what a tap of its plane reads
  int channels;               // summed
  int n;                      // made
  // Filled in by the launch.
  int blocks;   // of kHalo3dMade channels made
  int ctas;     // that share a block
  int tiles;    // of places in a plane of a strip
  int buffers;  // planes of a tile in shared memory
  int buffer_bytes;
};

// wgrad of 3 x 3 x 3 filters.
struct Halo3dWgrad {
  CUtensorMap x[kHalo3dStrips], dy[kHalo3dStrips];  // of a strip of the planes
  int images;
  int strips;
  int pitch;                    // places of a strip's row, gap included
  int column[kHalo3dStrips];    // coordinate of a strip's place 0 in its planes of x
  int row;                      // of place 0, likewise
  int planes;                   // D of x
  int ahead;                    // as above
  int made;                     // planes of dy
  int row_shift, column_shift;  // places from a tap to the next
  int channels;                 // C
  int n;                        // K
  int tiles;                    // of kHalo3dWgradPlaces places in a plane of a strip
  void* dw;
  float* partials;
  int parts;              // CTAs that share the work of a block
  int x_bytes, dy_bytes;  // of a plane of a tile
  int x_buffers;
};

Status Halo3dFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                   const void* w, const void* bias, void* y, void* z, const std::string& what);
Status Halo3dDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                   void* dx, const std::string& what);

Status Halo3dWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                     const void* dy, void* dw, Workspace workspace, const std::string& what);

Status LaunchHalo3dWgradBf16(const Context& ctx, Halo3dWgrad& p, const std::string& what);
Status LaunchHalo3dWgradF16(const Context& ctx, Halo3dWgrad& p, const std::string& what);
Status LaunchHalo3dProductBf16(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                               const std::string& what);
Status LaunchHalo3dProductF16(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                              const std::string& what);

}  // namespace jaxconv::cuda
