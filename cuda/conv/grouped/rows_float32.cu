// fprop and dgrad for 3x3 filters, stride 1 or 2, C/G == K/G of 4, 8 or 16, float32, channels-last:
//
//   dst[n, p, q, k] = sum over r, s and channels c of k's group of
//                     src[n, p * stride - pad + r, q * stride - pad + s, c] * w[r, s, c, k]
//
// by float32 FMAs; dgrad of stride 1 is that of dy with the filter reversed and transposed. A thread
// owns kOut channels of dst, kIn of the group's of src, and kRun neighbouring columns of a strip
// (common/row_stream.cuh). Going down the rows it keeps the sums of the rows of dst that a row of src
// contributes to, and its filter, in registers: with stride 1, 9 * kIn * kOut * kRun FMAs for
// (kRun + 2) * kIn / 4 reads of 16 bytes of shared memory. Two outputs a thread keep x's register in
// the operand cache for twice as many FMAs: one that reads three new registers takes two cycles.
//
// Reads src about once from DRAM, writes dst once.
#include "cuda/conv/grouped/kernels.h"
#include "cuda/conv/grouped/rows_float32.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

struct FloatRowsArgs {
  CUtensorMap map;  // of src
  const float* w;
  float* dst;
  EpilogueArgs<float> epilogue;
  RowUnits u;
  FloatThreads t;
  RowArray from, to;
  int pad_h, pad_w;
  bool dgrad;
};

// Columns of src in a stage for `width` of the fewer, which a thread's run counts.
JAXCONV_HD int StagedColumns(Meet meet, int width) {
  return meet == Meet::kOne ? width + 2 : meet == Meet::kGather ? 2 * width + 1 : width + 1;
}

