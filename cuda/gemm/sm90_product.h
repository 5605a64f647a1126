// A product on the sm_90a main loop, as a host fills it in. sm90_product.cuh says what the fields mean
// together, and has the loop of most kernels that compute it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "common/activation.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {

struct Sm90Epilogue {
  const void* bias = nullptr;  // of the elements' type
  int64_t stride_bias = 0;     // between instances
  const void* c = nullptr;     // like d, where d is a matrix; null without an addend
  int64_t stride_c = 0;        // between instances
  float alpha = 1.f, beta = 0.f, slope = 0.f;
  BiasKind bias_kind = BiasKind::kNone;
  Activation activation = Activation::kNone;
  bool save_z = false;
};

// Axes are W, H, D, as in TMA's coordinates.
struct Sm90Phase {
  int m;          // rows of an instance
  int extent[3];  // pixels; their product times the images is m
  int first[3], step[3];
  int taps[3];  // their product may be 0: d = f(bias)
  int tap_step[3];
  int filter_first, filter_step[3];  // the tap's index in B
  // Filled in by the launch.
  FastDiv by_extent[3];
  int tiles_m;
  int begin;            // the number of its first tile
  FastDiv by_instance;  // tiles of an instance
  FastDiv by_last;      // rows of tiles in the last band
};

inline constexpr int kMaxPhases = 8;

// Float32 only: where row m, column n of an instance goes. m is a pixel of the phase's extent:
// d + begin[phase] + instance * at.instance + image * stride_image + sum of pixel[i] * stride[i] + n
struct Sm90FloatOutput {
  float *d, *z;    // z: where the epilogue saves it
  const float* c;  // added to the sums, lies like d or is it; null without
  int64_t begin[kMaxPhases], instance, stride_image, stride[3];
};

// What is added to the sums: nothing; c; or what d holds, in place, where d is columns of pixels. In float32 it is
// Sm90FloatOutput's c, wherever that lies.
enum class Sm90Added : int32_t { kNothing, kMatrix, kInPlace };

struct Sm90Product {
  CUtensorMap a[kMaxPhases], d[kMaxPhases], b, z;  // d, z: 16-bit only
  CUtensorMap c;  // where Sm90Added says so: (n, instance, m), boxes of 64 columns x a tile's rows
  Sm90Phase phase[kMaxPhases];
  Sm90Epilogue epilogue;
  int phases;
  int rank_a;  // of a's columns; 0: a is a matrix, (k, instance, m), or (m, instance, k) if m-major
  int rank_d;  // of d's columns; 0: d and z are matrices (n, instance, m)
  Sm90Added added;          // 16-bit, a k-major A only; swapped tiles take a matrix
  bool shared_a, shared_b;  // by all instances: coordinate 0
  int instances;
  int n;
  int channels;  // of an instance, in a's and d's columns of pixels: k and n
  int k_blocks;  // blocks of 64 k (32 in TF32) in a tap
  int splits;    // parts that k, or taps times k, is cut into; more than 1 for few rows only
  // A shortcut: products of a second A, a[1], of one tap, and a second B, whose map is z. They follow those of A and B. It needs
  // one phase, one instance, and no saved z. Its step is phase[1]'s.
  int shortcut_steps;       // stages behind those that the phase counts
  int shortcut_rank;        // of a[1]'s columns; 0: a[1] is a matrix
  void *plain_d, *plain_z;  // few rows: d and z as they lie
  // Clusters: elements from a row of d, z and c to the next, from an instance of d and z; rows of a's boxes.
  int64_t row_d, instance_d;
  int box_rows;
  float* partials;  // few rows: (splits, instances, m, n)
  int term_taps;    // taps of B between a term and the next
  Sm90FloatOutput out;
  // Filled in by the launch.
  int tiles, tiles_n;
  FastDiv by_band, by_splits;
  FastDiv by_tiles_n, by_columns;  // columns of tiles: of an instance, of all
  int resident_step;               // resident: rows of tiles from one of a warpgroup to its next
};

// Rows of a's boxes for clusters: the tile's, or the eights that hold all m.
constexpr int ClusterBoxRows(TileSize tile, int64_t m) {
  return m < tile.rows ? int((m + 7) / 8 * 8) : tile.rows;
}

static_assert(sizeof(Sm90Product) <= 4000, "a kernel's parameters are 4 KiB at most");

// By the operands' fastest axes; one translation unit each. KN: A (m, k) and B (k, n) row-major.
#define JAXCONV_DECLARE_SM90(Name)                                               \
  Status LaunchSm90##Name(const Context& ctx, Sm90Product& p, Sm90Choice choice, \
                          int multiprocessors, const std::string& what);
JAXCONV_DECLARE_SM90(KNBf16)
JAXCONV_DECLARE_SM90(KNF16)
JAXCONV_DECLARE_SM90(KKBf16)
JAXCONV_DECLARE_SM90(KKF16)
JAXCONV_DECLARE_SM90(MNBf16)
JAXCONV_DECLARE_SM90(MNF16)
JAXCONV_DECLARE_SM90(KNFloat)
JAXCONV_DECLARE_SM90(KKFloat)
JAXCONV_DECLARE_SM90(MNFloat)
JAXCONV_DECLARE_SM90(KKTf32)
#undef JAXCONV_DECLARE_SM90
// The kernel "cluster" in TF32, B (n, k) row-major or (k, n).
Status LaunchSm90ClusterTf32(const Context& ctx, Sm90Product& p, TileSize tile, bool k_major_b,
                             const std::string& what);

}  // namespace jaxconv::cuda
