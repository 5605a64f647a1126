// dw[r, s, c] = sum over n, p, q of  x[n, p - pad + r, q - pad + s, c] * dy[n, p, q, c]
//
// for channels-last, stride 1. A thread owns V channels, all R * S taps of them, and kRun
// neighbouring columns of dy of a strip (common/row_stream.cuh, rows.cuh). It goes down the rows: a
// stage brings row h of x and row h + pad of dy, the last row of dy that meets it. The rows of dy that
// x's row meets, h + pad - r, are kept in registers. R * S * kRun * V FMAs for 2 kRun + S - 1
// reads of shared memory.
//
// Where K = m * C (3x3, m even) the two channels of a thread's dy meet one of x.
//
// With a dilation rows are taken residue by residue, columns that far apart (RowDilation); then h + pad
// - r is h + pad - r * dilation.
//
// A block stays with its slab of channels: a split is the parts of all slabs with one number. The sums
// of a channel's threads are added in shared memory in a fixed order at the end. Reads x and dy about once;
// writes dw or, with several splits, a partial sum each.
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/normalised.cuh"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct RowsWgradArgs {
  CUtensorMap x, dy;
  T* dw;            // with one split
  float* partials;  // (splits, R*S, K) otherwise; null with one
  RowUnits u;       // of dy's columns and x's rows
  RowArray in, out;
  int pad_h, pad_w;
  RowThreads t;
  int x_pixel_bytes;  // of a slab of x
  int multiplier;     // K / C
  uint32_t dy_at;     // in a stage
  RowDilation d;      // where the kernel is kDilated
  NormalisedArgs n;   // where its input is not kPlain
};

// kShared: the V channels of dy meet one of x.
template <typename T, int V, int R, int kThreads, bool kShared, bool kDilated, int kRun,
          Input kInput>
