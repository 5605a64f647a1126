// The end of two_read's first walk: a block's sums, added up over its threads, become parts of its channels' sums.
#pragma once

#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/layout.h"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {

// Floats of shared memory that WriteParts takes.
template <int V, bool kLast>
constexpr int kPartsScratch = kLast ? kThreads * 2 * V : kThreads / 32 * 2;

// All threads of the block.
struct SyncBlock {
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// A thread's sums: channels-last of its V channels, channels-first N chains of one. To `sums`, (2, batch, channels, splits).
// By a block's first kBlock threads, which `sync` makes wait for each other; scratch: as many times 2 * V floats.
template <int V, bool kLast, int kBlock = kThreads, int N, typename Sync = SyncBlock>
__device__ __forceinline__ void WriteParts(const Layout& a, const Place& at, int64_t splits,
                                           const float (&s1)[N], const float (&s2)[N],
                                           float* scratch, float* sums, Sync sync = {}) {
  const auto write = [&](int which, int64_t channel, float sum) {
    if (channel >= a.channels) return;
    const int64_t row = (which * a.batch + at.instance) * a.channels + channel;
    sums[row * splits + at.part] = sum;
  };
  if constexpr (!kLast) {
    float total[2] = {s1[0], s2[0]};
#pragma unroll
    for (int j = 1; j < N; ++j) {
      total[0] += s1[j];
      total[1] += s2[j];
    }
    BlockColumnSums(total, 1, scratch);
    if (threadIdx.x < 2) write(threadIdx.x, at.tile, scratch[threadIdx.x]);
  } else {
    static_assert(N == V);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      scratch[j * kBlock + threadIdx.x] = s1[j];
      scratch[(V + j) * kBlock + threadIdx.x] = s2[j];
    }
    sync();
    // A column is one value of a lane, its rows are the threads of this lane.
    const uint32_t lanes = a.lanes, rows = kBlock / lanes, columns = 2 * V * lanes;
    const auto add_up = [&](uint32_t column, uint32_t first, uint32_t stride) {
      const uint32_t value = column / lanes;
      const float* from = scratch + value * kBlock + (column - value * lanes);
      float sum = 0.f;
#pragma unroll 4
      for (uint32_t r = first; r < rows; r += stride) sum += from[r * lanes];
      return sum;
    };
    const auto write_column = [&](uint32_t column, float sum) {
      const uint32_t value = column / lanes, lane = column - value * lanes;
      write(value / V, (at.tile * lanes + lane) * V + value % V, sum);
    };
    // Several threads a column where there are.
    const uint32_t several = columns < kBlock ? kBlock / columns : 1;
    if (several == 1) {
#pragma unroll 1
      for (uint32_t c = threadIdx.x; c < columns; c += kBlock) write_column(c, add_up(c, 0, 1));
      return;
    }
    const uint32_t turn = threadIdx.x / columns, column = threadIdx.x - turn * columns;
    const float sum = turn < several ? add_up(column, turn, several) : 0.f;
    sync();
    if (turn < several) scratch[threadIdx.x] = sum;
    sync();
    if (turn > 0) return;
    float total = 0.f;
#pragma unroll 1
    for (uint32_t t = 0; t < several; ++t) total += scratch[t * columns + column];
    write_column(column, total);
  }
}

}  // namespace jaxconv::cuda::batchnorm
