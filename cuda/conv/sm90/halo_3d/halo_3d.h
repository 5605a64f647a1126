// 3-D convolutions of few channels on the sm_90a tensor cores, as the host fills them in;
// halo_3d.cuh computes them and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

inline constexpr int kPlanesTaps = 16;     // of a plane, the most
inline constexpr int kPlanesPlaces = 256;  // of a tile
inline constexpr int kPlanesMade = 32;     // channels that a CTA makes
inline constexpr int kPlanesShared = 227 * 1024;

// fprop, and dgrad of stride 1. Axes are W, H, D.
struct PlanesProduct {
  CUtensorMap x;
  const void* w;  // (3, R, S, channels, n); dgrad: (3, R, S, n, channels), taps backwards
  bool dgrad;
  void *d, *z;  // z: null unless saved
  Sm90Epilogue epilogue;
  int images;
  int pitch;               // places of a row, gap included
  int first[2];            // coordinate of place 0 in the planes that are read
  int planes;              // D of the images that are read
  int ahead;               // output plane o reads planes o - ahead, o - ahead + 1, o - ahead + 2
  int made[3];             // extents of the images that are made
  int taps;                // of a plane
  int shift[kPlanesTaps];  // places from an output's to what a tap of its plane reads
  int channels;            // summed
  int n;                   // made
  // Filled in by the launch.
  int blocks;   // of kPlanesMade channels made
  int ctas;     // that share a block
  int tiles;    // of places in a plane
  int buffers;  // planes of a tile in shared memory
  int buffer_bytes;
};

// wgrad of 3 x 3 x 3 filters.
struct PlanesWgrad {
  CUtensorMap x, dy;
  int images;
  int pitch;                    // places of a row, gap included
  int first[2];                 // coordinate of place 0 in the planes of x
  int planes;                   // D of x
  int ahead;                    // as above
  int made;                     // planes of dy
  int row_shift, column_shift;  // places from a tap to the next
  int channels;                 // C
  int n;                        // K
  int tiles;                    // of kPlanesWgradPlaces places in a plane
  void* dw;
  float* partials;
  int parts;  // CTAs that share the work of a block
  // Filled in by the launch.
  int x_bytes, dy_bytes;  // of a plane of a tile
  int x_buffers;
};

inline constexpr int kPlanesWgradPlaces = 384;  // of a tile
inline constexpr int kPlanesDyBuffers = 3;
// Of a CTA: what its threads hold of the 27 taps of 32 x 32 channels, and of 3 taps more.
inline constexpr int64_t kPlanesPartialBytes = 3 * 20 * 128 * 16;

// With what compute-sanitizer believes that the last k of an operand of overlapping blocks reads.
constexpr int64_t PlanesWgradShared(int64_t row_shift, int64_t column_shift, int64_t x_buffers) {
  return x_buffers * ((kPlanesWgradPlaces + 2 * (row_shift + column_shift) + 15) / 16 * 16 * 64) +
         kPlanesDyBuffers * ((kPlanesWgradPlaces + 2 * column_shift + 15) / 16 * 16 * 64) + 128 +
         2048;
}

// Bytes of shared memory for the reach (the largest shift). row: bytes of a place.
constexpr int64_t PlanesBufferBytes(int64_t reach, int64_t row) {
  return ((kPlanesPlaces + reach) * row + 1023) / 1024 * 1024;
}
constexpr int64_t PlanesShared(int64_t taps, int64_t reach, int64_t row, int64_t buffers) {
  return taps * 3 * kPlanesMade * row + buffers * PlanesBufferBytes(reach, row) + 256;
}
// Bytes of a place of so many channels in shared memory.
constexpr int PlanesRow(int64_t channels) {
  return channels <= 16 ? 32 : channels <= 32 ? 64 : 128;
}

Status PlanesFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                   const void* w, const void* bias, void* y, void* z, const std::string& what);
Status PlanesDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                   void* dx, const std::string& what);

Status PlanesWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                     const void* dy, void* dw, Workspace workspace, const std::string& what);

Status LaunchPlanesWgradBf16(const Context& ctx, PlanesWgrad& p, int64_t workspace_bytes,
                             const std::string& what);
Status LaunchPlanesWgradF16(const Context& ctx, PlanesWgrad& p, int64_t workspace_bytes,
                            const std::string& what);
Status LaunchPlanesProductBf16(const Context& ctx, PlanesProduct& p, int multiprocessors,
                               const std::string& what);
Status LaunchPlanesProductF16(const Context& ctx, PlanesProduct& p, int multiprocessors,
                              const std::string& what);

}  // namespace jaxconv::cuda
