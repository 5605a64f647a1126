// What sm90/halo can run, and the line of pixels and gaps that it walks (halo.cuh). Host C++17 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {

inline constexpr int64_t kSm90Pixels =
    (int64_t(1) << 31) - 1 - 4096;  // the most of a tensor or a line

inline constexpr int kHaloTaps = 16;         // the most
inline constexpr int kHaloPlaces = 256;      // of a tile
inline constexpr int kHaloTf32Places = 128;  // of a tile in TF32
inline constexpr int kHaloStep = 128;        // places of a step of wgrad
inline constexpr int kHaloOutbox = 8 * 1024;
inline constexpr int kHaloShared = 227 * 1024;

// The line: places of every image in one order, a gap after each row and image that reads as zeros. Axes are W, H, D.
struct HaloLine {
  int rank;        // of the images
  int extent[3];   // places, gaps included
  int first[3];    // coordinate of place 0 in the images that are read
  int64_t places;  // N times all extents
};

// Bytes of shared memory that the kernels need for the reach (the largest shift), with the fewest buffers they run with.
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

// CTAs that share the tiles of a block of 64 channels made: of kGradient at most this many in all, whatever the device, as
// each of their warpgroups leaves a part of the sums.
inline constexpr int64_t kHaloMostCtas = 256;
constexpr int64_t HaloCtas(int64_t multiprocessors, int64_t blocks, int64_t tiles) {
  const int64_t share = std::max<int64_t>(multiprocessors / blocks, 1);
  return std::min(share, tiles);
}

// wgrad in TF32 (wgrad/wgrad_tf32.cu): shared memory beside the ring of x, whose slots are 32 or 64 places of 256 bytes.
inline constexpr int kTf32Step = 32;  // places
inline constexpr int kTf32MaxRing = 32;
inline constexpr int kTf32BarrierBytes = (2 * kTf32MaxRing + 32) * 8;
inline constexpr int kTf32HaloFixedBytes = 192 * 256 + 4 * 8192;
inline constexpr TileSize kTf32HaloTile = {9 * 64, 64};

// A warpgroup asks for a step and the next before it frees a slot of the step's. One more is fetched.
constexpr int Tf32LeastRing(int slot, int reach) {
  return (kTf32Step + slot + reach + slot - 1) / slot;
}

// The convolution of stride 1 over the line: place q reads places q + r * row + s * column + ... of the line that is read, as
// fprop and wgrad (dgrad: with taps backwards).
struct HaloWalk {
  HaloLine line;
  bool negative;       // it has negative padding
  int64_t shift[3];    // places from a tap to the next, W H D
  int64_t reach;       // the largest shift of all taps
  TmaWalk read, made;  // of the images that are read and made

  HaloWalk(const ConvProblem& p, bool dgrad) {
    line.rank = Rank(p);
    line.places = p.n;
    negative = false;
    reach = 0;
    int64_t pitch = 1;
    for (int i = 0; i < 3; ++i) {
      const int d = 2 - i;
      const int64_t window = (p.filter[d] - 1) * p.dilation[d];
      const int64_t from = dgrad ? p.out[d] : p.in[d], to = dgrad ? p.in[d] : p.out[d];
      // dx[h] sums dy[h + pad - t * dilation]: from h + pad - window on.
      const int64_t pad = dgrad ? window - p.pad[d] : p.pad[d];
      const int64_t high = to + window - pad - from;
      negative = negative || pad < 0;
      const int64_t extent = std::max({from + std::max(pad, high), to, int64_t(1)});
      line.extent[i] = read.count[i] = made.count[i] = int(extent);
      line.first[i] = read.first[i] = int(-pad);
      made.first[i] = 0;
      read.step[i] = made.step[i] = 1;
      shift[i] = p.dilation[d] * pitch;
      reach = std::min<int64_t>(reach + window * pitch, 1 << 20);
      // Saturated: what is more is refused.
      line.places = std::min(line.places, int64_t(1) << 31) * extent;
      pitch = std::min<int64_t>(pitch, 1 << 30) * extent;
    }
  }
};

