// Depthwise convolution of stride 2 by 3x3, 5x5 and 7x7, channels-last, in rows (common/row_stream.cuh,
// rows.cuh). A thread owns V channels and kRun columns of a strip, and goes down the rows. M = (R - 1) / 2
// rows are under way at a time:
//
//   fprop   dst[p, q] = sum over r, s of  src[2 p - pad + r, 2 q - pad + s] * w[r, s]
//           columns and rows of dst. An even row of src (counted from 2 p - pad) ends a row of dst, meets
//           M - 1 more and begins one; an odd one meets M. The sums are kept.
//   wgrad   the same rows and columns of dy: dw[r, s] = sum over p, q of  x[...] * dy[p, q]
//           A row of dy comes with the even row of x that meets it first, and is kept.
//   dgrad   dx[i, j] = sum over r, s of  dy[(i + pad - r) / 2, (j + pad - s) / 2] * w[r, s]  where exact
//           pairs of rows and columns (i + pad = 2 p, 2 p + 1; j likewise): row p of dy ends pair p by its
//           first two rows of taps, meets M - 1 more and begins pair p + M. The sums are kept.
//
// Rows and columns outside the arrays come as zeros from TMA.
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/normalised.cuh"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {
namespace {

enum class Pass { kFprop, kDgrad, kWgrad };

// Of a pass of a filter: what fits the registers of that many threads, the producer's warp among them.
template <Pass kPass, int kR>
struct Shape {
  // Pairs of columns of dx are seldom a multiple of 7: 28 columns are 15 where the padding is odd.
  static constexpr bool kPairs = kPass == Pass::kDgrad && kR > 3;
  static constexpr int kV = kR == 7 ? 1 : 2, kThreads = kR == 3 ? 640 : 512,
                       kRun = !kPairs   ? kRowRun
                              : kR == 5 ? 3
                                        : 4;
};

template <typename T>
struct StridedArgs {
  CUtensorMap src, dy;  // dy: of wgrad
  const T* w;
  T* dst;           // dw of wgrad with one split
  float* partials;  // wgrad: (splits, R*S, K) with several splits, else null
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowThreads t;
  RowArray to;         // of dst, and of dy in wgrad
  int pad_h, pad_w;    // of dgrad 0 or 1: dx's row and column 2 p - pad are the first of pair p
  int skip_h, skip_w;  // of dgrad: pairs of rows and columns that lie in the padding
  int pitch;           // pixels of a row of src in a stage
  uint32_t dy_at;      // in a stage
  RowArray from;       // of src, where the kernel's input is not kPlain
  NormalisedArgs n;
};

// Columns [begin, end) of `line`, whose column 0 is at `to`; `step` elements lie between two.
template <typename T, int kCount, int V>
__device__ __forceinline__ void StoreColumns(T* to, int step, const float (&line)[kCount][V],
                                             int begin, int end) {
  if (begin <= 0 && end >= kCount) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) StoreLane<T, V>(to + int64_t(step) * e, line[e]);
  } else {
    // Opaque: else all of these predicates are computed before the rows' loop and kept in registers.
    asm volatile("" : "+r"(begin), "+r"(end));
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (e >= begin && e < end) StoreLane<T, V>(to + int64_t(step) * e, line[e]);
    }
  }
}

