// What the dense products can run, and their workspaces. Host C++17 without CUDA headers (cuda/domain.h).
//
//   gemm                  every product (cuda/gemm/gemm.h)
//   sm90/product          sm_90: every tile of gemm/sm90_tiles.h
//   sm90/product_swapped  16 bit, columns of y on the tensor cores' rows: neither an addend nor a bias by row
//   sm90/resident         16 bit, x not transposed: w's columns stay in shared memory
//   sm90/rows             16 bit, x not transposed: few rows, splits are the parts of K
//   sm90/cluster          16 bit and TF32, x not transposed: few rows, splits are the parts of K, the CTAs of a cluster
//   sm90/gradient         the way back through an activation (DenseGradient, which has no other): 16 bit, one instance, w
//                         stored (N, K), neither bias nor addend, alpha 1
//   sm90/gated            a gate behind the product (DenseGated, which has no other): 16 bit, one instance, x stored (M, K), w
//                         (K, N), halves of N of multiples of 8 elements, a bias by column or none, no addend, alpha 1
//   sm90/gated_gradient   the way back through a gate (DenseGatedGradient): as sm90/gradient
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "cuda/domain.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda::dense {

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 1 - 4096;

inline std::string RefuseGemm(const DenseProblem& p, const Plan& plan) {
  if (std::max({p.m, p.n, p.k, p.batch}) > kMaxExtent)
    return "it takes batch, M, N and K of at most " + std::to_string(kMaxExtent);
  if (plan.splits > 65535) return "it cuts K into at most 65535 parts";
  constexpr TileSize kTiles[] = {{128, 128}, {128, 64}, {64, 64}};
  return Among(ReadTile(plan.tile), kTiles) ? "" : NoSuchTile(plan.tile);
}

inline std::string RefuseSm90(const DenseProblem& p, const Plan& plan, const Device& device) {
  const std::string_view member = MemberOf(plan.kernel);
  const Sm90Choice choice = ReadSm90Choice(member, plan.tile);
  const bool single = p.dtype == DType::kF32, tf32 = single && !p.full_float32;
  if (choice.kernel == Sm90Kernel::kNone) return "there is no such kernel";
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  const bool cluster = choice.kernel == Sm90Kernel::kCluster;
  if (p.addend && single && !cluster) return "in float32 it takes no addend";
  if (p.trans_x && p.trans_w) return "it does not take both operands transposed";
  if (p.n % 8 != 0 || (p.trans_x ? p.m : p.k) % 8 != 0 || (p.trans_w ? p.k : p.n) % 8 != 0)
    return "it needs rows of x, w and y of a multiple of 8 elements";
  if (p.k < 1) return "it needs K of at least 1";
  if (tf32 && p.k % 8 != 0)
    return "in TF32 it needs K to be a multiple of 8, got " + std::to_string(p.k);
  // A coordinate counts the instances of all terms.
  const int64_t most = kMaxExtent / (single ? 3 : 1);
  if (std::max({p.m, p.n, p.k, p.batch}) > most)
    return "it takes batch, M, N and K of at most " + std::to_string(most);
  std::string why = RefuseSm90Tile(choice.kernel, plan.tile, p.dtype, p.full_float32);
  if (!why.empty()) return why;
  const bool rows = choice.kernel == Sm90Kernel::kRows;
  if (plan.splits > (rows ? CeilDivide(p.k, 64) : cluster ? kMostClusterParts : 1))
    return "sm90/rows cuts K, into at most ceil(K / 64) parts, and sm90/cluster, into at most 8";
  if (choice.kernel == Sm90Kernel::kProductSwapped && (p.addend || p.bias == BiasKind::kRow))
    return "it takes neither an addend nor a bias by row";
  if (choice.kernel == Sm90Kernel::kGradient || choice.kernel == Sm90Kernel::kGatedGradient) {
    if (p.trans_x || !p.trans_w) return "it takes x stored (M, K) and w stored (N, K)";
    if (p.batch != 1) return "it takes one instance";
    if (p.bias != BiasKind::kNone || p.addend) return "it takes neither a bias nor an addend";
    const int64_t columns = plan.tile.empty() ? 1 : CeilDivide(p.n, choice.tile.columns);
    if (columns > device.multiprocessors)
      return "it has at most " + std::to_string(device.multiprocessors) + " columns of tiles";
  }
  if (choice.kernel == Sm90Kernel::kGated) {
    if (p.trans_x || p.trans_w) return "it takes x stored (M, K) and w stored (K, N)";
    if (p.batch != 1) return "it takes one instance";
    if ((p.bias != BiasKind::kNone && p.bias != BiasKind::kColumn) || p.addend)
      return "it takes a bias by column or none, and no addend";
    if (p.n % 16 != 0)
      return "it needs halves of N of a multiple of 8 columns, got N = " + std::to_string(p.n);
  }
  const bool resident = choice.kernel == Sm90Kernel::kResident;
  if ((rows || resident || cluster) && p.trans_x) return "it does not take x transposed";
  if (plan.tile.empty()) return "";
  const double tiles = double(CeilDivide(p.m, choice.tile.rows)) *
                       double(CeilDivide(p.n, choice.tile.columns)) * double(p.batch);
  if (cluster && tiles > double(kMostClusterTiles))
    return "it has at most " + std::to_string(kMostClusterTiles) + " tiles";
  why = RefuseSm90Tiles(tiles * double(plan.splits), CeilDivide(p.k, tf32 ? 32 : 64));
  if (why.empty() && rows && double(p.batch) * double(p.m) * double(p.n) > double(int64_t(1) << 41))
    why = "it makes at most 2^41 outputs";
  if (why.empty() && resident) why = RefuseResident(choice.tile, p.n, p.k, p.batch, device);
  return why;
}

// Bytes. Parts of K in float32. Float32 operands of sm90: three bfloat16 terms of each element of w, or in TF32 the
// transposes of what is not k-major, which sm90/cluster reads as it lies.
inline int64_t WorkspaceOf(const DenseProblem& p, const Plan& plan) {
  const int64_t sums = plan.splits * p.batch * p.m * p.n * 4;
  if (plan.kernel == "gemm") return plan.splits > 1 ? sums : 0;
  if (plan.kernel == "sm90/rows") return sums;
  if (plan.kernel == "sm90/gradient") return MostColumnParts(p.m) * p.n * 4;
  if (plan.kernel == "sm90/gated_gradient") return MostColumnParts(p.m) * 2 * p.n * 4;
  if (p.dtype != DType::kF32 || plan.kernel == "sm90/cluster") return 0;
  const int64_t x = (p.x_batched ? p.batch : 1) * p.m * p.k;
  const int64_t w = (p.w_batched ? p.batch : 1) * p.k * p.n;
  if (p.full_float32) return Align256(6 * w);
  return (p.trans_x ? Align256(4 * x) : 0) + (p.trans_w ? 0 : Align256(4 * w));
}

}  // namespace jaxconv::cuda::dense
