// fprop and wgrad of a filter of several planes (T of them, three axes) and few input channels, a volume's first layer:
//
//   y[n, o, p, q, k]  = sum over t, r, s, c of x[n, o * stride + t * dilation - pad, ..., c] * w[t, r, s, c, k]
//   dw[t, r, s, c, k] = sum over n, o, p, q of x[n, o * stride + t * dilation - pad, ..., c] * dy[n, o, p, q, k]
//
// The planes that an output's window spans become channels: FoldPlanesKernel writes, for each plane o of y, x's T planes
// as one of T*C channels, filled up with zeros to 4, 8, 16 or 32. What is left is a convolution of images of few
// channels, which stem's kernels do, or narrow/rows where there are more than 8, and whose wgrad reads dy once.
// FoldFilterKernel puts w's taps in the order of these channels, UnfoldPlanesKernel dw's back. Reads x T times, writes
// and reads these channels of each pixel of a plane of x.
#include <algorithm>
#include <cstdint>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/narrow/narrow.h"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kPixels = 8 * kThreads;  // of a plane, of a tile

struct FoldPlanesArgs {
  const void* x;
  void* to;
  int64_t planes, tiles, pixels;  // of y in all, tiles of a plane, pixels of a plane of x
  int made, depth, stride;        // planes of an image of y and of x
  int vectors;                    // of a pixel of x
  // Of a folded vector: the plane of x for o = 0, and the vector there.
  int first[stem::kMostFolded], vector[stem::kMostFolded];
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
  for (int64_t tile = blockIdx.x; tile < a.planes * a.tiles; tile += gridDim.x) {
    const int64_t plane = tile / a.tiles, begin = (tile - plane * a.tiles) * kPixels;
    const int64_t image = plane / a.made;
    const int o = int(plane - image * a.made);
    const int64_t end = begin + kPixels < a.pixels ? begin + kPixels : a.pixels;
    const Vector* from[kVectors];  // null: zeros
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int d = o * a.stride + a.first[i];
      from[i] = i < a.count && d >= 0 && d < a.depth
                    ? x + (image * a.depth + d) * a.pixels * a.vectors + a.vector[i]
                    : nullptr;
    }
    for (int64_t at = begin + threadIdx.x; at < end; at += kThreads) {
      Pixel pixel;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        pixel.v[i] = from[i] != nullptr ? __ldg(from[i] + at * a.vectors) : Vector{};
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
  const unsigned blocks = unsigned(std::min<int64_t>(a.planes * a.tiles, 132 * 16));
  kernel<<<blocks, kThreads, 0, ctx.stream>>>(a);
  return LaunchStatus(what + " (planes to channels)");
}

Status Fold(const Context& ctx, const ConvProblem& p, int64_t channels, const void* x, void* to,
            const std::string& what) {
  const int64_t item = int64_t(SizeOf(p.dtype));
  int64_t bytes = 16;  // of a vector
  while (p.c * item % bytes != 0) bytes /= 2;
  FoldPlanesArgs a{};
  a.x = x;
  a.to = to;
  a.pixels = p.in[1] * p.in[2];
  a.planes = p.n * p.out[0];
  a.tiles = CeilDiv(a.pixels, kPixels);
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
  return fold(ctx, a, channels * item, what);
}

template <typename E>
Status FoldFilter(const Context& ctx, const ConvProblem& p, const ConvProblem& q, const void* w,
                  void* to, const std::string& what) {
  const int64_t count = FilterCount(q);
  const unsigned blocks = unsigned(std::min<int64_t>(CeilDiv(count, kThreads), 132 * 8));
  FoldFilterKernel<E><<<blocks, kThreads, 0, ctx.stream>>>(
      static_cast<const E*>(w), static_cast<E*>(to), count, p.filter[1] * p.filter[2], p.c, p.k,
      q.c, p.filter[0] * p.c);
  return LaunchStatus(what + " (planes of the filter to channels)");
}

template <typename E>
Status Unfold(const Context& ctx, const ConvProblem& p, int64_t channels, const void* from,
              void* dw, const std::string& what) {
  const int64_t count = FilterCount(p);
  const unsigned blocks = unsigned(std::min<int64_t>(CeilDiv(count, kThreads), 132 * 8));
  UnfoldPlanesKernel<E>
      <<<blocks, kThreads, 0, ctx.stream>>>(static_cast<const E*>(from), static_cast<E*>(dw), count,
                                            p.filter[1] * p.filter[2], p.c, p.k, channels);
  return LaunchStatus(what + " (channels to planes)");
}

}  // namespace

Status StemPlanesFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                       const void* w, const void* bias, void* y, void* z, Workspace workspace,
                       const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const ConvProblem q = stem::PlanesAsChannels(p);
  char* folded = static_cast<char*>(workspace.data);
  char* filter = folded + stem::FoldedBytes(q);
  const bool half = SizeOf(p.dtype) == 2;
  JAXCONV_RETURN_IF_ERROR(Fold(ctx, p, q.c, x, folded, what));
  JAXCONV_RETURN_IF_ERROR(half ? FoldFilter<uint16_t>(ctx, p, q, w, filter, what)
                               : FoldFilter<uint32_t>(ctx, p, q, w, filter, what));
  if (q.c > kFew)
    return NarrowFprop(ctx, q, e, {"narrow/rows", "", 1, 0}, folded, filter, bias, nullptr, y, z,
                       {});
  const bool narrow_in = stem::RefuseNarrowIn(ConvOp::kFprop, q, device).empty();
  return (narrow_in ? StemNarrowIn : StemMma)(ctx, ConvOp::kFprop, q, e, folded, filter, bias, y, z,
                                              what);
}

Status StemPlanesWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                       const void* dy, void* dw, Workspace workspace, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const ConvProblem q = stem::PlanesAsChannels(p);
  char* folded = static_cast<char*>(workspace.data);
  char* sums = folded + stem::FoldedBytes(q);
  float* partials = reinterpret_cast<float*>(sums + stem::FoldedFilterBytes(q));
  const bool half = SizeOf(p.dtype) == 2;
  JAXCONV_RETURN_IF_ERROR(Fold(ctx, p, q.c, x, folded, what));
  if (q.c > kFew) {
    const Workspace parts = {partials, PartialsBytes(q, splits)};
    JAXCONV_RETURN_IF_ERROR(
        NarrowWgrad(ctx, q, {"narrow/rows", "", splits, 0}, folded, dy, sums, parts));
  } else {
    const bool narrow_in = stem::RefuseNarrowIn(ConvOp::kWgrad, q, device).empty();
    JAXCONV_RETURN_IF_ERROR((narrow_in ? StemNarrowInWgrad : StemMmaWgrad)(
        ctx, q, splits, folded, dy, sums, partials, what));
  }
  return half ? Unfold<uint16_t>(ctx, p, q.c, sums, dw, what)
              : Unfold<uint32_t>(ctx, p, q.c, sums, dw, what);
}

}  // namespace jaxconv::cuda::conv
