// Integer convolution on the host, an output at a time: what XLA's own is checked against, and the reader's numbers. The
// plan gives a CPU XLA's own convolution, which is exact and faster.
#include <algorithm>
#include <string>

#include "common/integer.h"
#include "common/launch.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

Status ConvInteger(const Context& ctx, const IntegerConvProblem& p, const Plan& plan,
                   const ConvIntegerArrays& a, Workspace) {
  if (plan.kernel != "integer/output") {
    return Status::Unimplemented("conv_integer[" + std::string(plan.kernel) +
                                 "]: there is no such kernel on a CPU");
  }
  const auto place = integer::MakePlace<integer::PlainDivider>(
      p, [](int64_t d) { return integer::PlainDivider{d}; });
  constexpr int64_t kRun = 256;  // outputs of an item
  const int64_t outputs = p.n * p.out_size() * p.k;
  integer::WithTypes(p, [&](auto sum, auto x, auto w) {
    using Sum = typename decltype(sum)::type;
    using X = typename decltype(x)::type;
    using W = typename decltype(w)::type;
    ParallelFor(ctx, (outputs + kRun - 1) / kRun, [&](int64_t item) {
      for (int64_t i = item * kRun; i < std::min(outputs, (item + 1) * kRun); ++i) {
        const integer::Output y = integer::OutputAt(place, i);
        integer::Store(p.y_type, a.y, i,
                       integer::SumOf<Sum, X, W, int64_t>(p, a.x.as<X>(), a.w.as<W>(), y));
      }
    });
  });
  return Status::Ok();
}

}  // namespace jaxconv::cpu
