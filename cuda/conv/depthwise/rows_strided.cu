// Depthwise 3x3 convolution of stride 2, channels-last, in rows (common/row_stream.cuh, rows.cuh). A
// thread owns V = 2 channels and kRowRun columns of a strip, and goes down the rows:
//
//   fprop   dst[p, q] = sum over r, s of  src[2 p - pad + r, 2 q - pad + s] * w[r, s]
//           columns and rows of dst; a row of src meets one row of dst, or ends one and begins the next
//   wgrad   the same rows and columns of dy: dw[r, s] = sum over p, q of  x[...] * dy[p, q]
//   dgrad   dx[i, j] = sum over r, s of  dy[(i + pad - r) / 2, (j + pad - s) / 2] * w[r, s]  where exact
//           pairs of rows and columns (i + pad = 2 p, 2 p + 1; j likewise): row p of dy makes all of the
//           odd row, ends the even row, and begins the next pair's.
//
// Rows and columns outside the arrays come as zeros from TMA.
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {
namespace {

enum class Pass { kFprop, kDgrad, kWgrad };

[[maybe_unused]] constexpr int kR = 3, kS = 3, kV = 2, kRun = kRowRun;
constexpr int kThreads = 640;  // with the producer's warp

template <typename T>
struct StridedArgs {
  CUtensorMap src, dy;  // dy: of wgrad
  const T* w;
  T* dst;           // dw of wgrad with one split
  float* partials;  // wgrad: (splits, R*S, K) with several splits, else null
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowThreads t;
  RowArray to;  // of dst, and of dy in wgrad
  int pad_h, pad_w;
  int pitch;       // pixels of a row of src in a stage
  uint32_t dy_at;  // in a stage
};

template <typename T>
__device__ __forceinline__ void StorePair(T* to, const float (&v)[kV]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = PackPair(v[0], v[1], T());
  }
}

template <typename T, Pass kPass>
__global__ void __launch_bounds__(kThreads, 1)
    DepthwiseStridedKernel(const __grid_constant__ StridedArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kDgrad = kPass == Pass::kDgrad, kWgrad = kPass == Pass::kWgrad;
  constexpr int kStep = kDgrad ? 1 : 2;  // of a column of the strip, in src
  constexpr int kCols = kDgrad ? kRun + 1 : 2 * (kRun - 1) + kS;
  extern __shared__ __align__(128) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  RowRing ring(ring_at, ring_at + uint32_t(u.stages * u.stage_bytes), u);
  const int lane = threadIdx.x % 32, threads = g.t.threads;
  if (threadIdx.x == 0) ring.Init(threads / 32);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t part = blockIdx.x / unsigned(u.slabs);
  const int64_t begin = part * u.share, end = min(begin + u.share, u.rows);
  const int channel0 = slab * (g.t.lanes * kV);
  // A unit's rows of src: the first, and how many.
  const auto first_row = [&](const RowUnit& at) { return kDgrad ? at.p - 1 : 2 * at.p - g.pad_h; };
  const auto row_count = [&](const RowUnit& at) { return (at.end - at.p) * kStep + 1; };

  const bool worker = int(threadIdx.x) < threads;
  if (!worker && lane == 0) {
    const uint32_t bytes = uint32_t(u.images * g.pitch * g.t.pixel_bytes);
    const uint32_t dy_bytes = uint32_t(u.images * u.width * g.t.pixel_bytes);
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
      const int h0 = first_row(at), count = row_count(at);
      const int w0 = kDgrad ? at.q - 1 : 2 * at.q - g.pad_w;
      for (int t = 0; t < count; ++t) {
        const bool both = kWgrad && t % 2 == 0 && t + 1 < count;
        const uint32_t full = ring.Claim(both ? bytes + dy_bytes : bytes);
        LoadTile(ring.At(), g.src, full, channel0, w0, h0 + t, at.image);
        if (both) LoadTile(ring.At() + g.dy_at, g.dy, full, channel0, at.q, at.p + t / 2, at.image);
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
  const auto read = [&](uint32_t from) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) UnpackShared<T, kV>(from + c * g.t.pixel_bytes, in[c]);
  };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) ring.Release();
    ring.Advance();
  };

  if constexpr (kWgrad) {
    const uint32_t dy_mine =
        g.dy_at + uint32_t((of * u.width + col) * g.t.pixel_bytes + in_slab * int(sizeof(T)));
    float acc[kR][kS][kV] = {};
    const auto add = [&](float (&sums)[kS][kV], const float (&grad)[kRun][kV]) {
#pragma unroll
      for (int s = 0; s < kS; ++s) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
#pragma unroll
          for (int i = 0; i < kV; ++i) sums[s][i] = fmaf(in[2 * e + s][i], grad[e][i], sums[s][i]);
        }
      }
    };
    if (worker) {
      for (int64_t row = begin; row < end;) {
        const RowUnit at = UnitOf(u, row, end);
        row += at.end - at.p;
        float grad[kRun][kV] = {};  // the last row of dy
        for (int p = at.p; p <= at.end; ++p) {
          ring.Await();  // x's row 2 p - pad
          read(ring.At() + mine);
          add(acc[2], grad);
          if (p < at.end) {
#pragma unroll
            for (int e = 0; e < kRun; ++e) {
              UnpackShared<T, kV>(ring.At() + dy_mine + e * g.t.pixel_bytes, grad[e]);
            }
            add(acc[0], grad);
            release();
            ring.Await();  // x's next row
            read(ring.At() + mine);
            add(acc[1], grad);
          }
          release();
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
      if (g.epilogue.bias != nullptr) LoadVec<T, kV>(g.epilogue.bias + channel, bias);
    }
    const int64_t to_row = int64_t(g.to.w) * g.to.channels;
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
      const int h0 = first_row(at);
      const int64_t image = int64_t(at.image + of) * g.to.h;
      const bool here = live && at.image + of < g.to.images;
      if constexpr (kDgrad) {
        const int w0 = 2 * (at.q + col) - g.pad_w;  // of dx
        const auto store = [&](int i, const float (&line)[2 * kRun][kV]) {
          if (unsigned(i) >= unsigned(g.to.h) || !here) return;
          T* to = g.dst + (image + i) * to_row + int64_t(w0) * g.to.channels + channel;
          const bool inside = w0 >= 0 && w0 + 2 * kRun <= g.to.w;
#pragma unroll
          for (int e = 0; e < 2 * kRun; ++e) {
            if (inside || unsigned(w0 + e) < unsigned(g.to.w))
              StorePair(to + e * g.to.channels, line[e]);
          }
        };
        // in[e] is dy's column q + col + e - 1. Even columns of the pair e: taps s = 0 of column e + 1
        // and s = 2 of column e; odd ones: s = 1 of column e + 1.
        const auto add = [&](float (&line)[2 * kRun][kV], const float (&f)[kS][kV]) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) {
              line[2 * e][i] = fmaf(in[e + 1][i], f[0][i], fmaf(in[e][i], f[2][i], line[2 * e][i]));
              line[2 * e + 1][i] = fmaf(in[e + 1][i], f[1][i], line[2 * e + 1][i]);
            }
          }
        };
        float even[2 * kRun][kV];
        for (int p = at.p - 1; p < at.end; ++p) {
          ring.Await();
          read(ring.At() + mine);
          release();
          if (p >= at.p) {
            add(even, w[0]);
            store(2 * p - g.pad_h, even);
            float odd[2 * kRun][kV] = {};
            add(odd, w[1]);
            store(2 * p + 1 - g.pad_h, odd);
          }
#pragma unroll
          for (int e = 0; e < 2 * kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) even[e][i] = 0.f;
          }
          add(even, w[2]);
        }
      } else {
        const int q = at.q + col, cols = here ? g.to.w - q : 0;
        int64_t out = (image + at.p) * to_row + int64_t(q) * g.to.channels + channel;
        float sum[kRun][kV];
        const auto add = [&](const float (&f)[kS][kV]) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int s = 0; s < kS; ++s) {
#pragma unroll
              for (int i = 0; i < kV; ++i) sum[e][i] = fmaf(in[2 * e + s][i], f[s][i], sum[e][i]);
            }
          }
        };
        const auto put = [&](T* to) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if (e < cols) StorePair(to + e * g.to.channels, sum[e]);
          }
        };
        for (int p = at.p; p <= at.end; ++p) {
          ring.Await();  // src's row 2 p - pad
          read(ring.At() + mine);
          release();
          if (p > at.p) {
            add(w[2]);
            if (g.epilogue.z != nullptr) put(g.epilogue.z + out);
            if (g.epilogue.activation != Activation::kNone) {
#pragma unroll
              for (int e = 0; e < kRun; ++e) {
                ApplyActivation(g.epilogue.activation, sum[e], g.epilogue.slope);
              }
            }
            put(g.dst + out);
            out += to_row;
          }
          if (p == at.end) break;
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
#pragma unroll
            for (int i = 0; i < kV; ++i) sum[e][i] = bias[i];
          }
          add(w[0]);
          ring.Await();  // src's next row
          read(ring.At() + mine);
          release();
          add(w[1]);
        }
      }
    }
  }
