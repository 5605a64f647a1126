// Products on the sm_90a main loop in float32: operands of bfloat16 terms (sm90_operands.h) or TF32,
// and an epilogue
//
//   z = alpha * sum + bias + c;  d = f(z)
//
// that stores from the registers: four neighbouring lanes write 32 bytes of a row. The loop over tiles
// is sm90_product.cuh's streamed one. The main loops are two to six times as long as 16-bit ones, so
// that the stages are worth more than an outbox.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/core/activate.cuh"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_product.cuh"

namespace jaxconv::cuda {

// The element (m, 0) of an instance.
__device__ __forceinline__ int64_t RowOffset(const Sm90Product& p, const Sm90Place& at, int m) {
  const Sm90Phase& phase = p.phase[at.phase];
  const Digits4 pixel = SplitDigits(m, phase.extent[2], phase.extent[1], phase.extent[0]);
  int64_t offset =
      p.out.begin[at.phase] + at.instance * p.out.instance + pixel.digit[0] * p.out.stride_image;
#pragma unroll
  for (int i = 0; i < 3; ++i) offset += pixel.digit[3 - i] * p.out.stride[i];
  return offset;
}

__device__ __forceinline__ void StoreFloats(float* to, const float (&v)[32], int half,
                                            int columns) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j * 8 < columns) {
      *reinterpret_cast<float2*>(to + j * 8) =
          make_float2(v[j * 4 + half * 2], v[j * 4 + half * 2 + 1]);
    }
  }
}

// What lies where StoreFloats would store, of a row each: 0 where that row, null, or column is not there. All loads are on
// their way before the first is waited for.
__device__ __forceinline__ void LoadFloats(const float* upper, const float* lower, int columns,
                                           float2 (&two)[2][8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* from = half == 0 ? upper : lower;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool inside = from != nullptr && j * 8 < columns;
      two[half][j] =
          inside ? *reinterpret_cast<const float2*>(from + j * 8) : make_float2(0.f, 0.f);
    }
  }
}

// v += what lies there. d may be there: each element is read by the thread that writes it afterwards.
__device__ __forceinline__ void AddFloats(const float* upper, const float* lower, int columns,
                                          float (&v)[32]) {
  float2 two[2][8];
  LoadFloats(upper, lower, columns, two);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float2 pair = two[i / 2 % 2][i / 4];
    v[i] += i % 2 == 0 ? pair.x : pair.y;
  }
}

template <typename Tile>
struct Sm90Floats : Sm90EpilogueDefaults {
  __device__ __forceinline__ Sm90Floats(const Sm90Product&, const Args&, uint32_t, int, int block0)
      : block0(block0) {}

  template <typename Ring>
  __device__ __forceinline__ void Finish(const Sm90Product& p, const Args&, const Sm90Place& at,
                                         Ring&,
                                         const float (&acc)[Tile::kBlocks][Tile::kTileN / 2]) {
    const Sm90Phase& phase = p.phase[at.phase];
    const Sm90Epilogue& e = p.epilogue;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const float* bias = static_cast<const float*>(e.bias) + at.instance * e.stride_bias;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int upper = at.m + (block0 + block) * 64 + warp * 16 +
                        (Tile::kRowTerms ? TermRow<Tile::kMajorA>(lane) : lane / 4),
                lower = upper + (Tile::kRowTerms ? kTermRowBetween<Tile::kMajorA> : 8);
      const bool has_upper = upper < phase.m, has_lower = lower < phase.m;
      const int64_t to_upper = has_upper ? RowOffset(p, at, upper) : 0;
      const int64_t to_lower = has_lower ? RowOffset(p, at, lower) : 0;
      float row_bias[2] = {};
      if (e.bias_kind == BiasKind::kScalar) {
        row_bias[0] = row_bias[1] = __ldg(bias);
      } else if (e.bias_kind == BiasKind::kRow) {
        row_bias[0] = __ldg(bias + (has_upper ? upper : 0));
        row_bias[1] = __ldg(bias + (has_lower ? lower : 0));
      }
#pragma unroll
      for (int chunk = 0; chunk < Tile::kTileN / 64; ++chunk) {
        const int n = at.n + chunk * 64 + lane % 4 * 2;
        const int columns = p.n - at.n - chunk * 64;  // of the chunk's 64 that are there
        float v[32];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 b = make_float2(0.f, 0.f);
          if (e.bias_kind == BiasKind::kColumn && j * 8 < columns) {
            b = __ldg(reinterpret_cast<const float2*>(bias + n + j * 8));
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[j * 4 + i] = acc[block][chunk * 32 + j * 4 + i] * e.alpha + (i % 2 == 0 ? b.x : b.y) +
                           row_bias[i / 2];
          }
        }
        if (p.out.c != nullptr) {
          AddFloats(has_upper ? p.out.c + to_upper + n : nullptr,
                    has_lower ? p.out.c + to_lower + n : nullptr, columns, v);
        }
        if (e.save_z) {
          if (has_upper) StoreFloats(p.out.z + to_upper + n, v, 0, columns);
          if (has_lower) StoreFloats(p.out.z + to_lower + n, v, 1, columns);
        }
        ActivateAll(e.activation, e.slope, v);
        if (has_upper) StoreFloats(p.out.d + to_upper + n, v, 0, columns);
        if (has_lower) StoreFloats(p.out.d + to_lower + n, v, 1, columns);
      }
    }
  }

  __device__ __forceinline__ void End(const Sm90Product&, const Args&, const Sm90Place&, int) {}

  int block0;
};

// TF32: as Sm90TileOf, without an outbox.
template <int kRows, int kColumns>
using Sm90Tf32Tile = Sm90Tile<float, true, true, kRows == kColumns ? 2 : kRows / 128, kColumns,
                              kRows == kColumns, false>;

template <bool kMajorA, bool kMajorB>
Status LaunchSm90TermsByTile(const Context& ctx, Sm90Product& p, Sm90Choice choice,
                             int multiprocessors, const std::string& what) {
#define JAXCONV_SM90_CASE(rows, columns)                                                       \
  if (choice.tile == TileSize{rows, columns}) {                                                \
    using Tile = Sm90Tile<__nv_bfloat16, kMajorA, kMajorB, 1, columns, false, false, 3, true>; \
    return LaunchSm90Streamed<Tile, Sm90Floats<Tile>>(ctx, p, multiprocessors, what);          \
  }
  JAXCONV_SM90_CASE(128, 128)
  JAXCONV_SM90_CASE(128, 64)
#undef JAXCONV_SM90_CASE
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
