// out[i] = sum over parts of partial[part][order(i)], in an order that depends on their number
// only: reads parts * count * 4 bytes, writes count elements. Also the checks that every launcher
// of this folder makes.
#include "cuda/conv/common/reduce.h"

#include "cuda/conv/common/kernel.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kRuns = 8;   // of the parts of an element, where they are many
constexpr int kMany = 32;  // parts: one thread would wait for its loads one after another

// A block sums kThreads / kWide elements; kWide threads share an element, each with a run of its
// parts in order, and the runs are added in order.
template <typename T, int kWide>
__global__ void __launch_bounds__(kThreads)
    SumPartialsKernel(const float* __restrict__ partials, int64_t parts, int64_t count,
                      bool tap_inner, FastDiv by_k, FastDiv by_channels, int64_t taps,
                      T* __restrict__ out) {
  constexpr int kElements = kThreads / kWide;
  const int run = threadIdx.x / kElements;
  const int64_t i = int64_t(blockIdx.x) * kElements + threadIdx.x % kElements;  // [0, count)
  float sum = 0.f;
  if (i < count) {
    int64_t from = i;
    if (tap_inner) {
      const QuotRem k = DivMod(i, by_k);
      const QuotRem channel = DivMod(k.quot, by_channels);
      from = (channel.rem * taps + channel.quot) * int64_t(by_k.d) + k.rem;
    }
    const int64_t each = CeilDiv(parts, kWide);
    const int64_t end = min(parts, (run + 1) * each);
#pragma unroll 8
    for (int64_t part = run * each; part < end; ++part) sum += partials[part * count + from];
  }
  if constexpr (kWide > 1) {
    __shared__ float sums[kThreads];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (run > 0) return;
#pragma unroll
    for (int r = 1; r < kWide; ++r) sum += sums[r * kElements + threadIdx.x];
  }
  if (i < count) out[i] = FromFloat<T>(sum);
}

std::string Number(int64_t v) { return std::to_string(v); }

}  // namespace

Status SumPartials(const Context& ctx, DType dtype, const float* partials, int64_t parts,
                   int64_t count, const PartialOrder& order, void* out, const char* what) {
  if (count == 0) return Status::Ok();
  const bool many = parts >= kMany;
  const int64_t blocks = CeilDiv(count, many ? kThreads / kRuns : kThreads);
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  return ForElement(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = many ? SumPartialsKernel<T, kRuns> : SumPartialsKernel<T, 1>;
    kernel<<<unsigned(blocks), kThreads, 0, ctx.stream>>>(partials, parts, count, order.tap_inner,
                                                          FastDiv(order.k), FastDiv(order.channels),
                                                          order.taps, static_cast<T*>(out));
    return LaunchStatus(std::string(what) + " partial sums");
  });
}

Status CheckWorkspace(Workspace workspace, int64_t needed, const std::string& what) {
  if (needed < 0) return Status::Invalid(what + ": its workspace has more than 2^63 bytes");
  if (needed == 0 || (workspace.data != nullptr && workspace.bytes >= needed)) return Status::Ok();
  return Status::Invalid(what + ": expected a workspace of at least " + Number(needed) +
                         " bytes, got " + Number(workspace.data ? workspace.bytes : 0));
}

Status CheckBlocks(int64_t blocks, const std::string& what) {
  if (blocks >= 1 && blocks < (int64_t(1) << 31)) return Status::Ok();
  return Status::Invalid(what + ": " + Number(blocks) + " blocks; expected 1 to 2147483647");
}

}  // namespace jaxconv::cuda::conv
