// The matrix main loop that every view shares:
//
//   sum[m, n] = sum over k of A[m, k] * B[k, n],  then the epilogue
//
// A CTA makes one kTileM x kTileN tile of one instance (batch entry, group) of one part (slice of a
// split reduction, or phase of a strided dgrad). The grid is one-dimensional: tiles fastest, then
// instances, then parts. Operands pass through kStages tiles of 64 bytes of k in shared memory; a
// CTA reads (kTileM + kTileN) * k elements and writes its tile once.
//
// Math (sm80.cuh, simt.cuh) says how two tiles are multiplied, View what A and B are. A View has
//   Params            what the host computed; a kernel argument
//   kPlain            whether d is the sum alone, without the rest of the epilogue
//   Shared            what a CTA keeps beside the tiles
//   LoaderA, LoaderB  as MatrixLoader in tile.h, made by MakeA(cta, thread) and MakeB(cta, thread)
//   View(params, grid, epilogue, cta, shared)
//                     collective: may fill `shared`; a barrier follows before MakeA and MakeB
//   m_end, k_begin, k_end
//                     this part's extents
//   OutRow(m)         offset of row m in d
#pragma once

#include <cuda_runtime.h>

#include "cuda/core/divmod.h"
#include "cuda/core/mma.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile.h"

namespace jaxconv::cuda {

inline constexpr int kStages = 4;

struct Grid {
  int m, n, k;  // of the largest part
  int tiles_m, tiles_n;
  int instances;
  int parts;
  int k_per_part;                      // a multiple of the k-tile
  int64_t stride_a = 0, stride_b = 0;  // between instances, in elements
};

struct Cta {
  int m0, n0, instance, part;
};

// Tiles go eight rows of tiles at a time, down each column: CTAs that run together then share both
// operands in L2.
JAXCONV_HD Cta LocateCta(const Grid& grid, unsigned index, int tile_m, int tile_n) {
  constexpr unsigned kBand = 8;
  const unsigned tiles = unsigned(grid.tiles_m) * unsigned(grid.tiles_n);
  const unsigned tile = index % tiles;
  const unsigned rest = index / tiles;
  const unsigned in_band = kBand * unsigned(grid.tiles_n);
  const unsigned band = tile / in_band;
  const unsigned left = unsigned(grid.tiles_m) - band * kBand;
  const unsigned height = left < kBand ? left : kBand;
  const unsigned at = tile - band * in_band;
  Cta cta;
  cta.m0 = int(band * kBand + at % height) * tile_m;
  cta.n0 = int(at / height) * tile_n;
  cta.instance = int(rest % unsigned(grid.instances));
  cta.part = int(rest / unsigned(grid.instances));
  return cta;
}

// The slice of k of one part of a split reduction.
struct KRange {
  int begin, end;
};
JAXCONV_HD KRange PartOfK(const Grid& grid, int part) {
  const int64_t begin = int64_t(part) * grid.k_per_part;
  const int64_t end = begin + grid.k_per_part;
  return {int(begin < grid.k ? begin : grid.k), int(end < grid.k ? end : grid.k)};
}

#ifdef __CUDACC__

template <typename View>
struct KernelParams {
  Grid grid;
  typename View::Params view;
  EpilogueParams epilogue;
  const void* a;
  const void* b;
};

// One operand on its way to shared memory. Copies of 4 bytes and more are asynchronous; single
// 16-bit elements wait in registers from Fetch (before the tile's product) to Place (after it).
template <typename Loader>
struct Feed {
  using T = typename Loader::T;
  static constexpr int kBytes = Loader::kVec * int(sizeof(T));
  static constexpr bool kHeld = kBytes < 4;

  __device__ __forceinline__ Feed(const Loader& loader, const T* base)
      : loader(loader), base(base), place(Loader::Offset(threadIdx.x)) {}

  __device__ __forceinline__ void Fetch(uint32_t tile) {
#pragma unroll
    for (int i = 0; i < Loader::kCount; ++i) {
      const Span span = loader.At(i);
      if constexpr (kHeld) {
        held[i] = 0;
        if (span.bytes > 0) {
          held[i] = __ldg(reinterpret_cast<const unsigned short*>(base) + span.offset);
        }
      } else {
        CopyAsync<kBytes>(tile + Loader::Shift(place, i), base + (span.bytes > 0 ? span.offset : 0),
                          span.bytes);
      }
    }
    loader.Advance();
  }

