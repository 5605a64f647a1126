// C = A B by register tiles: kRows x (kVectors * lanes) elements of C stay in vector registers
// while k runs, each step loading kVectors vectors of B and broadcasting kRows elements of A. 6 x 2
// is 12 accumulators + 2 + 1 of AVX2's 16 registers; measured 94 Gflop/s a core with operands in
// the first-level cache (EPYC 7003, float32).
#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>

#include "cpu/blas.h"
#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

constexpr int kMaxRows = 6;

template <typename T, int kRows, int kVectors>
JAXCONV_INLINE void RegisterTile(int64_t k, const T* __restrict a, int64_t a_row, int64_t a_col,
                                 const T* __restrict b, int64_t ldb, T* __restrict c, int64_t ldc,
                                 bool accumulate) {
  using Vector = typename Simd<T>::Vector;
  constexpr int64_t kLanes = Simd<T>::kLanes;
  Vector sum[kRows][kVectors] = {};
  if (accumulate) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) sum[i][j] = VectorAt(c + i * ldc + j * kLanes);
    }
  }
  for (int64_t l = 0; l < k; ++l, a += a_col, b += ldb) {
    Vector b_row[kVectors];
    for (int j = 0; j < kVectors; ++j) b_row[j] = VectorAt(b + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) sum[i][j] += a[i * a_row] * b_row[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) VectorAt(c + i * ldc + j * kLanes) = sum[i][j];
  }
}

// kRows rows of C, all of its columns.
template <typename T, int kRows>
JAXCONV_INLINE void RowBlock(int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                             const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    RegisterTile<T, kRows, 2>(k, a, a_row, a_col, b + j, ldb, c + j, ldc, accumulate);
  }
  if (j < n) RegisterTile<T, kRows, 1>(k, a, a_row, a_col, b + j, ldb, c + j, ldc, accumulate);
}

