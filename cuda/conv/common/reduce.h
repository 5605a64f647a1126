// The second stage of every split reduction here: out[i] = sum over parts in order of
// partial[part][i], in float32.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// How an output index finds its partial sum. kSame: both have the same order. kTapInner: out is
// (taps, channels, k) and the partial is (channels, taps, k).
struct PartialOrder {
  int64_t taps = 1, channels = 1, k = 1;
  bool tap_inner = false;
};

// `partials` holds `parts` arrays of `count` floats one after another; `out` has `count` elements
// of `dtype`.
Status SumPartials(const Context& ctx, DType dtype, const float* partials, int64_t parts,
                   int64_t count, const PartialOrder& order, void* out, const char* what);

}  // namespace jaxconv::cuda::conv
