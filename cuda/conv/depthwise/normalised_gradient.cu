// The backward pass of a batch-norm, its activation and a 3x3 depthwise convolution in 16 bits, channels-last, of stride 1
// and 2, without da, the gradient of what the convolution read:
//
//   a = f(z), z = the batch-norm of x (normalised.cuh);  da[i, j] = sum over r, s of  dy[(i + pad - r) / stride, ...] * w[r, s]
//   where that is exact;  dz = da * f'(z)
//   sums   dw[r, s] = sum of a * dy;  dbias = sum of dz;  dscale = sum of dz * xhat, xhat = (x - mean) * rstd
//   dx     dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), from all sums
//
// Either reads x and dy once, and makes da again: nine FMAs an element (a quarter of them with stride 2) are cheaper than
// a pass over memory.
//
// A thread owns two channels and kRun columns of x (stride 2: pairs of columns) of a strip (common/row_stream.cuh, rows.cuh)
// and goes down the rows (pairs of rows). Of stride 1 a stage brings a row of dy and the row of x above whose windows it ends;
// three rows of dy stay in the ring. Of stride 2 a stage brings a row of x, that of even rows dy's too; the row of dy before
// stays in registers. Nothing is carried but the sums.
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/normalised.cuh"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {
namespace {

using depthwise::kSums, depthwise::kTaps;

enum class Pass { kSums, kDx };

template <typename T>
struct GradientArgs {
  CUtensorMap x, dy;
  const T* w;
  T* dx;                        // of kDx
  const float *dscale, *dbias;  // of kDx, of 1 / inv_n elements a channel
  float inv_n;
  float* partials;  // of kSums: (splits, kSums, C)
  RowUnits u;       // of x's rows and columns, or pairs of them
  RowThreads t;
  RowArray of;         // of x
  int pad_h, pad_w;    // of stride 2: 0 or 1, x's row and column 2 p - pad are the first of pair p
  int skip_h, skip_w;  // of stride 2: pairs that lie in the padding
  int pitch;           // pixels of a row of dy in a stage
  uint32_t x_at;       // in a stage
  NormalisedArgs n;
};

// What a thread does with a pixel of x, of its two channels, and da there.
template <typename T, Input kInput, Pass kPass>
struct Pixel {
  Normaliser<T, kInput> norm;
  float mean[2] = {};
  // kSums: the sums of dz, and of dz * (x - mean). kDx: what is added to dz, and the factor of x - mean.
  float first[2] = {}, second[2] = {};

  __device__ __forceinline__ void Load(const GradientArgs<T>& g, int channel) {
    norm.Load(g.n.of, channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mean[i] = g.n.of.mean[channel + i];
      if constexpr (kPass == Pass::kDx) {
        const float rstd = 1.f / sqrtf(g.n.of.var[channel + i] + g.n.of.epsilon);
        first[i] = -g.dbias[channel + i] * g.inv_n;
        second[i] = -rstd * (g.dscale[channel + i] * g.inv_n);
      }
    }
  }

  // v = x - mean, dz from da, and a where it is wanted.
  __device__ __forceinline__ void Back(const NormalisedArgs& n, uint32_t word, float (&v)[2],
                                       float (&dz)[2], float (&a)[2]) const {
    UnpackPair<T>(word, v);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float z = fmaf(v[i], norm.scale[i], norm.offset[i]);
      v[i] -= mean[i];
      if constexpr (kInput == Input::kSilu) {
        float within = z;  // where the gate is not 0 or 1
        const auto [gate, rest] = GateAndRest<false, float, true>(within);
        a[i] = AtLeast(z, -88.f) * gate;
        dz[i] *= gate * fmaf(within, rest, 1.f);
      } else {
        a[i] = z;
        dz[i] = z > 0.f && z < n.most ? dz[i] : 0.f;
      }
    }
    if constexpr (kPass == Pass::kSums) {
      const uint32_t pair =
          kInput == Input::kClipped ? PackClipped<T>(a, n.limit) : PackPair(a[0], a[1], T());
      UnpackPair<T>(pair, a);
    }
  }

  __device__ __forceinline__ void Add(const float (&v)[2], const float (&dz)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] += dz[i];
      second[i] = fmaf(dz[i], v[i], second[i]);
    }
  }

  __device__ __forceinline__ uint32_t Dx(const float (&v)[2], const float (&dz)[2]) const {
    float dx[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dx[i] = norm.scale[i] * fmaf(second[i], v[i], dz[i] + first[i]);
    }
    return PackPair(dx[0], dx[1], T());
  }
};

