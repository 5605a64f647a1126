// Products of 8-bit operands on the sm_90a main loop, as a host fills them in; sm90_eight.cuh computes them.
#pragma once

#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_product.h"

// macro(X, W) of each pair of types, of a's and of b's elements.
#define JAXCONV_EIGHT_PAIRS(macro)                                                            \
  macro(S8, S8) macro(U8, S8) macro(S8, U8) macro(U8, U8) macro(E4M3, E4M3) macro(E4M3, E5M2) \
      macro(E5M2, E4M3) macro(E5M2, E5M2)

namespace jaxconv::cuda {

// In which order a CTA makes tiles.
enum class EightWalk : int32_t {
  kBands,   // LocateTile: next to the other CTAs'
  kColumn,  // LocateInColumn: all have the same columns
  kRuns,    // neighbours in a column, then in the next one: most have the same columns
};

// What follows a sum: v = float32(sum) * scale[n] + bias[n] + float32(residual) * residual_scale; d = f(v) * out_scale, in
// float32, each operation rounded by itself; then in d's type, of 8 bits saturated. d of int32 is the sum. A bias of integers is
// the sum's: v = float32(sum + bias[n]) * scale[n] + ...
struct Sm90EightEpilogue {
  const float* scale;           // (instances, n), or null: 1
  const void* bias;             // the same, of float32 or int32, or null
  const void* residual;         // like d, or null
  const float* residual_scale;  // a number, or null: 1
  const float* out_scale;       // a number, or null: 1
  void* d;
  int64_t row;  // elements of d from a row to the next
  Activation activation;
  float slope;
  Number residual_type, type;  // type: of d
  bool bias_of_sums;           // the bias is of int32, or there is none and sums are of integers
  EightWalk walk;              // the launcher's, also by_rows: the tiles of a column
  FastDiv by_rows;
  // Of blocks of 64 k: the filter's taps, where the phase's one tap has k_blocks stages, and whether the last has one block.
  int taps[3];
  bool half;
};

// Whether a stage is two blocks of 64 k (sm90_eight.cuh): where that many channels fill them better, on tiles of few columns.
constexpr bool EightHalves(TileSize tile, Number w, int64_t channels) {
  return w != Number::kU8 && tile.rows == 256 && (channels - 1) % 128 < 64;
}

// Of `p` are read: a[0] (rank_a), b, d[0] where d has 8 bits, c where the residual has (Sm90Added::kMatrix), the phase,
// instances, n, channels, k_blocks, and a shortcut (in blocks of 64 k its stages are among k_blocks). b is (k of all taps, 2, 4, 2, n / 16), a sixteen of n in the order of sm90_eight.cuh.
#define JAXCONV_DECLARE_EIGHT(X, W)                                                            \
  Status LaunchSm90Eight##X##W(const Context& ctx, Sm90Product& p, const Sm90EightEpilogue& e, \
                               TileSize tile, int multiprocessors, const std::string& what);
JAXCONV_EIGHT_PAIRS(JAXCONV_DECLARE_EIGHT)
#undef JAXCONV_DECLARE_EIGHT

}  // namespace jaxconv::cuda
