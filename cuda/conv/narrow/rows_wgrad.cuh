// dw[r, s, c, k] = sum over n, p, q of  x[n, p - pad + r, q - pad + s, c] * dy[n, p, q, k]
//
// for the problems of rows.cuh on mma.m16n8: 16 rows of dw (a tap's 16 channels of x, or those of 2 taps with 8 channels, of 4
// with 4), 8 columns, 8 or 16 pixels of a line (strips.cuh). A warp owns 16 channels of x, 16 of dy and all nine taps, and a
// run of 16 pixels of a stage; it goes down the rows. A stage brings row h of x and row h + pad of dy, the last row of dy that
// meets it. The rows of dy that x's row meets, h + pad - r, are kept in registers, and so are the sums, until the block ends:
// 36 products of float32 (18 of 16 bits) for 16 (4) loads.
//
// 16-bit operands are transposed by ldmatrix. Of float32 a lane loads two neighbouring channels of a pixel: rows g and g + 8
// of a product are channels 2 g and 2 g + 1, and columns alike. Which 4 of 8 pixels are the first half of a product is free as
// long as both operands agree: those of which the channels of x lie in different banks. (Those of dy then may not: a fifth of
// the loads.)
//
// The sums of a block's warps are added in shared memory in a fixed order at the end. Reads x and dy about once; writes dw or,
// with several splits, a partial sum each.
#pragma once

#include "cuda/conv/narrow/strips.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct NarrowWgradArgs {
  CUtensorMap x, dy;
  T* dw;            // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  RowUnits u;       // of dy's columns and x's rows
  RowArray in, out;
  int pad_h, pad_w;
  int dy_at, dy_bytes;  // in a stage; of a pixel
  int blocks;           // of 16 x 16 channels, a warp each, that share a run of pixels
  int columns;          // blocks of a row of them
};

constexpr int kNarrowWgradWarps = 12;
constexpr int kBlockChannels = 16;  // of a warp's block of dw, a side

// Pixel of 8 that is the k-th, k = half * 4 + lane % 4, of float32.
template <int kPixel>
__device__ __forceinline__ int PixelOfStep(int in_group, int half) {
  if constexpr (kPixel == 128) return in_group * 2 + half;
  if constexpr (kPixel == 32) return in_group + half * 4;
  return in_group + (in_group & 2) + half * 2;
}

