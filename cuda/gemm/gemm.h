// The matrix product as the other rooms of cuda/ call it: batched, strided, row-major,
// deterministic.
//
//   z = alpha * op(a) @ op(b) + beta * c + bias;  d = f(z)      for each of `batch` instances
//
// Leading dimensions and instance strides are in elements; a stride of 0 shares the operand between
// instances.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

struct GemmArgs {
  int64_t m, n, k;
  int64_t batch = 1;
  bool trans_a = false;  // op(a) is (m, k); a is stored (k, m)
  bool trans_b = false;  // op(b) is (k, n); b is stored (n, k)
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;                     // (m, n) like d, in dtype; null without an addend
  const void* bias = nullptr;                  // null unless bias_kind says otherwise
  void* d = nullptr;                           // (m, n)
  void* z = nullptr;                           // pre-activation like d; null unless wanted
  int64_t lda = 0, ldb = 0, ldc = 0, ldd = 0;  // ldd is also z's
  int64_t stride_a = 0, stride_b = 0, stride_c = 0, stride_d = 0, stride_bias = 0;
  double alpha = 1.0, beta = 0.0;
  BiasKind bias_kind = BiasKind::kNone;
  Activation activation = Activation::kNone;
  double slope = 0.0;
  DType dtype = DType::kF32;  // of a, b, c, bias, and of d and z unless float32_out
  bool float32_out = false;   // d in float32 whatever dtype is (partial sums of a split reduction)
  bool accumulate = false;    // d += ... instead of d = ...; float32_out only
  bool full_float32 = false;  // float32: SIMT FMAs instead of TF32 tensor cores
  std::string_view tile;      // "128x128", "128x64", "64x64"
  int64_t splits = 1;         // parts that k is cut into, summed in a fixed order; 1: no split
  Workspace workspace = {nullptr,
                         0};  // splits > 1: splits * batch * m * n * 4 bytes; otherwise unused
};

// `what` opens the message of a failed launch.
Status Gemm(const Context& ctx, const GemmArgs& args, const char* what);

}  // namespace jaxconv::cuda
