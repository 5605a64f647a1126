// Convolution as matrix products. For one image and one group, with C/G input and K/G output
// channels, call
//
//   W        (K/G, C/G*T*R*S)    the filters, one per row
//   columns  (C/G*T*R*S, O*P*Q)  columns[(ci, t, r, s), (o, p, q)] = x[o*stride - pad + t*dilation,
//   ..., ci], 0 outside Y        (K/G, O*P*Q)        the output, one channel per row
//
// with the rows of `columns` in the order (ci, t, r, s), s (the filter's width, kw) fastest. Then
//
//   fprop    Y = W columns              columns by Im2col
//   dgrad    dcolumns = W^T dY          then Col2im adds every element of dcolumns to the input it
//   was copied from wgrad    dW^T = columns dY^T        summed over images
//
// and im2col, GEMM and the way back are the same for both layouts: channels-last only has its
// filters packed into W first, and its rows of Y transposed as they are written.
//
// The columns hold every input element T*R*S times, so they are never all there. The work is cut
// into tiles: `pixels` output positions of one image by `channels` input channels of one group,
// chosen so that the columns of a tile stay in the second-level cache between being gathered and
// being multiplied. (plan.chunk, the number of images whose columns are held, has therefore no use
// here.) Products are GemmTile's, one thread each, not BLAS's, which would use its own
// threads for each tile and let one tile in at a time: eight float32 products of 64 x 3136 x 576
// took OpenBLAS 0.3.30 15 ms one after another, and 26 ms from two threads at once (2 cores).
//
// Every sum has a fixed order: results do not depend on the number of threads.
#include <cstring>

#include "cpu/conv.h"
#include "cpu/gemm.h"
#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

// How one group of one image is cut up.
template <typename T>
struct Tiling {
  int64_t taps;      // T*R*S
  int64_t channels;  // input channels per tile, >= 1
  int64_t blocks;    // of channels; >= 1, so that an empty sum is still written
  int64_t pixels;    // output positions per tile, whole cache lines of T
  int64_t tiles;     // of pixels
  int64_t ld;  // distance between rows of a tile; an odd number of cache lines, so that the same
               // column of successive rows spreads over all sets of the first-level cache

  explicit Tiling(const ConvProblem& p) {
    constexpr int64_t kRows = 256;  // of columns in a tile, where the filter leaves a choice
    constexpr int64_t kTileBytes = 192 * 1024;  // of columns, and of output rows
    // Channels of channels-last pixels that are turned at a time. A large filter has so many too, if a
    // cache line of each row then fits a tile. With fewer, 128 taps of 48 channels a group took 1.6
    // times as long (AMD EPYC).
    constexpr int64_t kLanes = 8, kMostRows = kTileBytes / int64_t{kCacheLine};
    constexpr int64_t kMaxPixels = 256;
    taps = p.filter_size();
    channels = std::max(kRows / taps, std::min(kLanes, kMostRows / taps));
    channels = std::clamp<int64_t>(channels, 1, std::max<int64_t>(p.group_c(), 1));
    blocks = std::max<int64_t>(CeilDiv(p.group_c(), channels), 1);
    const int64_t tallest = std::max(channels * taps, p.group_k());
    pixels = std::min(kTileBytes / int64_t{sizeof(T)} / std::max<int64_t>(tallest, 1), kMaxPixels);
    pixels = RoundToLine(std::clamp<int64_t>(pixels, 1, std::max<int64_t>(p.out_size(), 1)));
    tiles = CeilDiv(p.out_size(), pixels);
    ld = OddLines(pixels);
  }

  static constexpr int64_t kLine = kCacheLine / sizeof(T);
  static int64_t RoundToLine(int64_t x) { return CeilDiv(x, kLine) * kLine; }
  static int64_t OddLines(int64_t x) { return (CeilDiv(x, kLine) | 1) * kLine; }
};

// The output positions [begin, end) of one image, numbered (o*P + p)*Q + q, are runs along q. For
// every tap and run calls  visit(tap, column, length, inside, input):  the run is columns [column,
// column + length) of the tile, those in `inside` (relative to `column`) read the input, the first
// of them at element `input` of the image.
template <typename Visit>
void ForEachRun(const ConvProblem& p, const ImageStrides& xs, Range tile, const Visit& visit) {
  int64_t tap = 0;
  for (int64_t t = 0; t < p.filter[0]; ++t) {
    for (int64_t r = 0; r < p.filter[1]; ++r) {
      for (int64_t s = 0; s < p.filter[2]; ++s, ++tap) {
        const Range reached = OutputsReached(p, 2, s);
        for (int64_t m = tile.begin; m < tile.end;) {
          const int64_t row = m / p.out[2], q = m % p.out[2];
          const int64_t length = std::min(p.out[2] - q, tile.end - m);
          const int64_t d = InputAt(p, 0, row / p.out[1], t), h = InputAt(p, 1, row % p.out[1], r);
          Range inside{0, 0};
          int64_t input = 0;
          if (Inside(p, 0, d) && Inside(p, 1, h)) {
            inside.begin = std::clamp<int64_t>(reached.begin - q, 0, length);
            inside.end = std::clamp(reached.end - q, inside.begin, length);
            input = d * xs.d[0] + h * xs.d[1] + InputAt(p, 2, q + inside.begin, s) * xs.d[2];
          }
          visit(tap, m - tile.begin, length, inside, input);
          m += length;
        }
      }
    }
  }
}