__global__ void __launch_bounds__(kThreads, 1)
    DepthwiseRowsWgradKernel(const __grid_constant__ RowsWgradArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int S = R, kCols = kRun + S - 1, kIn = kShared ? 1 : V;
  constexpr bool kPlain = kInput == Input::kPlain;
  static_assert(kPlain || (!kShared && !kDilated && V == 2));
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.ring_bytes), u);
  const int lane = threadIdx.x % 32, threads = g.t.threads;  // besides the producer's warp
  if (threadIdx.x == 0) ring.Init(threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t part = blockIdx.x / unsigned(u.slabs);
  const int64_t begin = part * u.share, end = min(begin + u.share, u.rows);
  const int column = kDilated ? int(g.d.by_w.d) : 1;  // from a pixel of a run to the next
  const int channel0 = slab * (g.t.lanes * V), pitch = u.width + (S - 1) * column;
  const uint32_t x_bytes = uint32_t(u.images * pitch * g.x_pixel_bytes);
  const uint32_t dy_bytes = uint32_t(u.images * u.width * g.t.pixel_bytes);
  // The rows of x above the unit's first bring the rows of dy that the first one meets.
  using Unit = std::conditional_t<kDilated, ResidueUnit, RowUnit>;
  const auto first_row = [&](const Unit& at) {
    int above = g.pad_h;
    if constexpr (kDilated) above = int(g.d.by_h.Div(at.residue + g.pad_h));
    return max(at.p - (R - 1), -above);
  };
  const auto unit = [&](int64_t row) {
    if constexpr (kDilated) {
      return UnitOf(u, g.d, row, end);
    } else {
      return UnitOf(u, row, end);
    }
  };

  const bool worker = int(threadIdx.x) < threads;
  if (!worker) {
    if (lane == 0) {
      for (int64_t row = begin; row < end;) {
        const Unit at = unit(row);
        row += at.end - at.p;
        for (int h = first_row(at); h < at.end; ++h) {
          int x_h = h;
          if constexpr (kDilated) x_h = at.residue + h * int(g.d.by_h.d);
          const bool both = h >= at.p;
          const uint32_t full = ring.Claim(both ? x_bytes + dy_bytes : dy_bytes);
          if (both) {
            const int x_channel0 = kShared ? channel0 / g.multiplier : channel0;
            LoadTile(ring.At(), g.x, full, x_channel0, at.q - g.pad_w, x_h, at.image);
          }
          LoadTile(ring.At() + g.dy_at, g.dy, full, channel0, at.q, x_h + g.pad_h, at.image);
          ring.Advance();
        }
      }
    }
    __syncwarp();
  }

  // Threads past the last run repeat what the first does; nobody adds their sums.
  const int run = int(g.t.by_lanes.Div(threadIdx.x));
  const int tile = int(g.t.by_tiles.Div(run));
  const int of = tile < u.images ? tile : 0;
  const int in_tile = tile < u.images ? run - tile * g.t.col_tiles : 0;
  const int col = kDilated ? ColumnOf(g.d, in_tile, kRun) : in_tile * kRun;
  const int in_slab = (int(threadIdx.x) - run * g.t.lanes) * V;
  const int x_in_slab = kShared ? in_slab / g.multiplier : in_slab;
  const uint32_t x_mine =
      uint32_t((of * pitch + col) * g.x_pixel_bytes + x_in_slab * int(sizeof(T)));
  const uint32_t dy_mine =
      g.dy_at + uint32_t((of * u.width + col) * g.t.pixel_bytes + in_slab * int(sizeof(T)));

  std::conditional_t<kPlain, std::nullptr_t, Normaliser<T, kInput>> normaliser{};
  if constexpr (!kPlain) {
    if (worker && channel0 + in_slab < g.in.channels) {
      normaliser.Load(g.n.of, channel0 + in_slab);
    }
  }

  float acc[R][S][V] = {};
  if (worker) {
    for (int64_t row = begin; row < end;) {
      const Unit at = unit(row);
      row += at.end - at.p;
      float grad[R][kRun][V] = {};  // grad[r] is row h + pad - r of dy
      for (int h = first_row(at); h < at.end; ++h) {
#pragma unroll
        for (int r = R - 1; r > 0; --r) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < V; ++i) grad[r][e][i] = grad[r - 1][e][i];
          }
        }
        ring.Await();
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          UnpackShared<T, V>(ring.At() + dy_mine + e * (g.t.pixel_bytes * column), grad[0][e]);
        }
        if (h >= at.p) {
          float in[kCols][kIn];
#pragma unroll
          for (int c = 0; c < kCols; ++c) {
            UnpackShared<T, kIn>(ring.At() + x_mine + c * (g.x_pixel_bytes * column), in[c]);
          }
          if constexpr (!kPlain) {
            const InsideRow<S> inside(at.q + col - g.pad_w, g.in.w);
#pragma unroll
            for (int c = 0; c < kCols; ++c) normaliser.Apply(g.n, inside(c), in[c]);
          }
#pragma unroll
          for (int r = R - 1; r >= 0; --r) {
#pragma unroll
            for (int s = 0; s < S; ++s) {
#pragma unroll
              for (int e = 0; e < kRun; ++e) {
#pragma unroll
                for (int i = 0; i < V; ++i) {
                  acc[r][s][i] = fmaf(in[e + s][kShared ? 0 : i], grad[r][e][i], acc[r][s][i]);
                }
              }
            }
          }
        }
        ring.GiveBack();
      }
    }
  }

  __syncthreads();
  StoreSums<T, R, S, V>(
      g.t, u, reinterpret_cast<float*>(cells), acc, channel0, g.out.channels,
      g.partials == nullptr ? nullptr : g.partials + part * (R * S) * int64_t(g.out.channels),
      g.dw);
#endif
}

template <typename T, int V, int R, int kThreads, bool kShared = false, bool kDilated = false,
          int kRun = kRowRun, Input kInput = Input::kPlain>
