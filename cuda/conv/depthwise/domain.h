// What the depthwise kernels can run. Host C++17 without CUDA headers (cuda/domain.h).
//
//   depthwise/fma           every depthwise problem, in float32 FMAs
//   depthwise/mma           16 bit, stride 1, by banded matrices on the tensor cores
//   depthwise/conv1d        2 to 4 taps along one axis
//   depthwise/rows          sm_90: rows streamed through shared memory by TMA, FMAs
//   depthwise/rows_strided  sm_90: the same for 3x3, 5x5 and 7x7 of stride 2
//   depthwise/rows_mma      sm_90: rows streamed for 5x5 and 7x7 in 16 bit, by banded matrices
//   depthwise/few           few images (few_domain.h): everything asked for at once, FMAs
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/depthwise/few_domain.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::depthwise {

// Along W, by filter: what the zeros between taps leave of a ring stage.
constexpr int MostRowDilation(int filter) { return filter == 3 ? 18 : 6; }

// ---- depthwise/mma
constexpr int kMaxSpan = 9;  // (S - 1) * dilation + 1: 8 outputs reach 16 inputs
constexpr int kMaxFilterRows = 7;
constexpr int kMaxLargeFilter = 41;  // rows, and span: 8 outputs reach 48 inputs
constexpr int kStreams = 16;         // rows of an mma

// Words of one copy of a filter row: elements -8 to 16 deep - 1.
constexpr int CopyWords(int deep) { return 4 + 8 * deep; }
// Of the filter of 8 channels, in shared memory.
constexpr int64_t LargeFilterBytes(int deep, int64_t rows) {
  return 8 * rows * 2 * CopyWords(deep) * 4;
}

inline bool MmaFits(const ConvProblem& p, int64_t filter_rows, int64_t span) {
  return Half(p.dtype) && p.channels_last && p.k == p.c && p.c % 8 == 0 && p.stride[1] == 1 &&
         p.stride[2] == 1 && PlanesAreImages(p) && p.filter[1] <= filter_rows &&
         (p.dilation[1] == 1 || p.filter[1] == 1) && (p.filter[2] - 1) * p.dilation[2] < span &&
         p.n * p.in[0] < kCoordLimit;
}

inline std::string RefuseMma(ConvOp op, const ConvProblem& p, const Device& device) {
  if (MmaFits(p, kMaxFilterRows, kMaxSpan)) return "";
  if (!MmaFits(p, kMaxLargeFilter, kMaxLargeFilter)) {
    return "it needs 16-bit channels-last arrays with K = C a multiple of 8, stride 1, at most 41 "
           "filter rows, not dilated, "
           "and filter rows that reach at most 41 pixels";
  }
  // One output row of 16 runs must fit beside the filter.
  const int64_t needed =
      LargeFilterBytes(3, p.filter[1]) + (p.filter[1] * (kStreams + 5) + kStreams) * 128;
  return op == ConvOp::kWgrad || needed <= device.shared_memory()
             ? ""
             : "its filter does not fit shared memory";
}

// ---- depthwise/conv1d
// The axis of the filter, or -1 where it is none of 2 to 4 taps alone.
inline int Conv1dAxis(const ConvProblem& p) {
  int axis = -1;
  for (int d = 0; d < 3; ++d) {
    if (p.stride[d] != 1) return -1;
    if (p.filter[d] == 1) {
      if (p.pad[d] != 0 || p.in[d] != p.out[d]) return -1;
    } else if (axis >= 0 || p.filter[d] > 4 ||
               p.dilation[d] >= 1 << 26) {  // steps past the end are ints
      return -1;
    } else {
      axis = d;
    }
  }
  return axis;
}

inline std::string RefuseConv1d(const ConvProblem& p) {
  const int axis = Conv1dAxis(p);
  const bool fits = p.channels_last && p.k == p.c && WholeVectors(p, p.c) && axis >= 0;
  // A thread has 16 bytes of each place that the dilation steps over, and of each 16 places of a line.
  if (fits) {
    const double lines =
        double(p.n) * double(p.in_size()) / double(std::max<int64_t>(p.in[axis], 1));
    const double places = double(p.dilation[axis]) + double(std::max(p.in[axis], p.out[axis])) + 16;
    if (lines * places * double(p.c * int64_t(SizeOf(p.dtype)) / 16) >= double(int64_t(1) << 39))
      return "it needs fewer than 2^39 vectors of lines times the dilation and a line's places";
  }
  return fits ? ""
              : "it needs channels-last arrays with K = C of whole 16 bytes, stride 1, and 2 to 4 "
                "taps along one axis with a "
                "dilation below 2^26";
}

// ---- depthwise/rows, rows_strided, rows_mma
inline bool SquareOverRows(const ConvProblem& p) {
  return p.channels_last && WholeVectors(p, p.c) && PlanesAreImages(p) &&
         p.filter[1] == p.filter[2] && p.stride[1] == p.stride[2] && p.padded_below_filter(1) &&
         p.padded_below_filter(2) && p.n * p.in[0] < kCoordLimit;
}

inline std::string RefuseRows(const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  const bool dilated = p.dilation[1] > 1 || p.dilation[2] > 1;
  const int64_t filter = p.filter[1], multiplier = p.k / p.c;
  const bool multiplied =
      !dilated && filter == 3 && (multiplier == 2 || multiplier == 4 || multiplier == 8);
  const bool large = (filter == 5 || filter == 7) && (dilated || p.dtype == DType::kF32);
  const bool fits = SquareOverRows(p) && (p.k == p.c || multiplied) && p.k % p.c == 0 &&
                    p.stride[2] == 1 && (filter == 3 || large) &&
                    p.dilation[2] <= MostRowDilation(int(filter));
  if (fits && !RunFits(p, 8)) return "it needs fewer than 2^31 elements in a run of 8 columns";
  return fits ? ""
              : "it needs channels-last arrays of whole 16 bytes of channels, stride 1, padding "
                "below the filter's reach and "
                "a filter of 3x3, in float32 or with a dilation (along rows up to 18, 5x5 and 7x7 "
                "6) also 5x5 or 7x7, with "
                "K = C, 3x3 without a dilation also K of 2, 4 or 8 times C";
}

inline std::string RefuseRowsStrided(const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  const int64_t filter = p.filter[2];
  const bool fits = SquareOverRows(p) && p.k == p.c &&
                    (filter == 3 || filter == 5 || filter == 7) && p.stride[2] == 2 &&
                    p.dilation[1] == 1 && p.dilation[2] == 1;
  return fits ? ""
              : "it needs channels-last arrays with K = C of whole 16 bytes, a filter of "
                "3x3, 5x5 or 7x7 of stride 2, not dilated, and "
                "padding below the filter's reach";
}

// Runs of 8 columns in a strip's row, and the images of a strip: 16 runs in all.
struct RowsMmaStrip {
  int64_t runs, images, rows;  // rows of all strips

  RowsMmaStrip(int64_t count, int64_t height, int64_t width) {
    const int64_t all = CeilDivide(width, 8);
    runs = CeilDivide(all, CeilDivide(all, kStreams));
    images = std::min<int64_t>(kStreams / runs, count);
    rows = CeilDivide(count, kStreams / runs) * CeilDivide(all, runs) * height;
  }
};

inline std::string RefuseRowsMma(ConvOp op, const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  const bool fits = SquareOverRows(p) && Half(p.dtype) && p.k == p.c &&
                    (p.filter[2] == 5 || p.filter[2] == 7) && p.stride[2] == 1 &&
                    p.dilation[1] == 1 && p.dilation[2] == 1;
  if (!fits) {
    return "it needs 16-bit channels-last arrays with K = C a multiple of 8, a filter of 5x5 or "
           "7x7 of stride 1, not dilated, "
           "and padding below the filter's extent";
  }
  const int64_t height = op == ConvOp::kFprop ? p.out[1] : p.in[1],
                width = op == ConvOp::kDgrad ? p.in[2] : p.out[2];
  const RowsMmaStrip strip(p.n * p.in[0], height, width);
  const bool counts =
      strip.rows < kCoordLimit && kStreams / strip.runs * height * width < kCoordLimit;
  return counts ? "" : "it needs fewer than 2^30 rows in all strips and pixels in a strip's images";
}

// Whether dgrad by the kernel takes an array to add to its sums.
inline bool AddsToDgrad(std::string_view kernel) { return kernel == "rows_mma"; }

inline std::string Refusal(std::string_view kernel, ConvOp op, const ConvProblem& p,
                           const Device& device) {
  if (p.groups != p.c || p.c < 1 || p.k % p.c != 0) {
    return "it needs one input channel per group, got groups=" + std::to_string(p.groups) +
           " for " + std::to_string(p.c) + " channels";
  }
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  if (kernel == "fma") return "";
  if (kernel == "mma") return RefuseMma(op, p, device);
  if (kernel == "conv1d") return RefuseConv1d(p);
  if (kernel == "rows") return RefuseRows(p, device);
  if (kernel == "rows_strided") return RefuseRowsStrided(p, device);
  if (kernel == "rows_mma") return RefuseRowsMma(op, p, device);
  if (kernel == "few") return RefuseFew(op, p);
  return "there is no such kernel";
}

// Besides Refusal, of x normalised where it is read: which kernels can, 3x3 in 16 bit.
inline std::string RefuseNormalised(std::string_view kernel, const ConvProblem& p,
                                    Activation activation) {
  const bool plain = p.filter[1] == 3 && p.filter[2] == 3 && p.k == p.c && p.dilation[1] == 1 &&
                     p.dilation[2] == 1;
  const bool known = activation == Activation::kRelu || activation == Activation::kRelu6 ||
                     activation == Activation::kSilu;
  if ((kernel == "rows" || kernel == "rows_strided") && Half(p.dtype) && plain && known) return "";
  return "only rows and rows_strided normalise their input: 16-bit arrays with K = C, a 3x3 filter "
         "that is not dilated, and relu, relu6 or silu";
}

// What a part of kSums leaves of a channel: dw of 3x3, dbias, dscale.
inline constexpr int kTaps = 9, kSums = kTaps + 2;

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  if (op == ConvOp::kSums) return plan.splits * kSums * p.c * int64_t(sizeof(float));
  return op == ConvOp::kWgrad ? PartialsBytes(p, plan.splits) : 0;
}

}  // namespace jaxconv::cuda::conv::depthwise
