// FoldPlanesKernel writes the planes that a window spans as channels, FoldFilterKernel puts w's taps in the order of these
// channels, UnfoldPlanesKernel dw's back (planes.h).
#include "cuda/conv/common/fold.h"

#include <algorithm>
#include <cstdint>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/planes.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 132 * 16;  // of all planes, about

struct FoldPlanesArgs {
  const void* x;
  void* to;
  int64_t pixels;                   // of a plane of x
  int planes, made, depth, stride;  // planes of y in all, of an image of y, and of x
  int vectors;                      // of a pixel of x
  // Of a folded vector: the plane of x for o = 0, and the vector there.
  int first[kMostFolded], vector[kMostFolded];
  int count;  // folded vectors, the others are zeros
};

// Vector: elements of x that one load reads, all of a pixel or a part of them.
template <typename Vector, int kVectors>
__global__ void __launch_bounds__(kThreads)
    FoldPlanesKernel(const __grid_constant__ FoldPlanesArgs a) {
  constexpr int kBytes = int(sizeof(Vector)) * kVectors;
  struct alignas(kBytes < 16 ? kBytes : 16) Pixel {
    Vector v[kVectors];
  };
  const Vector* x = static_cast<const Vector*>(a.x);
  Pixel* to = static_cast<Pixel*>(a.to);
  for (int plane = blockIdx.x; plane < a.planes; plane += gridDim.x) {
    const int image = plane / a.made, o = plane - image * a.made;
    const Vector* from[kVectors];  // null: zeros
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int d = o * a.stride + a.first[i];
      from[i] = i < a.count && d >= 0 && d < a.depth
                    ? x + (int64_t(image) * a.depth + d) * a.pixels * a.vectors + a.vector[i]
                    : nullptr;
    }
    const int64_t step = int64_t(gridDim.y) * kThreads;
    for (int64_t at = int64_t(blockIdx.y) * kThreads + threadIdx.x; at < a.pixels; at += step) {
      Pixel pixel;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        pixel.v[i] = Vector{};
        if (from[i] != nullptr) pixel.v[i] = __ldg(from[i] + at * a.vectors);
      }
      to[plane * a.pixels + at] = pixel;
    }
  }
}

// (R*S, channels, K) from w (T, R*S, C, K): channel t * C + c is plane t's, those past T * C are zeros. `count`: elements
// that are written, `filled`: T * C.
template <typename E>
__global__ void __launch_bounds__(kThreads)
    FoldFilterKernel(const E* __restrict__ w, E* __restrict__ to, int64_t count, int64_t taps,
                     int64_t c, int64_t k, int64_t channels, int64_t filled) {
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kThreads) {
    const int64_t column = at % k, row = at / k;  // row: (tap, channel of all)
    const int64_t of_all = row % channels, tap = row / channels;
    const int64_t t = of_all / c, channel = of_all % c;
    to[at] = of_all < filled ? w[((t * taps + tap) * c + channel) * k + column] : E(0);
  }
}

// dw (T, R*S, C, K) from (R*S, channels, K), of whose channels t * C + c is plane t's.
template <typename E>
__global__ void __launch_bounds__(kThreads)
    UnfoldPlanesKernel(const E* __restrict__ from, E* __restrict__ dw, int64_t count, int64_t taps,
                       int64_t c, int64_t k, int64_t channels) {
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kThreads) {
    const int64_t column = at % k, row = at / k;  // row: (t, tap, channel)
    const int64_t channel = row % c, tap = row / c % taps, t = row / c / taps;
    dw[at] = from[(tap * channels + t * c + channel) * k + column];
  }
}

