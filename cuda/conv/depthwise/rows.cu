// fprop, and dgrad as fprop of dy with the filter reversed, for channels-last, stride 1:
//
//   dst[n, p, q, c] = sum over r, s of  src[n, p - pad + r, q - pad + s, c] * w[r, s, c]
//
// Where K = m * C (3x3, m even), the V = 2 output channels of a thread share an input channel, and in dgrad
// a thread adds m channels of dy, two at a time, to one of dx.
//
// A thread owns V channels and kRun neighbouring columns of a strip (common/row_stream.cuh,
// rows.cuh). Going down the rows it keeps the sums of the R output rows that an input row
// contributes to, and the filter, in registers: R * S * kRun * V FMAs for kRun + S - 1 reads of
// shared memory and kRun stores. The sums move up by one row with each input row; that costs
// nothing, because an FMA may add to another register than it writes.
//
// With a dilation the rows are taken residue by residue, the columns that far apart (RowDilation); the
// instances without one do not carry its arithmetic.
//
// Reads src about once from DRAM (rows and columns that blocks share again from L2), writes dst once.
// Stores by TMA, through shared memory, lost 3 to 5% to stores from registers (H200).
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/normalised.cuh"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct RowsArgs {
  CUtensorMap map;  // of src
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowThreads t;
  RowArray from, to;
  int pad_h, pad_w;
  int pixel_bytes;  // of a slab of src
  int multiplier;   // K / C
  bool reverse;
  RowDilation d;     // where the kernel is kDilated
  NormalisedArgs n;  // where its input is not kPlain
};

// How the channels of src and dst meet: one to one; one of src for V of dst; pairs of src for one of
// dst.
enum class Channels { kOne, kSpread, kGather };

// kInline: the first thread is also the producer; otherwise a warp of its own is. 12 warps leave 168
// registers to a thread, a thirteenth would leave 128.
template <typename T, int V, int R, int kThreads, bool kInline, Channels kChannels, bool kDilated,
          int kRun, Input kInput>