template <typename T>
void Zero(T* data, int64_t count) {
  std::memset(data, 0, static_cast<size_t>(count) * sizeof(T));
}

// columns[(ci, tap), m] for `channels` channels of the image whose first such channel is x.
template <typename T>
void Im2col(const ConvProblem& p, const Tiling<T>& tiling, Range tile, int64_t channels, const T* x,
            T* columns) {
  const ImageStrides xs = XStrides(p);
  const int64_t ld = tiling.ld, next_channel = tiling.taps * ld;
  ForEachRun(p, xs, tile,
             [&](int64_t tap, int64_t column, int64_t length, Range inside, int64_t input) {
               T* run = columns + tap * ld + column;
               for (int64_t ci = 0; ci < channels && inside.begin > 0; ++ci) {
                 Zero(run + ci * next_channel, inside.begin);
               }
               if (inside.begin < inside.end) {
                 CopyTile(channels, inside.end - inside.begin, x + input, xs.c,
                          p.stride[2] * xs.d[2], run + inside.begin, next_channel);
               }
               for (int64_t ci = 0; ci < channels && inside.end < length; ++ci) {
                 Zero(run + ci * next_channel + inside.end, length - inside.end);
               }
             });
  // The last tile of an image: the rest of its last vector.
  const int64_t width = tile.end - tile.begin, padded = PadToLanes<T>(width);
  for (int64_t row = 0; row < channels * tiling.taps && padded > width; ++row) {
    Zero(columns + row * ld + width, padded - width);
  }
}

// planes[ci, input position] += columns[(ci, tap), m]: the transpose of Im2col, into dense planes
// (D, H, W).
template <typename T>
JAXCONV_MULTIVERSION void AddRows(int64_t rows, int64_t cols, const T* src, int64_t src_row, T* dst,
                                  int64_t dst_row, int64_t dst_col) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* __restrict from = src + i * src_row;
    T* __restrict to = dst + i * dst_row;
    if (dst_col == 1) {
      for (int64_t j = 0; j < cols; ++j) to[j] += from[j];
    } else {
      for (int64_t j = 0; j < cols; ++j) to[j * dst_col] += from[j];
    }
  }
}

template <typename T>
void Col2im(const ConvProblem& p, const Tiling<T>& tiling, Range tile, int64_t channels,
            const T* columns, T* planes) {
  const ImageStrides planar = StridesOf(/*channels_last=*/false, p.c, p.in);
  ForEachRun(p, planar, tile,
             [&](int64_t tap, int64_t column, int64_t, Range inside, int64_t input) {
               if (inside.begin == inside.end) return;
               AddRows(channels, inside.end - inside.begin,
                       columns + tap * tiling.ld + column + inside.begin, tiling.taps * tiling.ld,
                       planes + input, planar.c, p.stride[2]);
             });
}

// The matrices W of all groups, one after the other; or W^T (C/G*T*R*S, K/G) of each.
template <typename T>
void PackFilters(const Context& ctx, const ConvProblem& p, bool transpose, const T* w, T* packed) {
  const FilterStrides ws = WStrides(p);
  const int64_t taps = p.filter_size(), rows = p.group_k(), cols = p.group_c() * taps;
  ParallelFor(ctx, p.groups * p.group_c(), [&](int64_t item) {
    const int64_t g = item / p.group_c(), ci = item % p.group_c();
    const T* from = w + ci * ws.c + g * rows * ws.k;
    T* to = packed + g * rows * cols;
    if (transpose) {
      CopyTile(taps, rows, from, ws.tap, ws.k, to + ci * taps * rows, rows);
    } else {
      CopyTile(rows, taps, from, ws.k, ws.tap, to + ci * taps, cols);
    }
  });
}

}  // namespace