// kParts: threads that share the channels of a group of src; the two add their sums of a finished row.
// kSlab: channels that a block keeps to.
template <Meet kMeet, int kIn, int kOut, int kParts, int kRun, int kSlab, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedFloatKernel(const __grid_constant__ FloatRowsArgs g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int R = kFloatTaps, S = kFloatTaps, kPixel = kSlab * 4;
  constexpr int kStep = kMeet == Meet::kGather ? 2 : 1, kSpread = kMeet == Meet::kSpread ? 2 : 1;
  constexpr int kTo = kRun * kSpread;  // columns of dst
  constexpr int kGroup = kIn * kParts, kLanes = kSlab / kOut * kParts;
  static_assert(kParts == 1 || (kParts == 2 && kOut == 2));
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.stages * u.stage_bytes), u);
  if (threadIdx.x == 0) ring.Init(g.t.threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t begin = blockIdx.x / unsigned(u.slabs) * u.share;
  const int64_t end = min(begin + u.share, u.rows);
  const int channel0 = slab * kSlab, pitch = StagedColumns(kMeet, u.width);
  const auto first_row = [&](const RowUnit& at) {
    return max(kMeet == Meet::kSpread ? at.p - 1 : at.p * kStep - g.pad_h, 0);
  };
  const auto last_row = [&](const RowUnit& at) {  // past it
    return min(kMeet == Meet::kSpread ? at.end : (at.end - 1) * kStep - g.pad_h + R, g.from.h);
  };

  // The first thread is also the producer, a ring ahead of its warp.
  const uint32_t bytes = uint32_t(u.images * pitch * kPixel);
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_w = 0, next_h = 0, next_end = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_w = kMeet == Meet::kSpread ? next.q - 1 : next.q * kStep - g.pad_w;
      next_h = first_row(next);
      next_end = last_row(next);
    }
    const uint32_t full = ahead.Claim(bytes);
    LoadTile(ahead.At(), g.map, full, channel0, next_w, next_h, next_image);
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 1; s < u.stages; ++s) feed();
  }

  // Threads past the last run repeat what the first does and store nothing.
  const int run = int(threadIdx.x) / kLanes, in_run = int(threadIdx.x) % kLanes;
  const int tile = int(g.t.by_tiles.Div(run));
  const bool spare = tile >= u.images;
  const int of = spare ? 0 : tile, col = spare ? 0 : (run - tile * g.t.col_tiles) * kRun;
  const int part = in_run % kParts, in_slab = in_run / kParts * kOut;
  const int channel = channel0 + in_slab;
  const bool live = !spare && channel < g.to.channels;
  const int src_in_slab = in_slab / kGroup * kGroup + part * kIn;
  const uint32_t mine = uint32_t((of * pitch + col * kStep) * kPixel + src_in_slab * 4);

  float w[R][S][kIn][kOut] = {}, bias[kOut] = {};
  if (live) {
    // Vectors along the filter's last axis, K.
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) {
      float (&to)[kIn][kOut] = w[tap / S][tap % S];
      if (g.dgrad) {
#pragma unroll
        for (int o = 0; o < kOut; ++o) {
          float v[kIn];
          const int row = (R * S - 1 - tap) * kGroup + (channel + o) % kGroup;
          LoadVec<float, kIn>(g.w + int64_t(row) * g.to.channels + channel0 + src_in_slab, v);
#pragma unroll
          for (int i = 0; i < kIn; ++i) to[i][o] = v[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kIn; ++i) {
          const int row = tap * kGroup + part * kIn + i;
          LoadVec<float, kOut>(g.w + int64_t(row) * g.to.channels + channel, to[i]);
        }
      }
    }
    if (g.epilogue.bias != nullptr && part == 0) {
#pragma unroll
      for (int o = 0; o < kOut; ++o) bias[o] = g.epilogue.bias[channel + o];
    }
  }
  const int step = g.to.channels;  // to the next pixel
  const int64_t row_elements = int64_t(g.to.w) * step;

  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    const int h0 = first_row(at), h1 = last_row(at);
    const bool real = live && at.image + of < g.to.images;
    // Of dst: the thread's first column, and the row at hand.
    const int q = (at.q + col) * kSpread - (kMeet == Meet::kSpread ? g.pad_w : 0);
    int p;
    const int64_t first =
        (int64_t(at.image + of) * g.to.h * g.to.w + q) * step + channel + (kParts == 2 ? part : 0);
    const auto finish = [&](auto& v) {
      constexpr int kEach = std::extent_v<std::remove_reference_t<decltype(v)>, 1>;
      const int64_t out = first + p * row_elements;
      const auto put = [&](float* to) {
#pragma unroll
        for (int e = 0; e < kTo; ++e) {
          if (real && unsigned(q + e) < unsigned(g.to.w)) {
            if constexpr (kEach == 2) {
              *reinterpret_cast<float2*>(to + e * step) = make_float2(v[e][0], v[e][1]);
            } else {
              to[e * step] = v[e][0];
            }
          }
        }
      };
      if (g.epilogue.z != nullptr) put(g.epilogue.z + out);
      if (g.epilogue.activation != Activation::kNone) {
#pragma unroll
        for (int e = 0; e < kTo; ++e) {
          ApplyActivation(g.epilogue.activation, v[e], g.epilogue.slope);
        }
      }
      put(g.dst + out);
    };
    const auto store = [&](float (&v)[kTo][kOut]) {
      if constexpr (kParts == 1) {
        finish(v);
      } else {
        // Each of the two keeps the channel of its number.
        float kept[kTo][1];
#pragma unroll
        for (int e = 0; e < kTo; ++e) {
          const float other = __shfl_xor_sync(0xffffffffu, part == 0 ? v[e][1] : v[e][0], 1);
          kept[e][0] = (part == 0 ? v[e][0] : v[e][1]) + other;
        }
        finish(kept);
      }
    };
    const auto clear = [&](float (&v)[kTo][kOut]) {
#pragma unroll
      for (int e = 0; e < kTo; ++e) {
#pragma unroll
        for (int o = 0; o < kOut; ++o) v[e][o] = bias[o];
      }
    };
    const auto copy = [&](float (&v)[kTo][kOut], const float (&of)[kTo][kOut]) {
#pragma unroll
      for (int e = 0; e < kTo; ++e) {
#pragma unroll
        for (int o = 0; o < kOut; ++o) v[e][o] = of[e][o];
      }
    };
    // Adds the stage's row of src to rows of sums, to sum[j] with row first - j * step of the filter.
    const auto add = [&](auto& sum, auto first, auto step) {
      constexpr int kRows = std::extent_v<std::remove_reference_t<decltype(sum)>>;
      constexpr int kFirst = decltype(first)::value, kStepDown = decltype(step)::value;
      // Of src. Column c meets c - s of dst, where kSpread 2 c - s (the filter is reversed).
      constexpr int kCols = kMeet == Meet::kSpread ? kRun + 1 : (kRun - 1) * kStep + S;
      const uint32_t from = ring.At() + mine;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
#pragma unroll
        for (int i0 = 0; i0 < kIn; i0 += 4) {
          float in[4];
          LoadFloats<4>(from + c * kPixel + i0 * 4, in);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
#pragma unroll
              for (int s = 0; s < S; ++s) {
                const int to = kMeet == Meet::kSpread ? 2 * c - s : c - s;
                if (to < 0 || to % kStep != 0 || to / kStep >= kTo) continue;
#pragma unroll
                for (int o = 0; o < kOut; ++o) {
                  float& sum_of = sum[j][to / kStep][o];
                  sum_of = fmaf(in[i], w[kFirst - j * kStepDown][s][i0 + i][o], sum_of);
                }
              }
            }
          }
        }
      }
    };
    const auto release = [&] { ring.GiveBack(); };
    const auto await = [&] {
      if (threadIdx.x == 0) feed();
      __syncwarp();
      ring.Await();
    };

    if constexpr (kMeet == Meet::kOne) {
      // sum[j] is row p + j before row h of src.
      float sum[R][kTo][kOut];
#pragma unroll
      for (int j = 0; j < R; ++j) clear(sum[j]);
      p = h0 + g.pad_h - (R - 1);
      for (int h = h0; h < h1; ++h) {
        await();
        add(sum, Int<R - 1>{}, Int<1>{});
        release();
        if (p >= at.p && p < at.end) store(sum[0]);
        ++p;
#pragma unroll
        for (int j = 0; j + 1 < R; ++j) copy(sum[j], sum[j + 1]);
        clear(sum[R - 1]);
      }
      // Below the image: rows that wait for no more input.
#pragma unroll
      for (int j = 0; j + 1 < R; ++j, ++p) {
        if (p >= at.p && p < at.end) store(sum[j]);
      }
    } else if constexpr (kMeet == Meet::kGather) {
      // Row 2 p - pad + r of src meets row r of the filter: every other one ends a row of dst and begins
      // the next.
      float sum[2][kTo][kOut];
      clear(sum[0]);
      p = (h0 + g.pad_h + 1) / 2 - 1;
      for (int h = h0; h < h1; ++h) {
        await();
        if ((h + g.pad_h) % 2 == 0) {
          clear(sum[1]);
          add(sum, Int<2>{}, Int<2>{});
          release();
          if (p >= at.p && p < at.end) store(sum[0]);
          ++p;
          copy(sum[0], sum[1]);
        } else {
          float (&odd)[1][kTo][kOut] = reinterpret_cast<float (&)[1][kTo][kOut]>(sum[0]);
          add(odd, Int<1>{}, Int<0>{});
          release();
        }
      }
      if (p >= at.p && p < at.end) store(sum[0]);
    } else {
      // Row h of dy meets rows 2 h - pad + r of dx, its last one together with row h + 1. The filter
      // is reversed.
      float sum[2][kTo][kOut], odd[1][kTo][kOut];
      clear(sum[0]);
      const auto in_image = [&] { return unsigned(p) < unsigned(g.to.h); };
      for (int h = h0; h < h1; ++h) {
        await();
        clear(sum[1]);
        add(sum, Int<2>{}, Int<2>{});
        p = 2 * h - g.pad_h;
        if (h >= at.p && in_image()) store(sum[0]);
        copy(sum[0], sum[1]);
        clear(odd[0]);
        add(odd, Int<1>{}, Int<0>{});
        release();
        ++p;
        if (h >= at.p && in_image()) store(odd[0]);
      }
      // Below dy: the row that its last one reaches, and rows that none does.
      for (int h = h1; h < at.end; ++h) {
        p = 2 * h - g.pad_h;
        if (in_image()) store(sum[0]);
        clear(sum[0]);
        clear(odd[0]);
        ++p;
        if (in_image()) store(odd[0]);
      }
    }
  }
