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
constexpr int kPieces = 8;  // that a thread writes of a plane, or more in planes of many blocks
constexpr int kRows = 64;   // blocks of a plane, at most

struct FoldPlanesArgs {
  const void* x;
  void* to;
  int64_t pixels;           // of a plane of x
  int made, depth, stride;  // planes of an image of y, and of x
  int vectors;              // of a pixel of x
  // Of a folded vector: the plane of x for o = 0, and the vector there.
  int first[kMostFolded], vector[kMostFolded];
  int count;  // folded vectors, the others are zeros
};

// Vector: elements of x that one load reads, all of a pixel or a part of them. kBytes: of a folded pixel. A thread writes
// pieces of up to 16 bytes, and a warp's lie side by side: with a whole pixel a thread, pixels of 128 bytes were written at
// a quarter of the memory's rate.
template <typename Vector, int kBytes>
__global__ void __launch_bounds__(kThreads)
    FoldPlanesKernel(const __grid_constant__ FoldPlanesArgs a) {
  constexpr int kPiece = kBytes < 16 ? kBytes : 16, kOfPixel = kBytes / kPiece;
  constexpr int kVectors = kPiece / int(sizeof(Vector));
  static_assert(kThreads % kOfPixel == 0, "a thread's pieces have one place in their pixels");
  struct alignas(kPiece) Piece {
    Vector v[kVectors];
  };
  const int64_t plane = blockIdx.x;
  const int image = int(plane / a.made), o = int(plane - int64_t(image) * a.made);
  const int begin = int(threadIdx.x) % kOfPixel * kVectors;  // of the thread's folded vectors
  const Vector* from[kVectors];                              // null: zeros
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    from[i] = nullptr;
    if (begin + i >= a.count) continue;
    const int d = o * a.stride + a.first[begin + i];
    if (d < 0 || d >= a.depth) continue;
    from[i] = static_cast<const Vector*>(a.x) +
              (int64_t(image) * a.depth + d) * a.pixels * a.vectors + a.vector[begin + i];
  }
  const int64_t pieces = a.pixels * kOfPixel, step = int64_t(gridDim.y) * kThreads;
  Piece* to = static_cast<Piece*>(a.to) + plane * pieces;
  for (int64_t at = int64_t(blockIdx.y) * kThreads + threadIdx.x; at < pieces; at += step) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      piece.v[i] = Vector{};
      if (from[i] != nullptr) piece.v[i] = __ldg(from[i] + at / kOfPixel * a.vectors);
    }
    to[at] = piece;
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

// bytes: of a folded pixel. planes: of y in all.
template <typename Vector>
Status FoldVectors(const Context& ctx, const FoldPlanesArgs& a, int64_t planes, int64_t bytes,
                   const std::string& what) {
  const auto kernel = [&]() -> void (*)(FoldPlanesArgs) {
    constexpr int kOne = int(sizeof(Vector));
    switch (bytes) {
      case 8:
        if constexpr (kOne <= 4) return FoldPlanesKernel<Vector, 8>;
        break;
      case 16:
        if constexpr (kOne <= 8) return FoldPlanesKernel<Vector, 16>;
        break;
      case 32:
        return FoldPlanesKernel<Vector, 32>;
      case 64:
        return FoldPlanesKernel<Vector, 64>;
      case 128:
        if constexpr (kOne >= 4) return FoldPlanesKernel<Vector, 128>;
        break;
    }
    return nullptr;
  }();
  if (kernel == nullptr) return Status::Internal(what + ": no kernel folds its planes");
  const int64_t pieces = a.pixels * CeilDiv(bytes, 16);
  const int64_t rows = CeilDiv(pieces, kPieces * kThreads);
  const dim3 blocks(unsigned(planes), unsigned(std::min<int64_t>(rows, kRows)));
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
  return fold(ctx, a, p.n * p.out[0], q.c * item, what);
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
