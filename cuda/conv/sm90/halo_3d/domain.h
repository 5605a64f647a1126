// What sm90/halo_3d can run, and the planes of places that it walks (halo_3d.cuh). Host C++17 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {

inline constexpr int kHalo3dTaps = 16;     // of a plane, the most
inline constexpr int kHalo3dPlaces = 256;  // of a tile
inline constexpr int kHalo3dMade = 32;     // channels that a CTA makes
inline constexpr int kHalo3dShared = 227 * 1024;
inline constexpr int kHalo3dStrips = 8;   // of the columns of wide planes, the most
inline constexpr int kHalo3dCopy = 1024;  // places of a copy of TMA, the most

inline constexpr int kHalo3dWgradPlaces = 384;  // of a tile
inline constexpr int kHalo3dDyBuffers = 3;
// Of a CTA: what its threads hold of the 27 taps of 32 x 32 channels, and of 3 taps more.
inline constexpr int64_t kHalo3dPartialBytes = 3 * 20 * 128 * 16;

// Bytes of a plane of a tile of wgrad, which read so many places past it.
constexpr int64_t Halo3dWgradBytes(int64_t places) {
  return (kHalo3dWgradPlaces + places + 15) / 16 * 16 * 64;
}
// With what compute-sanitizer believes that the last k of an operand of overlapping blocks reads.
constexpr int64_t Halo3dWgradShared(int64_t row_shift, int64_t column_shift, int64_t x_buffers) {
  return x_buffers * Halo3dWgradBytes(2 * (row_shift + column_shift)) +
         kHalo3dDyBuffers * Halo3dWgradBytes(2 * column_shift) + 128 + 2048;
}
// Planes of x that fit: 3, which are multiplied by one of dy, to 5. 0: there is no room for three.
constexpr int Halo3dWgradBuffers(int64_t row_shift, int64_t column_shift) {
  if (Halo3dWgradBytes(2 * (row_shift + column_shift)) > kHalo3dCopy * 64) return 0;
  int buffers = 5;
  while (buffers > 2 && Halo3dWgradShared(row_shift, column_shift, buffers) > kHalo3dShared)
    --buffers;
  return buffers > 2 ? buffers : 0;
}

// Bytes of shared memory for the reach (the largest shift). row: bytes of a place.
constexpr int64_t Halo3dBufferBytes(int64_t reach, int64_t row) {
  return ((kHalo3dPlaces + reach) * row + 1023) / 1024 * 1024;
}
constexpr int64_t Halo3dProductShared(int64_t taps, int64_t reach, int64_t row, int64_t buffers) {
  return taps * 3 * kHalo3dMade * row + buffers * Halo3dBufferBytes(reach, row) + 256;
}
// Bytes of a place of so many channels in shared memory.
constexpr int Halo3dRow(int64_t channels) {
  return channels <= 16 ? 32 : channels <= 32 ? 64 : 128;
}

// A strip of the planes: columns [made, made + width) of the images that are made, for which columns [read, read + span) of
// the others are images of their own.
struct Halo3dStrip {
  int64_t made, width, read, span;
  TmaWalk walk;  // over those
};

// A plane's places, of every row a gap after it. Planes too wide for shared memory are cut into strips of columns, each a
// plane of its own, whose gaps are as wide as the taps reach: there the images that are read go on, and those of dy end.
// Axes are W, H, D.
struct Halo3dWalk {
  int64_t pad[3];     // W H D
  int64_t strips;     // of columns, widths that differ by one at most
  int64_t extent[2];  // places of a strip's row, and rows
  int64_t row_shift;  // places from a row of taps to the next, clamped
  int64_t reach;      // the largest shift of a plane's taps
  int64_t from, to;   // W of the images that are read and made
  TmaWalk read;       // of fprop and dgrad, but for a strip's first column

