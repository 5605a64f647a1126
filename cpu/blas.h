// The BLAS that Python hands over: SciPy's, whose Fortran entry points are found in
// scipy.linalg.cython_blas.__pyx_capi__. Absent until SetBlas is called; everything works without
// it.
#pragma once

#include <cstdint>

namespace jaxconv::cpu {

// Fortran ABI: every argument by address, 32-bit integers, column-major. Either may be null.
void SetBlas(void* sgemm, void* dgemm);

bool HasBlas();  // both are there

// C = alpha op(A) op(B) + beta C, row-major, m, n, k >= 1. False, with C untouched, if there is no
// BLAS for T or a leading dimension does not fit its 32-bit integers; longer extents are split.
// OpenBLAS spreads the product over its own threads and lets one caller in at a time, so calls from
// many threads only queue up.
template <typename T>
bool BlasGemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
              int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc);

}  // namespace jaxconv::cpu
