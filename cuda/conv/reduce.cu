// out[i] = sum over parts in order of partial[part][order(i)]. One thread an element: reads parts *
// count * 4 bytes, writes count elements. Also the checks that every launcher of this folder makes.
#include "cuda/conv/reduce.h"

#include "cuda/conv/common.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumPartialsKernel(const float* __restrict__ partials, int64_t parts, int64_t count,
                      bool tap_inner, FastDiv by_k, FastDiv by_channels, int64_t taps,
                      T* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;  // [0, count)
  if (i >= count) return;
  int64_t from = i;
  if (tap_inner) {
    const QuotRem k = DivMod(i, by_k);
    const QuotRem channel = DivMod(k.quot, by_channels);
    from = (channel.rem * taps + channel.quot) * int64_t(by_k.d) + k.rem;
  }
  float sum = 0.f;
#pragma unroll 8
  for (int64_t part = 0; part < parts; ++part) sum += partials[part * count + from];
  out[i] = FromFloat<T>(sum);
}

std::string Number(int64_t v) { return std::to_string(v); }

}  // namespace

Status SumPartials(const Context& ctx, DType dtype, const float* partials, int64_t parts,
                   int64_t count, const PartialOrder& order, void* out, const char* what) {
  if (count == 0) return Status::Ok();
  const int64_t blocks = CeilDiv(count, kThreads);
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  return ForElement(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SumPartialsKernel<T><<<unsigned(blocks), kThreads, 0, ctx.stream>>>(
        partials, parts, count, order.tap_inner, FastDiv(order.k), FastDiv(order.channels),
        order.taps, static_cast<T*>(out));
    return LaunchStatus(std::string(what) + " partial sums");
  });
}

Status CheckIndexable(const ConvProblem& p, const char* what) {
  const auto fits = [](int64_t v) { return v > -kCoordLimit && v < kCoordLimit; };
  bool ok = fits(p.n) && fits(p.c) && fits(p.k) && fits(p.in_size()) && fits(p.out_size()) &&
            fits(p.filter_size()) && fits(p.filter_size() * p.group_c()) &&
            fits(p.filter_size() * p.group_k());
  for (int d = 0; d < 3; ++d) {
    ok = ok && fits(p.stride[d]) && fits(p.pad[d]) && fits(p.dilation[d]) &&
         fits(p.out[d] * p.stride[d] + (p.pad[d] < 0 ? -p.pad[d] : p.pad[d])) &&
         fits(p.in[d] + (p.pad[d] < 0 ? -p.pad[d] : p.pad[d])) &&
         fits(p.filter[d] * p.dilation[d] + (p.pad[d] < 0 ? -p.pad[d] : p.pad[d]));
  }
  if (ok) return Status::Ok();
  const auto extents = [](const int64_t (&v)[3]) {
    return "(" + Number(v[0]) + ", " + Number(v[1]) + ", " + Number(v[2]) + ")";
  };
  return Status::Invalid(
      std::string(what) +
      ": expected batch, channels, pixels of one image, taps * channels of one group, and every "
      "coordinate below 2^30; got n=" +
      Number(p.n) + " c=" + Number(p.c) + " k=" + Number(p.k) + " in=" + extents(p.in) +
      " filter=" + extents(p.filter) + " out=" + extents(p.out) + " stride=" + extents(p.stride) +
      " pad=" + extents(p.pad) + " dilation=" + extents(p.dilation));
}

Status CheckWorkspace(Workspace workspace, int64_t needed, const std::string& what) {
  if (needed <= 0 || (workspace.data != nullptr && workspace.bytes >= needed)) return Status::Ok();
  return Status::Invalid(what + ": expected a workspace of at least " + Number(needed) +
                         " bytes, got " + Number(workspace.data ? workspace.bytes : 0));
}

Status CheckBlocks(int64_t blocks, const std::string& what) {
  if (blocks >= 1 && blocks < (int64_t(1) << 31)) return Status::Ok();
  return Status::Invalid(what + ": " + Number(blocks) + " blocks; expected 1 to 2147483647");
}

}  // namespace jaxconv::cuda::conv
