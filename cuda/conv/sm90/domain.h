// What the sm90 kernels can run, and their workspaces. Host C++17 without CUDA headers (cuda/domain.h).
//
//   product, product_swapped, resident    fprop, dgrad: implicit matrix products (gemm/sm90_tiles.h)
//   cluster                               fprop of few pixels in 16 bit and TF32: the same, its sums in parts
//   statistics                            fprop in 16 bit and TF32 with the mean and variance of its results; a bias and a
//                                         residual may be added to these
//   product                               also dgrad of stride 1 in 16 bit and TF32, one group, times an activation's derivative,
//                                         with the sums of its channels (gemm/sm90_gradient.h)
//   sums                                  dgrad of a 1x1 in 16 bit and TF32 with an addend, a relu's derivative and the sums
//                                         of the batch-norm that the relu follows (gemm/sm90_sums.h)
//   halo, halo_stream, halo_3d            pixels fetched once for all taps (halo/domain.h and so on)
//   wgrad, ...                            wgrad/domain.h
//   normalised                            fprop, with statistics or without, and wgrad of a 1x1 in 16 bit, one group, at most
//                                         2048 channels, of x normalised on its way (gemm/sm90_normalised.h, wgrad/normalised.cu)
//
// All need compute capability 9.0; channels_last; float32, bfloat16, float16; C/G and K/G multiples of 8, with more than
// one group the channels summed over multiples of 64; and walks that TMA can say (core/tma_walk.h): on each axis from the
// first one that does anything on
//   fprop, wgrad: stride in [1, 8]; -pad and (out - 1)*stride - pad + 1 - in in [-e, e), (filter - 1)*dilation < f
//   dgrad: the same of the stride-1 walks over dy of its phases (common/dgrad_phases.h), the product of the strides at most 8
// with e = 32768, 128, 16 and f = 65535, 255, 31 by the number of axes. A 1x1 of stride 1 needs none of this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "common/activation.h"
#include "cuda/conv/common/domain.h"
#include "cuda/conv/sm90/geometry.h"
#include "cuda/conv/sm90/halo/domain.h"
#include "cuda/conv/sm90/halo_3d/domain.h"
#include "cuda/conv/sm90/halo_stream/domain.h"
#include "cuda/conv/sm90/wgrad/domain.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda::conv::sm90 {

inline bool IsDgrad(ConvOp op) {
  return op == ConvOp::kDgrad || op == ConvOp::kDgradAdd || op == ConvOp::kDgradSums ||
         op == ConvOp::kGradient || op == ConvOp::kNormGradient;
}

// Of dgrad, where p's strides are at most kSm90Phases together.
inline std::string RefuseDgradWalks(const ConvProblem& p) {
  for (int d = 0; d < 3; ++d) {
    const DgradAxis axis = MakeDgradAxis(p, d);
    for (int residue = 0; residue < axis.residues; ++residue) {
      const DgradWalk a = MakeDgradWalk(axis, residue);
      if (a.taps == 0) continue;
      // One axis at a time: the others' walks do nothing.
      TmaWalk walk = {{0, 0, 0}, {1, 1, 1}, {1, 1, 1}};
      int64_t extent[3] = {1, 1, 1}, taps[3] = {1, 1, 1}, step[3] = {0, 0, 0};
      const int i = 2 - d;
      walk.first[i] = a.first;
      walk.count[i] = a.rows;
      extent[d] = p.out[d];
      taps[i] = a.taps;
      step[i] = a.step;
      if (i < Rank(p) - 2) {
        std::string why = RefuseImages(Rank(p), extent, walk, taps, step);
        if (!why.empty()) return why;
      }
    }
  }
  return "";
}

// Whether fprop by the kernel takes an array to add to its sums.
inline bool AddsResidual(std::string_view member, const ConvProblem& p) {
  return ReadSm90Choice(member, "").kernel != Sm90Kernel::kNone ||
         (member == "halo" && p.dtype != DType::kF32);
}