template <typename T, Pass kPass, int kR, Input kInput>
__global__ void __launch_bounds__(Shape<kPass, kR>::kThreads, 1)
    DepthwiseStridedKernel(const __grid_constant__ StridedArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kDgrad = kPass == Pass::kDgrad, kWgrad = kPass == Pass::kWgrad;
  constexpr int kV = Shape<kPass, kR>::kV, kRun = Shape<kPass, kR>::kRun;
  constexpr int kS = kR, M = (kR - 1) / 2;
  constexpr int kStep = kDgrad ? 1 : 2;  // of a column of the strip, in src
  constexpr int kCols = kDgrad ? kRun + M : 2 * (kRun - 1) + kS;
  constexpr bool kPlain = kInput == Input::kPlain;  // else there is no epilogue
  static_assert(kPlain || (!kDgrad && kV == 2));
  // Whether a row of src is read, its stage given back, and then used; larger filters leave no registers for a
  // whole row, and a stage of wgrad holds dy too.
  constexpr bool kReadFirst = kR == 3 && !kWgrad;
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.ring_bytes), u);
  const int lane = threadIdx.x % 32, threads = g.t.threads;
  if (threadIdx.x == 0) ring.Init(threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t part = blockIdx.x / unsigned(u.slabs);
  const int64_t begin = part * u.share, end = min(begin + u.share, u.rows);
  const int channel0 = slab * (g.t.lanes * kV);
  // Steps of a unit before its first, which see padding alone (wgrad's bring dy). A step is two rows of src,
  // the last one is one; of dgrad one row.
  const auto first_step = [&](const RowUnit& at) {
    return kWgrad ? 0 : max(kDgrad ? M - at.p - g.skip_h : g.pad_h / 2 - at.p, 0);
  };

  const bool worker = int(threadIdx.x) < threads;
  if (!worker && lane == 0) {
    const uint32_t bytes = uint32_t(u.images * g.pitch * g.t.pixel_bytes);
    const uint32_t dy_bytes = uint32_t(u.images * u.width * g.t.pixel_bytes);
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      const int rows = at.end - at.p;
      row += rows;
      const int h0 = kDgrad ? at.p + g.skip_h - M : 2 * at.p - g.pad_h;
      const int w0 = kDgrad ? at.q + g.skip_w - M : 2 * at.q - g.pad_w;
      const int count = (rows + M - 1) * kStep + 1;
      for (int t = first_step(at) * kStep; t < count; ++t) {
        const bool both = kWgrad && t % 2 == 0;
        const uint32_t full = ring.Claim(both ? bytes + dy_bytes : bytes);
        LoadTile(ring.At(), g.src, full, channel0, w0, h0 + t, at.image);
        if (both) {  // past the unit's last row of dy: a row of zeros
          const int p = t / 2 < rows ? at.p + t / 2 : -1;
          LoadTile(ring.At() + g.dy_at, g.dy, full, channel0, at.q, p, at.image);
        }
        ring.Advance();
      }
    }
  }
  if (!kWgrad && !worker) return;

  // Threads past the last run repeat what the first does; nobody stores or adds their results.
  const int run = int(g.t.by_lanes.Div(threadIdx.x));
  const int tile = int(g.t.by_tiles.Div(run));
  const bool spare = tile >= u.images;
  const int of = spare ? 0 : tile, col = spare ? 0 : (run - tile * g.t.col_tiles) * kRun;
  const int in_slab = (int(threadIdx.x) - run * g.t.lanes) * kV, channel = channel0 + in_slab;
  const uint32_t mine =
      uint32_t((of * g.pitch + col * kStep) * g.t.pixel_bytes + in_slab * int(sizeof(T)));
  float in[kCols][kV];
  std::conditional_t<kPlain, std::nullptr_t, Normaliser<T, kInput>> normaliser{};
  if constexpr (!kPlain) {
    if (worker && channel < g.to.channels) normaliser.Load(g.n.of, channel);
  }
  const auto release = [&] { ring.GiveBack(); };
  const auto read = [&] {
    ring.Await();
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      UnpackShared<T, kV>(ring.At() + mine + c * g.t.pixel_bytes, in[c]);
    }
    if constexpr (kReadFirst) release();
  };
  const auto done = [&] {
    if constexpr (!kReadFirst) release();
  };
  // Of row h of src.
  const auto inside = [&](const RowUnit& at, int h) {
    if constexpr (kPlain) {
      return nullptr;
    } else {
      const bool row = unsigned(h) < unsigned(g.from.h);
      return InsideRow<kS>(2 * (at.q + col) - g.pad_w, g.from.w, row);
    }
  };
  // use(e, s, column) for each tap s of column e that the row read meets; of dgrad for each pair e and its
  // pair s of taps. By columns of the row, of which few need be in registers at a time.
  // `inside`: which of them are x's.
  const auto meet = [&](auto inside, auto use) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      if constexpr (!kPlain) normaliser.Apply(g.n, inside(c), in[c]);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const int s = kDgrad ? e + M - c : c - 2 * e;
        if (s >= 0 && s < (kDgrad ? M + 1 : kS)) use(e, s, in[c]);
      }
    }
  };

  if constexpr (kWgrad) {
    const uint32_t dy_mine =
        g.dy_at + uint32_t((of * u.width + col) * g.t.pixel_bytes + in_slab * int(sizeof(T)));
    float acc[kR][kS][kV] = {};
    if (worker) {
      for (int64_t row = begin; row < end;) {
        const RowUnit at = UnitOf(u, row, end);
        row += at.end - at.p;
        float grad[M + 1][kRun][kV] = {};  // grad[k] is row p - k of dy, or zeros
        const auto add = [&](int p, int parity) {
          meet(inside(at, 2 * p - g.pad_h + parity), [&](int e, int s, const float (&x)[kV]) {
#pragma unroll
            for (int k = 0; 2 * k + parity < kR; ++k) {
#pragma unroll
              for (int i = 0; i < kV; ++i) {
                float& sum = acc[2 * k + parity][s][i];
                sum = fmaf(x[i], grad[k][e][i], sum);
              }
            }
          });
        };
        for (int p = at.p;; ++p) {
          read();  // x's row 2 p - pad
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int k = M; k > 0; --k) {
#pragma unroll
              for (int i = 0; i < kV; ++i) grad[k][e][i] = grad[k - 1][e][i];
            }
            UnpackShared<T, kV>(ring.At() + dy_mine + e * g.t.pixel_bytes, grad[0][e]);
          }
          add(p, 0);
          done();
          if (p == at.end + M - 1) break;
          read();  // x's next row
          add(p, 1);
          done();
        }
      }
    }
    __syncthreads();
    StoreSums<T, kR, kS, kV>(
        g.t, u, reinterpret_cast<float*>(cells), acc, channel0, g.to.channels,
        g.partials == nullptr ? nullptr : g.partials + part * (kR * kS) * int64_t(g.to.channels),
        g.dst);
  } else {
    const bool live = !spare && channel < g.to.channels;
    float w[kR][kS][kV] = {}, bias[kV] = {};
    if (live) {
#pragma unroll
      for (int t = 0; t < kR * kS; ++t) {
        LoadVec<T, kV>(g.w + int64_t(t) * g.to.channels + channel, w[t / kS][t % kS]);
      }
      if (kPlain && g.epilogue.bias != nullptr) LoadVec<T, kV>(g.epilogue.bias + channel, bias);
    }
    const int64_t to_row = int64_t(g.to.w) * g.to.channels;
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
      const int64_t image = int64_t(at.image + of) * g.to.h;
      const bool here = live && at.image + of < g.to.images;
      if constexpr (kDgrad) {
        const int w0 = 2 * (at.q + col) - g.pad_w;  // of dx
        const int w1 = here ? g.to.w - w0 : 0;
        int p = at.p - M + first_step(at);
        T* to = g.dst + (image + 2 * p - g.pad_h) * to_row + int64_t(w0) * g.to.channels + channel;
        const auto store = [&](int i, T* row, const float (&line)[2 * kRun][kV]) {
          if (unsigned(i) < unsigned(g.to.h)) StoreColumns(row, g.to.channels, line, -w0, w1);
        };
        // even[k] and odd[k] are the rows of pair p + k; those that begin are zeros.
        float even[M + 1][2 * kRun][kV] = {}, odd[M][2 * kRun][kV] = {};
        // in[c] is dy's column c - M of the first pair.
        const auto add = [&](float (&line)[2 * kRun][kV], const float (&f)[kS][kV]) {
          meet(nullptr, [&](int e, int s, const float (&dy)[kV]) {
#pragma unroll
            for (int b = 0; b < 2 && 2 * s + b < kS; ++b) {
#pragma unroll
              for (int i = 0; i < kV; ++i) {
                float& sum = line[2 * e + b][i];
                sum = fmaf(dy[i], f[2 * s + b][i], sum);
              }
            }
          });
        };
        for (; p < at.end; ++p, to += 2 * to_row) {
          read();
          if (p >= at.p) {
            add(even[0], w[0]);
            store(2 * p - g.pad_h, to, even[0]);
            add(odd[0], w[1]);
            store(2 * p + 1 - g.pad_h, to + to_row, odd[0]);
          }
#pragma unroll
          for (int k = 1; k <= M; ++k) {
            add(even[k], w[2 * k]);
            if (k < M) add(odd[k], w[2 * k + 1]);
          }
          done();
#pragma unroll
          for (int e = 0; e < 2 * kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) {
#pragma unroll
              for (int k = 0; k < M; ++k) {
                even[k][e][i] = even[k + 1][e][i];
                odd[k][e][i] = k + 1 < M ? odd[k + 1][e][i] : 0.f;
              }
              even[M][e][i] = 0.f;
            }
          }
        }
      } else {
        const int q = at.q + col, cols = here ? g.to.w - q : 0;
        int p = at.p - M + first_step(at);
        int64_t out = (image + p) * to_row + int64_t(q) * g.to.channels + channel;
        float sum[M + 1][kRun][kV];  // sum[k] is row p + k
#pragma unroll
        for (int k = 0; k <= M; ++k) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) sum[k][e][i] = bias[i];
          }
        }
        const auto add = [&](int parity) {
          meet(inside(at, 2 * (p + M) - g.pad_h + parity), [&](int e, int s, const float (&x)[kV]) {
#pragma unroll
            for (int k = parity; k <= M; ++k) {
#pragma unroll
              for (int i = 0; i < kV; ++i) {
                sum[k][e][i] = fmaf(x[i], w[2 * (M - k) + parity][s][i], sum[k][e][i]);
              }
            }
          });
        };
        const auto store = [&](T* to) { StoreColumns(to + out, g.to.channels, sum[0], 0, cols); };
        for (;; ++p) {
          read();  // src's row 2 (p + M) - pad
          add(0);
          done();
          if (p >= at.p) {
            if (kPlain && g.epilogue.z != nullptr) store(g.epilogue.z);
            if (kPlain && g.epilogue.activation != Activation::kNone) {
#pragma unroll
              for (int e = 0; e < kRun; ++e) {
                ApplyActivation(g.epilogue.activation, sum[0][e], g.epilogue.slope);
              }
            }
            store(g.dst);
          }
          if (p == at.end - 1) break;
          out += to_row;
          read();  // src's next row
          add(1);
          done();
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) {
#pragma unroll
              for (int k = 0; k < M; ++k) sum[k][e][i] = sum[k + 1][e][i];
              sum[M][e][i] = bias[i];
            }
          }
        }
      }
    }
  }
