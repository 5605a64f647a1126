// What the implicit matrix product can run. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::implicit_gemm {

// Rows, columns and the reduction of the product are ints, and a tile more than the last must not overflow.
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 1 - 4096;

constexpr std::string_view kTiles[] = {"128x128", "128x64", "64x64"};

inline std::string RefuseTile(const ConvProblem& p, std::string_view tile) {
  if (std::find(std::begin(kTiles), std::end(kTiles), tile) == std::end(kTiles))
    return "it has tiles 128x128, 128x64 and 64x64, not \"" + std::string(tile) + "\"";
  if (tile != "64x64" && !WholeVectors(p, p.group_k())) {
    return "if output channels of a group are not whole 16 bytes, it has only tile 64x64";
  }
  return "";
}

// Of the smallest tile, in all phases, groups and parts.
inline double Ctas(ConvOp op, const ConvProblem& p, int64_t splits) {
  const auto tiles = [](double extent) { return std::ceil(extent / 64); };
  double rows = double(p.n * p.out_size()), columns = double(p.group_k()), phases = 1;
  if (op == ConvOp::kWgrad) rows = double(p.filter_size() * p.group_c());
  if (op == ConvOp::kDgrad) {
    columns = double(p.group_c());
    rows = double(p.n);
    for (int i = 0; i < 3; ++i) {
      rows *= std::ceil(double(p.in[i]) / double(p.stride[i]));
      phases *= double(std::min(p.stride[i], p.in[i]));
    }
  }
  return tiles(rows) * tiles(columns) * phases * double(p.groups) *
         double(std::max<int64_t>(splits, 1));
}

// `p` is folded (FoldPatches).
inline std::string Refusal(ConvOp op, const ConvProblem& p, const Plan& plan) {
  if (!p.channels_last) return "it needs channels-last arrays";
  if (plan.splits > (op == ConvOp::kWgrad ? 65535 : 1))
    return "it cuts weight gradients only, into at most 65535 parts";
  const double taps = double(p.filter_size());
  const double pixels = double(p.n) * std::max(double(p.in_size()), double(p.out_size()));
  const double depth = taps * double(std::max(p.group_c(), p.group_k()));
  if (pixels > double(kMaxExtent) || depth > double(kMaxExtent) ||
      double(std::max(p.c, p.k)) > double(kMaxExtent)) {
    return "it needs fewer than 2^31 pixels and filter elements per channel";
  }
  for (int i = 0; i < 3; ++i) {
    const double reach =
        std::max(double(p.out[i]) * double(p.stride[i]) +
                     double(p.filter[i]) * double(p.dilation[i]) + double(std::llabs(p.pad[i])),
                 double(p.in[i]) + double(p.stride[i]));
    if (reach >= double(kCoordLimit)) return "its coordinates must stay below 2^30";
  }
  double phases = 1;  // one per stride residue
  for (int i = 0; i < 3; ++i) phases *= double(std::min(p.stride[i], p.in[i]));
  if (op == ConvOp::kDgrad && phases > double(kMaxExtent))
    return "its strides leave too many phases of dgrad";
  if (Ctas(op, p, plan.splits) > double(kMaxExtent))
    return "it needs fewer than 2^31 tiles of 64 x 64";
  return RefuseTile(p, plan.tile);
}

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  return op == ConvOp::kWgrad ? PartialsBytes(p, plan.splits) : 0;
}

}  // namespace jaxconv::cuda::conv::implicit_gemm
