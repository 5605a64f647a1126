// Fat to thin on sm_90a, row by row. Formula and choice in stem.cu.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/conv/stem/stem.cuh"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv {

// What a product needs to know of the offsets between a thin pixel's place j and the fat pixels
// that it sums over: j + offset.
constexpr int kMaxOffsets = 16;  // along an axis
struct ContractOffsets {
  int pad[2];
  int count[2], least[2];  // offsets, and the least of them
  int offset[2][kMaxOffsets];
  int columns;  // stride[0] * stride[1] * channels
};

// Sets `taken` to whether the kernel takes the problem, and runs it if so.
Status ContractRows(const Context& ctx, DType dtype, const StemGeometry& g,
                    const ContractOffsets& o, const Epilogue& e, const void* fat, const void* w,
                    const void* bias, void* thin, void* z, const std::string& what, bool* taken);

Status ExpandRows(const Context& ctx, DType dtype, const StemGeometry& g, const Epilogue& e,
                  const void* thin, const void* w, const void* bias, void* fat, void* z,
                  const std::string& what, bool* taken);

// `partials` (splits, dw_count). Not for float32: its operands must be k-major.
Status CrossRows(const Context& ctx, DType dtype, const StemGeometry& g, int64_t splits,
                 const void* thin, const void* fat, void* dw, float* partials, int64_t dw_count,
                 const std::string& what, bool* taken);

}  // namespace jaxconv::cuda::conv