#endif
}

template <typename T, Pass kPass, int kR, Input kInput = Input::kPlain>
Status Launch(const Context& ctx, const ConvProblem& p, StridedArgs<T> g, int64_t splits,
              const void* src, const void* dy, const std::string& what) {
  constexpr bool kDgrad = kPass == Pass::kDgrad, kWgrad = kPass == Pass::kWgrad;
  constexpr int kItem = int(sizeof(T)), kS = kR, M = (kR - 1) / 2;
  using S = Shape<kPass, kR>;
  RowUnits& u = g.u;
  const int sms = Multiprocessors();
  const RowArray x = RowsOfX(p), y = RowsOfY(p);
  g.to = kDgrad ? x : y;
  g.from = kDgrad ? y : x;
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  RowArray walked = y;  // rows and columns that threads own
  if (kDgrad) {
    g.skip_h = g.pad_h / 2;
    g.skip_w = g.pad_w / 2;
    g.pad_h %= 2;
    g.pad_w %= 2;
    walked.h = int(CeilDiv(x.h + g.pad_h, 2));
    walked.w = int(CeilDiv(x.w + g.pad_w, 2));
  }
  const int slabs = kWgrad ? int(CeilDiv(y.channels, 128 * S::kV)) : 0;  // as the plan has it
  // A stage of wgrad holds three pixels for a column; with fewer threads than 640 a larger one fills them.
  const int copies = kDgrad ? 1 : kWgrad && kR == 3 ? 3 : 2;
  g.t = ChooseThreads(u, walked, walked.channels, S::kV, kItem, kS, S::kThreads - 32, sms, slabs,
                      copies, kDgrad ? 1 : 2, 1, S::kRun);
  ShareRows(u, walked.images, walked.h, walked.w,
            kWgrad ? splits : std::max<int64_t>(1, sms / u.slabs));
  g.pitch = kDgrad ? u.width + M : 2 * u.width + kS - 2;
  g.dy_at = uint32_t(StagedBytes(u.images, g.pitch, g.t.pixel_bytes));
  u.stage_bytes = int(g.dy_at) + (kWgrad ? StagedBytes(u.images, u.width, g.t.pixel_bytes) : 0);
  u.stages = std::clamp(200 * 1024 / u.stage_bytes, 2, 16);
  const int slab = g.t.lanes * S::kV;
  JAXCONV_RETURN_IF_ERROR(
      EncodeRows(p.dtype, src, kDgrad ? y : x, slab, g.pitch, u.images, what, &g.src));
  if (kWgrad) {
    JAXCONV_RETURN_IF_ERROR(EncodeRows(p.dtype, dy, y, slab, u.width, u.images, what, &g.dy));
  }
  const int64_t blocks = (kWgrad ? splits : CeilDiv(u.rows, u.share)) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  CoverSums(u, kWgrad ? g.t.threads * kS * S::kV * 4 : 0);
  const int bytes = u.ring_bytes + u.stages * 16;
  const auto kernel = DepthwiseStridedKernel<T, kPass, kR, kInput>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads + 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T, Pass kPass>
Status LaunchFilter(const Context& ctx, const ConvProblem& p, const StridedArgs<T>& g,
                    int64_t splits, const void* src, const void* dy, const std::string& what) {
  if (p.filter[1] == 3) return Launch<T, kPass, 3>(ctx, p, g, splits, src, dy, what);
  if (p.filter[1] == 5) return Launch<T, kPass, 5>(ctx, p, g, splits, src, dy, what);
  return Launch<T, kPass, 7>(ctx, p, g, splits, src, dy, what);
}

// Of x normalised, 3x3: fprop of 5x5 has no registers left for it.
template <typename T, Pass kPass>
Status LaunchNormalised(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                        StridedArgs<T> g, int64_t splits, const void* x, const void* dy,
                        const std::string& what) {
  g.n = MakeNormalised<T>(n);
  return ForInput(n, what, [&](auto input) {
    return Launch<T, kPass, 3, decltype(input)::value>(ctx, p, g, splits, x, dy, what);
  });
}

}  // namespace

