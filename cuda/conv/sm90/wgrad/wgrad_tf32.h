// wgrad of float32 in TF32 on the sm_90a tensor cores, as the host fills it in;
// wgrad_tf32.cu computes it and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/wgrad/domain.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"

namespace jaxconv::cuda {

// Axes are W, H, D.
struct Tf32Wgrad {
  CUtensorMap x, dy;
  int rank_x, rank_dy;    // of columns of places; 0: a matrix (channel, group, pixel)
  int extent[3];          // the line: places, gaps included
  int first[3], step[3];  // coordinates in x
  int taps[3], tap_step[3];
  int instances;       // groups
  int channels;        // C/G
  int channel_blocks;  // of 64
  int n;               // K/G
  int64_t pitch;       // K
  // Rows of a tile: where halo, the 9 taps of a plane of the filter, of 64 channels, and otherwise
  // any blocks of 64 channels of a tap.
  bool halo;
  bool swapped;  // a 1x1 filter, rows are channels of dy: x and dy, channels and n change places
  bool terms;    // three bfloat16 terms of each number instead of TF32
  int row_shift, plane_shift;  // halo: places from a row of taps, a plane of taps to the next
  int steps;                   // of kTf32Step places, rounded up
  int parts;                   // 1: whole tiles
  void* dw;
  float* partials;
  // Filled in by PrepareTf32Wgrad.
  int tiles_m;
  int blocks;  // of 64 rows of a group's dw
  int strips;  // of a tile
  int reach;   // places that a step's taps read beyond it
  int slot;    // places that a copy fetches, 32 or 64
  int ring;    // slots of a strip
  // Filled in by the launch.
  FastDiv by_extent[3];
  bool whole_tiles;
  int tiles_n;
  int64_t tiles;
};

// What depends on the tile; the descriptors' boxes then have p.slot places.
Status PrepareTf32Wgrad(Tf32Wgrad& p, TileSize tile, const std::string& what);

// p.halo: kTf32HaloTile, 9 taps of 64 channels x 64; otherwise those of domain.h.
Status LaunchTf32Wgrad(const Context& ctx, Tf32Wgrad& p, TileSize tile, int multiprocessors,
                       const std::string& what);

// wgrad_tf32, wgrad_terms and wgrad_terms_swapped, and with WgradKernel::kNone sm90/halo, for a plan that was confirmed.
Status Sm90WgradTf32(const Context& ctx, const ConvProblem& p, WgradKernel kernel, const Plan& plan,
                     const void* x, const void* dy, void* dw, Workspace workspace,
                     const std::string& what);

}  // namespace jaxconv::cuda
