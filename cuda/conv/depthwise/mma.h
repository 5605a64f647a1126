// Depthwise convolution on the tensor cores: 16-bit, channels-last, stride 1. depthwise.h says when;
// mma.cuh says how. CheckDepthwise has passed before these are called.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// Of the problem; the pointers must be 16-byte aligned besides.
bool DepthwiseMmaSupports(const ConvProblem& p);  // fprop and dgrad
bool DepthwiseMmaWgradSupports(const ConvProblem& p);

// Shared memory of a block, in bytes.
struct DepthwiseMmaTile {
  int64_t budget = 72 * 1024;
};

// dst = y from src = x, or (dgrad) dst = dx from src = dy. `e`, `bias`, `z` as in ConvFprop.
Status DepthwiseMma(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                    const DepthwiseMmaTile& tile, const void* src, const void* w, const void* bias,
                    void* dst, void* z, const std::string& what);

// Shared memory for one of wgrad's two buffers: three blocks an SM up to 3 filter rows, two with
// more, one for a long filter row. Both buffers stay below the 99 KB of the smallest devices.
inline DepthwiseMmaTile DepthwiseMmaWgradTile(const ConvProblem& p) {
  const bool large = (p.filter[2] - 1) * p.dilation[2] >= 9;
  return {(large ? 46 : p.filter[1] <= 3 ? 36 : 48) * 1024};
}

// dw, or with several splits its partial sums (splits, R*S, K) in float32.
Status DepthwiseMmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits,
                         const DepthwiseMmaTile& tile, const void* x, const void* dy, void* dw,
                         float* partials, const std::string& what);

}  // namespace jaxconv::cuda::conv