  Halo3dWalk(const ConvProblem& p, bool dgrad, int64_t cut = 1) : strips(cut) {
    const int64_t (&in)[3] = dgrad ? p.out : p.in;
    const int64_t (&out)[3] = dgrad ? p.in : p.out;
    from = in[2];
    to = out[2];
    for (int i = 0; i < 3; ++i) {
      const int d = 2 - i;
      const int64_t window = (p.filter[d] - 1) * p.dilation[d];
      pad[i] = dgrad ? window - p.pad[d] : p.pad[d];
      read.step[i] = 1;
      if (i == 2) break;
      // A row's gap is also the padding before the next one.
      const int64_t high = out[d] + window - pad[i] - in[d];
      extent[i] = std::max(in[d] + std::max(pad[i], high), out[d]);
      if (i == 0 && strips > 1) extent[i] = CeilDivide(to, strips) + window;
      read.first[i] = int(-pad[i]);
      read.count[i] = int(extent[i]);
    }
    read.first[2] = 0;
    read.count[2] = int(in[0]);
    row_shift = std::min<int64_t>(p.dilation[1] * extent[0], 1 << 20);
    reach = std::min<int64_t>((p.filter[1] - 1) * row_shift + (p.filter[2] - 1) * p.dilation[2],
                              1 << 20);
  }

  Halo3dStrip Strip(int64_t i) const {
    Halo3dStrip s;
    s.made = to * i / strips;
    s.width = to * (i + 1) / strips - s.made;
    const int64_t first = s.made - pad[0];
    s.read = std::max<int64_t>(std::min(first, from - 1), 0);
    s.span = std::max<int64_t>(std::min(first + extent[0], from) - s.read, 1);
    s.walk = read;
    s.walk.first[0] = int(first - s.read);
    return s;
  }
};

// Bytes of a place of the channels that fprop or dgrad sums up.
inline int Halo3dSummedRow(const ConvProblem& p, bool dgrad) {
  return Halo3dRow(dgrad ? p.k : p.c);
}

inline bool Halo3dProductFits(const ConvProblem& p, bool dgrad, const Halo3dWalk& walk) {
  const int64_t row = Halo3dSummedRow(p, dgrad), taps = p.filter[1] * p.filter[2];
  return Halo3dBufferBytes(walk.reach, row) / row <= kHalo3dCopy &&
         Halo3dProductShared(taps, walk.reach, row, 2) <= kHalo3dShared;
}

// fprop's and dgrad's: planes as they are, or in the fewest strips that fit.
inline Halo3dWalk Halo3dProductWalk(const ConvProblem& p, bool dgrad) {
  const Halo3dWalk whole(p, dgrad);
  const int64_t most = std::min<int64_t>(whole.to, kHalo3dStrips);
  for (int64_t strips = 1; strips <= most; ++strips) {
    const Halo3dWalk walk(p, dgrad, strips);
    if (Halo3dProductFits(p, dgrad, walk)) return walk;
  }
  return whole;
}

// wgrad's: rows past the last output's are zeros of both x and dy, not those of the next plane.
struct Halo3dWgradWalk {
  Halo3dWalk plane;
  int64_t
      tiles;  // of kHalo3dWgradPlaces places in a plane; dy is read up to two columns before a place
  int64_t rows;   // of all of them
  int x_buffers;  // 0: it does not fit

  Halo3dWgradWalk(const ConvProblem& p, int64_t strips) : plane(p, false, strips) {
    const int64_t pitch = plane.extent[0];
    tiles = CeilDivide(p.out[1] * pitch + 2 * p.dilation[2], kHalo3dWgradPlaces);
    rows = CeilDivide(tiles * kHalo3dWgradPlaces, pitch);
    x_buffers = Halo3dWgradBuffers(plane.row_shift, p.dilation[2]);
    plane.read.count[1] = Count(rows + 2 * p.dilation[1] + 2);
  }

  // The walk over dy's columns of a strip; it begins a row before the first.
  TmaWalk Made(const ConvProblem& p) const {
    TmaWalk made;
    made.first[0] = made.first[2] = 0;
    made.first[1] = -1;
    made.count[0] = Count(plane.extent[0]);
    made.count[1] = Count(rows + 2);
    made.count[2] = int(p.out[0]);
    for (int i = 0; i < 3; ++i) made.step[i] = 1;
    return made;
  }

