// y[n, o, c] = max over taps t of x[n, o*stride - pad + t*dilation, c], and which t it is (common/problem.h).
//
// A thread makes 16 bytes of channels of one pixel of y, neighbours in a warp those beside them, then the next pixel's. It
// reads each tap once; what windows share comes from L1 and L2, so that memory is passed over once: x is read, y is written,
// and a byte for each element of y. Two elements a register, a tap of 16-bit types costs four instructions for two.
#include <type_traits>

#include "cuda/core/context.h"
#include "cuda/pool/geometry.h"
#include "cuda/pool/pool.h"
#include "cuda/pool/scan.cuh"

namespace jaxconv::cuda::pool {
namespace {

constexpr int kThreads = 256;

// kWidth: the window's, or 0 for any: a row's taps are loaded before the first is looked at.
template <typename T, int V, bool kSave, int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    MaxPoolKernel(const Geometry g, const T* __restrict__ x, T* __restrict__ y,
                  uint8_t* __restrict__ position, unsigned count) {
  using S = typename ScanOf<T, V>::type;
  using Access = typename S::Access;
  const unsigned thread = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  if (thread >= count) return;
  const unsigned pixel = g.lanes.Div(thread);
  const int channel = int(thread - pixel * g.lanes.d) * V;
  const Digits4 at = SplitDigits(int(pixel), g.extent[0], g.extent[1], g.extent[2]);
  int first[3];  // the window's first tap, which may be padding
#pragma unroll
  for (int i = 0; i < 3; ++i) first[i] = at.digit[i + 1] * g.stride[i] - g.pad[i];

  S scan;
  unsigned tap = 0;
  for (int t = 0; t < g.window[0]; ++t) {
    const int d = first[0] + t * g.dilation[0];
    for (int r = 0; r < g.window[1]; ++r) {
      const int h = first[1] + r * g.dilation[1];
      const bool inside = unsigned(d) < unsigned(g.in[0]) && unsigned(h) < unsigned(g.in[1]);
      // Not dereferenced where the row is padding.
      const T* row =
          x + (((int64_t(at.digit[0]) * g.in[0] + d) * g.in[1] + h) * g.in[2]) * g.c + channel;
      const auto load = [&](int s) {
        const int w = first[2] + s * g.dilation[2];
        return inside && unsigned(w) < unsigned(g.in[2])
                   ? *reinterpret_cast<const Access*>(row + int64_t(w) * g.c)
                   : S::Padding();
      };
      if constexpr (kWidth > 0) {
        Access taps[kWidth];
#pragma unroll
        for (int s = 0; s < kWidth; ++s) taps[s] = load(s);
#pragma unroll
        for (int s = 0; s < kWidth; ++s) scan.template Take<kSave>(taps[s], tap++);
      } else {
#pragma unroll 2
        for (int s = 0; s < g.window[2]; ++s) scan.template Take<kSave>(load(s), tap++);
      }
    }
  }
  const int64_t to = int64_t(pixel) * g.c + channel;
  *reinterpret_cast<Access*>(y + to) = scan.Max();
  if constexpr (kSave) {
    const auto positions = scan.Positions();
    *reinterpret_cast<std::remove_const_t<decltype(positions)>*>(position + to) = positions;
  }
}

template <typename T, int V, bool kSave, int kWidth>
Status Launch(const Context& ctx, const PoolProblem& p, const void* x, void* y, uint8_t* position,
              const std::string& what) {
  const int64_t count = ForwardThreads(p, V);
  if (count > kMaxThreads) return TooMany(count, what);
  const unsigned blocks = unsigned(CeilDivide(count, kThreads));
  MaxPoolKernel<T, V, kSave, kWidth>
      <<<blocks, kThreads, 0, ctx.stream>>>(Geometry(p, V, false), static_cast<const T*>(x),
                                            static_cast<T*>(y), position, unsigned(count));
  return LaunchStatus(what);
}

template <typename T, int V, bool kSave>
Status WithWidth(const Context& ctx, const PoolProblem& p, const void* x, void* y,
                 uint8_t* position, const std::string& what) {
  if constexpr (V > 1) {
    if (p.window[2] == 2) return Launch<T, V, kSave, 2>(ctx, p, x, y, position, what);
    if (p.window[2] == 3) return Launch<T, V, kSave, 3>(ctx, p, x, y, position, what);
  }
  return Launch<T, V, kSave, 0>(ctx, p, x, y, position, what);
}

}  // namespace

Status Forward(const Context& ctx, const PoolProblem& p, const void* x, void* y, uint8_t* position,
               const std::string& what) {
  return WithInstance(p, {x, y, position}, [&](auto instance) {
    using I = decltype(instance);
    return position != nullptr
               ? WithWidth<typename I::T, I::V, true>(ctx, p, x, y, position, what)
               : WithWidth<typename I::T, I::V, false>(ctx, p, x, y, position, what);
  });
}

}  // namespace jaxconv::cuda::pool
