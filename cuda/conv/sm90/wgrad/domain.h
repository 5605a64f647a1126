// What the weight gradients of sm90 can run, but for the halo kernels'. Host C++17 without CUDA headers.
//
//   wgrad                 16 bit, and float32 as terms in memory: columns of 64 pixels x channels of x, dy as it lies
//   wgrad_swapped         16 bit: channels of dy on the tensor cores' rows
//   wgrad_pair            16 bit: a pair of CTAs makes a tile, which fetch what they share once for both; splits count pairs
//   wgrad_tf32            float32 in TF32
//   wgrad_terms           float32 as terms that it makes on their way
//   wgrad_terms_swapped   the same, rows are channels of dy: a 1x1 of stride 1
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/conv/sm90/halo/domain.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {

enum class WgradKernel { kNone, kWgrad, kSwapped, kPair, kTf32, kTerms, kTermsSwapped };

constexpr WgradKernel ReadWgradKernel(std::string_view member) {
  return member == "wgrad"                 ? WgradKernel::kWgrad
         : member == "wgrad_swapped"       ? WgradKernel::kSwapped
         : member == "wgrad_pair"          ? WgradKernel::kPair
         : member == "wgrad_tf32"          ? WgradKernel::kTf32
         : member == "wgrad_terms"         ? WgradKernel::kTerms
         : member == "wgrad_terms_swapped" ? WgradKernel::kTermsSwapped
                                           : WgradKernel::kNone;
}

inline constexpr TileSize kWgradTiles[] = {{128, 256}, {256, 64}, {128, 320}, {64, 256}};
inline constexpr TileSize kWgradPairTiles[] = {
    {256, 256}, {256, 128}, {128, 256}, {256, 64}, {64, 256}};
inline constexpr TileSize kNormalisedPair = {128, 128};  // of a CTA of a pair; splits count pairs
inline constexpr TileSize kNormalisedWgradTiles[] = {
    {128, 256}, {256, 64}, kNormalisedPair};  // normalised.cu
// Of these both CTAs of a pair share x, which TMA gives to both of a plain product only.
inline constexpr TileSize kWgradSharedX[] = {{128, 256}, {64, 256}};
inline constexpr TileSize kWgradTf32Tiles[] = {{256, 128}, {128, 256}, {256, 64}};
inline constexpr TileSize kWgradTermsTiles[] = {{256, 128}, {256, 64}};
inline constexpr TileSize kWgradTermsSwappedTiles[] = {{256, 64}};
inline constexpr int64_t kWgradSplits = 4096;  // the most

namespace conv::sm90 {

// Tiles of dw: blocks of 64 channels of a tap x channels, of all groups.
inline int64_t WgradTileCount(const ConvProblem& p, TileSize tile, bool swapped) {
  const int64_t blocks =
      swapped ? CeilDivide(p.group_k(), 64) : p.filter_size() * CeilDivide(p.group_c(), 64);
  return CeilDivide(blocks * 64, tile.rows) *
         CeilDivide(swapped ? p.group_c() : p.group_k(), tile.columns) * p.groups;
}

inline std::string RefuseWgradCount(const ConvProblem& p, int64_t tiles, int64_t splits,
                                    int64_t step) {
  if (tiles > int64_t(1) << 30) return "it takes at most 2^30 tiles";
  const double steps = double(CeilDivide(p.n * p.out_size(), step));
  return double(tiles) * steps * double(splits) <= 4e18
             ? ""
             : "its tiles times steps times splits overflow 64 bits";
}

inline std::string RefuseWgrad(WgradKernel kernel, const ConvProblem& p, const Plan& plan) {
  const TileSize tile = ReadTile(plan.tile);
  const bool some = plan.tile.empty(), single = p.dtype == DType::kF32;
  const char* half = "it takes 16-bit arrays only";
  const char* plain = "it needs a 1x1 convolution of stride 1";
  bool has = false;
  int64_t step = 64;
  switch (kernel) {
    case WgradKernel::kWgrad:
      if (single && !p.full_float32) return "it does not round float32 to TF32";
      has = single ? Among(tile, kTermsTiles) : Among(tile, kWgradTiles);
      break;
    case WgradKernel::kSwapped:
      if (single) return half;
      has = Among(tile, kSwappedTiles);
      break;
    case WgradKernel::kPair:
      if (single) return half;
      has = Among(tile, kWgradPairTiles);
      if (Among(tile, kWgradSharedX) && !Plain(p)) return plain;
      break;
    case WgradKernel::kTf32:
      if (!single || p.full_float32) return "it rounds float32 to TF32";
      has = Among(tile, kWgradTf32Tiles);
      step = kTf32Step;
      break;
    case WgradKernel::kTerms:
    case WgradKernel::kTermsSwapped:
      if (!single || !p.full_float32) return "it is for float32 at the highest precision";
      if (kernel == WgradKernel::kTermsSwapped && !Plain(p)) return plain;
      has = kernel == WgradKernel::kTerms ? Among(tile, kWgradTermsTiles)
                                          : Among(tile, kWgradTermsSwappedTiles);
      step = kTf32Step;
      break;
    case WgradKernel::kNone:
      return "there is no such kernel";
  }
  if (some) return "";
  if (!has) return NoSuchTile(plan.tile);
  return RefuseWgradCount(p, WgradTileCount(p, tile, kernel == WgradKernel::kTermsSwapped),
                          plan.splits, step);
}

}  // namespace conv::sm90
}  // namespace jaxconv::cuda
