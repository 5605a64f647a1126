// What "sm90/eight" and "sm90/eight_halo" can run. Host C++17 without CUDA headers (cuda/domain.h).
//
// Both need compute capability 9.0; channels_last; C/G and K/G multiples of 16; and the walks of cuda/conv/sm90/domain.h. eight
// needs multiples of 128 of C/G with more than one group. eight_halo takes 3x3 filters of stride 1 and at most 128 input
// channels, one group, no negative padding, and rows of which two and a tile fit shared memory twice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/sm90/domain.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/conv/sm90/halo/domain.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {

// eight_halo (halo.cuh), whose line and walk are those of halo/domain.h.
inline constexpr int kEightHaloTaps = 9;
inline constexpr int kEightHaloMostBuffers = 4;
inline constexpr int kMostBoxPixels = 1024;  // of a copy by TMA

// Places of a tile.
constexpr int64_t EightHaloPlaces(bool integers) { return integers ? 256 : 128; }
// Bytes of a pixel's channels in shared memory.
constexpr int64_t EightHaloRow(int64_t channels) { return channels <= 64 ? 64 : 128; }
// Of a buffer: places and the reach of the taps, in KiB.
constexpr int64_t EightHaloPixels(bool integers, int64_t row, int64_t reach) {
  const int64_t align = 1024 / row;
  return CeilDivide(EightHaloPlaces(integers) + reach, align) * align;
}
constexpr int64_t EightHaloShared(bool integers, int64_t row, int64_t reach, int64_t buffers) {
  const int64_t places = EightHaloPlaces(integers);
  return kEightHaloTaps * 64 * row + buffers * EightHaloPixels(integers, row, reach) * row +
         2 * places * 64 + 4 * places * 4 + (2 * kEightHaloMostBuffers + 3) * 8;
}

}  // namespace jaxconv::cuda

namespace jaxconv::cuda::conv::sm90 {

// By the operands' types: of int8 filters all, of float8 the last two, of uint8 filters the last.
inline constexpr TileSize kEightTiles[] = {{256, 128}, {256, 64}, {128, 128}};
inline constexpr TileSize kFloat8Tiles[] = {{256, 64}, {128, 128}};
inline constexpr TileSize kOneEightTile[] = {{128, 128}};

// What both refuse.
inline std::string RefuseEightArrays(const ConvProblem& p, const Plan& plan, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (!p.channels_last) return "it needs channels-last arrays";
  if (plan.splits != 1) return "it has no splits, got " + std::to_string(plan.splits);
  const int64_t c = p.group_c(), k = p.group_k();
  if (c % 16 != 0 || k % 16 != 0) {
    return "in 8 bits it needs multiples of 16 channels a group, got " + std::to_string(c) +
           " and " + std::to_string(k);
  }
  for (int i = 0; i < 3; ++i) {
    // Room for sums of coordinates in an int.
    if (double(p.filter[i]) * double(p.dilation[i]) + double(std::llabs(p.pad[i])) +
            double(p.out[i]) * double(p.stride[i]) + double(p.in[i]) + double(p.stride[i]) >=
        double(kCoordLimit)) {
      return "its coordinates must stay below 2^30";
    }
  }
  const double rows = double(p.n) * std::max(double(p.in_size()), double(p.out_size()));
  if (std::max(rows, double(p.filter_size()) * double(std::max(p.c, p.k))) > double(kSm90Pixels))
    return "it needs fewer than 2^31 pixels and filter elements per channel";
  return "";
}

inline std::string RefuseEight(const ScaledConvProblem& s, const Plan& plan, const Device& device) {
  const ConvProblem& p = s.conv;
  if (std::string why = RefuseEightArrays(p, plan, device); !why.empty()) return why;
  const int64_t c = p.group_c(), k = p.group_k();
  if (p.groups > 1 && c % 128 != 0) {
    return "in 8 bits with groups it needs multiples of 128 input channels a group, got " +
           std::to_string(c) + " and " + std::to_string(k);
  }
  if (s.has_shortcut) {
    if (p.groups > 1) return "a shortcut has one group";
    const ConvProblem& q = s.shortcut;
    if (std::string why = RefuseEightArrays(q, plan, device); !why.empty())
      return "in its shortcut " + why;
    if (!Plain(q)) {
      const std::string why = RefuseImages(Rank(q), q.in, InputWalk(q));
      if (!why.empty()) return "in its shortcut " + why;
    }
  }
  if (!Plain(p)) {
    const int64_t taps[3] = {p.filter[2], p.filter[1], p.filter[0]};
    const int64_t step[3] = {p.dilation[2], p.dilation[1], p.dilation[0]};
    const std::string why = RefuseImages(Rank(p), p.in, InputWalk(p), taps, step);
    if (!why.empty()) return why;
  }
  if (plan.tile.empty()) return "";
  const TileSize tile = ReadTile(plan.tile);
  const bool has = s.w_type == Number::kS8   ? Among(tile, kEightTiles)
                   : s.w_type == Number::kU8 ? Among(tile, kOneEightTile)
                                             : Among(tile, kFloat8Tiles);
  if (!has) return "it has no tile \"" + std::string(plan.tile) + "\" of these types";
  const double tiles = (double(p.n) * double(p.out_size()) / tile.rows + 1) *
                       double(CeilDivide(k, tile.columns)) * double(p.groups);
  const int64_t more = s.has_shortcut ? CeilDivide(s.shortcut.c, 128) : 0;
  return RefuseSm90Tiles(tiles, CeilDivide(c, 128) + more);
}

inline std::string RefuseEightHalo(const ScaledConvProblem& s, const Plan& plan,
                                   const Device& device) {
  const ConvProblem& p = s.conv;
  if (std::string why = RefuseEightArrays(p, plan, device); !why.empty()) return why;
  if (!plan.tile.empty()) return "it has no tile \"" + std::string(plan.tile) + "\" of these types";
  if (s.has_shortcut) return "it takes no shortcut";
  if (p.filter[0] != 1 || p.filter[1] != 3 || p.filter[2] != 3) return "it needs a 3x3 filter";
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1) return "it needs stride 1";
  if (p.groups != 1 || p.c == 0 || p.c > 128) {
    return "it needs one group of at most 128 input channels, got " + std::to_string(p.groups) +
           " of " + std::to_string(p.group_c());
  }
  const HaloWalk walk(p, false);
  if (walk.negative) return "it takes no negative padding";
  if (walk.line.places > kSm90Pixels) return "it needs fewer than 2^31 pixels and gaps";
  if (std::string why = RefuseImages(walk.line.rank, p.in, walk.read); !why.empty()) return why;
  const bool integers = IsInteger8(s.x_type);
  const int64_t row = EightHaloRow(p.c);
  const bool fits = EightHaloShared(integers, row, walk.reach, 2) <= kHaloShared &&
                    EightHaloPixels(integers, row, walk.reach) <= kMostBoxPixels;
  return fits ? "" : "its pixels do not fit shared memory";
}

}  // namespace jaxconv::cuda::conv::sm90