template <typename T, int kPixel>
__global__ void __launch_bounds__(kNarrowWgradWarps * 32, 1)
    NarrowWgradKernel(const __grid_constant__ NarrowWgradArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int R = kNarrowTaps, S = kNarrowTaps, kItem = int(sizeof(T));
  constexpr bool kSingle = kItem == 4;
  constexpr int kChannels = kPixel / kItem;  // of x in shared memory
  // Products for a row of the filter, and k steps of a run.
  constexpr int kRows = kChannels >= 16 ? S : kChannels == 8 ? 2 : 1, kSteps = kSingle ? 2 : 1;
  extern __shared__ __align__(1024) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.ring_bytes), u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int pitch = u.width + S - 1, pixels = u.images * pitch;
  if (threadIdx.x == 0) {
    PrefetchMap(g.x);
    PrefetchMap(g.dy);
    ring.Init(warps);
  }
  // Behind the line's end dy counts as zero. Zero times what lies there must be zero: x is made so.
  for (int s = 0; s < u.stages; ++s) {
    for (int at = pixels * kPixel + int(threadIdx.x) * 16; at < g.dy_at;
         at += int(blockDim.x) * 16) {
      StoreShared16(ring_at + uint32_t(s * u.stage_bytes + at), make_uint4(0, 0, 0, 0));
    }
  }
  __syncthreads();

  const int64_t split = blockIdx.x;
  const int64_t begin = split * u.share, end = min(begin + u.share, u.rows);
  // Units are rows of x. Rows above the unit's first bring the rows of dy that the first one meets.
  const auto first_row = [&](const RowUnit& at) { return max(at.p - (R - 1), -g.pad_h); };

  // The first thread is also the producer, a ring but one stage ahead of its warp.
  const uint32_t x_bytes = uint32_t(pixels * kPixel), dy_bytes = uint32_t(pixels * g.dy_bytes);
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
      next_end = next.end;
    }
    const bool has_x = next_h >= next_p;
    const uint32_t full = ahead.Claim((has_x ? x_bytes : 0) + dy_bytes);
    if (has_x) LoadTile(ahead.At(), g.x, full, 0, next_q - g.pad_w, next_h, next_image);
    LoadTile(ahead.At() + uint32_t(g.dy_at), g.dy, full, 0, next_q, next_h + g.pad_h, next_image);
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 2; s < u.stages; ++s) feed();
  }

  const int block = warp % g.blocks, group = lane / 4, in_group = lane % 4;
  const int row_block = block / g.columns, column_block = block % g.columns;
  const int pixel0 = warp / g.blocks * kNarrowPixels;
  // Where the lane's part of a fragment lies in a stage: of x, of each product of a row of the filter (or of each tap) and
  // half of a step; of dy, of each half.
  constexpr int kHalves = kSingle ? 2 : 1;
  uint32_t x_at[S][kHalves], dy_at[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if constexpr (kSingle) {
        const int pixel = pixel0 + PixelOfStep<kPixel>(in_group, half);
        if constexpr (kChannels == 4) {
          x_at[s][half] = uint32_t((pixel + group / 4) * kPixel + group % 4 * 4);
        } else if constexpr (kChannels == 8) {
          x_at[s][half] = ChunkAt<kPixel>(pixel + s, group / 4) + group % 4 * 4;
        } else {
          x_at[s][half] = ChunkAt<kPixel>(pixel + s, row_block * 4 + group / 2) + group % 2 * 8;
        }
      } else {
        const int pixel = pixel0 + lane / 16 * 8 + lane % 8, other = lane / 8 % 2;
        x_at[s][half] = kChannels == 8 ? ChunkAt<kPixel>(pixel + 2 * s + other, 0)
                                       : ChunkAt<kPixel>(pixel + s, row_block * 2 + other);
      }
    }
    if constexpr (kSingle) {
      dy_at[half] = ChunkAt(g.dy_bytes, pixel0 + PixelOfStep<kPixel>(in_group, half),
                            column_block * 4 + group / 2) +
                    group % 2 * 8;
    } else {
      dy_at[half] =
          ChunkAt(g.dy_bytes, pixel0 + lane / 8 % 2 * 8 + lane % 8, column_block * 2 + lane / 16);
    }
    dy_at[half] += uint32_t(g.dy_at);
  }
  // Ones where an element of dy is a pixel of the strip.
  uint32_t real[kSteps][2] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto inside = [&](int of) {
        const int pixel = pixel0 + of;
        return pixel < pixels && pixel % pitch < u.width;
      };
      if constexpr (kSingle) {
        real[step][half] = inside(step * 8 + PixelOfStep<kPixel>(in_group, half)) ? ~0u : 0u;
      } else {
        const int first = half * 8 + in_group * 2;
        real[step][half] = (inside(first) ? 0xffffu : 0u) | (inside(first + 1) ? 0xffff0000u : 0u);
      }
    }
  }

  float acc[R][kRows][2][4] = {};
  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    uint32_t grad[R][kSteps][2][2] = {};  // row h + pad - r of dy: [step][octet][half]
    for (int h = first_row(at); h < at.end; ++h) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int r = R - 1; r > 0; --r)
            grad[r][step][i / 2][i % 2] = grad[r - 1][step][i / 2][i % 2];
        }
      }
      if (threadIdx.x == 0) feed();
      __syncwarp();
      ring.Await();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (kSingle) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint2 v = LoadShared8(ring.At() + dy_at[half] + uint32_t(step * 8 * g.dy_bytes));
            grad[0][step][0][half] = v.x & real[step][half];
            grad[0][step][1][half] = v.y & real[step][half];
          }
        } else {
          uint32_t v[4];
          LoadMatrixTransposed(v, ring.At() + dy_at[0]);
#pragma unroll
          for (int i = 0; i < 4; ++i) grad[0][step][i / 2][i % 2] = v[i] & real[step][i % 2];
        }
      }
      if (h >= at.p) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            uint32_t a[4];
            if constexpr (!kSingle) {
              LoadMatrixTransposed(a, ring.At() + x_at[i][0]);
            } else {
              const uint32_t from = ring.At() + uint32_t(step * 8 * kPixel);
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                if constexpr (kChannels == 4) {
                  a[half * 2] = LoadShared4(from + x_at[0][half]);
                  a[half * 2 + 1] = LoadShared4(from + x_at[0][half] + 2 * kPixel);
                } else if constexpr (kChannels == 8) {
                  a[half * 2] = LoadShared4(from + x_at[i * 2][half]);
                  a[half * 2 + 1] = i == 0 ? LoadShared4(from + x_at[1][half]) : 0u;
                } else {
                  const uint2 v = LoadShared8(from + x_at[i][half]);
                  a[half * 2] = v.x;
                  a[half * 2 + 1] = v.y;
                }
              }
            }
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
              for (int o = 0; o < 2; ++o) {
                Mma<T>(acc[r][i][o], a, grad[r][step][o][0], grad[r][step][o][1]);
              }
            }
          }
        }
      }
      ring.GiveBack();
    }
  }

  // Over the ring, which nobody reads any more.
  constexpr int kSums = R * kRows * 2 * 4;
  float* shared = reinterpret_cast<float*>(cells);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kSums; ++e) {
    shared[(warp * kSums + e) * 32 + lane] = acc[e / (kRows * 8)][e / 8 % kRows][e / 4 % 2][e % 4];
  }
  __syncthreads();
  const int channels = g.in.channels, filters = g.out.channels, runs = warps / g.blocks;
  const int64_t count = int64_t(R * S) * channels * filters;
  for (int e = warp; e < g.blocks * kSums; e += warps) {  // a warp's registers, one after another
    const int of = e / kSums, index = e - of * kSums;
    float sum = 0.f;
    for (int run = 0; run < runs; ++run)
      sum += shared[((run * g.blocks + of) * kSums + index) * 32 + lane];
    const int r = index / (kRows * 8), i = index / 8 % kRows, o = index / 4 % 2, part = index % 4;
    const int high = part / 2, odd = part % 2;  // row group + 8 high, column 2 in_group + odd
    const int flat = group + 8 * high;
    const int s = kChannels >= 16 ? i : i * (16 / kChannels) + flat / kChannels;
    const int in_block = kChannels < 16 ? flat % kChannels : kSingle ? group * 2 + high : flat;
    const int c = of / g.columns * 16 + in_block;
    const int k =
        of % g.columns * 16 + (kSingle ? in_group * 4 + odd * 2 + o : o * 8 + in_group * 2 + odd);
    if (s < S && c < channels && k < filters) {
      const int64_t to = (int64_t(r * S + s) * channels + c) * filters + k;
      if (g.partials == nullptr) {
        g.dw[to] = FromFloat<T>(sum);
      } else {
        g.partials[split * count + to] = sum;
      }
    }
  }