// One item is a tile of pixels of one image and group, all of its input channels in turn.
template <typename T>
Status Im2colFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                   const T* w, const T* bias, const T* residual, T* y, T* z) {
  const Tiling<T> tiling(p);
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t out_channels = p.group_k(), filter_row = p.group_c() * tiling.taps, ld = tiling.ld;
  Scratch<T> packed(p.channels_last ? p.k * filter_row : 0);
  JAXCONV_RETURN_IF_ERROR(packed.status());
  if (p.channels_last) {
    PackFilters(ctx, p, /*transpose=*/false, w, packed.data());
    w = packed.data();
  }
  const int64_t columns_size = tiling.channels * tiling.taps * ld;
  return ParallelForWithScratch<T>(
      ctx, p.n * p.groups * tiling.tiles, columns_size + out_channels * ld,
      [&](int64_t item, T* scratch) {
        const int64_t tile_index = item % tiling.tiles, g = item / tiling.tiles % p.groups;
        const int64_t n = item / tiling.tiles / p.groups;
        const Range tile{tile_index * tiling.pixels,
                         std::min((tile_index + 1) * tiling.pixels, p.out_size())};
        const int64_t width = tile.end - tile.begin;
        T* columns = scratch;
        T* rows = scratch + columns_size;  // of Y: (K/G, width)
        for (int64_t block = 0; block < tiling.blocks; ++block) {
          const int64_t c0 = block * tiling.channels;
          const int64_t channels = std::min(p.group_c() - c0, tiling.channels);
          Im2col(p, tiling, tile, channels, x + n * xs.n + (g * p.group_c() + c0) * xs.c, columns);
          GemmTile(out_channels, PadToLanes<T>(width), channels * tiling.taps,
                   w + g * out_channels * filter_row + c0 * tiling.taps, filter_row, 1, columns, ld,
                   rows, ld, /*accumulate=*/block > 0);
        }
        const int64_t k0 = g * out_channels;
        const int64_t output = n * ys.n + tile.begin * ys.d[2] + k0 * ys.c;
        // Rows of Y are contiguous in channels-first memory; channels-last memory takes them
        // transposed.
        auto write = [&](T* to) {
          if (p.channels_last) {
            CopyTile(width, out_channels, rows, 1, ld, to + output, ys.d[2]);
          } else {
            CopyTile(out_channels, width, rows, ld, 1, to + output, ys.c);
          }
        };
        for (int64_t k = 0; k < out_channels && bias != nullptr; ++k) {
          AddBias(width, bias + k0 + k, /*shared=*/true, rows + k * ld);
        }
        if (residual != nullptr && p.channels_last) {
          AddRows(width, out_channels, residual + output, ys.d[2], rows, 1, ld);
        } else if (residual != nullptr) {
          AddRows(out_channels, width, residual + output, ys.c, rows, ld, 1);
        }
        if (z != nullptr) write(z);
        for (int64_t k = 0; k < out_channels && e.activation != Activation::kNone; ++k) {
          FinishInPlace<T>(e, width, rows + k * ld, nullptr);
        }
        write(y);
      });
}

// One item is a block of input channels of one image: it alone adds to those planes of dx, tile
// after tile.
template <typename T>
Status Im2colDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  const Tiling<T> tiling(p);
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t out_channels = p.group_k(), filter_row = p.group_c() * tiling.taps, ld = tiling.ld;
  Scratch<T> packed(p.k * filter_row);  // W^T of each group
  JAXCONV_RETURN_IF_ERROR(packed.status());
  PackFilters(ctx, p, /*transpose=*/true, w, packed.data());
  const int64_t columns_size = tiling.channels * tiling.taps * ld;
  const int64_t rows_size = out_channels * ld;
  const int64_t planes_size = p.channels_last ? tiling.channels * p.in_size() : 0;
  return ParallelForWithScratch<T>(
      ctx, p.n * p.groups * tiling.blocks, columns_size + rows_size + planes_size,
      [&](int64_t item, T* scratch) {
        const int64_t c0 = item % tiling.blocks * tiling.channels;
        const int64_t g = item / tiling.blocks % p.groups, n = item / tiling.blocks / p.groups;
        const int64_t channels = std::min(p.group_c() - c0, tiling.channels);
        T* columns = scratch;
        T* rows = scratch + columns_size;  // of dY: (K/G, width)
        T* out = dx + n * xs.n + (g * p.group_c() + c0) * xs.c;
        T* planes = p.channels_last ? rows + rows_size : out;
        Zero(planes, channels * p.in_size());
        for (int64_t begin = 0; begin < p.out_size(); begin += tiling.pixels) {
          const Range tile{begin, std::min(begin + tiling.pixels, p.out_size())};
          const int64_t width = tile.end - tile.begin, padded = PadToLanes<T>(width);
          CopyTile(out_channels, width, dy + n * ys.n + begin * ys.d[2] + g * out_channels * ys.c,
                   ys.c, ys.d[2], rows, ld);
          for (int64_t k = 0; k < out_channels && padded > width; ++k) {
            Zero(rows + k * ld + width, padded - width);
          }
          GemmTile(channels * tiling.taps, padded, out_channels,
                   packed.data() + (g * filter_row + c0 * tiling.taps) * out_channels, out_channels,
                   1, rows, ld, columns, ld, /*accumulate=*/false);
          Col2im(p, tiling, tile, channels, columns, planes);
        }
        if (p.channels_last) CopyTile(p.in_size(), channels, planes, 1, p.in_size(), out, xs.d[2]);
      });
}