// bytes: of a folded pixel.
template <typename Vector>
Status FoldVectors(const Context& ctx, const FoldPlanesArgs& a, int64_t bytes,
                   const std::string& what) {
  const auto kernel = [&]() -> void (*)(FoldPlanesArgs) {
    constexpr int kOne = int(sizeof(Vector));
    switch (bytes) {
      case 8:
        if constexpr (kOne <= 4) return FoldPlanesKernel<Vector, 8 / kOne>;
        break;
      case 16:
        if constexpr (kOne <= 8) return FoldPlanesKernel<Vector, 16 / kOne>;
        break;
      case 32:
        return FoldPlanesKernel<Vector, 32 / kOne>;
      case 64:
        return FoldPlanesKernel<Vector, 64 / kOne>;
      case 128:
        if constexpr (kOne >= 4) return FoldPlanesKernel<Vector, 128 / kOne>;
        break;
    }
    return nullptr;
  }();
  if (kernel == nullptr) return Status::Internal(what + ": no kernel folds its planes");
  // A thread has eight pixels of a plane, or more where there are enough planes.
  const unsigned rows = unsigned(std::clamp<int64_t>(a.pixels / (8 * kThreads), 1, 64));
  const dim3 blocks(unsigned(std::min<int64_t>(a.planes, CeilDiv(kBlocks, rows))), rows);
  kernel<<<blocks, kThreads, 0, ctx.stream>>>(a);
  return LaunchStatus(what + " (planes to channels)");
}

}  // namespace

Status FoldPlanes(const Context& ctx, const ConvProblem& p, const ConvProblem& q, const void* x,
                  void* to, const std::string& what) {
  const int64_t item = int64_t(SizeOf(p.dtype));
  int64_t bytes = 16;  // of a vector
  while (p.c * item % bytes != 0) bytes /= 2;
  FoldPlanesArgs a{};
  a.x = x;
  a.to = to;
  a.pixels = p.in[1] * p.in[2];
  a.planes = int(p.n * p.out[0]);
  a.made = int(p.out[0]);
  a.depth = int(p.in[0]);
  a.stride = int(p.stride[0]);
  a.vectors = int(p.c * item / bytes);
  a.count = int(p.filter[0]) * a.vectors;
  for (int i = 0; i < a.count; ++i) {
    a.first[i] = int(i / a.vectors * p.dilation[0] - p.pad[0]);
    a.vector[i] = i % a.vectors;
  }
  const auto fold = bytes == 16  ? FoldVectors<uint4>
                    : bytes == 8 ? FoldVectors<uint2>
                    : bytes == 4 ? FoldVectors<uint32_t>
                                 : FoldVectors<uint16_t>;
  return fold(ctx, a, q.c * item, what);
}

Status FoldFilter(const Context& ctx, const ConvProblem& p, const ConvProblem& q, const void* w,
                  void* to, const std::string& what) {
  const int64_t count = FilterCount(q);
  const unsigned blocks = unsigned(std::min<int64_t>(CeilDiv(count, kThreads), 132 * 8));
  const auto launch = [&](auto element) {
    using E = decltype(element);
    FoldFilterKernel<E><<<blocks, kThreads, 0, ctx.stream>>>(
        static_cast<const E*>(w), static_cast<E*>(to), count, p.filter[1] * p.filter[2], p.c, p.k,
        q.c, p.filter[0] * p.c);
  };
  SizeOf(p.dtype) == 2 ? launch(uint16_t{}) : launch(uint32_t{});
  return LaunchStatus(what + " (planes of the filter to channels)");
}

Status UnfoldFilter(const Context& ctx, const ConvProblem& p, const ConvProblem& q,
                    const void* from, void* dw, const std::string& what) {
  const int64_t count = FilterCount(p);
  const unsigned blocks = unsigned(std::min<int64_t>(CeilDiv(count, kThreads), 132 * 8));
  const auto launch = [&](auto element) {
    using E = decltype(element);
    UnfoldPlanesKernel<E>
        <<<blocks, kThreads, 0, ctx.stream>>>(static_cast<const E*>(from), static_cast<E*>(dw),
                                              count, p.filter[1] * p.filter[2], p.c, p.k, q.c);
  };
  SizeOf(p.dtype) == 2 ? launch(uint16_t{}) : launch(uint32_t{});
  return LaunchStatus(what + " (channels to planes)");
}

}  // namespace jaxconv::cuda::conv
