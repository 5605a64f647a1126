// fprop of few images, and dgrad of stride 1 as the same with the filter turned:
//
//   dst[n, p, q, c] = sum over r, s of  src[n, p * stride - pad + r, q * stride - pad + s, c] * w[r, s, c]
//
// Arrays of a few hundred KB lie in the L2 cache, and what takes time is to wait for it: this kernel waits once or twice
// (the larger filters in 32 bits more often). A thread computes a run of kRun adjacent pixels along W for 4 channels, and
// asks for all inputs and taps that registers hold before its first FMA. There is no shared memory and no barrier. A block
// is (vectors of 4 channels) x (runs) x (rows), so that the pixels that its threads share come from L1; blocks are small,
// so that every multiprocessor has some of them. Reads: src, from L2 about twice; w once per block. Writes dst once.
#include "cuda/conv/depthwise/few_domain.h"

#include <algorithm>
#include <type_traits>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/depthwise/kernels.h"

namespace jaxconv::cuda::conv {
namespace {

using depthwise::FewBlock;
using depthwise::kFewThreads;
using depthwise::kFewVector;

// Registers for inputs and taps on their way, of 168.
constexpr int kWordsOnTheirWay = 120;

template <typename T>
struct FewArgs {
  const T* src;
  const T* w;  // its last tap where it is turned
  T* dst;
  EpilogueArgs<T> epilogue;
  int src_h, src_w, dst_h, dst_w;
  int pad_h, pad_w;
  int vecs;                                       // of a pixel
  int pixel_bytes, src_row_bytes, dst_row_bytes;  // from one to the next
  int tap_bytes;                                  // negative where the filter is turned
  FastDiv by_channels, by_columns,
      by_rows;  // blocks: (channels, columns, rows, images), the first fastest
};

// 4 elements as they lie in memory.
template <typename T>
struct Raw {
  uint32_t word[kFewVector * sizeof(T) / 4];
};

// `times` as many bytes on. nvcc makes of 64-bit products three instructions and more, and they are in front of the loads.
template <typename T>
__device__ __forceinline__ T* Step(T* p, int times, int bytes) {
#ifdef __CUDA_ARCH__
  uint64_t to;
  asm("mad.wide.s32 %0, %1, %2, %3;"
      : "=l"(to)
      : "r"(bytes), "r"(times), "l"(reinterpret_cast<uint64_t>(p)));
  return reinterpret_cast<T*>(to);
#else
  return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(p) + uint64_t(int64_t(times) * bytes));
#endif
}

template <typename T>
__device__ __forceinline__ void LoadRaw(const T* p, Raw<T>& raw) {
  if constexpr (sizeof(T) == 4) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    raw.word[0] = v.x, raw.word[1] = v.y, raw.word[2] = v.z, raw.word[3] = v.w;
  } else {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    raw.word[0] = v.x, raw.word[1] = v.y;
  }
}

template <typename T>
__device__ __forceinline__ void Unpack(const Raw<T>& raw, float (&to)[kFewVector]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kFewVector; ++i) to[i] = __uint_as_float(raw.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kFewVector / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        to[2 * i] = __uint_as_float(raw.word[i] << 16);
        to[2 * i + 1] = __uint_as_float(raw.word[i] & 0xffff0000u);
      } else {
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&raw.word[i]));
        to[2 * i] = both.x;
        to[2 * i + 1] = both.y;
      }
    }
  }
}