  static int Count(int64_t v) { return int(std::min<int64_t>(v, 1 << 30)); }
};

// Planes as they are, where they fit; else the fewest strips with room for a fourth plane of x, which is loaded while
// three are multiplied; else for three.
inline Halo3dWgradWalk Halo3dWgradWalkOf(const ConvProblem& p) {
  const Halo3dWgradWalk whole(p, 1);
  if (whole.x_buffers > 0) return whole;
  const int64_t most = std::min<int64_t>(p.out[2], kHalo3dStrips);
  for (int buffers : {4, 3}) {
    for (int64_t strips = 2; strips <= most; ++strips) {
      const Halo3dWgradWalk walk(p, strips);
      if (walk.x_buffers >= buffers) return walk;
    }
  }
  return whole;
}

namespace conv::sm90 {

inline std::string RefuseHalo3d(ConvOp op, const ConvProblem& p) {
  const bool dgrad = op == ConvOp::kDgrad, wgrad = op == ConvOp::kWgrad;
  if (op != ConvOp::kFprop && !dgrad && !wgrad)
    return "sm90/halo_3d takes no addend and makes no statistics";
  if (!Half(p.dtype)) return "it takes 16-bit arrays only";
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1 || p.groups != 1 || p.filter[0] != 3 ||
      p.dilation[0] != 1) {
    return "it needs three axes, stride 1, one group and three planes of taps, not dilated";
  }
  const Halo3dWalk walk(p, dgrad);
  if (walk.pad[2] > 2 || walk.pad[1] < 0 || walk.pad[0] < 0)
    return "it takes no negative padding, and padding of planes below 3";
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  const char* room = "its planes do not fit shared memory";
  if (wgrad) {
    if (p.filter[1] != 3 || p.filter[2] != 3) return "it needs a 3x3x3 filter";
    if (CeilDivide(p.c, 32) * CeilDivide(p.k, 32) > kMostGridRows)
      return "it takes weight gradients of at most 65535 blocks of 32 x 32 channels";
    const Halo3dWgradWalk both = Halo3dWgradWalkOf(p);
    const Halo3dWalk& plane = both.plane;
    if (both.x_buffers == 0) return room;
    if (double(p.n) * double(plane.strips) * double(both.tiles) * double(p.out[0]) *
            kHalo3dWgradPlaces >
        double(1 << 30))
      return "it needs fewer than 2^30 pixels and gaps";
    bool fits = 2 * p.dilation[2] <= plane.extent[0];
    for (int i = 0; i < plane.strips; ++i) {
      const Halo3dStrip strip = plane.Strip(i);
      const int64_t read[3] = {p.in[0], p.in[1], strip.span};
      const int64_t made[3] = {p.out[0], p.out[1], strip.width};
      fits = fits && RefuseImages(5, read, strip.walk).empty() &&
             RefuseImages(5, made, both.Made(p)).empty();
    }
    if (!fits) return "its rows are too short, or too few for their padding";
    return "";
  }
  const int64_t summed = dgrad ? p.k : p.c, taps = p.filter[1] * p.filter[2];
  if (summed > 64 || taps > kHalo3dTaps)
    return "it takes at most 64 summed channels and 16 taps in a plane";
  const Halo3dWalk plane = Halo3dProductWalk(p, dgrad);
  if (!Halo3dProductFits(p, dgrad, plane)) return room;
  if (double(p.n) * double(plane.strips) * double(plane.extent[0]) * double(plane.extent[1]) *
          double(to[0]) >
      double(1 << 30)) {
    return "it needs fewer than 2^30 pixels and gaps";
  }
  for (int64_t i = 0; i < plane.strips; ++i) {
    const Halo3dStrip strip = plane.Strip(i);
    const std::string why = RefuseImages(5, {from[0], from[1], strip.span}, strip.walk);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace conv::sm90
}  // namespace jaxconv::cuda