inline std::string RefuseAll(ConvOp op, const ConvProblem& p, const Device& device) {
  const bool dgrad = IsDgrad(op);
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (!p.channels_last) return "it needs channels-last arrays";
  const int64_t c = p.group_c(), k = p.group_k();
  if (c % 8 != 0 || k % 8 != 0) {
    return "it needs multiples of 8 channels a group, got " + std::to_string(c) + " and " +
           std::to_string(k);
  }
  const double strides = double(p.stride[0]) * double(p.stride[1]) * double(p.stride[2]);
  if (p.groups > 1 && ((dgrad ? k : c) % 64 != 0 || (dgrad && strides > 1 && c % 64 != 0))) {
    return "with groups it needs multiples of 64 channels a group, got " + std::to_string(c) +
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
  const double terms = p.dtype == DType::kF32 ? 3 : 1;  // a coordinate counts those of all terms
  const double rows = double(p.n) * std::max(double(p.in_size()), double(p.out_size()));
  const double depth = double(p.filter_size()) * double(std::max(p.c, p.k));
  if (terms * std::max(rows, depth) > double(kSm90Pixels)) {
    return "it needs fewer than 2^31 pixels and filter elements per channel, in float32 a third of "
           "that";
  }
  if (op == ConvOp::kStatistics) {
    if (p.dtype == DType::kF32 && p.full_float32)
      return "with statistics it takes float32 in TF32 only";
    if (CeilDivide(k, 64) * p.groups > device.multiprocessors) {
      return "with statistics a multiprocessor must have a column of tiles of its own, got " +
             std::to_string(p.k) + " channels";
    }
  }
  if (Plain(p)) return "";
  if (dgrad) {
    if (strides > kSm90Phases) return "it needs strides of at most 8 together";
    return RefuseDgradWalks(p);
  }
  const int64_t taps[3] = {p.filter[2], p.filter[1], p.filter[0]};
  const int64_t step[3] = {p.dilation[2], p.dilation[1], p.dilation[0]};
  return RefuseImages(Rank(p), p.in, InputWalk(p), taps, step);
}

// Tiles of all phases of a product in `tile` times blocks of 128 bytes of k.
inline std::string RefuseProductTiles(ConvOp op, const ConvProblem& p, TileSize tile) {
  const bool dgrad = IsDgrad(op);
  const int64_t depth = p.dtype == DType::kF32 && !p.full_float32 ? 32 : 64;
  double phases = 1;
  for (int i = 0; dgrad && i < 3; ++i) phases *= double(std::min(p.stride[i], p.in[i]));
  // A phase has at most as many rows of tiles as its share, and one more.
  const double rows = double(p.n) * double(dgrad ? p.in_size() : p.out_size());
  const double tiles = (rows / tile.rows + phases) *
                       double(CeilDivide(dgrad ? p.group_c() : p.group_k(), tile.columns)) *
                       double(p.groups);
  return RefuseSm90Tiles(tiles, CeilDivide(dgrad ? p.group_k() : p.group_c(), depth));
}

// dgrad that goes back through an activation, kNormGradient: and a batch-norm, and sums up.
inline std::string RefuseGradient(ConvOp op, const ConvProblem& p, const Plan& plan,
                                  const Device& device) {
  const Sm90Choice choice = ReadSm90Choice(MemberOf(plan.kernel), plan.tile);
  const bool single = p.dtype == DType::kF32;
  if (choice.kernel != Sm90Kernel::kProduct)
    return std::string(plan.kernel) + " does not go back through an activation";
  if (single && p.full_float32) return "through an activation it takes float32 in TF32 only";
  if (p.groups > 1) return "through an activation it takes one group";
  for (int i = 0; i < 3; ++i) {
    if (p.stride[i] != 1) return "through an activation it takes strides of 1";
  }
  if (plan.tile.empty()) return "";
  const bool has = op == ConvOp::kNormGradient ? Among(choice.tile, kNormGradientTiles)
                   : single                    ? Among(choice.tile, kTf32Tiles)
                                               : Among(choice.tile, kDgradGradientTiles);
  if (!has) return NoSuchTile(plan.tile);
  if (CeilDivide(p.c, choice.tile.columns) > device.multiprocessors)
    return "it has at most " + std::to_string(device.multiprocessors) + " columns of tiles";
  return RefuseProductTiles(op, p, choice.tile);
}

// Bytes: float32 sums of each part's rows.
inline int64_t GradientWorkspace(const ConvProblem& p) {
  return MostGradientParts(p.dtype, p.n * p.in_size()) * p.c * 4;
}

inline std::string RefuseProduct(ConvOp op, const ConvProblem& p, const Plan& plan,
                                 const Device& device) {
  const std::string_view member = MemberOf(plan.kernel);
  const Sm90Choice choice = ReadSm90Choice(member, plan.tile);
  if (choice.kernel == Sm90Kernel::kNone || choice.kernel == Sm90Kernel::kRows ||
      choice.kernel == Sm90Kernel::kGradient)
    return "there is no such kernel";
  if (op == ConvOp::kWgrad) return "it makes no weight gradients";
  if (op == ConvOp::kStatistics) return "it makes no statistics";
  if (op == ConvOp::kDgradSums) return "it makes no sums";
  if (op == ConvOp::kGradient || op == ConvOp::kNormGradient)
    return RefuseGradient(op, p, plan, device);
  if (op == ConvOp::kDgradAdd && choice.kernel == Sm90Kernel::kProductSwapped)
    return std::string(plan.kernel) + " takes no addend";
  const bool cluster = choice.kernel == Sm90Kernel::kCluster;
  if (cluster && op != ConvOp::kFprop) return "it makes fprops only";
  std::string why = RefuseSm90Tile(choice.kernel, plan.tile, p.dtype, p.full_float32);
  if (!why.empty() || plan.tile.empty()) return why;
  if (cluster && CeilDivide(p.n * p.out_size(), choice.tile.rows) *
                         CeilDivide(p.group_k(), choice.tile.columns) * p.groups >
                     kMostClusterTiles)
    return "it has at most " + std::to_string(kMostClusterTiles) + " tiles";
  why = RefuseProductTiles(op, p, choice.tile);
  if (!why.empty() || choice.kernel != Sm90Kernel::kResident) return why;
  if (!Plain(p)) return "it needs a 1x1 convolution of stride 1";
  const bool fprop = op == ConvOp::kFprop;
  return RefuseResident(choice.tile, fprop ? p.group_k() : p.group_c(),
                        fprop ? p.group_c() : p.group_k(), p.groups, device);
}

// fprop. The sums of `q`, a convolution of one tap, are added to its sums.
inline std::string RefuseShortcut(const ConvProblem& p, const ConvProblem& q, const Plan& plan,
                                  const Device& device) {
  if (p.dtype == DType::kF32) return "with a shortcut it takes 16-bit arrays only";
  if (p.groups > 1 || q.groups > 1) return "with a shortcut it takes one group";
  if (std::string why = RefuseAll(ConvOp::kFprop, p, device); !why.empty()) return why;
  if (std::string why = RefuseAll(ConvOp::kFprop, q, device); !why.empty())
    return "in its shortcut " + why;
  ConvProblem both = p;  // tiles and blocks are counted as for one convolution of all channels
  both.c = p.c + q.c;
  return RefuseProduct(ConvOp::kFprop, both, plan, device);
}

// dgrad with a batch-norm's sums.
inline std::string RefuseSums(const ConvProblem& p, std::string_view tile, const Device& device) {
  const bool single = p.dtype == DType::kF32;
  if (single && p.full_float32) return "with sums it takes float32 in TF32 only";
  if (!Plain(p) || p.groups > 1) return "it needs a 1x1 convolution of stride 1 without groups";
  if (p.c % 128 != 0) return "it needs multiples of 128 channels of x, got " + std::to_string(p.c);
  if (tile.empty()) return "";
  const TileSize size = ReadTile(tile);
  if (!(single ? Among(size, kSumsTf32Tiles) : Among(size, kSumsTiles))) return NoSuchTile(tile);
  std::string why = RefuseProductTiles(ConvOp::kDgradSums, p, size);
  if (single && CeilDivide(p.c, size.columns) > device.multiprocessors)
    return "it has at most " + std::to_string(device.multiprocessors) + " columns of tiles";
  return why.empty() && !single ? RefuseResident(size, p.c, p.k, 1, device) : why;
}

// dgrad with the sums of a batch-norm whose result only the convolution reads; any number of channels.
inline std::string RefuseNormSums(const ConvProblem& p, std::string_view tile,
                                  const Device& device) {
  if (p.dtype == DType::kF32) return "with sums of such a norm it takes 16-bit arrays only";
  if (!Plain(p) || p.groups > 1) return "it needs a 1x1 convolution of stride 1 without groups";
  if (tile.empty()) return "";
  const TileSize size = ReadTile(tile);
  if (!Among(size, kSumsTiles)) return NoSuchTile(tile);
  std::string why = RefuseProductTiles(ConvOp::kNormGradient, p, size);
  // Two numbers of each column, of both warpgroups.
  return why.empty() ? RefuseResident(size, p.c, p.k, 1, device, 2 * size.columns * 8) : why;
}

// Of x normalised where it is read, and put through `activation`.
inline std::string RefuseNormalised(ConvOp op, const ConvProblem& p, Activation activation,
                                    const Plan& plan, const Device& device) {
  if (MemberOf(plan.kernel) != "normalised") return "only normalised normalises its input";
  if (op != ConvOp::kFprop && op != ConvOp::kStatistics && op != ConvOp::kWgrad)
    return "it makes no dgrads of what it normalises";
  if (std::string why = RefuseAll(op, p, device); !why.empty()) return why;
  if (p.dtype == DType::kF32) return "it normalises 16-bit arrays only";
  if (!Plain(p) || p.groups > 1) return "it needs a 1x1 convolution of stride 1 without groups";
  if (activation != Activation::kNone && activation != Activation::kRelu &&
      activation != Activation::kRelu6 && activation != Activation::kSilu)
    return "it normalises with relu, relu6, silu or no activation";
  if (p.c > kMostNormalised)
    return "it normalises at most 2048 channels, got " + std::to_string(p.c);
  const bool wgrad = op == ConvOp::kWgrad;
  const int64_t most = wgrad ? kWgradSplits : 1;
  if (plan.splits > most) return "it cuts weight gradients into at most 4096 parts";
  if (plan.tile.empty()) return "";
  const TileSize tile = ReadTile(plan.tile);
  if (!(wgrad ? Among(tile, kNormalisedWgradTiles) : Among(tile, kNormalisedTiles)))
    return NoSuchTile(plan.tile);
  return wgrad ? RefuseWgradCount(p, WgradTileCount(p, tile, false), plan.splits, 64)
               : RefuseProductTiles(op, p, tile);
}

// Whether kGradient takes activations whose derivative has no pieces (core/derivative.h).
inline bool HasEveryDerivative(std::string_view member) { return member != "halo"; }

// `p` is folded (FoldPatches), but for kDgradSums, kGradient and kNormGradient.
inline std::string Refusal(ConvOp op, const ConvProblem& p, const Plan& plan,
                           const Device& device) {
  const std::string_view member = MemberOf(plan.kernel);
  if (std::string why = RefuseAll(op, p, device); !why.empty()) return why;
  const WgradKernel wgrad = ReadWgradKernel(member);
  const bool halo = member == "halo" || member == "halo_stream" || member == "halo_3d";
  const int most = op == ConvOp::kWgrad  ? kWgradSplits
                   : member == "cluster" ? kMostClusterParts
                                         : 1;
  if (plan.splits > most)
    return "it cuts weight gradients into at most 4096 parts, sm90/cluster fprops into at most 8";
  if (halo && !plan.tile.empty()) return NoSuchTile(plan.tile);
  if (member == "normalised") return "it makes convolutions of what it normalises only";
  if (member == "halo") return RefuseHalo(op, p);
  if (member == "halo_stream") return RefuseHaloStream(op, p);
  if (member == "halo_3d") return RefuseHalo3d(op, p);
  if (wgrad != WgradKernel::kNone) {
    if (op != ConvOp::kWgrad) return "it makes weight gradients only";
    return RefuseWgrad(wgrad, p, plan);
  }
  if (member == "statistics") {
    if (op != ConvOp::kStatistics) return "it makes statistics only";
    if (plan.tile.empty()) return "";
    const TileSize tile = ReadTile(plan.tile);
    const bool has =
        p.dtype == DType::kF32 ? Among(tile, kTf32StatisticsTiles) : Among(tile, kStatisticsTiles);
    return has ? RefuseProductTiles(op, p, tile) : NoSuchTile(plan.tile);
  }
  if (member == "sums") {
    return op == ConvOp::kDgradSums      ? RefuseSums(p, plan.tile, device)
           : op == ConvOp::kNormGradient ? RefuseNormSums(p, plan.tile, device)
                                         : "it makes dgrads with a batch-norm's sums only";
  }
  return RefuseProduct(op, p, plan, device);
}

// Bytes. `p` is folded. Partial sums: two tiles a part; a halo kernel's are all of its block. Float32 operands: three
// bfloat16 terms of each element (gemm/sm90_operands.h), or in TF32 the transpose of fprop's filter, which "cluster" reads
// as it lies.
inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  const std::string_view member = MemberOf(plan.kernel);
  const bool single = p.dtype == DType::kF32;
  const int64_t x = p.n * p.in_size() * p.c, y = p.n * p.out_size() * p.k;
  if (op == ConvOp::kStatistics) {
    const int64_t filter = single ? Align256(4 * FilterCount(p)) : 0;
    return filter + MostGradientParts(p.dtype, p.n * p.out_size()) * (p.k * 8 + 4);
  }
  if (op == ConvOp::kDgradSums) return MostGradientParts(p.dtype, p.n * p.in_size()) * 2 * p.c * 4;
  if (op == ConvOp::kGradient || op == ConvOp::kNormGradient) {
    const int64_t sums = op == ConvOp::kNormGradient ? 2 : 1;
    return sums * (member == "halo" ? HaloGradientParts(p) * p.c * 4 : GradientWorkspace(p));
  }
  if (op != ConvOp::kWgrad) {
    if (!single) return 0;
    if (p.full_float32) return Align256(6 * FilterCount(p));
    return op == ConvOp::kFprop && member != "cluster" ? Align256(4 * FilterCount(p)) : 0;
  }
  if (member == "halo" && !single)
    return CeilDivide(p.group_k(), 64) * p.groups * plan.splits * kHaloPartialBytes;
  if (member == "halo_3d")
    return CeilDivide(p.c, 32) * CeilDivide(p.k, 32) * plan.splits * kHalo3dPartialBytes;
  const TileSize tile = member == "halo" ? kTf32HaloTile : ReadTile(plan.tile);
  const int64_t tiles = member == "normalised" && tile == kNormalisedPair ? 2 : 1;  // of a part
  const int64_t sums =
      plan.splits > 1 ? 2 * plan.splits * tiles * int64_t(tile.rows) * tile.columns * 4 : 0;
  const bool copies = single && member == "wgrad";
  return sums + (copies ? Align256(6 * x) + Align256(6 * y) : 0);
}

}  // namespace jaxconv::cuda::conv::sm90
