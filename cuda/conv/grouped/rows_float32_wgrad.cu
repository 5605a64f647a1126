// dw[r, s, c, k] = sum over n, p, q of  x[n, p * stride - pad + r, q * stride - pad + s, c] * dy[n, p, q, k]
//
// for the problems of rows_float32.cu, c and k of one group, by float32 FMAs. A thread owns kIn
// channels of x and kOut of dy of a group, all nine taps of them, and kRun neighbouring columns of dy
// of a strip (common/row_stream.cuh). It goes down the rows: a stage brings row h of x and row h + pad
// of dy, the last row of dy that meets it. The rows of dy that x's row meets, h + pad - r, are kept
// in registers, and so are the sums, until the block ends. 9 * kIn * kOut * kRun FMAs for
// (kRun + 2) * kIn / 4 reads of 16 bytes of shared memory and kRun of kOut * 4. Stride 2: a stage
// brings a row of x, every other one with the row of dy that begins with it.
//
// The sums of the threads that own the same channels are added in shared memory in a fixed order at
// the end. Reads x and dy about once; writes dw or, with several splits, a partial sum each.
#include "cuda/conv/grouped/kernels.h"
#include "cuda/conv/grouped/rows_float32.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kSlab = 32;  // channels: 128 bytes of a pixel

struct FloatRowsWgradArgs {
  CUtensorMap x, dy;
  float* dw;        // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  RowUnits u;       // of dy's columns and x's rows
  FloatThreads t;
  RowArray in, out;
  int pad_h, pad_w;
  int group_shift, parts_shift;  // log2 of its channels, of the threads that share them
  uint32_t dy_at;                // in a stage
};

template <int kStep, int kIn, int kOut, int kRun, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedFloatWgradKernel(const __grid_constant__ FloatRowsWgradArgs g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int R = kFloatTaps, S = kFloatTaps, kPixel = kSlab * 4, kCols = (kRun - 1) * kStep + S;
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.ring_bytes), u);
  if (threadIdx.x == 0) ring.Init(g.t.threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t split = blockIdx.x / unsigned(u.slabs);
  const int64_t begin = split * u.share, end = min(begin + u.share, u.rows);
  const int channel0 = slab * kSlab, pitch = (u.width - 1) * kStep + S;
  // Units are rows of x, of stride 2 rows of dy. The rows of x above the unit's first bring the rows of
  // dy that the first one meets.
  const auto first_row = [&](const RowUnit& at) {
    return kStep == 2 ? 2 * at.p - g.pad_h : max(at.p - (R - 1), -g.pad_h);
  };
  const auto last_row = [&](const RowUnit& at) {  // past it
    return kStep == 2 ? 2 * at.end - g.pad_h + 1 : at.end;
  };

  // The first thread is also the producer, a ring ahead of its warp.
  const uint32_t x_bytes = uint32_t(u.images * pitch * kPixel);
  const uint32_t dy_bytes = uint32_t(u.images * u.width * kPixel);
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_q = 0, next_h = 0, next_end = 0, next_p = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_q = next.q;
      next_p = next.p;
      next_h = first_row(next);
      next_end = last_row(next);
    }
    const int met = next_h + g.pad_h;  // of dy, times kStep
    const bool has_x = kStep == 2 || next_h >= next_p;
    const bool has_dy = kStep == 1 || (met % 2 == 0 && next_h + 1 < next_end);
    const uint32_t full = ahead.Claim((has_x ? x_bytes : 0) + (has_dy ? dy_bytes : 0));
    if (has_x) {
      LoadTile(ahead.At(), g.x, full, channel0, next_q * kStep - g.pad_w, next_h, next_image);
    }
    if (has_dy) {
      LoadTile(ahead.At() + g.dy_at, g.dy, full, channel0, next_q, met / kStep, next_image);
    }
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 1; s < u.stages; ++s) feed();
  }

  // Threads past the last run repeat what the first does; nobody adds their sums.
  const int lanes = g.t.lanes;  // a power of two
  const int run = int(threadIdx.x) / lanes, in_run = int(threadIdx.x) % lanes;
  const int tile = int(g.t.by_tiles.Div(run));
  const int of = tile < u.images ? tile : 0;
  const int col = tile < u.images ? (run - tile * g.t.col_tiles) * kRun : 0;
  const int part = in_run & ((1 << g.parts_shift) - 1);
  const int in_slab = (in_run >> g.parts_shift) * kOut;
  const int x_in_slab = (in_slab >> g.group_shift << g.group_shift) + part * kIn;
  const uint32_t x_mine = uint32_t((of * pitch + col * kStep) * kPixel + x_in_slab * 4);
  const uint32_t dy_mine = g.dy_at + uint32_t((of * u.width + col) * kPixel + in_slab * 4);

  float acc[R][S][kIn][kOut] = {};
  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    const auto await = [&] {
      if (threadIdx.x == 0) feed();
      __syncwarp();
      ring.Await();
    };
    const auto release = [&] { ring.GiveBack(); };
    const auto load = [&](float (&to)[kRun][kOut]) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        LoadFloats<kOut>(ring.At() + dy_mine + e * kPixel, to[e]);
      }
    };
    const auto copy = [&](float (&to)[kRun][kOut], const float (&of)[kRun][kOut]) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int o = 0; o < kOut; ++o) to[e][o] = of[e][o];
      }
    };
    // The stage's row of x with `count` rows of dy, from grad[row] on: row r of the filter and r + 2 / (count - 1).
    float grad[kStep == 2 ? 2 : R][kRun][kOut] = {};
    const auto multiply = [&](auto row, auto count, auto filter) {
      constexpr int kRow = decltype(row)::value, kCount = decltype(count)::value;
      constexpr int kFilter = decltype(filter)::value, kApart = kCount == 2 ? 2 : 1;
      const uint32_t from = ring.At() + x_mine;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
#pragma unroll
        for (int i0 = 0; i0 < kIn; i0 += 4) {
          float in[4];
          LoadFloats<4>(from + c * kPixel + i0 * 4, in);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = kCount - 1; j >= 0; --j) {
#pragma unroll
              for (int s = 0; s < S; ++s) {
                const int e = c - s;
                if (e < 0 || e % kStep != 0 || e / kStep >= kRun) continue;
#pragma unroll
                for (int o = 0; o < kOut; ++o) {
                  float& sum = acc[kFilter + j * kApart][s][i0 + i][o];
                  sum = fmaf(in[i], grad[kRow + j][e / kStep][o], sum);
                }
              }
            }
          }
        }
      }
    };

    if constexpr (kStep == 1) {
      // grad[r] is row h + pad - r of dy.
      for (int h = first_row(at); h < at.end; ++h) {
#pragma unroll
        for (int r = R - 1; r > 0; --r) copy(grad[r], grad[r - 1]);
        await();
        load(grad[0]);
        if (h >= at.p) multiply(Int<0>{}, Int<R>{}, Int<0>{});
        release();
      }
    } else {
      // grad[0] is the row of dy that row 2 p - pad of x begins, grad[1] the one before, which it ends.
      for (int p = at.p; p < at.end; ++p) {
        await();
        load(grad[0]);
        multiply(Int<0>{}, Int<2>{}, Int<0>{});
        release();
        await();
        multiply(Int<0>{}, Int<1>{}, Int<1>{});
        release();
        copy(grad[1], grad[0]);
      }
      await();
      multiply(Int<1>{}, Int<1>{}, Int<2>{});
      release();
    }
  }

  // A filter row after the other over the ring, which nobody reads any more.
  float* shared = reinterpret_cast<float*>(cells);
  const int threads = g.t.threads, runs = u.images * g.t.col_tiles, group = 1 << g.group_shift;
  const int64_t count = int64_t(R * S * group) * g.out.channels;
  float* to = g.partials == nullptr ? g.dw : g.partials + split * count;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S; ++s) {
#pragma unroll
      for (int i = 0; i < kIn; ++i) {
#pragma unroll
        for (int o = 0; o < kOut; ++o) {
          shared[((s * kIn + i) * kOut + o) * threads + threadIdx.x] = acc[r][s][i][o];
        }
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < S * kIn * kOut * lanes; e += threads) {
      const int sum_of = e / lanes, in = e % lanes;
      float sum = 0.f;
      for (int k = 0; k < runs; ++k) sum += shared[sum_of * threads + k * lanes + in];
      const int s = sum_of / (kIn * kOut), i = sum_of / kOut % kIn, o = sum_of % kOut;
      const int c = (in & ((1 << g.parts_shift) - 1)) * kIn + i;
      const int channel = channel0 + (in >> g.parts_shift) * kOut + o;
      if (channel < g.out.channels) {
        to[int64_t((r * S + s) * group + c) * g.out.channels + channel] = sum;
      }
    }
  }
