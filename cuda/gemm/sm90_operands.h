// What is done to float32 operands before a product on the sm_90a main loop.
//
// 16-bit tensor cores: x = t0 + t1 + t2, each term the bfloat16 nearest to what
// the terms before it leave, 8 + 8 + 8 bits for float32's 24. A product of two operands is then a
// sum of products of terms:
//
//   t0 t0 + t0 t1 + t1 t0 + t1 t1 + t0 t2 + t2 t0    without what is below 2^-24 of it
//
// bfloat16 has float32's exponents, so nothing is scaled. Below 2^-110 the third term of a number
// underflows, and below 2^-118 the second.
//
// In memory the smallest term is first: [terms][elements]. An infinity or a NaN is the smallest term
// of its element, t0 is 1 with its sign, and a term between is 0: the infinity meets t0 alone, and
// all that it is added to is finite or of its own sign.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/plan.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

// How a product is computed.
struct Sm90Arithmetic {
  DType element;  // that the tensor cores multiply: bfloat16, float16, or float32 as TF32
  int terms;      // of an operand
  bool tf32;
  int depth;  // k in 128 bytes
};

inline Sm90Arithmetic ArithmeticOf(DType dtype, bool full_float32) {
  if (dtype != DType::kF32) return {dtype, 1, false, 64};
  if (full_float32) return {DType::kBF16, 3, false, 64};
  return {dtype, 1, true, 32};
}

// Replaces operands, `count` float32 numbers each, by their three terms in the workspace, in one
// launch: 2 bytes a term and element, each operand's rounded up to 256. The counts are
// multiples of 8, everything is 16-byte aligned. An operand whose count is 0 is left alone: a product's A
// is split on its way (sm90_split.cuh).
//
// Splitting on the way saves writing and reading the terms, 10 bytes an element, and costs a product
// nothing, a wgrad a fifth of its speed: conversions, for every tap and both columns of tiles.
Status SplitIntoTerms(const Context& ctx, int64_t count_a, int64_t count_b, const std::string& what,
                      const void** a, const void** b, Workspace* workspace);

// TF32 tensor cores read k-major operands only. Replaces an operand, `count` row-major float32
// matrices, by their transposes in the workspace: 4 bytes an element, rounded up to 256.
Status TransposeFloats(const Context& ctx, int64_t count, int64_t rows, int64_t columns,
                       const std::string& what, const void** operand, Workspace* workspace);

}  // namespace jaxconv::cuda
