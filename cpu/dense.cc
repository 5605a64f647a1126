// Dense of common/launch.h on the CPU, plan.kernel "gemm": y = f(z), z = alpha op(x) op(w) +
// beta c + bias. One product for the whole batch writes alpha op(x) op(w) to y; one pass over its
// rows, spread over the threads, does the rest. float32 and float64. The workspace argument is
// unused.
#include <string>

#include "common/launch.h"
#include "cpu/conv.h"
#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

// y += beta * c
template <typename T>
JAXCONV_MULTIVERSION void AddScaled(int64_t count, T beta, const T* __restrict c, T* __restrict y) {
  for (int64_t i = 0; i < count; ++i) y[i] += beta * c[i];
}

template <typename T>
Status Run(const Context& ctx, const DenseProblem& p, const Epilogue& e, const T* x, const T* w,
           const T* bias, const T* c, T* y, T* z) {
  const int64_t ldx = p.trans_x ? p.m : p.k, ldw = p.trans_w ? p.k : p.n;
  if (!p.w_batched && p.x_batched && !p.trans_x) {
    // The instances' rows follow each other: one product of batch * m rows.
    JAXCONV_RETURN_IF_ERROR(Gemm(ctx, false, p.trans_w, p.batch * p.m, p.n, p.k,
                                 static_cast<T>(p.alpha), x, ldx, w, ldw, T(0), y, p.n));
  } else {
    JAXCONV_RETURN_IF_ERROR(Gemm(
        ctx, p.trans_x, p.trans_w, p.m, p.n, p.k, static_cast<T>(p.alpha), x, ldx, w, ldw, T(0), y,
        p.n, p.batch, {p.x_batched ? p.m * p.k : 0, p.w_batched ? p.k * p.n : 0, p.m * p.n}));
  }
  const bool add_c = p.addend && c != nullptr,
             add_bias = p.bias != BiasKind::kNone && bias != nullptr;
  if (!add_c && !add_bias && z == nullptr && e.activation == Activation::kNone) return Status::Ok();
  if (p.n == 0) return Status::Ok();

  const int64_t bias_size = p.bias == BiasKind::kRow ? p.m : p.bias == BiasKind::kColumn ? p.n : 1;
  const int64_t rows = p.batch * p.m;
  const int64_t block = std::max<int64_t>(16384 / p.n, 1);  // rows per item: 64 KiB of float32
  ParallelFor(ctx, CeilDiv(rows, block), [&](int64_t item) {
    const int64_t first = item * block, last = std::min(first + block, rows);
    for (int64_t row = first; row < last; ++row) {
      const int64_t instance = row / p.m, i = row % p.m;
      T* y_row = y + row * p.n;
      if (add_c) {
        AddScaled(p.n, static_cast<T>(p.beta), c + (p.c_batched ? row : i) * p.n, y_row);
      }
      if (add_bias) {
        const T* values = bias + (p.bias_batched ? instance * bias_size : 0);
        if (p.bias == BiasKind::kRow) values += i;
        AddBias(p.n, values, /*shared=*/p.bias != BiasKind::kColumn, y_row);
      }
    }
    FinishInPlace(e, (last - first) * p.n, y + first * p.n,
                  z == nullptr ? nullptr : z + first * p.n);
  });
  return Status::Ok();
}

}  // namespace

Status Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
             const DenseArrays& a, Workspace) {
  if (plan.kernel != "gemm") {
    return Status::Invalid("dense: the CPU backend has no kernel \"" + std::string(plan.kernel) +
                           "\"; it has gemm");
  }
  void* z = e.save_preactivation ? a.z.as<void>() : nullptr;
  switch (p.dtype) {
    case DType::kF32:
      return Run(ctx, p, e, a.x.as<float>(), a.w.as<float>(), a.b.as<float>(), a.c.as<float>(),
                 a.y.as<float>(), static_cast<float*>(z));
    case DType::kF64:
      return Run(ctx, p, e, a.x.as<double>(), a.w.as<double>(), a.b.as<double>(), a.c.as<double>(),
                 a.y.as<double>(), static_cast<double*>(z));
    default:
      return Status::Unimplemented(
          std::string("dense: the CPU backend computes in float32 and float64, not ") +
          Name(p.dtype) + ": convert first");
  }
}

}  // namespace jaxconv::cpu
