// wgrad on the sm_90a main loop, as the host fills it in; wgrad.cuh computes it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/wgrad/domain.h"
#include "cuda/core/context.h"
#include "cuda/gemm/sm90_normalised.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// Axes are W, H, D.
struct WgradLaunch {
  CUtensorMap x;   // columns of 64 pixels
  CUtensorMap dy;  // (k, group, pixels)
  int extent[3];   // O P Q's: pixels
  int first[3], step[3];
  int taps[3], tap_step[3];
  int rank;            // of x; 0: a 1x1 filter, x is (c, group, pixels)
  int instances;       // groups
  int channels;        // C/G
  int channel_blocks;  // of 64, in a tap
  int n;               // K/G
  int steps;           // of 64 pixels, rounded up
  int parts;           // of CTAs or pairs of them; 1: whole tiles
  int64_t pitch;       // K
  int images;          // of a term: the terms of x follow each other as images, those of dy as taps
  void* dw;
  float* partials;
  // Filled in by the launch.
  bool whole_tiles;
  int tiles_m, tiles_n;
  int64_t tiles;
  int shares;  // of a tile's parts, in the pairs' second pass
};

// tile: of both CTAs of a pair.
Status LaunchSm90WgradBf16(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                           int multiprocessors, const std::string& what);
Status LaunchSm90WgradF16(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                          int multiprocessors, const std::string& what);
// float32 from operands of three bfloat16 terms.
Status LaunchSm90WgradFloat(const Context& ctx, WgradLaunch& p, WgradKernel kernel, TileSize tile,
                            int multiprocessors, const std::string& what);

// Of x normalised on its way: a 1x1 convolution of stride 1, one group, 16 bit (normalised.cu).
Status LaunchSm90NormalisedWgrad(const Context& ctx, DType dtype, WgradLaunch& p,
                                 Sm90Normalisation n, TileSize tile, int multiprocessors,
                                 const std::string& what);

// wgrad, wgrad_swapped and wgrad_pair, for a plan that was confirmed; with `n`, what is normalised.
Status Sm90WgradOf(const Context& ctx, const ConvProblem& p, WgradKernel kernel, const Plan& plan,
                   const void* x, const void* dy, void* dw, Workspace workspace,
                   const std::string& what, const Sm90Normalisation* n = nullptr);

}  // namespace jaxconv::cuda
