// Names of the matrix tiles (Plan::tile): M x N of a CTA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace jaxconv::cuda {

enum class Tile { k128x128, k128x64, k64x64 };

constexpr const char* Name(Tile tile) {
  return tile == Tile::k128x128 ? "128x128" : tile == Tile::k128x64 ? "128x64" : "64x64";
}

// A product whose operands cannot be read 16 bytes at a time has this one, whatever was chosen.
inline constexpr Tile kElementTile = Tile::k64x64;

// "" is the default: the largest tile that still gives most SMs of a large GPU something to do, and
// no wider than the product is. `ctas` counts the instances and parts, each of which has m x n
// outputs.
inline Status ChooseTile(std::string_view name, int64_t m, int64_t n, int64_t ctas,
                         const char* what, Tile* tile) {
  if (name.empty()) {
    constexpr double kEnough = 96;  // CTAs
    const auto count = [&](int64_t tile_m, int64_t tile_n) {
      return double((m + tile_m - 1) / tile_m) * double((n + tile_n - 1) / tile_n) * double(ctas);
    };
    if (n > 64 && m > 64 && count(128, 128) >= kEnough) {
      *tile = Tile::k128x128;
    } else if (m > 64 && count(128, 64) >= kEnough) {
      *tile = Tile::k128x64;
    } else {
      *tile = Tile::k64x64;
    }
    return Status::Ok();
  }
  for (Tile known : {Tile::k128x128, Tile::k128x64, Tile::k64x64}) {
    if (name == Name(known)) {
      *tile = known;
      return Status::Ok();
    }
  }
  return Status::Invalid(
      std::string(what) + ": tile \"" + std::string(name) +
      "\" is unknown; the tiles are \"\" (default), \"128x128\", \"128x64\", \"64x64\"");
}

}  // namespace jaxconv::cuda
