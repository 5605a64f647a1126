// Float32 arrays into bfloat16 terms, or transposed; sm90_operands.h says how. Terms: reads 4 bytes
// an element, writes 2 a term; a thread splits 8 elements. Transposition: reads and writes 4 bytes an
// element; a block turns 32 x 32.
#include "cuda/gemm/sm90_operands.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/core/divmod.h"
#include "cuda/core/vec.cuh"
#include "cuda/gemm/sm90_split.cuh"

namespace jaxconv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTerms = 3;

struct TermsOf {
  const float* from;
  __nv_bfloat16* to;  // [terms][count]
  int64_t count;
};

__global__ void __launch_bounds__(kThreads) SplitKernel(TermsOf a, TermsOf b) {
  int64_t run = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const bool of_b = run >= a.count / 8;
  run -= of_b ? a.count / 8 : 0;
  const TermsOf o = of_b ? b : a;
  if (run >= o.count / 8) return;
  float x[8];
  LoadVec<float, 8>(o.from + run * 8, x);
  Vec<__nv_bfloat16, 8> out[kTerms];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    __nv_bfloat16 terms[kTerms];
    SplitNumber(x[i], terms);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) out[t].v[i] = terms[t];
  }
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    *reinterpret_cast<Vec<__nv_bfloat16, 8>*>(o.to + t * o.count + run * 8) = out[t];
  }
}

__global__ void __launch_bounds__(kThreads)
    TransposeKernel(const float* from, unsigned tiles_m, unsigned tiles_n, int64_t rows,
                    int64_t columns, float* to) {
  __shared__ float turned[32][33];
  const unsigned tile_n = blockIdx.x % tiles_n, rest = blockIdx.x / tiles_n;
  const unsigned tile_m = rest % tiles_m;
  const int64_t matrix = int64_t(rest / tiles_m) * rows * columns;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
#pragma unroll
  for (int i = y; i < 32; i += kThreads / 32) {
    const int64_t m = int64_t(tile_m) * 32 + i, n = int64_t(tile_n) * 32 + x;
    if (m < rows && n < columns) turned[i][x] = from[matrix + m * columns + n];
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < 32; i += kThreads / 32) {
    const int64_t n = int64_t(tile_n) * 32 + i, m = int64_t(tile_m) * 32 + x;
    if (m < rows && n < columns) to[matrix + n * rows + m] = turned[x][i];
  }
}

// Takes `bytes`, rounded up to 256, off the workspace.
Status Take(int64_t bytes, const std::string& what, Workspace* workspace, void** taken) {
  bytes = CeilDiv(bytes, 256) * 256;
  if (workspace->data == nullptr || workspace->bytes < bytes) {
    return Status::Invalid(what + ": needs " + std::to_string(bytes) +
                           " bytes of workspace for an operand, given " +
                           std::to_string(workspace->data ? workspace->bytes : 0));
  }
  *taken = workspace->data;
  *workspace = {static_cast<char*>(workspace->data) + bytes, workspace->bytes - bytes};
  return Status::Ok();
}

}  // namespace

Status SplitIntoTerms(const Context& ctx, int64_t count_a, int64_t count_b, const std::string& what,
                      const void** a, const void** b, Workspace* workspace) {
  TermsOf of[2] = {};
  for (int i = 0; i < 2; ++i) {
    const void** operand = i == 0 ? a : b;
    of[i].count = i == 0 ? count_a : count_b;
    if (of[i].count == 0) continue;
    void* to;
    JAXCONV_RETURN_IF_ERROR(Take(2 * kTerms * of[i].count, what, workspace, &to));
    of[i].from = static_cast<const float*>(*operand);
    of[i].to = static_cast<__nv_bfloat16*>(to);
    *operand = to;
  }
  const int64_t blocks = CeilDiv(count_a / 8 + count_b / 8, kThreads);
  if (blocks == 0) return Status::Ok();
  if (blocks > 2147483647) {
    return Status::Unimplemented(what + ": more than 2^31 - 1 blocks to split the operands");
  }
  SplitKernel<<<unsigned(blocks), kThreads, 0, ctx.stream>>>(of[0], of[1]);
  return LaunchStatus(what + " (terms)");
}

Status TransposeFloats(const Context& ctx, int64_t count, int64_t rows, int64_t columns,
                       const std::string& what, const void** operand, Workspace* workspace) {
  void* to;
  JAXCONV_RETURN_IF_ERROR(Take(4 * count * rows * columns, what, workspace, &to));
  const int64_t tiles_m = CeilDiv(rows, 32), tiles_n = CeilDiv(columns, 32);
  if (double(count) * double(tiles_m) * double(tiles_n) > 2147483647.0) {
    return Status::Unimplemented(what + ": more than 2^31 - 1 blocks to transpose an operand");
  }
  if (count * rows * columns > 0) {
    TransposeKernel<<<unsigned(count * tiles_m * tiles_n), kThreads, 0, ctx.stream>>>(
        static_cast<const float*>(*operand), unsigned(tiles_m), unsigned(tiles_n), rows, columns,
        static_cast<float*>(to));
  }
  *operand = to;
  return LaunchStatus(what + " (transposition)");
}

}  // namespace jaxconv::cuda