#endif
}

template <Meet kMeet, int kIn, int kOut, int kParts, int kRun, int kSlab, int kThreads>
Status Launch(const Context& ctx, FloatRowsArgs g, const void* src, const std::string& what) {
  RowUnits& u = g.u;
  RowArray runs = g.to;  // what blocks share
  if (kMeet == Meet::kSpread) {
    runs.h = int(CeilDiv(g.to.h + g.pad_h, 2));
    runs.w = int(CeilDiv(g.to.w + g.pad_w, 2));
  }
  g.t = ChooseFloatThreads(u, runs, kSlab, kSlab / kOut * kParts, kRun, kThreads,
                           kMeet == Meet::kGather ? 2 : 1);
  ShareRows(u, runs.images, runs.h, runs.w, std::max(1, Multiprocessors() / u.slabs));
  const int width = StagedColumns(kMeet, u.width);
  u.stage_bytes = u.images * width * kSlab * 4;
  u.stages = std::clamp(kRingBytes / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(EncodeFloatRows(src, g.from, kSlab, width, u.images, what, &g.map));
  const int64_t blocks = CeilDiv(u.rows, u.share) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int bytes = u.stages * (u.stage_bytes + 16);
  const auto kernel = GroupedFloatKernel<kMeet, kIn, kOut, kParts, kRun, kSlab, kThreads>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status GroupedRowsFloat32(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                          const void* src, const void* w, const void* bias, void* dst, void* z,
                          const std::string& what) {
  FloatRowsArgs g{};
  g.w = static_cast<const float*>(w);
  g.dst = static_cast<float*>(dst);
  g.epilogue = MakeEpilogue<float>(e, bias, z);
  const bool strided = p.stride[2] == 2;
  SetRows(g, p, dgrad, dgrad && !strided);
  g.dgrad = dgrad;
  // The fastest on an H200 of 2 to 5 each (docs/kernels/grouped.md).
  const auto run = [&](auto launch) { return launch(ctx, g, src, what); };
  const int64_t group = p.group_c();
  if (!strided) {
    if (group == 16) return run(Launch<Meet::kOne, 16, 1, 1, 7, 32, 256>);
    if (group == 8) return run(Launch<Meet::kOne, 8, 2, 1, 7, 32, 256>);
    return FillsRuns(g.to.w, 14, 7) && FillsRuns(g.to.channels, 64, 32)
               ? run(Launch<Meet::kOne, 4, 2, 1, 14, 64, 256>)
               : run(Launch<Meet::kOne, 4, 2, 1, 7, 32, 384>);
  }
  if (!dgrad) {
    if (group == 16) return run(Launch<Meet::kGather, 8, 2, 2, 7, 32, 256>);
    if (group == 8) return run(Launch<Meet::kGather, 8, 2, 1, 7, 32, 256>);
    return run(Launch<Meet::kGather, 4, 2, 1, 7, 32, 256>);
  }
  if (group == 16) return run(Launch<Meet::kSpread, 16, 1, 1, 7, 32, 256>);
  if (group == 8) return run(Launch<Meet::kSpread, 8, 1, 1, 7, 32, 384>);
  return run(Launch<Meet::kSpread, 4, 2, 1, 7, 32, 256>);
}

}  // namespace jaxconv::cuda::conv