__global__ void __launch_bounds__(kThreads, 1)
    DepthwiseRowsKernel(const __grid_constant__ RowsArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int S = R, kCols = kRun + S - 1;
  constexpr bool kGather = kChannels == Channels::kGather;
  constexpr int kIn = kChannels == Channels::kSpread ? 1
                      : kGather                      ? 2
                                                     : V;  // channels of src, at a time
  constexpr bool kPlain = kInput == Input::kPlain;         // else there is no epilogue
  static_assert(!kGather || V == 1);
  static_assert(kPlain || (kChannels == Channels::kOne && !kDilated && V == 2));
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.stages * u.stage_bytes), u);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) ring.Init(g.t.threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t begin = blockIdx.x / unsigned(u.slabs) * u.share;
  const int64_t end = min(begin + u.share, u.rows);
  const int column = kDilated ? int(g.d.by_w.d) : 1;  // from a pixel of a run to the next
  const int channel0 = slab * (g.t.lanes * V), pitch = u.width + (S - 1) * column;
  const int src_channel0 = kChannels == Channels::kSpread ? channel0 / g.multiplier
                           : kGather                      ? channel0 * g.multiplier
                                                          : channel0;
  using Unit = std::conditional_t<kDilated, ResidueUnit, RowUnit>;
  const auto unit = [&](int64_t row) {
    if constexpr (kDilated) {
      return UnitOf(u, g.d, row, end);
    } else {
      return UnitOf(u, row, end);
    }
  };
  // In rows of the unit's residue, the first of which is row `from` of src: the padding, and how many
  // there are.
  const auto pad = [&](const Unit& at) {
    if constexpr (kDilated) {
      return int(g.d.by_h.Div(max(g.pad_h - at.residue + int(g.d.by_h.d) - 1, 0)));
    } else {
      return g.pad_h;
    }
  };
  const auto from = [&](const Unit& at) {
    if constexpr (kDilated) {
      return at.residue - g.pad_h + pad(at) * int(g.d.by_h.d);
    } else {
      return 0;
    }
  };
  const auto rows = [&](const Unit& at) {
    if constexpr (kDilated) {
      return int(g.d.by_h.Div(g.from.h - from(at) + int(g.d.by_h.d) - 1));
    } else {
      return g.from.h;
    }
  };
  const auto first_row = [&](const Unit& at) { return max(at.p - pad(at), 0); };
  const auto last_row = [&](const Unit& at) {  // past it
    return min(at.end - pad(at) + R - 1, rows(at));
  };

  const uint32_t bytes = uint32_t(u.images * pitch * g.pixel_bytes);
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_w = 0, next_h = 0, next_end = 0, next_from = 0;
  const auto feed = [&] {  // false at the end
    if (next_h == next_end) {
      do {  // with a dilation a residue of src may be empty
        if (next_row >= end) return false;
        const Unit next = unit(next_row);
        next_row += next.end - next.p;
        next_image = next.image;
        next_w = next.q - g.pad_w;
        next_h = first_row(next);
        next_end = last_row(next);
        next_from = from(next);
      } while (kDilated && next_h >= next_end);
    }
    const int src_h = kDilated ? next_from + next_h * int(g.d.by_h.d) : next_h;
    const uint32_t full = ahead.Claim(bytes);
    LoadTile(ahead.At(), g.map, full, src_channel0, next_w, src_h, next_image);
    ahead.Advance();
    ++next_h;
    return true;
  };
  if constexpr (kInline) {
    if (threadIdx.x == 0) {
      for (int s = 1; s < u.stages; ++s) feed();
    }
  } else if (int(threadIdx.x) >= g.t.threads) {
    if (lane == 0) {
      while (feed()) {
      }
    }
    return;
  }

  // Threads past the last run repeat what the first does and store nothing.
  const int run = int(g.t.by_lanes.Div(threadIdx.x));
  const int tile = int(g.t.by_tiles.Div(run));
  const bool spare = tile >= u.images;
  const int of = spare ? 0 : tile, in_tile = spare ? 0 : run - tile * g.t.col_tiles;
  const int col = kDilated ? ColumnOf(g.d, in_tile, kRun) : in_tile * kRun;
  const int in_slab = (int(threadIdx.x) - run * g.t.lanes) * V, channel = channel0 + in_slab;
  const bool live = !spare && channel < g.to.channels;
  const int src_in_slab = kChannels == Channels::kSpread ? in_slab / g.multiplier
                          : kGather                      ? in_slab * g.multiplier
                                                         : in_slab;
  const uint32_t mine = uint32_t((of * pitch + col) * g.pixel_bytes + src_in_slab * int(sizeof(T)));

  // Of src's channels in kGather, of the pair at hand; else of dst's.
  constexpr int kW = kGather ? 2 : V;
  const int w_row = kGather ? g.from.channels : g.to.channels;
  float w[R][S][kW] = {}, bias[V] = {};
  const auto filter = [&](int from) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int s = 0; s < S; ++s) {
        const int tap = g.reverse ? (R - 1 - r) * S + S - 1 - s : r * S + s;
        LoadVec<T, kW>(g.w + int64_t(tap) * w_row + from, w[r][s]);
      }
    }
  };
  if (live) {
    filter(kGather ? channel * g.multiplier : channel);
    if (kPlain && g.epilogue.bias != nullptr) LoadVec<T, V>(g.epilogue.bias + channel, bias);
  }
  std::conditional_t<kPlain, std::nullptr_t, Normaliser<T, kInput>> normaliser{};
  if constexpr (!kPlain) {
    if (live) normaliser.Load(g.n.of, channel);
  }
  const int step = g.to.channels * column;  // to the next pixel

  for (int64_t row = begin; row < end;) {
    const Unit at = unit(row);
    row += at.end - at.p;
    const int h0 = first_row(at), h1 = last_row(at);
    const int q = at.q + col;
    int cols = live && at.image + of < g.to.images ? g.to.w - q : 0;  // that exist
    if constexpr (kDilated) cols = cols > 0 ? int(g.d.by_w.Div(cols + column - 1)) : 0;

    // sum[j] is output row p + j before input row h, p = h + pad - (R - 1).
    float sum[R][kRun][V];
#pragma unroll
    for (int j = 0; j < R; ++j) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int i = 0; i < V; ++i) sum[j][e][i] = bias[i];
      }
    }
    int p = h0 + pad(at) - (R - 1);
    int dst_h = p;
    if constexpr (kDilated) dst_h = at.residue + p * int(g.d.by_h.d);
    int64_t out =
        ((int64_t(at.image + of) * g.to.h + dst_h) * g.to.w + q) * g.to.channels + channel;
    const auto put = [&](T* to, const float (&row)[kRun][V]) {
      if (cols >= kRun) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) StoreLane<T, V>(to + e * step, row[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (e < cols) StoreLane<T, V>(to + e * step, row[e]);
        }
      }
    };
    const auto store = [&](float (&row)[kRun][V]) {
      if (p >= at.p && p < at.end) {
        if (kPlain && g.epilogue.z != nullptr) put(g.epilogue.z + out, row);
        if (kPlain && g.epilogue.activation != Activation::kNone) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            ApplyActivation(g.epilogue.activation, row[e], g.epilogue.slope);
          }
        }
        put(g.dst + out, row);
      }
      ++p;
      out += kDilated ? int64_t(g.to.w) * int(g.d.by_h.d) * g.to.channels : int64_t(g.to.w) * step;
    };

    for (int h = h0; h < h1; ++h) {
      if constexpr (kInline) {
        if (threadIdx.x == 0) feed();
        __syncwarp();
      }
      ring.Await();
      const uint32_t from = ring.At() + mine;
      float in[kCols][kIn];
      const auto read = [&](uint32_t at) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          UnpackShared<T, kIn>(at + c * (g.pixel_bytes * column), in[c]);
        }
      };
      const auto add = [&] {
#pragma unroll
        for (int j = 0; j < R; ++j) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kW; ++i) {
#pragma unroll
              for (int s = 0; s < S; ++s) {
                float& to = sum[j][e][kGather ? 0 : i];
                to = fmaf(in[e + s][kIn == 1 ? 0 : i], w[R - 1 - j][s][i], to);
              }
            }
          }
        }
      };
      if constexpr (kGather) {
        // Of more than one pair the filters come from L1 each time: they would not fit registers.
        for (int pair = 2; pair < g.multiplier; pair += 2) {
          read(from + (pair - 2) * int(sizeof(T)));
          add();
          if (live) filter(channel * g.multiplier + pair);
        }
      }
      read(from + (kGather ? (g.multiplier - 2) * int(sizeof(T)) : 0));
      ring.GiveBack();
      if constexpr (!kPlain) {
        const InsideRow<S> inside(q - g.pad_w, g.from.w);
#pragma unroll
        for (int c = 0; c < kCols; ++c) normaliser.Apply(g.n, inside(c), in[c]);
      }
      add();
      if constexpr (kGather) {
        if (live && g.multiplier > 2) filter(channel * g.multiplier);
      }
      store(sum[0]);