  __device__ __forceinline__ void Place(uint32_t tile) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < Loader::kCount; ++i) {
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(tile + Loader::Shift(place, i)), "h"(held[i])
                     : "memory");
      }
    }
  }

  Loader loader;
  const T* base;
  int place;  // bytes, in the tile
  unsigned short held[kHeld ? Loader::kCount : 1];
};

template <typename Math>
inline constexpr int kStageBytes =
    kTileBytes<typename Math::T, Math::kTileM> + kTileBytes<typename Math::T, Math::kTileN>;

// Dynamic shared memory of a CTA: the pipeline, and after it the tile's sums in its place.
template <typename Math>
inline constexpr int kSharedBytes =
    kStages * kStageBytes<Math> > Math::kTileM* kStagePitch<Math::kTileN> * 4
        ? kStages * kStageBytes<Math>
        : Math::kTileM * kStagePitch<Math::kTileN> * 4;

// Element-wise loaders hold many values and addresses: they get all the registers there are.
template <typename View>
inline constexpr int kMinCtas = View::LoaderA::kVec > 1 && View::LoaderB::kVec > 1 ? 2 : 1;

template <typename Math, typename View>
__global__ void __launch_bounds__(Math::kThreads, kMinCtas<View>)
    MatrixKernel(const __grid_constant__ KernelParams<View> p) {
  using T = typename Math::T;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ typename View::Shared view_shared;
  __shared__ int64_t out_row[Math::kTileM];

  const Cta cta = LocateCta(p.grid, blockIdx.x, Math::kTileM, Math::kTileN);
  const View view(p.view, p.grid, p.epilogue, cta, view_shared);
  if (cta.m0 >= view.m_end) return;  // the whole CTA: a phase with fewer rows than the largest
  for (int i = threadIdx.x; i < Math::kTileM; i += Math::kThreads) {
    out_row[i] = cta.m0 + i < view.m_end ? view.OutRow(cta.m0 + i) : -1;
  }
  __syncthreads();

  Feed<typename View::LoaderA> a(view.MakeA(cta, threadIdx.x),
                                 static_cast<const T*>(p.a) + cta.instance * p.grid.stride_a);
  Feed<typename View::LoaderB> b(view.MakeB(cta, threadIdx.x),
                                 static_cast<const T*>(p.b) + cta.instance * p.grid.stride_b);
  Math math;

  const uint32_t ring = SharedAddress(shared);
  const auto a_tile = [&](int stage) { return ring + stage * kStageBytes<Math>; };
  const auto b_tile = [&](int stage) { return a_tile(stage) + kTileBytes<T, Math::kTileM>; };
  const int tiles = (view.k_end - view.k_begin + kTileK<T> - 1) / kTileK<T>;

#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < tiles) {
      a.Fetch(a_tile(stage));
      b.Fetch(b_tile(stage));
      a.Place(a_tile(stage));
      b.Place(b_tile(stage));
    }
    CopyCommit();
  }

  int read = 0, write = kStages - 1;  // stages
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    CopyWait<kStages - 2>();
    __syncthreads();  // tile `tile` is in; everyone is done with the one before, whose stage is
                      // refilled now
    const bool more = tile + kStages - 1 < tiles;
    if (more) {
      a.Fetch(a_tile(write));
      b.Fetch(b_tile(write));
    }
    CopyCommit();
    math.Multiply(a_tile(read), b_tile(read));
    if (more) {
      a.Place(a_tile(write));
      b.Place(b_tile(write));
    }
    read = read + 1 == kStages ? 0 : read + 1;
    write = write + 1 == kStages ? 0 : write + 1;
  }

  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);
  math.Store(sums);
  __syncthreads();
  FinishTile<T, View::kPlain, Math::kTileM, Math::kTileN, Math::kThreads>(
      p.epilogue, sums, out_row, cta.instance, cta.part, cta.m0, cta.n0, p.grid.n);
}

#endif  // __CUDACC__

}  // namespace jaxconv::cuda
