// Convolutions of at most 64 summed channels on the sm_90a main loop, as the host fills them in;
// halo.cuh computes them and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

inline constexpr int kHaloTaps = 16;         // the most
inline constexpr int kHaloPlaces = 256;      // of a tile
inline constexpr int kHaloTf32Places = 128;  // of a tile in TF32
inline constexpr int kHaloStep = 128;        // places of a step of wgrad
inline constexpr int kHaloOutbox = 8 * 1024;
inline constexpr int kHaloShared = 227 * 1024;

// The line: places of every image in one order, a gap after each row and image that reads as zeros.
// Axes are W, H, D.
struct HaloLine {
  int rank;        // of the images
  int extent[3];   // places, gaps included
  int first[3];    // coordinate of place 0 in the images that are read
  int64_t places;  // N times all extents
};

// fprop, and dgrad of stride 1.
struct HaloProduct {
  CUtensorMap x, w;
  void *d, *z;  // z: null unless saved
  Sm90Epilogue epilogue;
  HaloLine line;
  int made[3];           // extents of the images that are made
  int shift[kHaloTaps];  // places from an output's to what tap t reads
  int taps;
  bool flip;      // tap t multiplies filter element taps - 1 - t
  int instances;  // groups
  int channels;   // summed, of an instance
  int n;          // made, of an instance
  int tiles;      // of kHaloPlaces
  // Filled in by the launch.
  int blocks;   // of 64 channels made
  int ctas;     // that share a block
  int buffers;  // of x, 2 or 3
  FastDiv by_extent[3];
  Digits4 sixteen;  // places
  int plane;        // pixels that are made
  int64_t image;
  int buffer_bytes;
};

// wgrad of 3 x 3 filters.
struct HaloWgrad {
  CUtensorMap x, dy;
  HaloLine line;
  int row_shift, column_shift;  // places from a tap to the next
  int instances;
  int channels;   // C/G
  int n;          // K/G
  int64_t pitch;  // K
  void* dw;
  float* partials;
  int steps;  // of kHaloStep places
  int parts;  // CTAs that share the steps of a block
  // Filled in by the launch.
  int blocks;  // of 64 of K/G
  int stages;
  int buffer_bytes;  // of x
};

// Bytes of shared memory that the kernels need for the reach (the largest shift), with the fewest
// buffers they run with.
constexpr int64_t HaloBufferBytes(int64_t places, int64_t reach) {
  return (places + reach + 7) / 8 * 8 * 128;
}
constexpr int64_t HaloProductShared(int64_t taps, int64_t reach, int64_t buffers) {
  return taps * 8192 + buffers * HaloBufferBytes(kHaloPlaces, reach) + kHaloOutbox + 128;
}
constexpr int64_t HaloTf32Shared(int64_t taps, int64_t channels, int64_t reach) {
  return taps * (channels > 32 ? 2 : 1) * 8192 + 2 * HaloBufferBytes(kHaloTf32Places, reach) + 64;
}
constexpr int64_t HaloWgradShared(int64_t reach, int64_t stages) {
  return stages * (HaloBufferBytes(kHaloStep, reach) + kHaloStep * 128) + 128;
}
constexpr int64_t kHaloPartialBytes = 9 * 64 * 64 * 4;

Status LaunchHaloProductBf16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                             const std::string& what);
Status LaunchHaloProductF16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                            const std::string& what);
Status LaunchHaloProductTf32(const Context& ctx, HaloProduct& p, int multiprocessors,
                             const std::string& what);
Status LaunchHaloWgradBf16(const Context& ctx, HaloWgrad& p, int multiprocessors,
                           int64_t workspace_bytes, const std::string& what);
Status LaunchHaloWgradF16(const Context& ctx, HaloWgrad& p, int multiprocessors,
                          int64_t workspace_bytes, const std::string& what);

}  // namespace jaxconv::cuda