template <typename T, int R, int kStride, int kRun>
__global__ void __launch_bounds__(kFewThreads, 3) FewKernel(const FewArgs<T> g) {
  constexpr int V = kFewVector;
  constexpr int kColumns = (kRun - 1) * kStride + R;
  constexpr int kRowWords = (kColumns + R) * V * int(sizeof(T)) / 4;
  constexpr int kRows = std::clamp(kWordsOnTheirWay / kRowWords, 1, R);  // of the filter, at a time

  const uint32_t a = g.by_channels.Div(blockIdx.x), b = g.by_columns.Div(a), n = g.by_rows.Div(b);
  const int vec = int((blockIdx.x - a * g.by_channels.d) * blockDim.x + threadIdx.x);
  const int q0 = int((a - b * g.by_columns.d) * blockDim.y + threadIdx.y) * kRun;
  const int p = int((b - n * g.by_rows.d) * blockDim.z + threadIdx.z);
  if (vec >= g.vecs || q0 >= g.dst_w || p >= g.dst_h) return;

  const int h0 = p * kStride - g.pad_h, w0 = q0 * kStride - g.pad_w;
  constexpr int kVectorBytes = V * int(sizeof(T));
  // Of what is outside only addresses are made.
  const T* src = Step(Step(g.src, vec, kVectorBytes), int(n) * g.src_h + h0, g.src_row_bytes);
  src = Step(src, w0, g.pixel_bytes);
  const T* taps = Step(g.w, vec, kVectorBytes);

  Raw<T> bias;
  const bool biased = g.epilogue.bias != nullptr;
  if (biased) LoadRaw(Step(g.epilogue.bias, vec, kVectorBytes), bias);

  float acc[kRun][V] = {};
#pragma unroll 1
  for (int first = 0; first < R; first += kRows) {
    Raw<T> in[kRows][kColumns], tap[kRows][R];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (R % kRows != 0 && first + r >= R) break;
      const int h = h0 + first + r;
      // A row that is outside has no columns.
      const unsigned width = unsigned(h) < unsigned(g.src_h) ? unsigned(g.src_w) : 0u;
      const T* row = Step(src, first + r, g.src_row_bytes);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        in[r][c] = {};
        if (unsigned(w0 + c) < width) LoadRaw(Step(row, c, g.pixel_bytes), in[r][c]);
      }
#pragma unroll
      for (int s = 0; s < R; ++s) LoadRaw(Step(taps, (first + r) * R + s, g.tap_bytes), tap[r][s]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (R % kRows != 0 && first + r >= R) break;
      float x[kColumns][V];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) Unpack(in[r][c], x[c]);
#pragma unroll
      for (int s = 0; s < R; ++s) {
        float f[V];
        Unpack(tap[r][s], f);
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
#pragma unroll
          for (int i = 0; i < V; ++i) acc[e][i] = fmaf(x[e * kStride + s][i], f[i], acc[e][i]);
        }
      }
    }
  }

  if (biased) {
    float shift[V];
    Unpack(bias, shift);
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
#pragma unroll
      for (int i = 0; i < V; ++i) acc[e][i] += shift[i];
    }
  }
  const auto store = [&](T* array) {
    T* run = Step(Step(array, vec, kVectorBytes), int(n) * g.dst_h + p, g.dst_row_bytes);
    run = Step(run, q0, g.pixel_bytes);
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (q0 + e < g.dst_w) StorePacked<T, V>(Step(run, e, g.pixel_bytes), acc[e]);
    }
  };
  if (g.epilogue.z != nullptr) store(g.epilogue.z);
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    // What mobile networks have side by side; a call takes as long as all FMAs.
    if (!ActivateFrequent(g.epilogue.activation, g.epilogue.slope, acc[e]))
      ApplyActivation(g.epilogue.activation, acc[e], g.epilogue.slope);
  }
  store(g.dst);
}

template <typename T>
using Kernel = void (*)(const FewArgs<T>);

template <typename T, int R, int kStride>
Kernel<T> OfRun(int run) {
  if constexpr (depthwise::MostFewRun(R, kStride) == 4) {
    if (run == 4) return FewKernel<T, R, kStride, 4>;
  }
  return run == 2 ? FewKernel<T, R, kStride, 2> : FewKernel<T, R, kStride, 1>;
}

template <typename T>
Kernel<T> KernelOf(int64_t filter, int64_t stride, int run) {
  if (filter == 3) return stride == 1 ? OfRun<T, 3, 1>(run) : OfRun<T, 3, 2>(run);
  if (filter == 5) return stride == 1 ? OfRun<T, 5, 1>(run) : OfRun<T, 5, 2>(run);
  return OfRun<T, 7, 1>(run);
}

}  // namespace

Status DepthwiseFew(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                    const void* src, const void* w, const void* bias, void* dst, void* z,
                    const std::string& what) {
  const int64_t* from = dgrad ? p.out : p.in;
  const int64_t* to = dgrad ? p.in : p.out;
  const int64_t images = p.n * p.in[0];
  const FewBlock block(images, to[1], to[2], p.c, p.filter[2], p.stride[2], Multiprocessors());
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(block.blocks(images), what));
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    FewArgs<T> g{};
    g.src = static_cast<const T*>(src);
    g.w = static_cast<const T*>(w) + (dgrad ? (p.filter_size() - 1) * p.c : 0);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    g.src_h = int(from[1]);
    g.src_w = int(from[2]);
    g.dst_h = int(to[1]);
    g.dst_w = int(to[2]);
    g.pad_h = int(dgrad ? p.filter[1] - 1 - p.pad[1] : p.pad[1]);
    g.pad_w = int(dgrad ? p.filter[2] - 1 - p.pad[2] : p.pad[2]);
    g.vecs = int(p.c / kFewVector);
    g.pixel_bytes = int(p.c * int64_t(sizeof(T)));
    g.src_row_bytes = g.src_w * g.pixel_bytes;
    g.dst_row_bytes = g.dst_w * g.pixel_bytes;
    g.tap_bytes = dgrad ? -g.pixel_bytes : g.pixel_bytes;
    g.by_channels = FastDiv(block.channel_blocks);
    g.by_columns = FastDiv(block.column_blocks);
    g.by_rows = FastDiv(block.row_blocks);
    const dim3 threads{unsigned(block.vecs), unsigned(block.runs), unsigned(block.rows)};
    KernelOf<T>(p.filter[2], p.stride[2],
                block.run)<<<unsigned(block.blocks(images)), threads, 0, ctx.stream>>>(g);
    return LaunchStatus(what);
  });
}

}  // namespace jaxconv::cuda::conv
