// Row-major products through a column-major BLAS: what BLAS reads as a column-major matrix is our
// transpose, and C^T = op(B)^T op(A)^T, so the operands (and m and n) change places and the
// transposition flags stay.
#include "cpu/blas.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

namespace jaxconv::cpu {
namespace {

template <typename T>
using FortranGemm = void(const char* trans_a, const char* trans_b, const int* m, const int* n,
                         const int* k, const T* alpha, const T* a, const int* lda, const T* b,
                         const int* ldb, const T* beta, T* c, const int* ldc);

std::atomic<FortranGemm<float>*> sgemm_pointer{nullptr};
std::atomic<FortranGemm<double>*> dgemm_pointer{nullptr};

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kMaxExtent = int64_t{1} << 30;  // of one call

}  // namespace

void SetBlas(void* sgemm, void* dgemm) {
  sgemm_pointer = reinterpret_cast<FortranGemm<float>*>(sgemm);
  dgemm_pointer = reinterpret_cast<FortranGemm<double>*>(dgemm);
}

bool HasBlas() { return sgemm_pointer != nullptr && dgemm_pointer != nullptr; }

template <typename T>
bool BlasGemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
              int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  FortranGemm<T>* gemm;
  if constexpr (std::is_same_v<T, float>) {
    gemm = sgemm_pointer;
  } else {
    gemm = dgemm_pointer;
  }
  if (gemm == nullptr || lda > kMaxInt || ldb > kMaxInt || ldc > kMaxInt) return false;
  const char flag_a = trans_a ? 'T' : 'N', flag_b = trans_b ? 'T' : 'N';
  const int ia = static_cast<int>(lda), ib = static_cast<int>(ldb), ic = static_cast<int>(ldc);
  for (int64_t i0 = 0; i0 < m; i0 += kMaxExtent) {
    for (int64_t j0 = 0; j0 < n; j0 += kMaxExtent) {
      for (int64_t l0 = 0; l0 < k; l0 += kMaxExtent) {
        const int mi = static_cast<int>(std::min(m - i0, kMaxExtent));
        const int ni = static_cast<int>(std::min(n - j0, kMaxExtent));
        const int ki = static_cast<int>(std::min(k - l0, kMaxExtent));
        const T beta_l = l0 == 0 ? beta : T(1);
        gemm(&flag_b, &flag_a, &ni, &mi, &ki, &alpha, b + (trans_b ? j0 * ldb + l0 : l0 * ldb + j0),
             &ib, a + (trans_a ? l0 * lda + i0 : i0 * lda + l0), &ia, &beta_l, c + i0 * ldc + j0,
             &ic);
      }
    }
  }
  return true;
}

template bool BlasGemm<float>(bool, bool, int64_t, int64_t, int64_t, float, const float*, int64_t,
                              const float*, int64_t, float, float*, int64_t);
template bool BlasGemm<double>(bool, bool, int64_t, int64_t, int64_t, double, const double*,
                               int64_t, const double*, int64_t, double, double*, int64_t);

}  // namespace jaxconv::cpu