// dst (kLanes, kLanes) = the transpose of src, rows contiguous in both. Three rounds (two for
// float64) in which vectors i and i + half are merged element by element.
template <typename T>
JAXCONV_INLINE void TransposeSquare(const T* src, int64_t src_row, T* dst, int64_t dst_row) {
  using Vector = typename Simd<T>::Vector;
  constexpr int kLanes = Simd<T>::kLanes;
  Vector v[kLanes], u[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = VectorAt(src + i * src_row);
  for (int round = 1; round < kLanes; round *= 2) {
    for (int i = 0; i < kLanes / 2; ++i) {
      const Vector a = v[i], b = v[i + kLanes / 2];
      if constexpr (kLanes == 8) {
        u[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        u[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      } else {
        u[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        u[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      }
    }
    for (int i = 0; i < kLanes; ++i) v[i] = u[i];
  }
  for (int i = 0; i < kLanes; ++i) VectorAt(dst + i * dst_row) = v[i];
}

constexpr int64_t kTileM = GemmShape::kTileM, kTileN = GemmShape::kTileN;
constexpr int64_t kTileK = GemmShape::kTileK, kItems = GemmShape::kItems;
constexpr int64_t kMinSplit = GemmShape::kMinSplit, kBlasWork = GemmShape::kBlasWork;

}  // namespace

template <typename T>
JAXCONV_MULTIVERSION void GemmTile(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row,
                                   int64_t a_col, const T* b, int64_t ldb, T* c, int64_t ldc,
                                   bool accumulate) {
  // Even row blocks: 8 rows are 4 + 4, not 6 + 2, whose two rows would not cover the latency of the
  // adder.
  for (int64_t left = m; left > 0;) {
    const int64_t blocks = (left + kMaxRows - 1) / kMaxRows;
    const int64_t rows = (left + blocks - 1) / blocks;  // [1, kMaxRows]
    switch (rows) {
      case 1:
        RowBlock<T, 1>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
      case 2:
        RowBlock<T, 2>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
      case 3:
        RowBlock<T, 3>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
      case 4:
        RowBlock<T, 4>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
      case 5:
        RowBlock<T, 5>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
      default:
        RowBlock<T, 6>(n, k, a, a_row, a_col, b, ldb, c, ldc, accumulate);
        break;
    }
    a += rows * a_row;
    c += rows * ldc;
    left -= rows;
  }
}

template <typename T>
JAXCONV_MULTIVERSION void CopyTile(int64_t rows, int64_t cols, const T* src, int64_t src_row,
                                   int64_t src_col, T* dst, int64_t dst_row) {
  if (src_col == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      const T* __restrict from = src + i * src_row;
      T* __restrict to = dst + i * dst_row;
      for (int64_t j = 0; j < cols; ++j) to[j] = from[j];
    }
    return;
  }
  int64_t i = 0;
  if (src_row == 1) {
    constexpr int64_t kLanes = Simd<T>::kLanes;
    for (; i + kLanes <= rows; i += kLanes) {
      int64_t j = 0;
      for (; j + kLanes <= cols; j += kLanes) {
        TransposeSquare(src + i + j * src_col, src_col, dst + i * dst_row + j, dst_row);
      }
      for (; j < cols; ++j) {
        for (int64_t l = 0; l < kLanes; ++l) dst[(i + l) * dst_row + j] = src[i + l + j * src_col];
      }
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) dst[i * dst_row + j] = src[i * src_row + j * src_col];
  }
}

template <typename T>
Status Gemm(const Context& ctx, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
            T alpha, const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc,
            int64_t batch, BatchStrides strides) {
  if (m == 0 || n == 0 || batch == 0) return Status::Ok();
  if (k > 0 && m * n >= kBlasWork / k) {  // m * n * k may not fit 64 bits
    bool by_blas = true;
    for (int64_t i = 0; i < batch && by_blas; ++i) {
      by_blas =
          BlasGemm(trans_a, trans_b, m, n, k, alpha, a + i * strides.a, lda, b + i * strides.b, ldb,
                   beta, c + i * strides.c, ldc);  // true for all or for none
    }
    if (by_blas) return Status::Ok();
  }
  // One item: one tile of C of one instance, summed over one of `splits` parts of k in steps of
  // kTileK. Parts are used where a long k makes few tiles, and do not depend on the number of
  // threads.
  const int64_t tiles_m = (m + kTileM - 1) / kTileM, tiles_n = (n + kTileN - 1) / kTileN;
  const int64_t tiles = batch * tiles_m * tiles_n;
  const int64_t splits = std::clamp<int64_t>(std::min(kItems / tiles, k / kMinSplit), 1, kItems);
  const int64_t a_row = trans_a ? 1 : lda, a_col = trans_a ? lda : 1;
  const int64_t b_row = trans_b ? 1 : ldb, b_col = trans_b ? ldb : 1;
  Scratch<T> parts(splits > 1 ? tiles * splits * kTileM * kTileN : 0);
  JAXCONV_RETURN_IF_ERROR(parts.status());

  struct Tile {
    int64_t instance, i, j, rows, cols;
  };
  auto tile_at = [&](int64_t tile) -> Tile {
    const int64_t i = tile / tiles_n % tiles_m * kTileM, j = tile % tiles_n * kTileN;
    return {tile / tiles_n / tiles_m, i, j, std::min(m - i, kTileM), std::min(n - j, kTileN)};
  };
  auto write = [&](const Tile& t, const T* sum) {
    for (int64_t i = 0; i < t.rows; ++i, sum += kTileN) {
      T* c_row = c + t.instance * strides.c + (t.i + i) * ldc + t.j;
      if (beta == T(0)) {
        for (int64_t j = 0; j < t.cols; ++j) c_row[j] = alpha * sum[j];
      } else {
        for (int64_t j = 0; j < t.cols; ++j) c_row[j] = alpha * sum[j] + beta * c_row[j];
      }
    }
  };
  JAXCONV_RETURN_IF_ERROR(ParallelForWithScratch<T>(
      ctx, tiles * splits, (kTileK + kTileM) * kTileN, [&](int64_t item, T* scratch) {
        const Tile t = tile_at(item / splits);
        const int64_t split = item % splits, k_end = k * (split + 1) / splits;
        const int64_t padded = PadToLanes<T>(t.cols);
        const T* a_tile = a + t.instance * strides.a + t.i * a_row;
        const T* b_from = b + t.instance * strides.b + t.j * b_col;
        T* b_tile = scratch;
        T* sum = splits > 1 ? parts.data() + item * kTileM * kTileN : scratch + kTileK * kTileN;
        if (k == 0) std::memset(sum, 0, t.rows * kTileN * sizeof(T));
        const int64_t k_begin = k * split / splits;
        for (int64_t l0 = k_begin; l0 < k_end; l0 += kTileK) {
          const int64_t depth = std::min(k_end - l0, kTileK);
          CopyTile(depth, t.cols, b_from + l0 * b_row, b_row, b_col, b_tile, kTileN);
          for (int64_t l = 0; l < depth && padded > t.cols; ++l) {
            std::memset(b_tile + l * kTileN + t.cols, 0, (padded - t.cols) * sizeof(T));
          }
          GemmTile(t.rows, padded, depth, a_tile + l0 * a_col, a_row, a_col, b_tile, kTileN, sum,
                   kTileN, /*accumulate=*/l0 > k_begin);
        }
        if (splits == 1) write(t, sum);
      }));
  if (splits == 1) return Status::Ok();
  ParallelFor(ctx, tiles, [&](int64_t tile) {
    const Tile t = tile_at(tile);
    T* sum = parts.data() + tile * splits * kTileM * kTileN;
    for (int64_t split = 1; split < splits; ++split) {
      const T* part = sum + split * kTileM * kTileN;
      for (int64_t i = 0; i < t.rows; ++i) {
        for (int64_t j = 0; j < t.cols; ++j) sum[i * kTileN + j] += part[i * kTileN + j];
      }
    }
    write(t, sum);
  });
  return Status::Ok();
}

#define JAXCONV_INSTANTIATE(T)                                                                \
  template void GemmTile<T>(int64_t, int64_t, int64_t, const T*, int64_t, int64_t, const T*,  \
                            int64_t, T*, int64_t, bool);                                      \
  template void CopyTile<T>(int64_t, int64_t, const T*, int64_t, int64_t, T*, int64_t);       \
  template Status Gemm<T>(const Context&, bool, bool, int64_t, int64_t, int64_t, T, const T*, \
                          int64_t, const T*, int64_t, T, T*, int64_t, int64_t, BatchStrides);
JAXCONV_INSTANTIATE(float)
JAXCONV_INSTANTIATE(double)
#undef JAXCONV_INSTANTIATE

}  // namespace jaxconv::cpu
