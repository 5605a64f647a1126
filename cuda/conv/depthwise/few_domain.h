// depthwise/few: what it can run, and how its threads are dealt out. Host C++17 without CUDA headers (cuda/domain.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv/common/domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::depthwise {

constexpr int kFewVector = 4;     // channels of a thread
constexpr int kFewThreads = 128;  // of a block, at most
constexpr int kFewResident = 80;  // of a multiprocessor, about as many as are enough
// Elements of the array that is written, and of the one that is read, which stride 2 makes four times as large. Beyond
// them memory and FMAs count, not latency, and the other kernels read every row once.
constexpr int64_t kMostFewOutputs = int64_t(1) << 22;
constexpr int64_t kMostFewInputs = int64_t(1) << 24;

// Adjacent pixels of a thread. Of 5x5, inputs and taps for four would not fit registers; with stride 2 four read hardly
// less than two do.
constexpr int MostFewRun(int64_t filter, int64_t stride) {
  return filter == 3 && stride == 1 ? 4 : 2;
}

// Whether a * b * c is at most `most`, which is below 2^31; none is negative.
inline bool AtMost(int64_t most, int64_t a, int64_t b, int64_t c) {
  if (a > most || b > most || c > most) return false;
  return a == 0 || b == 0 || c == 0 || (a * b <= most && a * b * c <= most);
}

inline std::string RefuseFew(ConvOp op, const ConvProblem& p) {
  if (op == ConvOp::kWgrad) return "it has no weight gradient";
  const int64_t filter = p.filter[2], stride = p.stride[2];
  const bool fits = p.channels_last && p.k == p.c && p.c % kFewVector == 0 && PlanesAreImages(p) &&
                    p.filter[1] == filter && (filter == 3 || filter == 5 || filter == 7) &&
                    p.dilation[1] == 1 && p.dilation[2] == 1 && p.stride[1] == stride &&
                    (stride == 1 || (stride == 2 && filter < 7 && op == ConvOp::kFprop));
  if (!fits) {
    return "it needs channels-last arrays with K = C a multiple of 4, a filter of 3x3, 5x5 or 7x7, "
           "not dilated, of stride 1, fprop of 3x3 and 5x5 also of stride 2";
  }
  const bool dgrad = op == ConvOp::kDgrad;
  const bool few = AtMost(dgrad ? kMostFewOutputs : kMostFewInputs, p.n, p.in_size(), p.c) &&
                   AtMost(dgrad ? kMostFewInputs : kMostFewOutputs, p.n, p.out_size(), p.c);
  return few ? "" : "it takes at most 2^22 elements of its result, and at most 2^24 of x";
}

// A thread owns a run of adjacent pixels along W for 4 channels; a block is (vectors) x (runs) x (rows) of threads.
struct FewBlock {
  int run;                                            // pixels of a thread: 1, 2 or 4
  int vecs, runs, rows;                               // threads of a block
  int64_t channel_blocks, column_blocks, row_blocks;  // blocks of an image

  // The longest run that leaves kFewResident threads a multiprocessor. With runs half as long its four schedulers would
  // have a second warp then, and two warps issue more than one that does the work of both; with fewer threads than that,
  // short runs are done sooner. Blocks of 64 threads where those of 128 would be fewer than two a multiprocessor: they
  // spread more evenly. A block has some 8 runs for as many neighbouring channels as are left, in steps of 16 so that
  // sectors of 32 bytes stay whole; and of the ways to lay its runs out, that with the fewest blocks, then that which
  // reads the fewest pixels.
  FewBlock(int64_t images, int64_t height, int64_t width, int64_t channels, int64_t filter,
           int64_t stride, int64_t multiprocessors) {
    const int64_t all = channels / kFewVector;
    const auto threads = [&](int64_t of) { return images * height * CeilDivide(width, of) * all; };
    run = MostFewRun(filter, stride);
    while (run > 1 && threads(run) < kFewResident * multiprocessors) run /= 2;
    const int64_t most =
        threads(run) < 2 * kFewThreads * multiprocessors ? kFewThreads / 2 : kFewThreads;

    const int64_t even = CeilDivide(all, CeilDivide(all, most / 8));
    vecs = int(std::min(all, CeilDivide(even, 4) * 4));
    channel_blocks = CeilDivide(all, vecs);
    const int64_t in_row = CeilDivide(width, run), lanes = most / vecs;
    int64_t least_blocks = -1, least_pixels = 0;
    for (int64_t across = 1; across <= std::min(in_row, lanes); ++across) {
      const int64_t down =
          std::min({lanes / across, height, int64_t(64)});  // blockDim.z is at most 64
      const int64_t blocks = CeilDivide(in_row, across) * CeilDivide(height, down);
      const int64_t pixels =
          ((across * run - 1) * stride + filter) * ((down - 1) * stride + filter);
      if (least_blocks >= 0 &&
          (blocks > least_blocks || (blocks == least_blocks && pixels >= least_pixels))) {
        continue;
      }
      least_blocks = blocks;
      least_pixels = pixels;
      runs = int(across);
      rows = int(down);
    }
    column_blocks = CeilDivide(in_row, runs);
    row_blocks = CeilDivide(height, rows);
  }

  int64_t blocks(int64_t images) const {
    return images * row_blocks * column_blocks * channel_blocks;
  }
};

}  // namespace jaxconv::cuda::conv::depthwise