// One item is a block of input channels and one of `splits` parts of all tiles of all images; parts
// are summed in order.
template <typename T>
Status Im2colWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  constexpr int64_t kItems =
      32;  // wanted, whatever the number of threads: enough to share out evenly
  const Tiling<T> tiling(p);
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const FilterStrides ws = WStrides(p);
  const int64_t out_channels = p.group_k(), filter_row = p.group_c() * tiling.taps, ld = tiling.ld;
  const int64_t padded_k = PadToLanes<T>(out_channels), ld_k = Tiling<T>::OddLines(padded_k);
  const int64_t all_tiles = p.n * tiling.tiles;
  const int64_t splits = std::clamp<int64_t>(CeilDiv(kItems, p.groups * tiling.blocks), 1,
                                             std::max<int64_t>(all_tiles, 1));
  const int64_t part_size = p.groups * filter_row * padded_k;
  Scratch<T> parts(splits * part_size);  // dW^T (C/G*T*R*S, padded K/G) of each split and group
  JAXCONV_RETURN_IF_ERROR(parts.status());
  const int64_t columns_size = tiling.channels * tiling.taps * ld;
  JAXCONV_RETURN_IF_ERROR(ParallelForWithScratch<T>(
      ctx, p.groups * tiling.blocks * splits, columns_size + tiling.pixels * ld_k,
      [&](int64_t item, T* scratch) {
        const int64_t split = item % splits, c0 = item / splits % tiling.blocks * tiling.channels;
        const int64_t g = item / splits / tiling.blocks;
        const int64_t channels = std::min(p.group_c() - c0, tiling.channels);
        const int64_t rows = channels * tiling.taps;
        T* columns = scratch;
        T* pixels = scratch + columns_size;  // dY^T (width, padded K/G)
        T* sum = parts.data() + split * part_size + (g * filter_row + c0 * tiling.taps) * padded_k;
        Zero(sum, rows * padded_k);
        Zero(pixels, tiling.pixels * ld_k);
        const int64_t last = all_tiles * (split + 1) / splits;
        for (int64_t i = all_tiles * split / splits; i < last; ++i) {
          const int64_t n = i / tiling.tiles, begin = i % tiling.tiles * tiling.pixels;
          const Range tile{begin, std::min(begin + tiling.pixels, p.out_size())};
          Im2col(p, tiling, tile, channels, x + n * xs.n + (g * p.group_c() + c0) * xs.c, columns);
          CopyTile(tile.end - begin, out_channels,
                   dy + n * ys.n + begin * ys.d[2] + g * out_channels * ys.c, ys.d[2], ys.c, pixels,
                   ld_k);
          GemmTile(rows, padded_k, tile.end - begin, columns, ld, 1, pixels, ld_k, sum, padded_k,
                   /*accumulate=*/true);
        }
      }));
  // dw[(tap, ci, k)] or dw[(k, ci, tap)] from the sum of the parts.
  ParallelFor(ctx, p.groups * p.group_c(), [&](int64_t item) {
    const int64_t g = item / p.group_c(), ci = item % p.group_c();
    T* sum = parts.data() + (g * filter_row + ci * tiling.taps) * padded_k;  // (taps, padded K/G)
    for (int64_t split = 1; split < splits; ++split) {
      AddRows(1, tiling.taps * padded_k, sum + split * part_size, 0, sum, 0, 1);
    }
    T* to = dw + ci * ws.c + g * out_channels * ws.k;
    if (p.channels_last) {
      CopyTile(tiling.taps, out_channels, sum, padded_k, 1, to, ws.tap);
    } else {
      CopyTile(out_channels, tiling.taps, sum, 1, padded_k, to, ws.k);
    }
  });
  return Status::Ok();
}

JAXCONV_INSTANTIATE_CONV(Im2col, float);
JAXCONV_INSTANTIATE_CONV(Im2col, double);

}  // namespace jaxconv::cpu
