// Gemm's kernels by arithmetic, one translation unit each; gemm.cu checks the arguments and picks
// one.
#pragma once

#include <string>

#include "cuda/core/context.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/tiles.h"

namespace jaxconv::cuda {

struct GemmLaunch {
  Grid grid;  // without the tile counts
  EpilogueParams epilogue;
  const void* a;
  const void* b;
  int64_t lda, ldb;
  bool trans_a, trans_b;
  bool vector;  // bases, leading dimensions and instance strides of a and b are multiples of 16
                // bytes
  Tile tile;
};

Status LaunchGemmBf16(const Context& ctx, const GemmLaunch& g, const std::string& what);
Status LaunchGemmF16(const Context& ctx, const GemmLaunch& g, const std::string& what);
Status LaunchGemmTf32(const Context& ctx, const GemmLaunch& g, const std::string& what);
Status LaunchGemmFloat32(const Context& ctx, const GemmLaunch& g, const std::string& what);

}  // namespace jaxconv::cuda
