// Kernels and tiles of the products on the sm_90a main loop, and which of them a product can have. Host C++17 without CUDA
// headers (cuda/domain.h).
//
//   product           both consumer warpgroups on one tile, or on tiles of their own in turns (128x128)
//   product_swapped   d's columns on the tensor cores' rows
//   resident          all of B's columns of a tile stay in shared memory; a tile is a warpgroup's
//   rows              few rows: parts of K, added up by a second kernel
//   cluster           few rows, 16 bit and TF32: parts of K in the CTAs of a cluster, which add them up
//   gradient          d times an activation's derivative, and the sums of its columns
//   gated             half of the sums' columns times an activation of the other half
//   gated_gradient    d times both derivatives of such a product, and the sums of these columns
//
// statistics (a convolution's) and sums (a dgrad's) are named by their ops, so that only their tiles stand here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/dtype.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {

// Rows x columns of a CTA's outputs, "128x256" in a plan.
struct TileSize {
  int rows = 0, columns = 0;
};
constexpr bool operator==(TileSize a, TileSize b) {
  return a.rows == b.rows && a.columns == b.columns;
}

// {0, 0} where it is none, of at most three digits each.
constexpr TileSize ReadTile(std::string_view text) {
  int number[2] = {}, digits[2] = {}, at = 0;
  for (char c : text) {
    if (c == 'x' && at == 0) {
      at = 1;
    } else if (c >= '0' && c <= '9' && digits[at] < 3) {
      number[at] = number[at] * 10 + (c - '0');
      ++digits[at];
    } else {
      return {};
    }
  }
  return digits[0] > 0 && digits[1] > 0 ? TileSize{number[0], number[1]} : TileSize{};
}

template <size_t kCount>
constexpr bool Among(TileSize tile, const TileSize (&tiles)[kCount]) {
  for (TileSize known : tiles) {
    if (tile == known) return true;
  }
  return false;
}

// Rows of the boxes in which a k-major B comes.
constexpr int FilterBoxRows(TileSize tile) { return tile.columns > 256 ? 64 : tile.columns; }

enum class Sm90Kernel {
  kNone,
  kProduct,
  kProductSwapped,
  kResident,
  kRows,
  kCluster,
  kGradient,
  kGated,
  kGatedGradient
};

struct Sm90Choice {
  Sm90Kernel kernel = Sm90Kernel::kNone;
  TileSize tile;
};

constexpr Sm90Choice ReadSm90Choice(std::string_view member, std::string_view tile) {
  const Sm90Kernel kernel = member == "product"           ? Sm90Kernel::kProduct
                            : member == "product_swapped" ? Sm90Kernel::kProductSwapped
                            : member == "resident"        ? Sm90Kernel::kResident
                            : member == "rows"            ? Sm90Kernel::kRows
                            : member == "cluster"         ? Sm90Kernel::kCluster
                            : member == "gradient"        ? Sm90Kernel::kGradient
                            : member == "gated"           ? Sm90Kernel::kGated
                            : member == "gated_gradient"  ? Sm90Kernel::kGatedGradient
                                                          : Sm90Kernel::kNone;
  return {kernel, ReadTile(tile)};
}

inline constexpr TileSize kProductTiles[] = {
    {128, 256}, {256, 128}, {128, 128}, {256, 64}, {128, 320}};
inline constexpr TileSize kSwappedTiles[] = {{256, 128}};
inline constexpr TileSize kResidentTiles[] = {{128, 64}, {64, 256}};
inline constexpr TileSize kSumsTiles[] = {{64, 256}, {64, 128}};  // sm90_sums.h
inline constexpr TileSize kSumsTf32Tiles[] = {{128, 128}, {256, 64}};
inline constexpr TileSize kNormGradientTiles[] = {{128, 128}, {256, 64}};  // sm90_norm_gradient.h
inline constexpr TileSize kRowsTiles[] = {{64, 128}};
inline constexpr TileSize kClusterTiles[] = {{64, 64}, {64, 128}, {128, 128}};
inline constexpr TileSize kGradientTiles[] = {{128, 128}, {128, 256}, {256, 128}};
inline constexpr TileSize kGatedTiles[] = {{128, 128}, {128, 256}, {256, 128}};  // of the sums
inline constexpr TileSize kGatedGradientTiles[] = {{128, 256}, {256, 128}};
// The same of a dgrad, by `product`: also for few channels. In TF32 kTf32Tiles.
inline constexpr TileSize kDgradGradientTiles[] = {{128, 128}, {128, 256}, {256, 128}, {256, 64}};
inline constexpr int kMostClusterParts = 8;      // CTAs of a cluster
inline constexpr int kMostClusterTiles = 65535;  // of a grid's second axis
inline constexpr TileSize kTf32Tiles[] = {
    {128, 256}, {256, 128}, {128, 128}, {256, 64}, {128, 320}};
