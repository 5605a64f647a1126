// "integer/output": y[i] = the sum of common/integer.h, a thread an element of y, in the order of memory. y is written once,
// coalesced; x and w are read through the caches as often as there are outputs of theirs, coalesced where neighbours in y are
// neighbours there.
#include <cstdint>

#include "common/integer.h"
#include "cuda/conv/integer/domain.h"
#include "cuda/conv/integer/integer.h"
#include "cuda/core/divmod.h"

namespace jaxconv::cuda::conv::integer {
namespace {

using jaxconv::integer::MakePlace;
using jaxconv::integer::Place;

// `Index` is wide enough for all elements of y: uint32_t with FastDiv, int64_t with PlainDivider.
template <typename Sum, typename X, typename W, typename Index, typename Divider>
__global__ void __launch_bounds__(kThreads, 4)
    OutputKernel(const __grid_constant__ IntegerConvProblem p,
                 const __grid_constant__ Place<Divider> place, const X* __restrict__ x,
                 const W* __restrict__ w, void* __restrict__ y, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const jaxconv::integer::Output at = jaxconv::integer::OutputAt(place, Index(i));
  jaxconv::integer::Store(p.y_type, y, i, jaxconv::integer::SumOf<Sum, X, W, int>(p, x, w, at));
}

}  // namespace

Status OneOutput(const Context& ctx, const IntegerConvProblem& p, const void* x, const void* w,
                 void* y, const std::string& what) {
  const int64_t count = p.n * p.out_size() * p.k;
  const auto blocks = static_cast<unsigned>(CeilDivide(count, kThreads));
  jaxconv::integer::WithTypes(p, [&](auto sum, auto x_type, auto w_type) {
    using Sum = typename decltype(sum)::type;
    using X = typename decltype(x_type)::type;
    using W = typename decltype(w_type)::type;
    const auto launch = [&](auto index, const auto& place) {
      using Divider = std::decay_t<decltype(place.n)>;
      OutputKernel<Sum, X, W, decltype(index), Divider><<<blocks, kThreads, 0, ctx.stream>>>(
          p, place, static_cast<const X*>(x), static_cast<const W*>(w), y, count);
    };
    if (count < int64_t{1} << 31) {
      launch(uint32_t(), MakePlace<FastDiv>(p, [](int64_t d) { return FastDiv(d); }));
    } else {
      using jaxconv::integer::PlainDivider;
      launch(int64_t(), MakePlace<PlainDivider>(p, [](int64_t d) { return PlainDivider{d}; }));
    }
  });
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda::conv::integer
