// Convolutions of at most 64 summed channels on the sm_90a main loop, as the host fills them in;
// halo.cuh computes them and says what the fields mean together.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/sm90/halo/domain.h"
#include "cuda/core/context.h"
#include "cuda/core/derivative.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {

// A batch-norm that the convolution reads, and where its gradients go: float32, (groups * n) each.
struct HaloNorm {
  const float *scale, *bias, *mean, *rstd;
  float *dscale, *dbias;
};

// fprop, and dgrad of stride 1.
struct HaloProduct {
  CUtensorMap x, w;
  void *d, *z;    // z: null unless saved
  const void* c;  // like d: added to the sums, or what derivative is computed from; null without
  Sm90Epilogue epilogue;
  HaloLine line;
  int made[3];           // extents of the images that are made
  int shift[kHaloTaps];  // places from an output's to what tap t reads
  int taps;
  bool flip;      // tap t multiplies filter element taps - 1 - t
  int instances;  // groups
  int channels;   // summed, of an instance
  int n;          // made, of an instance
  int tiles;      // of kHaloPlaces
  // Filled in by the launch.
  int blocks;   // of 64 channels made
  int ctas;     // that share a block
  int buffers;  // of x, 2 or 3
  FastDiv by_extent[3];
  Digits4 sixteen;  // places
  int plane;        // pixels that are made
  int64_t image;
  int buffer_bytes;
  // Of kKept and kNormed.
  DerivativePieces derivative;
  float* parts;  // (2 * ctas, groups * n); of kNormed (2 * ctas, 2, groups * n)
  HaloNorm norm;
};

// What a dgrad reads beside its operands: an array to add, what an activation was given or gave, or what the batch-norm in front
// of an activation was given.
enum class HaloBeside { kNothing, kAddend, kKept, kNormed };

// wgrad of 3 x 3 filters.
struct HaloWgrad {
  CUtensorMap x, dy;
  HaloLine line;
  int row_shift, column_shift;  // places from a tap to the next
  int instances;
  int channels;   // C/G
  int n;          // K/G
  int64_t pitch;  // K
  void* dw;
  float* partials;
  int steps;  // of kHaloStep places
  int parts;  // CTAs that share the steps of a block
  // Filled in by the launch.
  int blocks;  // of 64 of K/G
  int stages;
  int buffer_bytes;  // of x
};

Status HaloFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                 const void* w, const void* bias, const void* residual, void* y, void* z,
                 Workspace workspace, const std::string& what);
// c: like dx and added to it, or null.
Status HaloDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                 const void* c, void* dx, const std::string& what);
// dgrad through e's activation, and the sums of its result.
Status HaloGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* dy,
                    const void* w, const void* kept, void* dz, void* dbias, Workspace workspace,
                    const std::string& what);
// dgrad through the batch-norm of x and e's activation, and the sums that the norm's gradients are (gemm/sm90_norm_gradient.h).
Status HaloNormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* dy,
                        const void* w, const void* x, const HaloNorm& norm, void* dz,
                        Workspace workspace, const std::string& what);
// 16 bit; TF32's is Sm90WgradTf32 (sm90/wgrad/wgrad_tf32.h).
Status HaloWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                   const void* dy, void* dw, Workspace workspace, const std::string& what);

Status LaunchHaloProductBf16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                             const std::string& what);
Status LaunchHaloProductF16(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                            const std::string& what);
Status LaunchHaloProductTf32(const Context& ctx, HaloProduct& p, int multiprocessors,
                             const std::string& what);
// dbias: (groups * n), of d's type.
Status LaunchHaloGradientBf16(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                              const std::string& what);
Status LaunchHaloGradientF16(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                             const std::string& what);
Status LaunchHaloGradientTf32(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                              const std::string& what);
// Of p.norm.
Status LaunchHaloNormGradientTf32(const Context& ctx, HaloProduct& p, int multiprocessors,
                                  const std::string& what);
Status LaunchHaloWgradBf16(const Context& ctx, HaloWgrad& p, const std::string& what);
Status LaunchHaloWgradF16(const Context& ctx, HaloWgrad& p, const std::string& what);

}  // namespace jaxconv::cuda