inline constexpr TileSize kTf32StatisticsTiles[] = {{128, 256}, {256, 128}, {128, 128}, {256, 64}};
inline constexpr TileSize kTermsTiles[] = {{128, 128}, {128, 64}};
inline constexpr TileSize kStatisticsTiles[] = {{256, 64}, {128, 128}, {256, 128}, {128, 256}};
inline constexpr TileSize kNormalisedTiles[] = {
    {256, 64}, {128, 128}, {128, 256}};  // sm90_normalised.h
inline constexpr int kMostNormalised =
    2048;  // channels, whose scales and offsets are in shared memory

// The most parts of a column's sums in `gradient`, statistics and sums, whatever the tile.
constexpr int64_t MostColumnParts(int64_t rows) {
  const int64_t parts = 2 * CeilDivide(rows, 128);
  return parts < 512 ? parts : 512;
}

// Of a warpgroup each; in TF32 of a warp.
constexpr int64_t MostGradientParts(DType dtype, int64_t rows) {
  return MostColumnParts(rows) * (dtype == DType::kF32 ? 4 : 1);
}

inline std::string NoSuchTile(std::string_view tile) {
  return "it has no tile \"" + std::string(tile) + "\" in this dtype and precision";
}

// Whether the kernel has the tile; an empty one is some tile.
inline std::string RefuseSm90Tile(Sm90Kernel kernel, std::string_view tile, DType dtype,
                                  bool full_float32) {
  if (dtype == DType::kF32 && kernel == Sm90Kernel::kCluster) {
    if (full_float32) return "it takes float32 in TF32 only";
  } else if (dtype == DType::kF32 && kernel != Sm90Kernel::kProduct) {
    return "it takes 16-bit arrays only";
  }
  if (tile.empty()) return "";
  const TileSize size = ReadTile(tile);
  bool has = false;
  switch (kernel) {
    case Sm90Kernel::kProduct:
      has = dtype != DType::kF32 ? Among(size, kProductTiles)
            : full_float32       ? Among(size, kTermsTiles)
                                 : Among(size, kTf32Tiles);
      break;
    case Sm90Kernel::kProductSwapped:
      has = Among(size, kSwappedTiles);
      break;
    case Sm90Kernel::kResident:
      has = Among(size, kResidentTiles);
      break;
    case Sm90Kernel::kRows:
      has = Among(size, kRowsTiles);
      break;
    case Sm90Kernel::kCluster:
      has = Among(size, kClusterTiles);
      break;
    case Sm90Kernel::kGradient:
      has = Among(size, kGradientTiles);
      break;
    case Sm90Kernel::kGated:
      has = Among(size, kGatedTiles);
      break;
    case Sm90Kernel::kGatedGradient:
      has = Among(size, kGatedGradientTiles);
      break;
    case Sm90Kernel::kNone:
      break;
  }
  return has ? "" : NoSuchTile(tile);
}

// Tiles times steps are counted in an int: `tiles` of all phases, `blocks` of 128 bytes of k in a tap.
inline std::string RefuseSm90Tiles(double tiles, int64_t blocks) {
  return tiles * double(blocks) <= double(1 << 30)
             ? ""
             : "it takes at most 2^30 tiles times blocks of channels";
}

// Shared memory for all of k, 16 KiB a warpgroup on their way out and two stages each, and a KiB for barriers; columns of
// tiles, of which a CTA keeps one. `more`: bytes of an epilogue's own.
inline std::string RefuseResident(TileSize tile, int64_t n, int64_t k, int64_t instances,
                                  const Device& device, int64_t more = 0) {
  const int64_t groups = tile.columns == 64 ? 4 : 2;
  const int64_t needed =
      (k + 63) / 64 * tile.columns * 128 + groups * (16384 + 2 * tile.rows * 128) + more;
  if (needed > 226 * 1024)
    return "its columns need " + std::to_string(needed) + " bytes of shared memory";
  const int64_t columns = (n + tile.columns - 1) / tile.columns * instances;
  const int64_t most = device.multiprocessors < 64 ? device.multiprocessors : 64;
  return columns <= most ? "" : "it has at most " + std::to_string(most) + " columns of tiles";
}

}  // namespace jaxconv::cuda
