// Squeeze-and-excitation on the GPU, channels last: the launches behind SqueezeExcite and SqueezeExciteBackward. Meaning and
// layouts: common/problem.h, common/launch.h. What runs, and how it lies on the device: domain.h.
//
// Traffic: forward 1 read + 1 write, backward 2 reads + 1 write, where an image's part of a CTA fits in shared memory; what
// does not is read again. Each cluster reads both weights, from the L2 cache.
#pragma once

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/core/divmod.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::squeeze_excite {

// One of forward's two products: threads side by side, each with a few columns, and so many of them with shares of the rows.
struct SmallProduct {
  FastDiv lanes;
  int parts;
};

// domain.h: Tiling, and the problem's numbers, as kernels have them. A division is some 30
// instructions, and at few images these take as long as the data does.
struct Layout {
  int64_t all_images;
  int64_t image_vectors;  // of an image
  int row, channels;      // vectors and channels of a pixel
  int hidden;
  uint32_t all_pixels;
  int ctas, shares, ctas_shift, shares_shift;  // shifts: log2 of them
  int lanes, images;
  int rows, pixel_parts;  // pixel_parts: shares of the rows when they are summed
  FastDiv by_lanes, by_rows, by_width, by_own, by_hidden;
  FastDiv by_gates, by_sums;  // vectors of 4: channels whose gates, whose sums are a CTA's
  SmallProduct hidden_product, gate_product;
  uint32_t pixels, held;
  int own;
  bool passes_on;
  int slab, parts, mine, hidden_parts, hidden_at, gates, first, second, biases;
  int barriers;  // bytes from the slab's end
  float count;   // of pixels
  Activation activation;
  float slope;
  Gating gating;
};

struct ForwardArgs {
  const void* x;
  const float* w1;  // (channels, hidden)
  const float* b1;
  const float* w2;  // (hidden, channels)
  const float* b2;
  void* y;
  float* mean;  // (images, channels)
  float* z1;    // (images, hidden)
  float* gate;  // (images, channels)
};

struct BackwardArgs {
  const void* x;
  const void* dy;
  const float* w1;
  const float* w2;
  const float* z1;
  const float* gate;
  float* dz2;  // (images, channels)
  float* dz1;  // (images, hidden)
  void* dx;    // null when unwanted
};

// `what` opens the message of a failure. All arrays of whole rows of channels begin at multiples of 16 bytes.
Status Forward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
               const Device& device, const ForwardArgs& args, const std::string& what);
Status Backward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                const Device& device, const BackwardArgs& args, const std::string& what);

}  // namespace jaxconv::cuda::squeeze_excite
