// A 16-bit product on the sm_90a main loop, as a host fills it in; sm90_product.cuh computes it and
// says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "common/activation.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

struct Sm90Epilogue {
  const void* bias = nullptr;  // of the elements' type
  int64_t stride_bias = 0;     // between instances
  float alpha = 1.f, slope = 0.f;
  BiasKind bias_kind = BiasKind::kNone;
  Activation activation = Activation::kNone;
  bool save_z = false;
};

// Axes are W, H, D, as in the copy engine's coordinates.
struct Sm90Phase {
  int m;          // rows of an instance
  int extent[3];  // pixels; their product times the images is m
  int first[3], step[3];
  int taps[3];  // their product may be 0: d = f(bias)
  int tap_step[3];
  int filter_first, filter_step[3];  // the tap's index in B
  int tiles_m;
  int begin;  // the number of its first tile
};

inline constexpr int kMaxPhases = 8;

struct Sm90Product {
  CUtensorMap a[kMaxPhases], d[kMaxPhases], b, z;
  Sm90Phase phase[kMaxPhases];
  Sm90Epilogue epilogue;
  int phases;
  int rank_a;  // of a's columns; 0: a is a matrix, (k, instance, m), or (m, instance, k) if m-major
  int rank_d;  // of d's columns; 0: d and z are matrices (n, instance, m)
  bool shared_a, shared_b;  // by all instances: coordinate 0
  int instances;
  int n, tiles_n;
  int channels;  // of an instance, in a's and d's columns of pixels: k and n
  int k_blocks;  // blocks of 64 k in a tap
  int tiles;
};

// Tiles, M x N of a CTA. In a product k128x128 is the one whose warpgroups take turns; in the
// others, and in wgrad, both work at one tile.
enum class Sm90TileName { k128x256, k256x128, k128x128, k256x64 };

constexpr std::string_view kSm90TileNames[] = {"128x256", "256x128", "128x128", "256x64"};

constexpr int TileRows(Sm90TileName tile) {
  return tile == Sm90TileName::k128x256 || tile == Sm90TileName::k128x128 ? 128 : 256;
}
constexpr int TileColumns(Sm90TileName tile) {
  return tile == Sm90TileName::k128x256 ? 256 : tile == Sm90TileName::k256x64 ? 64 : 128;
}

Status FindSm90Tile(std::string_view name, const std::string& what, Sm90TileName* tile);

// Multiprocessors of the current device, which must be an sm_90.
Status RequireSm90(const std::string& what, int* multiprocessors);

// By the operands' fastest axes; one translation unit each. KN: A (m, k) and B (k, n) row-major.
#define JAXCONV_DECLARE_SM90(Name)                                               \
  Status LaunchSm90##Name(const Context& ctx, Sm90Product& p, Sm90TileName tile, \
                          int multiprocessors, const std::string& what);
JAXCONV_DECLARE_SM90(KNBf16)
JAXCONV_DECLARE_SM90(KNF16)
JAXCONV_DECLARE_SM90(KKBf16)
JAXCONV_DECLARE_SM90(KKF16)
JAXCONV_DECLARE_SM90(MNBf16)
JAXCONV_DECLARE_SM90(MNF16)
#undef JAXCONV_DECLARE_SM90

}  // namespace jaxconv::cuda
