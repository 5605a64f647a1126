// What sm90/halo_stream can run, and its phases (halo_stream.cuh). Host C++17 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/sm90/halo/domain.h"

namespace jaxconv::cuda {

inline constexpr int kStreamTaps = 32;     // of all phases, the most
inline constexpr int kStreamPlaces = 128;  // of a tile
inline constexpr int kStreamMade = 128;    // channels of a tile
inline constexpr int kStreamSlots = 12;    // blocks of pixels and of the filter, the most

// What is made of a place: one pixel. Axes are W, H.
struct StreamPhase {
  int first, taps;  // of shift and tap; there may be none
  int made[2];      // places of a row and rows that have a pixel
  int offset;       // its pixel of place 0
};

constexpr int64_t StreamSlotBytes(int64_t reach) {
  return (kStreamPlaces + reach + 7) / 8 * 8 * 128;
}
constexpr int64_t StreamShared(int64_t reach, int64_t slots, int64_t stages) {
  return slots * StreamSlotBytes(reach) + stages * 2 * 8192 + 1024;
}

// The phases over one line: fprop of stride 1 has one, a dgrad one for each residue of its strides, at most kSm90Phases.
struct StreamWalk {
  HaloLine line;
  TmaWalk walk;
  StreamPhase phase[kSm90Phases];
  int phases = 0;
  int64_t taps = 0;        // of all phases; those past kStreamTaps are not listed
  int shift[kStreamTaps];  // places from an output's to what the tap reads
  int tap[kStreamTaps];    // its filter element
  int64_t reach = 0;       // the largest shift

  StreamWalk(const ConvProblem& p, bool dgrad) {
    DgradWalk axes[2][kSm90Phases] = {};  // of each axis (W, H) one or several residues' phases
    int residues[2] = {1, 1};
    const int64_t (&from)[3] = dgrad ? p.out : p.in;
    const int64_t (&to)[3] = dgrad ? p.in : p.out;
    line.rank = 4;
    line.places = p.n;
    line.extent[2] = 1;
    line.first[2] = 0;
    int64_t lowest[2];
    for (int i = 0; i < 2; ++i) {
      const int d = 2 - i;
      if (dgrad) {
        const DgradAxis a = MakeDgradAxis(p, d);
        residues[i] = std::min(a.residues, kSm90Phases);
        for (int residue = 0; residue < residues[i]; ++residue)
          axes[i][residue] = MakeDgradWalk(a, residue);
      } else {
        axes[i][0] = {int(p.out[d]), int(p.filter[d]), int(-p.pad[d]), int(p.dilation[d]), 0, 1};
      }
      int64_t low = 0, high = 0, made = 1;
      for (int j = 0; j < residues[i]; ++j) {
        const DgradWalk& a = axes[i][j];
        made = std::max<int64_t>(made, a.rows);
        if (a.taps == 0) continue;
        low = std::min<int64_t>(low, a.first);
        high = std::max(high, a.first + int64_t(a.taps - 1) * a.step + a.rows - from[d]);
      }
      lowest[i] = low;
      const int64_t extent = std::max(from[d] + std::max(-low, high), made);
      line.extent[i] = walk.count[i] = int(extent);
      line.first[i] = walk.first[i] = int(low);
      walk.step[i] = 1;
      line.places = std::min(line.places, int64_t(1) << 31) * extent;
    }
    walk.first[2] = 0;
    walk.step[2] = walk.count[2] = 1;
    for (int h = 0; h < residues[1]; ++h) {
      for (int v = 0; v < residues[0] && phases < kSm90Phases; ++v) {
        const DgradWalk &a = axes[0][v], &b = axes[1][h];
        StreamPhase& made = phase[phases++];
        made.first = int(std::min<int64_t>(taps, kStreamTaps));
        made.taps = a.taps * b.taps;
        made.made[0] = a.rows;
        made.made[1] = b.rows;
        made.offset = int(h * to[2] + v);
        for (int r = 0; r < b.taps && taps <= kStreamTaps; ++r) {
          for (int s = 0; s < a.taps && taps <= kStreamTaps; ++s) {
            const int64_t places = (b.first + int64_t(r) * b.step - lowest[1]) * line.extent[0] +
                                   a.first + int64_t(s) * a.step - lowest[0];
            reach = std::max(reach, places);
            if (taps < kStreamTaps) {
              shift[taps] = int(std::min<int64_t>(places, 1 << 20));
              tap[taps] = a.tap + s * a.tap_step + (b.tap + r * b.tap_step) * int(p.filter[2]);
            }
            ++taps;
          }
        }
      }
    }
  }
};

namespace conv::sm90 {

inline std::string RefuseHaloStream(ConvOp op, const ConvProblem& p) {
  const bool dgrad = op == ConvOp::kDgrad;
  if (!dgrad && op != ConvOp::kFprop)
    return "sm90/halo_stream takes no addend, and makes neither statistics nor weight gradients";
  if (!Half(p.dtype)) return "it takes 16-bit arrays only";
  if (p.groups != 1 || p.in[0] != 1 || !PlanesAreImages(p) ||
      (!dgrad && p.stride[1] * p.stride[2] != 1)) {
    return "it needs at most two axes, one group and stride 1, or a dgrad";
  }
  if (p.stride[1] * p.stride[2] > kSm90Phases) return "it needs strides of at most 8 together";
  if (!dgrad && (p.pad[1] < 0 || p.pad[2] < 0)) return "it takes no negative padding";
  if (p.filter_size() > kStreamTaps) return "it takes at most 32 taps";
  const StreamWalk walk(p, dgrad);
  if (walk.line.places > kSm90Pixels) return "it needs fewer than 2^31 pixels and gaps";
  const int64_t blocks = CeilDivide(dgrad ? p.k : p.c, 64);
  if (StreamSlotBytes(walk.reach) / 128 > 1024 || blocks > kStreamSlots ||
      StreamShared(walk.reach, blocks, 3) > kHaloShared) {
    return "its pixels do not fit shared memory";
  }
  return RefuseImages(4, dgrad ? p.out : p.in, walk.walk);
}

}  // namespace conv::sm90
}  // namespace jaxconv::cuda
