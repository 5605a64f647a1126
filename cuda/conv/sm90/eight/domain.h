// What "sm90/eight" can run. Host C++17 without CUDA headers (cuda/domain.h).
//
// It needs compute capability 9.0; channels_last; C/G and K/G multiples of 16, with more than one group C/G multiples of 128;
// and the walks of cuda/conv/sm90/domain.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/sm90/domain.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda::conv::sm90 {

// By the operands' types: of int8 filters all, of uint8 filters and of float8 the last.
inline constexpr TileSize kEightTiles[] = {{256, 128}, {256, 64}, {128, 128}};
inline constexpr TileSize kOneEightTile[] = {{128, 128}};

inline std::string RefuseEight(const ScaledConvProblem& s, const Plan& plan, const Device& device) {
  const ConvProblem& p = s.conv;
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (!p.channels_last) return "it needs channels-last arrays";
  if (plan.splits != 1) return "it has no splits, got " + std::to_string(plan.splits);
  const int64_t c = p.group_c(), k = p.group_k();
  const std::string channels = std::to_string(c) + " and " + std::to_string(k);
  if (c % 16 != 0 || k % 16 != 0)
    return "in 8 bits it needs multiples of 16 channels a group, got " + channels;
  if (p.groups > 1 && c % 128 != 0)
    return "in 8 bits with groups it needs multiples of 128 input channels a group, got " +
           channels;
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
  if (!Plain(p)) {
    const int64_t taps[3] = {p.filter[2], p.filter[1], p.filter[0]};
    const int64_t step[3] = {p.dilation[2], p.dilation[1], p.dilation[0]};
    const std::string why = RefuseImages(Rank(p), p.in, InputWalk(p), taps, step);
    if (!why.empty()) return why;
  }
  if (plan.tile.empty()) return "";
  const TileSize tile = ReadTile(plan.tile);
  const bool has = s.w_type == Number::kS8 ? Among(tile, kEightTiles) : Among(tile, kOneEightTile);
  if (!has) return "it has no tile \"" + std::string(plan.tile) + "\" of these types";
  const double tiles = (double(p.n) * double(p.out_size()) / tile.rows + 1) *
                       double(CeilDivide(k, tile.columns)) * double(p.groups);
  return RefuseSm90Tiles(tiles, CeilDivide(c, 128));
}

}  // namespace jaxconv::cuda::conv::sm90
