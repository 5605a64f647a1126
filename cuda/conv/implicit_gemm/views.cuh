// The three convolutions as views of the matrix main loop (cuda/gemm/kernel.cuh); instances are the
// groups.
#pragma once

#include "cuda/conv/common/gather.h"
#include "cuda/gemm/kernel.cuh"

namespace jaxconv::cuda {

// A: x, pixels (n o p q) x (t r s c), k-major.  B: w, (t r s c) x k, as it lies.
struct FpropParams {
  Gather gather;
  int64_t filter_pitch;  // K
};

template <typename Math, int kVecA, int kVecB>
struct FpropView {
  using T = typename Math::T;
  using Params = FpropParams;
  static constexpr bool kPlain = false;
  struct Shared {
    GatherRow rows[Math::kTileM];
  };
  using LoaderA = PixelTapLoader<T, Math::kTileM, kVecA, Math::kThreads>;
  using LoaderB = MatrixLoader<T, Math::kTileN, false, kVecB, Math::kThreads>;

  __device__ FpropView(const Params& params, const Grid& grid, const EpilogueParams& epilogue,
                       const Cta& cta, Shared& shared)
      : params(params),
        shared(shared),
        m_end(grid.m),
        n_end(grid.n),
        k_end(grid.k),
        ldd(epilogue.ldd) {
    for (int i = threadIdx.x; i < Math::kTileM; i += Math::kThreads) {
      shared.rows[i] = MakeGatherRow(params.gather, cta.m0 + i, m_end);
    }
  }
  JAXCONV_HD int64_t OutRow(int m) const { return m * ldd; }
  JAXCONV_HD LoaderA MakeA(const Cta&, int thread) const {
    return LoaderA(params.gather, shared.rows, thread);
  }
  JAXCONV_HD LoaderB MakeB(const Cta& cta, int thread) const {
    return LoaderB(params.filter_pitch, cta.n0, n_end, 0, k_end, thread);
  }

  const Params& params;
  const Shared& shared;
  int m_end, n_end, k_begin = 0, k_end;
  int64_t ldd;
};

// A: dy, pixels (n d h w) of one phase x (t r s k), k-major.  B: w, c x (t r s k), k-major. Parts
// are the phases, one per residue (d, h, w) modulo the strides; together they write every pixel of
// dx, with zeros where no tap reaches.
struct DgradParams {
  DgradAxis axis[3];
  int images;         // N
  int source[3];      // O P Q
  int channels;       // K/G
  int64_t pitch;      // K: of dy's pixels and of w's input channels
  int64_t filter[3];  // elements between taps along T, R, S
};

template <typename Math, int kVec>
struct DgradView {
  using T = typename Math::T;
  using Params = DgradParams;
  static constexpr bool kPlain = true;
  struct Shared {
    Gather gather;
    FilterTaps taps;
    int residue[3];
    int reduction;  // taps * K/G; 0 without taps
    GatherRow rows[Math::kTileM];
  };
  using LoaderA = PixelTapLoader<T, Math::kTileM, kVec, Math::kThreads>;
  using LoaderB = FilterTapLoader<T, Math::kTileN, kVec, Math::kThreads>;

  __device__ DgradView(const Params& params, const Grid& grid, const EpilogueParams& epilogue,
                       const Cta& cta, Shared& shared)
      : params(params), shared(shared), n_end(grid.n), ldd(epilogue.ldd) {
    if (threadIdx.x == 0) Describe(params, cta.part, shared);
    __syncthreads();
    const Gather& g = shared.gather;
    m_end = params.images * g.rows[0] * g.rows[1] * g.rows[2];
    k_end = shared.reduction;
    for (int i = threadIdx.x; i < Math::kTileM; i += Math::kThreads) {
      shared.rows[i] = MakeGatherRow(g, cta.m0 + i, m_end);
    }
  }

  static JAXCONV_HD void Describe(const Params& params, int part, Shared& shared) {
    const Digits4 residues = SplitDigits(part, params.axis[0].residues, params.axis[1].residues,
                                         params.axis[2].residues);
    Gather& g = shared.gather;
    g.channels = params.channels;
    g.pitch = params.pitch;
    shared.taps.pitch = params.pitch;
    shared.taps.base = 0;
    int taps = 1;
    for (int i = 0; i < 3; ++i) {
      const DgradAxis& axis = params.axis[i];
      const int residue = residues.digit[i + 1];
      const DgradPhase phase = MakeDgradPhase(axis, residue);
      shared.residue[i] = residue;
      g.source[i] = params.source[i];
      g.rows[i] = phase.rows;
      g.row_step[i] = 1;
      g.origin[i] = phase.origin;
      g.tap_step[i] = -(axis.dilation / axis.gcd);
      g.taps[i] = phase.taps > 0 ? phase.taps : 1;
      shared.taps.base += phase.first * params.filter[i];
      shared.taps.step[i] = axis.stride / axis.gcd * params.filter[i];
      taps *= phase.taps;
    }
    SetTileK(g, kTileK<T>);
    shared.reduction = taps * params.channels;
  }

  JAXCONV_HD int64_t OutRow(int m) const {
    const Gather& g = shared.gather;
    const Digits4 pixel = SplitDigits(m, g.rows[0], g.rows[1], g.rows[2]);
    int64_t offset = pixel.digit[0];
    for (int i = 0; i < 3; ++i) {
      offset = offset * params.axis[i].extent + pixel.digit[i + 1] * params.axis[i].stride +
               shared.residue[i];
    }
    return offset * ldd;
  }
  JAXCONV_HD LoaderA MakeA(const Cta&, int thread) const {
    return LoaderA(shared.gather, shared.rows, thread);
  }
  JAXCONV_HD LoaderB MakeB(const Cta& cta, int thread) const {
    return LoaderB(shared.gather, shared.taps, cta.n0, n_end, thread);
  }

  const Params& params;
  const Shared& shared;
  int m_end, n_end, k_begin = 0, k_end;
  int64_t ldd;
};

// A: x, (t r s c) x pixels (n o p q), mn-major.  B: dy, pixels x k, as it lies. Parts are runs of
// pixels.
struct WgradParams {
  Gather gather;
  int64_t pitch;  // K
};

template <typename Math, int kVecA, int kVecB>
struct WgradView {
  using T = typename Math::T;
  using Params = WgradParams;
  static constexpr bool kPlain = true;
  struct Shared {};
  using LoaderA = TapPixelLoader<T, Math::kTileM, kVecA, Math::kThreads>;
  using LoaderB = MatrixLoader<T, Math::kTileN, false, kVecB, Math::kThreads>;

  __device__ WgradView(const Params& params, const Grid& grid, const EpilogueParams& epilogue,
                       const Cta& cta, Shared&)
      : params(params), m_end(grid.m), n_end(grid.n), ldd(epilogue.ldd) {
    const KRange k = PartOfK(grid, cta.part);
    k_begin = k.begin;
    k_end = k.end;
  }
  JAXCONV_HD int64_t OutRow(int m) const { return m * ldd; }
  JAXCONV_HD LoaderA MakeA(const Cta& cta, int thread) const {
    return LoaderA(params.gather, cta.m0, m_end, k_begin, k_end, thread);
  }
  JAXCONV_HD LoaderB MakeB(const Cta& cta, int thread) const {
    return LoaderB(params.pitch, cta.n0, n_end, k_begin, k_end, thread);
  }

  const Params& params;
  int m_end, n_end, k_begin, k_end;
  int64_t ldd;
};

}  // namespace jaxconv::cuda