__device__ __forceinline__ uint32_t LoadWord(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(word) : "r"(address));
  return word;
}

// A block's threads, the producer's warp among them: sums want 102 to 127 registers, of which 640 threads have 96.
constexpr int kMany = 640, kFew = 512;

template <typename T, Input kInput, int kStride, Pass kPass, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    DepthwiseNormalisedGradientKernel(const __grid_constant__ GradientArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int R = 3, S = 3, V = 2, kRun = kRowRun;
  constexpr int kHalo = kStride == 1 ? S - 1 : 1;  // columns of dy beyond a run
  constexpr int kBefore = kStride == 1 ? 2 : 1;    // stages of dy alone before a unit's first row
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
  const int channel0 = slab * (g.t.lanes * V);

  const bool worker = int(threadIdx.x) < threads;
  if (!worker && lane == 0) {
    const uint32_t dy_bytes = uint32_t(u.images * g.pitch * g.t.pixel_bytes);
    const uint32_t x_bytes = uint32_t(u.images * u.width * kStride * g.t.pixel_bytes);
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
      const int count = (at.end - at.p) * kStride + kBefore;
      for (int t = 0; t < count; ++t) {
        const bool has_x = t >= kBefore, has_dy = kStride == 1 || t == 0 || t % 2 == 1;
        const uint32_t full = ring.Claim((has_x ? x_bytes : 0) + (has_dy ? dy_bytes : 0));
        if (has_dy) {
          const int h = kStride == 1 ? at.p + g.pad_h - 2 + t : at.p + g.skip_h + (t + 1) / 2 - 1;
          const int w = kStride == 1 ? at.q + g.pad_w - 2 : at.q + g.skip_w - 1;
          LoadTile(ring.At(), g.dy, full, channel0, w, h, at.image);
        }
        if (has_x) {
          const int h = kStride == 1 ? at.p + t - 2 : 2 * at.p - g.pad_h + t - 1;
          const int w = kStride == 1 ? at.q : 2 * at.q - g.pad_w;
          LoadTile(ring.At() + g.x_at, g.x, full, channel0, w, h, at.image);
        }
        ring.Advance();
      }
    }
  }
  if (kPass == Pass::kDx && !worker) return;

  // Threads past the last run repeat what the first does; nobody stores or adds their results.
  const int run = int(g.t.by_lanes.Div(threadIdx.x));
  const int tile = int(g.t.by_tiles.Div(run));
  const bool spare = tile >= u.images;
  const int of = spare ? 0 : tile, col = spare ? 0 : (run - tile * g.t.col_tiles) * kRun;
  const int in_slab = (int(threadIdx.x) - run * g.t.lanes) * V, channel = channel0 + in_slab;
  const bool live = worker && channel < g.of.channels;
  const uint32_t pixel_bytes = uint32_t(g.t.pixel_bytes);
  const uint32_t dy_mine = uint32_t(of * g.pitch + col) * pixel_bytes + uint32_t(in_slab * 2);
  const uint32_t x_mine =
      g.x_at + uint32_t(of * u.width + col) * kStride * pixel_bytes + uint32_t(in_slab * 2);

  float w[R][S][V] = {};
  Pixel<T, kInput, kPass> pixel{};
  if (live) {
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      LoadVec<T, V>(g.w + int64_t(t) * g.of.channels + channel, w[t / S][t % S]);
    }
    pixel.Load(g, channel);
  }
  float acc[R][S][V] = {};  // of kSums
  RowRing oldest = ring;    // of the stages that this thread has not given back
  const auto take = [&] {
    ring.Await();
    const uint32_t at = ring.At();
    ring.Advance();
    return at;
  };
  const auto give_back = [&] { oldest.GiveBack(); };
  // A pixel of x at `from` with its da: to the sums, or to dx at `to`. -> a, of kSums
  const auto meet = [&](uint32_t from, bool inside, float (&da)[V], float (&a)[V], T* to) {
    float v[V];
    pixel.Back(g.n, LoadWord(from), v, da, a);
    if constexpr (kPass == Pass::kSums) {
      if (!inside) a[0] = a[1] = da[0] = da[1] = 0.f;
      pixel.Add(v, da);
    } else {
      if (inside) *reinterpret_cast<uint32_t*>(to) = pixel.Dx(v, da);
    }
  };
  // da of a pixel += dy * w[r][s]; and, a being known, dw[r][s] += a * dy.
  const auto fold = [](float (&to)[V], const float (&by)[V], const float (&dy)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = fmaf(by[i], dy[i], to[i]);
  };

  if (worker) {
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
      const bool here = kPass == Pass::kSums || (live && !spare && at.image + of < g.of.images);
      if constexpr (kStride == 1) {
        const int cols = here ? g.of.w - (at.q + col) : 0;  // that exist
        T* to = g.dx +
                (((int64_t(at.image + of) * g.of.h + at.p) * g.of.w + at.q + col) * g.of.channels +
                 channel);
        uint32_t before[2] = {take(), take()};  // rows p + pad - 2 and p + pad - 1 of dy
        before[0] += dy_mine;
        before[1] += dy_mine;
        for (int p = at.p; p < at.end; ++p) {
          const uint32_t stage = take();
          const uint32_t rows[R] = {stage + dy_mine, before[1], before[0]};
          const auto sweep = [&](auto whole) {
            float dy[R][kRun + kHalo][V];
#pragma unroll
            for (int c = 0; c < kRun + kHalo; ++c) {
#pragma unroll
              for (int r = 0; r < R; ++r)
                UnpackPair<T>(LoadWord(rows[r] + c * pixel_bytes), dy[r][c]);
              const int e = c - kHalo;
              if (e < 0) continue;
              float da[V] = {}, a[V];
#pragma unroll
              for (int t = 0; t < kTaps; ++t) fold(da, w[t / S][t % S], dy[t / S][e + 2 - t % S]);
              meet(stage + x_mine + e * pixel_bytes, whole() || e < cols, da, a,
                   to + int64_t(e) * g.of.channels);
              if constexpr (kPass == Pass::kSums) {
#pragma unroll
                for (int t = 0; t < kTaps; ++t)
                  fold(acc[t / S][t % S], a, dy[t / S][e + 2 - t % S]);
              }
            }
          };
          if (cols >= kRun) {
            sweep([] { return true; });
          } else {
            sweep([] { return false; });
          }
          give_back();
          before[0] = before[1];
          before[1] = stage + dy_mine;
          to += int64_t(g.of.w) * g.of.channels;
        }
        give_back();
        give_back();
      } else {
        const int w0 = 2 * (at.q + col) - g.pad_w;  // of x
        const int64_t to_row = int64_t(g.of.w) * g.of.channels;
        T* to = g.dx + (int64_t(at.image + of) * g.of.h + 2 * at.p - g.pad_h) * to_row +
                int64_t(w0) * g.of.channels + channel;
        uint32_t before[kRun + kHalo], now[kRun + kHalo];  // rows p - 1 and p of dy
        const auto read = [&](uint32_t stage, uint32_t (&to)[kRun + kHalo]) {
#pragma unroll
          for (int c = 0; c < kRun + kHalo; ++c)
            to[c] = LoadWord(stage + dy_mine + c * pixel_bytes);
        };
        read(take(), before);
        give_back();
        for (int p = at.p; p < at.end; ++p) {
          // A row of x; odd: the second of its pair.
          const auto sweep = [&](uint32_t stage, auto odd, auto whole, T* to) {
            float dy[2][2][V];  // of rows p and p - 1: columns q and q - 1
            UnpackPair<T>(now[0], dy[0][0]);
            if (!odd()) UnpackPair<T>(before[0], dy[1][0]);
#pragma unroll
            for (int e = 0; e < kRun; ++e) {
#pragma unroll
              for (int i = 0; i < V; ++i) {
                dy[0][1][i] = dy[0][0][i];
                dy[1][1][i] = dy[1][0][i];
              }
              UnpackPair<T>(now[e + 1], dy[0][0]);
              if (!odd()) UnpackPair<T>(before[e + 1], dy[1][0]);
#pragma unroll
              for (int b = 0; b < 2; ++b) {  // x's column 2 q + b
                // f(r, s, dy) of the taps that meet it
                const auto taps = [&](auto f) {
#pragma unroll
                  for (int k = 0; k < (odd() ? 1 : 2); ++k) {
                    const int r = odd() ? 1 : 2 * k;
                    f(r, b, dy[k][0]);
                    if (b == 0) f(r, 2, dy[k][1]);
                  }
                };
                float da[V] = {}, a[V];
                taps([&](int r, int s, const float (&dy)[V]) { fold(da, w[r][s], dy); });
                const int c = 2 * e + b;
                meet(stage + x_mine + c * pixel_bytes,
                     whole() || unsigned(w0 + c) < unsigned(g.of.w), da, a,
                     to + int64_t(c) * g.of.channels);
                if constexpr (kPass == Pass::kSums) {
                  taps([&](int r, int s, const float (&dy)[V]) { fold(acc[r][s], a, dy); });
                }
              }
            }
          };
          const bool all = here && w0 >= 0 && w0 + 2 * kRun <= g.of.w;
          const auto pass = [&](auto odd) {
            const uint32_t stage = take();
            if constexpr (!odd()) read(stage, now);
            const int h = 2 * p - g.pad_h + odd();
            T* line = to + (odd() ? to_row : 0);
            if (here && unsigned(h) < unsigned(g.of.h)) {
              if (all) {
                sweep(stage, odd, [] { return true; }, line);
              } else {
                sweep(stage, odd, [] { return false; }, line);
              }
            }
            give_back();
          };
          pass(std::false_type());
          pass(std::true_type());
#pragma unroll
          for (int c = 0; c < kRun + kHalo; ++c) before[c] = now[c];
          to += 2 * to_row;
        }
      }
    }
  }

  if constexpr (kPass == Pass::kSums) {
    __syncthreads();
    float* to = g.partials + part * kSums * int64_t(g.of.channels);
    float* shared = reinterpret_cast<float*>(cells);
    StoreSums<T, R, S, V>(g.t, u, shared, acc, channel0, g.of.channels, to, nullptr);
    float sums[1][2][V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sums[0][0][i] = pixel.first[i];
      const float rstd = live ? 1.f / sqrtf(g.n.of.var[channel + i] + g.n.of.epsilon) : 0.f;
      sums[0][1][i] = pixel.second[i] * rstd;
    }
    StoreSums<float, 1, 2, V>(g.t, u, shared, sums, channel0, g.of.channels,
                              to + kTaps * int64_t(g.of.channels), nullptr);
  }