#pragma unroll
      for (int j = 0; j + 1 < R; ++j) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
#pragma unroll
          for (int i = 0; i < V; ++i) sum[j][e][i] = sum[j + 1][e][i];
        }
      }
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int i = 0; i < V; ++i) sum[R - 1][e][i] = bias[i];
      }
    }
    // Below the image: rows that wait for no more input.
#pragma unroll
    for (int j = 0; j + 1 < R; ++j) store(sum[j]);
  }
#endif
}

template <typename T, int V, int R, int kThreads, bool kInline, Channels kChannels = Channels::kOne,
          bool kDilated = false, int kRun = kRowRun, Input kInput = Input::kPlain>
Status Launch(const Context& ctx, RowsArgs<T> g, const void* src, DType dtype,
              const std::string& what) {
  constexpr int kItem = int(sizeof(T)), kProducer = kInline ? 0 : 32;
  RowUnits& u = g.u;
  const int sms = Multiprocessors();
  g.t = ChooseThreads(u, g.to, g.from.channels, V, kItem, R, kThreads - kProducer, sms, 0, 1, 1,
                      int(g.d.by_w.d), kRun);
  ShareRows(u, g.to.images, g.to.h, g.to.w, std::max(1, sms / u.slabs));
  const int slab = int(int64_t(g.t.lanes) * V * g.from.channels / g.to.channels);  // of src
  g.pixel_bytes = slab * kItem;
  const int pitch = u.width + (R - 1) * int(g.d.by_w.d);
  u.stage_bytes = StagedBytes(u.images, pitch, g.pixel_bytes);
  // 200 KB took up to 6% more: what the ring has, L1 has not.
  u.stages = std::clamp(128 * 1024 / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, src, g.from, slab, pitch, u.images, what, &g.map));
  const int64_t blocks = CeilDiv(u.rows, u.share) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int bytes = u.stages * (u.stage_bytes + 16);
  const auto kernel =
      DepthwiseRowsKernel<T, V, R, kThreads, kInline, kChannels, kDilated, kRun, kInput>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads + kProducer, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T>
