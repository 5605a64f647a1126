// dgrad of a filter that steps by its own extents (patches of an image of few channels):
//
//   dx[n, p * R + r, q * S + s, c] = sum over k of dy[n, p, q, k] * w[r, s, c, k]
//
// Each element of dx is one element of the product of dy's pixels (M = N*P*Q, K) and w (R*S*C, K) transposed, whose rows
// only have to be dealt to the rows of patches. The dense kernels make the product in the workspace; UnpatchKernel moves
// it, a grid-stride loop over vectors of S*C's elements. Reads dy and w once, dx's size twice, writes it twice: bound by
// that traffic.
#include <algorithm>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/dense/sm90.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;

// dx of patches from the product's rows, a row the R*S*C elements of a patch: x is (images, P, R, Q,
// S*C). `item` is a vector of S*C's elements.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    UnpatchKernel(const V* __restrict__ rows, V* __restrict__ dx, int64_t count, FastDiv by_item,
                  FastDiv by_q, FastDiv by_r) {
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kThreads) {
    const QuotRem item = DivMod(at, by_item), q = DivMod(item.quot, by_q), r = DivMod(q.quot, by_r);
    dx[at] = rows[((r.quot * by_q.d + q.rem) * by_r.d + r.rem) * by_item.d + item.rem];
  }
}

template <typename V>
Status Unpatch(const Context& ctx, const ConvProblem& p, const void* rows, void* dx, int64_t item,
               const std::string& what) {
  const int64_t count = p.n * p.in_size() * p.c * int64_t(SizeOf(p.dtype)) / int64_t(sizeof(V));
  const int64_t blocks = std::min<int64_t>(CeilDiv(count, kThreads), 132 * 16);
  UnpatchKernel<V><<<unsigned(blocks), kThreads, 0, ctx.stream>>>(
      static_cast<const V*>(rows), static_cast<V*>(dx), count, FastDiv(item), FastDiv(p.out[2]),
      FastDiv(p.filter[1]));
  return LaunchStatus(what);
}

}  // namespace

Status StemPatchesDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                        const void* w, void* dx, Workspace workspace, const std::string& what) {
  const DenseProblem q = stem::PatchProduct(p);
  const int64_t item = int64_t(SizeOf(p.dtype)), line = p.filter[2] * p.c;
  const int64_t bytes = Align256(q.m * q.n * item);
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  const Workspace rest = {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
  JAXCONV_RETURN_IF_ERROR(Sm90Dense(ctx, q, bare, stem::PatchPlan(plan.tile), dy, w, nullptr,
                                    nullptr, workspace.data, nullptr, rest));
  return line * item % 16 == 0 ? Unpatch<uint4>(ctx, p, workspace.data, dx, line * item / 16, what)
                               : Unpatch<uint16_t>(ctx, p, workspace.data, dx, line, what);
}

}  // namespace jaxconv::cuda::conv
