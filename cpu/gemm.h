// Matrix products on one thread and on all of them.
#pragma once

#include <cstdint>

#include "common/status.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

// C (m, n) = A (m, k) B (k, n), or += with `accumulate`, on the calling thread. For tiles that fit
// the second-level cache: nothing is packed. Strides in elements: A has any two (so a transpose is
// free), the rows of B and C are contiguous. n is a multiple of Simd<T>::kLanes: callers own the
// padding. Every element of C is one sum over k in ascending order, whatever m and n are. T is
// float or double.
template <typename T>
void GemmTile(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b,
              int64_t ldb, T* c, int64_t ldc, bool accumulate);

// c (rows, cols) = src, both with any strides (one of src's is usually 1), cols contiguous in dst.
template <typename T>
void CopyTile(int64_t rows, int64_t cols, const T* src, int64_t src_row, int64_t src_col, T* dst,
              int64_t dst_row);

// Of one batched product: instance i starts at a + i*a, and so on. 0 shares the operand.
struct BatchStrides {
  int64_t a, b, c;
};

// How Gemm cuts a product up. Tests take their shapes from it, on both sides of each threshold.
struct GemmShape {
  // 48 x 128 x 256: B's tile is 128 KiB of float32, half of a small second-level cache.
  static constexpr int64_t kTileM = 48, kTileN = 128, kTileK = 256;
  // k is cut into parts of at least kMinSplit where there would be fewer than kItems tiles.
  static constexpr int64_t kItems = 16, kMinSplit = 1024;
  // Multiply-adds from which one product goes to BLAS. Below, its threads cost more than its kernels
  // gain, and much more on a busy machine, where they spin for each other: float32 512^3 on 2 cores
  // with 5 other processes took 68 ms with OpenBLAS 0.3.30 and 3.7 ms here; 1024^3 costs it 32 ms of
  // CPU and us 45. The bits of those products are BLAS's: they may depend on its number of threads.
  static constexpr int64_t kBlasWork = int64_t{1} << 27;
};

// C = alpha op(A) op(B) + beta C for `batch` instances, row-major as in C: op(A) is (m, k), stored
// (k, m) if trans_a, and so on; ld* are the distances between stored rows. C is not read if beta is
// 0. Large products go to BLAS (cpu/blas.h) when there is one; the rest, and all of them without
// BLAS, to GemmTile under ParallelFor. Not to be called from inside a ParallelFor: BLAS has threads
// of its own.
template <typename T>
Status Gemm(const Context& ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
            T alpha, const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc,
            int64_t batch = 1, BatchStrides strides = {0, 0, 0});

}  // namespace jaxconv::cpu
