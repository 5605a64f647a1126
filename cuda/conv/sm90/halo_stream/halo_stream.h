// Convolutions of many channels whose pixels stay in shared memory while the filter streams past, as the
// host fills them in; halo_stream.cuh computes them and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/halo_stream/domain.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

struct HaloStream {
  CUtensorMap x, w;
  void *d, *z;  // z: null unless saved
  Sm90Epilogue epilogue;
  HaloLine line;
  StreamPhase phase[kSm90Phases];
  int phases;
  int shift[kStreamTaps];  // places from an output's to what the tap reads
  int tap[kStreamTaps];    // its filter element
  int step[2];             // pixels of d from a place to the next along W and H
  int image;               // pixels of d in an image
  int channels;            // summed
  int n;                   // made
  // Filled in by the launch.
  int tiles, blocks_k, blocks_n;
  int slots, stages;  // of pixels, 64 channels of a tile each; of the filter, 64 x 128
  int slot_bytes;
  FastDiv by_extent[2];
};

Status HaloStreamFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                       const void* w, const void* bias, void* y, void* z, const std::string& what);
Status HaloStreamDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                       void* dx, const std::string& what);

Status LaunchHaloStreamBf16(const Context& ctx, HaloStream& p, bool dgrad, int reach,
                            int multiprocessors, const std::string& what);
Status LaunchHaloStreamF16(const Context& ctx, HaloStream& p, bool dgrad, int reach,
                           int multiprocessors, const std::string& what);

}  // namespace jaxconv::cuda