Status DepthwiseRowsStrided(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                            const void* src, const void* w, const void* bias, void* dst, void* z,
                            const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StridedArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    return dgrad ? LaunchFilter<T, Pass::kDgrad>(ctx, p, g, 1, src, nullptr, what)
                 : LaunchFilter<T, Pass::kFprop>(ctx, p, g, 1, src, nullptr, what);
  });
}

Status DepthwiseRowsStridedWgrad(const Context& ctx, const ConvProblem& p, int64_t splits,
                                 const void* x, const void* dy, void* dw, float* partials,
                                 const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StridedArgs<T> g{};
    g.dst = static_cast<T*>(dw);
    g.partials = partials;
    return LaunchFilter<T, Pass::kWgrad>(ctx, p, g, splits, x, dy, what);
  });
}

Status DepthwiseRowsStridedNormalised(const Context& ctx, const ConvProblem& p,
                                      const Normalisation& n, const void* x, const void* w, void* y,
                                      const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StridedArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(y);
    return LaunchNormalised<T, Pass::kFprop>(ctx, p, n, g, 1, x, nullptr, what);
  });
}

Status DepthwiseRowsStridedNormalisedWgrad(const Context& ctx, const ConvProblem& p,
                                           const Normalisation& n, int64_t splits, const void* x,
                                           const void* dy, void* dw, float* partials,
                                           const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StridedArgs<T> g{};
    g.dst = static_cast<T*>(dw);
    g.partials = partials;
    return LaunchNormalised<T, Pass::kWgrad>(ctx, p, n, g, splits, x, dy, what);
  });
}

}  // namespace jaxconv::cuda::conv
