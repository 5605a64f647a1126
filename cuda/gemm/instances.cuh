// The plain matrix product as a view of the main loop: A (m, k) and B (k, n), each stored either
// way round.
#pragma once

#include "cuda/gemm/instances.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {

struct GemmViewParams {
  int64_t lda, ldb;
};

template <typename Math, bool kMajorA, bool kMajorB, int kVec>
struct GemmView {
  using T = typename Math::T;
  using Params = GemmViewParams;
  static constexpr bool kPlain = false;
  struct Shared {};
  using LoaderA = MatrixLoader<T, Math::kTileM, kMajorA, kVec, Math::kThreads>;
  using LoaderB = MatrixLoader<T, Math::kTileN, kMajorB, kVec, Math::kThreads>;

  JAXCONV_HD GemmView(const Params& params, const Grid& grid, const EpilogueParams& epilogue,
                      const Cta& cta, Shared&)
      : params(params), m_end(grid.m), n_end(grid.n), ldd(epilogue.ldd) {
    const KRange k = PartOfK(grid, cta.part);
    k_begin = k.begin;
    k_end = k.end;
  }
  JAXCONV_HD int64_t OutRow(int m) const { return m * ldd; }
  JAXCONV_HD LoaderA MakeA(const Cta& cta, int thread) const {
    return LoaderA(params.lda, cta.m0, m_end, k_begin, k_end, thread);
  }
  JAXCONV_HD LoaderB MakeB(const Cta& cta, int thread) const {
    return LoaderB(params.ldb, cta.n0, n_end, k_begin, k_end, thread);
  }

  const Params& params;
  int m_end, n_end, k_begin, k_end;
  int64_t ldd;
};

template <template <typename, int, int, bool, bool> class Math, typename T, int kTileM, int kTileN,
          int kVec, bool kMajorA, bool kMajorB>
Status LaunchGemmLayout(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  using M = Math<T, kTileM, kTileN, kMajorA, kMajorB>;
  using View = GemmView<M, kMajorA, kMajorB, kVec>;
  return LaunchMatrix<M, View>(ctx, {g.grid, {g.lda, g.ldb}, g.epilogue, g.a, g.b}, what);
}

template <template <typename, int, int, bool, bool> class Math, typename T, int kTileM, int kTileN,
          int kVec = kVecWidth<T>>
Status LaunchGemmTile(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  // A is k-major as stored (m, k), B as stored (n, k).
  if (g.trans_a) {
    return g.trans_b ? LaunchGemmLayout<Math, T, kTileM, kTileN, kVec, false, true>(ctx, g, what)
                     : LaunchGemmLayout<Math, T, kTileM, kTileN, kVec, false, false>(ctx, g, what);
  }
  return g.trans_b ? LaunchGemmLayout<Math, T, kTileM, kTileN, kVec, true, true>(ctx, g, what)
                   : LaunchGemmLayout<Math, T, kTileM, kTileN, kVec, true, false>(ctx, g, what);
}

template <template <typename, int, int, bool, bool> class Math, typename T>
Status LaunchGemmMath(const Context& ctx, const GemmLaunch& g, const std::string& what) {
  if (!g.vector) return LaunchGemmTile<Math, T, 64, 64, 1>(ctx, g, what);
  switch (g.tile) {
    case Tile::k128x128:
      return LaunchGemmTile<Math, T, 128, 128>(ctx, g, what);
    case Tile::k128x64:
      return LaunchGemmTile<Math, T, 128, 64>(ctx, g, what);
    case Tile::k64x64:
      return LaunchGemmTile<Math, T, 64, 64>(ctx, g, what);
  }
  return Status::Internal(what + ": no such tile");
}

}  // namespace jaxconv::cuda