#endif
}

template <int kStep, int kIn, int kOut, int kRun, int kThreads>
Status Launch(const Context& ctx, FloatRowsWgradArgs g, int64_t splits, const void* x,
              const void* dy, const std::string& what) {
  RowUnits& u = g.u;
  while (kIn << g.parts_shift < 1 << g.group_shift) ++g.parts_shift;
  g.t = ChooseFloatThreads(u, g.out, kSlab, kSlab / kOut << g.parts_shift, kRun, kThreads, kStep);
  ShareRows(u, g.in.images, kStep == 2 ? g.out.h : g.in.h, g.out.w, splits);
  const int width = (u.width - 1) * kStep + kFloatTaps;
  g.dy_at = uint32_t(u.images * width * kSlab * 4);
  u.stage_bytes = int(g.dy_at) + u.images * u.width * kSlab * 4;
  u.stages = std::clamp(200 * 1024 / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(EncodeFloatRows(x, g.in, kSlab, width, u.images, what, &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeFloatRows(dy, g.out, kSlab, u.width, u.images, what, &g.dy));
  const int64_t blocks = splits * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  CoverSums(u, g.t.threads * kFloatTaps * kIn * kOut * 4);
  const int bytes = u.ring_bytes + u.stages * 16;
  const auto kernel = GroupedFloatWgradKernel<kStep, kIn, kOut, kRun, kThreads>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status GroupedRowsFloat32Wgrad(const Context& ctx, const ConvProblem& p, int64_t splits,
                               const void* x, const void* dy, void* dw, float* partials,
                               const std::string& what) {
  FloatRowsWgradArgs g{};
  g.dw = static_cast<float*>(dw);
  g.partials = partials;
  g.in = RowsOfX(p);
  g.out = RowsOfY(p);
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  while (1 << g.group_shift < p.group_c()) ++g.group_shift;
  const auto run = [&](auto launch) { return launch(ctx, g, splits, x, dy, what); };
  if (p.stride[2] == 2) {
    return p.group_c() == 16 ? run(Launch<2, 8, 2, 7, 256>) : run(Launch<2, 4, 2, 7, 384>);
  }
  if (p.group_c() > 4) return run(Launch<1, 8, 2, 7, 256>);
  return FillsRuns(g.out.w, 14, 7) ? run(Launch<1, 4, 2, 14, 256>) : run(Launch<1, 4, 2, 7, 384>);
}

}  // namespace jaxconv::cuda::conv
