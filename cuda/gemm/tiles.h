// Names of the matrix tiles (Plan::tile): M x N of a CTA.
#pragma once

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

inline Status ToTile(std::string_view name, const char* what, Tile* tile) {
  for (Tile known : {Tile::k128x128, Tile::k128x64, Tile::k64x64}) {
    if (name == Name(known)) {
      *tile = known;
      return Status::Ok();
    }
  }
  return Status::Invalid(std::string(what) + ": tile \"" + std::string(name) +
                         "\" is unknown; the tiles are 128x128, 128x64, 64x64");
}

}  // namespace jaxconv::cuda