#endif
}

// Adds up the parts of every channel's sums, in order: kWide threads share an element.
constexpr int kSumThreads = 256, kWide = 8;

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    SumGradientKernel(const float* __restrict__ partials, int64_t parts, int channels,
                      T* __restrict__ dw, float* __restrict__ dbias, float* __restrict__ dscale) {
  constexpr int kElements = kSumThreads / kWide;
  const int64_t count = int64_t(kSums) * channels;
  const int run = threadIdx.x / kElements;
  const int64_t i = int64_t(blockIdx.x) * kElements + threadIdx.x % kElements;
  float sum = 0.f;
  if (i < count) {
    const int64_t each = CeilDiv(parts, kWide), end = min(parts, (run + 1) * each);
#pragma unroll 8
    for (int64_t k = run * each; k < end; ++k) sum += partials[k * count + i];
  }
  __shared__ float sums[kSumThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (run > 0 || i >= count) return;
#pragma unroll
  for (int r = 1; r < kWide; ++r) sum += sums[r * kElements + threadIdx.x];
  const int64_t weights = int64_t(kTaps) * channels;
  if (i < weights) {
    dw[i] = FromFloat<T>(sum);
  } else if (i < weights + channels) {
    dbias[i - weights] = sum;
  } else {
    dscale[i - weights - channels] = sum;
  }
}

template <typename T, Input kInput, int kStride, Pass kPass,
          int kThreads = kPass == Pass::kSums ? kFew : kMany>
Status Launch(const Context& ctx, const ConvProblem& p, GradientArgs<T> g, int64_t splits,
              const void* x, const void* dy, const std::string& what) {
  constexpr int kItem = 2, V = 2, S = 3;
  RowUnits& u = g.u;
  g.of = RowsOfX(p);
  const RowArray from = RowsOfY(p);
  g.pad_h = int(p.pad[1]);
  g.pad_w = int(p.pad[2]);
  RowArray walked = g.of;  // rows and columns, or pairs of them, that threads own
  if (kStride == 2) {
    g.skip_h = g.pad_h / 2;
    g.skip_w = g.pad_w / 2;
    g.pad_h %= 2;
    g.pad_w %= 2;
    walked.h = int(CeilDiv(g.of.h + g.pad_h, 2));
    walked.w = int(CeilDiv(g.of.w + g.pad_w, 2));
  }
  const int sms = Multiprocessors();
  // The sums': as the plan has it.
  const int slabs = kPass == Pass::kSums ? int(CeilDiv(walked.channels, 128 * V)) : 0;
  g.t = ChooseThreads(u, walked, walked.channels, V, kItem, S, kThreads - 32, sms, slabs,
                      kStride == 1 ? 2 : 3, kStride);
  if constexpr (kPass == Pass::kSums && kStride == 1 && kThreads == kFew) {
    // Runs do not divide the threads well: 56x56x144 takes 0.239 ms with 288 threads at work and 0.206 with 576 (H200),
    // 14x14x384 0.043 with 384 and 0.049 with 576. Of stride 2 more threads spill.
    if (g.t.threads < 2 * kThreads / 3) {
      return Launch<T, kInput, kStride, kPass, kMany>(ctx, p, g, splits, x, dy, what);
    }
  }
  const int64_t parts = kPass == Pass::kSums ? splits : std::max(1, sms / u.slabs);
  ShareRows(u, walked.images, walked.h, walked.w, parts);
  g.pitch = u.width + (kStride == 1 ? S - 1 : 1);
  g.x_at = uint32_t(StagedBytes(u.images, g.pitch, g.t.pixel_bytes));
  u.stage_bytes = int(g.x_at) + StagedBytes(u.images, u.width * kStride, g.t.pixel_bytes);
  u.stages = std::clamp(200 * 1024 / u.stage_bytes, 2, 16);
  if (u.stages < 4) return Status::Internal(what + ": its ring has no room for a window");
  const int slab = g.t.lanes * V;
  JAXCONV_RETURN_IF_ERROR(
      EncodeRows(p.dtype, x, g.of, slab, u.width * kStride, u.images, what, &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeRows(p.dtype, dy, from, slab, g.pitch, u.images, what, &g.dy));
  const int64_t blocks = (kPass == Pass::kSums ? splits : CeilDiv(u.rows, u.share)) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  CoverSums(u, kPass == Pass::kSums ? g.t.threads * S * V * 4 : 0);
  const int bytes = u.ring_bytes + u.stages * 16;
  const auto kernel = DepthwiseNormalisedGradientKernel<T, kInput, kStride, kPass, kThreads>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), g.t.threads + 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <Pass kPass, typename T>
Status LaunchStride(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                    GradientArgs<T> g, int64_t splits, const void* x, const void* dy,
                    const std::string& what) {
  g.n = MakeNormalised<T>(n);
  return ForInput(n, what, [&](auto input) {
    constexpr Input kInput = decltype(input)::value;
    return p.stride[2] == 2 ? Launch<T, kInput, 2, kPass>(ctx, p, g, splits, x, dy, what)
                            : Launch<T, kInput, 1, kPass>(ctx, p, g, splits, x, dy, what);
  });
}

}  // namespace

Status DepthwiseNormalisedSums(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                               int64_t splits, const void* x, const void* dy, const void* w,
                               void* dw, void* dscale, void* dbias, float* partials,
                               const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    GradientArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.partials = partials;
    JAXCONV_RETURN_IF_ERROR(LaunchStride<Pass::kSums>(ctx, p, n, g, splits, x, dy, what));
    const int64_t blocks = CeilDiv(kSums * p.c, kSumThreads / kWide);
    SumGradientKernel<T><<<unsigned(blocks), kSumThreads, 0, ctx.stream>>>(
        partials, splits, int(p.c), static_cast<T*>(dw), static_cast<float*>(dbias),
        static_cast<float*>(dscale));
    return LaunchStatus(what + " partial sums");
  });
}

Status DepthwiseNormalisedDx(const Context& ctx, const ConvProblem& p, const Normalisation& n,
                             int64_t count, const void* x, const void* dy, const void* w,
                             const void* dscale, const void* dbias, void* dx,
                             const std::string& what) {
  return ForHalf(p.dtype, what, [&](auto tag) {
    using T = typename decltype(tag)::type;
    GradientArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.dx = static_cast<T*>(dx);
    g.dscale = static_cast<const float*>(dscale);
    g.dbias = static_cast<const float*>(dbias);
    g.inv_n = float(1.0 / double(count));
    return LaunchStride<Pass::kDx>(ctx, p, n, g, 1, x, dy, what);
  });
}

}  // namespace jaxconv::cuda::conv