Status Launch(const Context& ctx, RowsWgradArgs<T> g, int64_t splits, const void* x, const void* dy,
              DType dtype, const std::string& what) {
  constexpr int kItem = int(sizeof(T));
  RowUnits& u = g.u;
  const int d = int(g.d.by_w.d);
  // As depthwise.h promises the plan.
  const int slabs = int(CeilDiv(g.out.channels, !kDilated ? 128 * V : R == 3 && d <= 4 ? 128 : 64));
  g.t = ChooseThreads(u, g.out, g.in.channels, V, kItem, R, kThreads - 32, Multiprocessors(), slabs,
                      g.multiplier + 1, 1, d, kRun);
  ShareRows(u, g.in.images, g.in.h, g.out.w, splits);
  const int slab = g.t.lanes * V, x_slab = slab / g.multiplier;
  g.x_pixel_bytes = x_slab * kItem;
  const int pitch = u.width + (R - 1) * d;
  g.dy_at = uint32_t(StagedBytes(u.images, pitch, g.x_pixel_bytes));
  u.stage_bytes = int(g.dy_at) + StagedBytes(u.images, u.width, g.t.pixel_bytes);
  u.stages = std::clamp(200 * 1024 / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, x, g.in, x_slab, pitch, u.images, what, &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, dy, g.out, slab, u.width, u.images, what, &g.dy));
  const int64_t blocks = splits * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  CoverSums(u, g.t.threads * R * V * 4);
  const int bytes = u.ring_bytes + u.stages * 16;
  const auto kernel = DepthwiseRowsWgradKernel<T, V, R, kThreads, kShared, kDilated, kRun, kInput>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads + 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T>
RowsWgradArgs<T> MakeArgs(const ConvProblem& p, void* dw, float* partials) {
  RowsWgradArgs<T> g{};
  g.dw = static_cast<T*>(dw);
  g.partials = partials;
  g.in = RowsOfX(p);
  g.out = RowsOfY(p);
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  g.multiplier = int(p.k / p.c);
  g.d = DilationOf(p, g.in.h);
  return g;
}

}  // namespace

Status DepthwiseRowsWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                          const void* dy, void* dw, float* partials, const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowsWgradArgs<T> g = MakeArgs<T>(p, dw, partials);
    if (p.dilation[1] > 1 || p.dilation[2] > 1) {
      if (p.filter[1] == 3 && g.out.w <= kShortRowRun * p.dilation[2]) {
        return Launch<T, 2, 3, 640, false, true, kShortRowRun>(ctx, g, splits, x, dy, p.dtype,
                                                               what);
      }
      if (p.filter[1] == 3) {
        return Launch<T, 2, 3, 640, false, true>(ctx, g, splits, x, dy, p.dtype, what);
      }
      if (p.filter[1] == 5) {
        return Launch<T, 1, 5, 640, false, true>(ctx, g, splits, x, dy, p.dtype, what);
      }
      return Launch<T, 1, 7, 512, false, true>(ctx, g, splits, x, dy, p.dtype, what);
    }
    if (g.multiplier > 1) return Launch<T, 2, 3, 640, true>(ctx, g, splits, x, dy, p.dtype, what);
    if (p.filter[1] == 3) return Launch<T, 2, 3, 640>(ctx, g, splits, x, dy, p.dtype, what);
    if constexpr (sizeof(T) == 4) {
      if (p.filter[1] == 5) return Launch<T, 1, 5, 640>(ctx, g, splits, x, dy, p.dtype, what);
      return Launch<T, 1, 7, 512>(ctx, g, splits, x, dy, p.dtype, what);
    } else {
      return Status::Internal(what + ": no kernel for 16-bit filters of 5x5 and 7x7");
    }
  });
}

Status DepthwiseRowsNormalisedWgrad(const Context& ctx, const ConvProblem& p,
                                    const Normalisation& n, int64_t splits, const void* x,
                                    const void* dy, void* dw, float* partials,
                                    const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowsWgradArgs<T> g = MakeArgs<T>(p, dw, partials);
    g.n = MakeNormalised<T>(n);
    return ForInput(n, what, [&](auto input) {
      return Launch<T, 2, 3, 640, false, false, kRowRun, decltype(input)::value>(ctx, g, splits, x,
                                                                                 dy, p.dtype, what);
    });
  });
}

}  // namespace jaxconv::cuda::conv