#endif
}

template <typename T, int kPixel>
Status LaunchWgrad(const Context& ctx, NarrowWgradArgs<T> g, DType dtype, int64_t splits,
                   const void* x, const void* dy, const std::string& what) {
  RowUnits& u = g.u;
  constexpr int kChannels = kPixel / int(sizeof(T)), kBlock = kBlockChannels;
  constexpr int kRows = kChannels >= 16 ? kNarrowTaps : kChannels == 8 ? 2 : 1;
  g.columns = int(CeilDiv(g.out.channels, kBlock));
  g.blocks = std::max(kChannels / kBlock, 1) * g.columns;
  g.dy_bytes = g.columns * kBlock * int(sizeof(T));
  ChooseStrips(u, g.out, kNarrowWgradWarps / g.blocks);
  ShareRows(u, g.in.images, g.in.h, g.out.w, splits);
  const int runs = ProductsOf(u), pixels = runs * kNarrowPixels;
  g.dy_at = int(CeilDiv((pixels + kNarrowTaps) * kPixel, 1024) * 1024);
  u.stage_bytes = g.dy_at + int(CeilDiv((pixels + kNarrowTaps) * g.dy_bytes, 1024) * 1024);
  const int room = kNarrowShared - 1024 - kNarrowMostStages * 16;
  u.stages = std::clamp(room / u.stage_bytes, 3, kNarrowMostStages);
  CoverSums(u, runs * g.blocks * kNarrowTaps * kRows * 8 * 32 * 4);
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, x, g.in, kPixel, u, what, &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, dy, g.out, g.dy_bytes, u, what, &g.dy));
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(splits, what));
  const auto kernel = NarrowWgradKernel<T, kPixel>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(splits), runs * g.blocks * 32, u.ring_bytes + u.stages * 16, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T>
Status NarrowWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                   const void* dy, void* dw, float* partials, const std::string& what) {
  NarrowWgradArgs<T> g{};
  g.dw = static_cast<T*>(dw);
  g.partials = partials;
  g.in = RowsOfX(p);
  g.out = RowsOfY(p);
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  const auto run = [&](auto launch) { return launch(ctx, g, p.dtype, splits, x, dy, what); };
  const int bytes = PixelBytes(p.c, p.dtype);
  if (bytes == 16) return run(LaunchWgrad<T, 16>);
  if (bytes == 32) return run(LaunchWgrad<T, 32>);
  if constexpr (sizeof(T) == 4) {
    if (bytes == 128) return run(LaunchWgrad<T, 128>);
  }
  return run(LaunchWgrad<T, 64>);
}

}  // namespace
}  // namespace jaxconv::cuda::conv