// The most parts of kGradient's and kNormGradient's sums.
inline int64_t HaloGradientParts(const ConvProblem& p) {
  const int64_t places = p.dtype == DType::kF32 ? kHaloTf32Places : kHaloPlaces;
  const int64_t blocks = CeilDivide(p.group_c(), 64) * p.groups;
  return 2 * HaloCtas(kHaloMostCtas, blocks, CeilDivide(HaloWalk(p, true).line.places, places));
}

namespace conv::sm90 {

inline std::string RefuseHaloWgradTf32(const ConvProblem& p, const HaloWalk& walk) {
  if (p.filter[0] > 3 || p.filter[1] != 3 || p.filter[2] != 3 || p.dilation[2] != 1)
    return "it takes up to 3 planes of 3x3 taps, no dilation along rows";
  if (3 * walk.line.places > kSm90Pixels)  // with the planes that the last ones read
    return "it needs fewer than 2^31 pixels and gaps";
  const int64_t reach = 2 * (walk.shift[1] + 1);
  const int64_t lines = (kHaloShared - kTf32HaloFixedBytes - kTf32BarrierBytes) / 256;
  return lines / 32 >= Tf32LeastRing(32, int(std::min<int64_t>(reach, 1 << 20)))
             ? ""
             : "its pixels do not fit shared memory";
}

inline std::string RefuseHalo(ConvOp op, const ConvProblem& p) {
  const bool wgrad = op == ConvOp::kWgrad;
  const bool back = op == ConvOp::kGradient || op == ConvOp::kNormGradient;
  const bool dgrad = op == ConvOp::kDgrad || op == ConvOp::kDgradAdd || back;
  const bool tf32 = p.dtype == DType::kF32;
  if (op == ConvOp::kStatistics || op == ConvOp::kDgradSums)
    return "sm90/halo makes no statistics, and no sums for a batch-norm with a residual";
  if (op == ConvOp::kNormGradient && !tf32)
    return "back through a batch-norm sm90/halo takes float32 only";
  if (tf32 && p.full_float32) return "it rounds float32 to TF32";
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1) return "it needs stride 1";
  const HaloWalk walk(p, dgrad);
  if (walk.negative) return "it takes no negative padding";
  if (walk.line.places > kSm90Pixels) return "it needs fewer than 2^31 pixels and gaps";
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  if (std::string why = RefuseImages(walk.line.rank, from, walk.read); !why.empty()) return why;
  if (wgrad) {
    if (std::string why = RefuseImages(walk.line.rank, p.out, walk.made); !why.empty()) return why;
    if (tf32) return RefuseHaloWgradTf32(p, walk);
  }
  const int64_t summed = dgrad ? p.group_k() : p.group_c();
  const int64_t made = dgrad ? p.group_c() : p.group_k();
  if (summed > 64 || (p.groups > 1 && (summed != 64 || made % 64 != 0))) {
    return "it needs at most 64 summed channels, with groups 64 and a multiple of 64 made, got " +
           std::to_string(summed) + " and " + std::to_string(made);
  }
  const int64_t taps = p.filter_size();
  if (wgrad && (p.filter[0] != 1 || p.filter[1] != 3 || p.filter[2] != 3))
    return "it needs a 3x3 filter";
  if (wgrad && CeilDivide(made, 64) * p.groups > kMostGridRows)
    return "it takes weight gradients of at most 65535 blocks of 64 output channels";
  if (taps > kHaloTaps) return "it takes at most 16 taps";
  const int64_t needed = wgrad  ? HaloWgradShared(walk.reach, 2)
                         : tf32 ? HaloTf32Shared(taps, summed, walk.reach)
                                : HaloProductShared(taps, walk.reach, 2);
  return needed <= kHaloShared ? "" : "its pixels do not fit shared memory";
}

}  // namespace conv::sm90
}  // namespace jaxconv::cuda