#endif
}

template <typename T, Pass kPass>
Status Launch(const Context& ctx, const ConvProblem& p, StridedArgs<T> g, int64_t splits,
              const void* src, const void* dy, const std::string& what) {
  constexpr bool kDgrad = kPass == Pass::kDgrad, kWgrad = kPass == Pass::kWgrad;
  constexpr int kItem = int(sizeof(T));
  RowUnits& u = g.u;
  const int sms = Multiprocessors();
  const RowArray x = RowsOfX(p), y = RowsOfY(p);
  g.to = kDgrad ? x : y;
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  RowArray walked = y;  // rows and columns that threads own
  if (kDgrad) {
    walked.h = int(CeilDiv(x.h + g.pad_h, 2));
    walked.w = int(CeilDiv(x.w + g.pad_w, 2));
  }
  const int slabs = kWgrad ? int(CeilDiv(y.channels, 128 * kV)) : 0;
  g.t = ChooseThreads(u, walked, walked.channels, kV, kItem, kS, kThreads - 32, sms, slabs,
                      kDgrad   ? 1
                      : kWgrad ? 3
                               : 2,
                      kDgrad ? 1 : 2);
  ShareRows(u, walked.images, walked.h, walked.w,
            kWgrad ? splits : std::max<int64_t>(1, sms / u.slabs));
  g.pitch = kDgrad ? u.width + 1 : 2 * u.width + 1;
  g.dy_at = uint32_t(StagedBytes(u.images, g.pitch, g.t.pixel_bytes));
  u.stage_bytes = int(g.dy_at) + (kWgrad ? StagedBytes(u.images, u.width, g.t.pixel_bytes) : 0);
  u.stages = std::clamp(200 * 1024 / u.stage_bytes, 2, 16);
  const int slab = g.t.lanes * kV;
  JAXCONV_RETURN_IF_ERROR(
      EncodeRows(p.dtype, src, kDgrad ? y : x, slab, g.pitch, u.images, what, &g.src));
  if (kWgrad) {
    JAXCONV_RETURN_IF_ERROR(EncodeRows(p.dtype, dy, y, slab, u.width, u.images, what, &g.dy));
  }
  const int64_t blocks = (kWgrad ? splits : CeilDiv(u.rows, u.share)) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int sums = kWgrad ? g.t.threads * kS * kV * 4 : 0;
  const int bytes = std::max(u.stages * (u.stage_bytes + 16), sums);
  const auto kernel = DepthwiseStridedKernel<T, kPass>;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what));
  kernel<<<unsigned(blocks), g.t.threads + 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
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
    return dgrad ? Launch<T, Pass::kDgrad>(ctx, p, g, 1, src, nullptr, what)
                 : Launch<T, Pass::kFprop>(ctx, p, g, 1, src, nullptr, what);
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
    return Launch<T, Pass::kWgrad>(ctx, p, g, splits, x, dy, what);
  });
}

}  // namespace jaxconv::cuda::conv