RowsArgs<T> MakeArgs(const ConvProblem& p, bool dgrad, const void* w, void* dst) {
  RowsArgs<T> g{};
  g.w = static_cast<const T*>(w);
  g.dst = static_cast<T*>(dst);
  SetRows(g, p, dgrad, dgrad);
  g.reverse = dgrad;
  g.multiplier = int(p.k / p.c);
  g.d = DilationOf(p, g.to.h);
  return g;
}

}  // namespace

Status DepthwiseRows(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                     const void* src, const void* w, const void* bias, void* dst, void* z,
                     const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowsArgs<T> g = MakeArgs<T>(p, dgrad, w, dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    if (p.dilation[1] > 1 || p.dilation[2] > 1) {
      if (p.filter[1] == 3 && g.to.w <= kShortRowRun * p.dilation[2]) {
        return Launch<T, 2, 3, 640, false, Channels::kOne, true, kShortRowRun>(ctx, g, src, p.dtype,
                                                                               what);
      }
      if (p.filter[1] == 3) {
        return Launch<T, 2, 3, 640, false, Channels::kOne, true>(ctx, g, src, p.dtype, what);
      }
      if (p.filter[1] == 5) {
        return Launch<T, 1, 5, 640, false, Channels::kOne, true>(ctx, g, src, p.dtype, what);
      }
      return Launch<T, 1, 7, 384, true, Channels::kOne, true>(ctx, g, src, p.dtype, what);
    }
    if (g.multiplier > 1 && dgrad) {
      return Launch<T, 1, 3, 640, false, Channels::kGather>(ctx, g, src, p.dtype, what);
    }
    if (g.multiplier > 1) {
      return Launch<T, 2, 3, 640, false, Channels::kSpread>(ctx, g, src, p.dtype, what);
    }
    if (p.filter[1] == 3) return Launch<T, 2, 3, 640, false>(ctx, g, src, p.dtype, what);
    if constexpr (sizeof(T) == 4) {
      if (p.filter[1] == 5) return Launch<T, 1, 5, 640, false>(ctx, g, src, p.dtype, what);
      return Launch<T, 1, 7, 384, true>(ctx, g, src, p.dtype, what);
    } else {
      return Status::Internal(what + ": no kernel for 16-bit filters of 5x5 and 7x7");
    }
  });
}

Status DepthwiseRowsNormalised(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                               const void* x, const void* w, void* y, const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowsArgs<T> g = MakeArgs<T>(p, false, w, y);
    g.n = MakeNormalised<T>(n);
    return ForInput(n, what, [&](auto input) {
      return Launch<T, 2, 3, 640, false, Channels::kOne, false, kRowRun, decltype(input)::value>(
          ctx, g, x, p.dtype, what);
    });
  });
}

}  // namespace jaxconv::cuda::conv
