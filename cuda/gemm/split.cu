// Second pass of a split reduction:
//
//   sum[i, m, n] = partials[0, i, m, n] + partials[1, i, m, n] + ... in this order;  then the
//   epilogue
//
// A thread makes four neighbouring columns (one where n is no multiple of four) and strides over
// the grid. Reads splits * instances * m * n floats, writes the output once.
#include <algorithm>

#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, int kRun>
__global__ void __launch_bounds__(kThreads)
    SplitSumKernel(const __grid_constant__ SplitSum s, const __grid_constant__ EpilogueParams e) {
  const int64_t size = s.instances * s.m * s.n;  // of one part
  const int64_t runs = size / kRun;
  for (int64_t run = int64_t(blockIdx.x) * kThreads + threadIdx.x; run < runs;
       run += int64_t(gridDim.x) * kThreads) {
    const int64_t at = run * kRun;
    const int64_t row = at / s.n;  // [0, instances * m)
    const int n = int(at - row * s.n);
    const int64_t instance = row / s.m;
    const int m = int(row - instance * s.m);
    float sum[kRun] = {};
    for (int64_t part = 0; part < s.splits; ++part) {
      float v[kRun];
      LoadVec<float, kRun>(s.partials + part * size + at, v);
#pragma unroll
      for (int i = 0; i < kRun; ++i) sum[i] += v[i];
    }
    float bias[kRun];
    LoadColumnBias<T>(e, int(instance), n, int(s.n), bias);
    FinishRun<T, false>(e, int(instance), 0, m * e.ldd, m, n, int(s.n), bias, sum);
  }
}

template <typename T>
Status Launch(const Context& ctx, const SplitSum& s, const EpilogueParams& e,
              const std::string& what) {
  const bool vector = s.n % 4 == 0 && Aligned16(s.partials);
  const int64_t runs = s.instances * s.m * s.n / (vector ? 4 : 1);
  const int blocks = int(std::min<int64_t>(CeilDiv(runs, kThreads), 1 << 20));
  if (vector) {
    SplitSumKernel<T, 4><<<blocks, kThreads, 0, ctx.stream>>>(s, e);
  } else {
    SplitSumKernel<T, 1><<<blocks, kThreads, 0, ctx.stream>>>(s, e);
  }
  return LaunchStatus(what + " (sum of splits)");
}

}  // namespace

Status LaunchSplitSum(const Context& ctx, DType dtype, const SplitSum& sum,
                      const EpilogueParams& epilogue, const std::string& what) {
  switch (dtype) {
    case DType::kF32:
      return Launch<float>(ctx, sum, epilogue, what);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(ctx, sum, epilogue, what);
    case DType::kF16:
      return Launch<__half>(ctx, sum, epilogue, what);
    case DType::kF64:
      break;
  }
  return Status::Unimplemented(what + ": no float64 on a GPU");
}

}  // namespace jaxconv::cuda
