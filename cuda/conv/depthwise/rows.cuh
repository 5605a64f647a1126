// What rows.cu, rows_strided.cu and rows_wgrad.cu share: who owns what of a strip, and a thread's channels in
// shared memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/depthwise/domain.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {

// Adjacent columns of a thread: the extents of the usual networks are multiples of 7. With a dilation
// of a quarter of a row and more, so few are in a residue that threads own 4.
constexpr int kRowRun = 7, kShortRowRun = 4;

// Of a stage at most, about, so that a ring has several.
constexpr int kStageBytes = 48 * 1024;

// A strip is cut into threads: V neighbouring channels, of `lanes` in a slab, fastest; then
// `col_tiles` runs of columns; then images.
struct RowThreads {
  int lanes, col_tiles, threads;
  int pixel_bytes;  // of a slab of `to`
  FastDiv by_lanes, by_tiles;
};

// With a dilation d, rows of one residue modulo d meet rows of one residue only, and with those are a
// convolution without one. So a strip's rows are taken residue after residue; a unit is of one. A row is
// staged as it lies: columns are taken d apart, and d runs are a stretch of them.
struct RowDilation {
  FastDiv by_h, by_w;         // the dilations
  FastDiv by_long, by_short;  // rows of the first `longs` residues, and of the others
  int longs;
};

inline RowDilation DilationOf(const ConvProblem& p, int rows) {
  const int64_t d = p.dilation[1], least = rows / d;
  return {FastDiv(d), FastDiv(p.dilation[2]), FastDiv(least + 1),
          FastDiv(std::max<int64_t>(least, 1)), int(rows % d)};
}

// p and end count the rows of `residue`.
struct ResidueUnit : RowUnit {
  int residue;
};

JAXCONV_HD ResidueUnit UnitOf(const RowUnits& u, const RowDilation& d, int64_t row, int64_t last) {
  ResidueUnit at{UnitOf(u, row, last), 0};
  const int longs = d.longs * int(d.by_long.d);
  const bool is_long = at.p < longs;
  const int rows = int(is_long ? d.by_long.d : d.by_short.d);
  const int before = is_long ? int(d.by_long.Div(at.p)) : int(d.by_short.Div(at.p - longs));
  const int first = before * rows + (is_long ? 0 : longs);
  at.residue = is_long ? before : d.longs + before;
  at.end = (at.end < first + rows ? at.end : first + rows) - first;
  at.p -= first;
  return at;
}

// The first column of run `i` of a strip, of runs of `run` columns.
JAXCONV_HD int ColumnOf(const RowDilation& d, int i, int run) {
  const int before = int(d.by_w.Div(i)), step = int(d.by_w.d);
  return before * step * run + i - before * step;
}

// Along W: 7 d columns and their halo, of the fewest channels, fit a block's threads, a stage and a box.

// Two 16-bit elements in a word, as float32.
template <typename T>
__device__ __forceinline__ void UnpackPair(uint32_t bits, float (&v)[2]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    v[0] = __uint_as_float(bits << 16);
    v[1] = __uint_as_float(bits & 0xffff0000u);
  } else {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    v[0] = both.x;
    v[1] = both.y;
  }
}

// V elements of T in shared memory, as float32.
template <typename T, int V>
__device__ __forceinline__ void UnpackShared(uint32_t address, float (&v)[V]) {
  if constexpr (sizeof(T) == 4 && V == 2) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(v[0]), "=f"(v[1]) : "r"(address));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v[0]) : "r"(address));
  } else if constexpr (V == 1) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(address));
    v[0] = ToFloat(*reinterpret_cast<const T*>(&bits));
  } else {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(bits) : "r"(address));
    UnpackPair<T>(bits, v);
  }
}

template <typename T, int V>
__device__ __forceinline__ void StoreLane(T* to, const float (&v)[V]) {
  if constexpr (V == 1) {
    *to = FromFloat<T>(v[0]);
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = PackPair(v[0], v[1], T());
  }
}

// wgrad's end: adds the sums of a channel's threads, a filter row after the other, through `shared`
// (S * V * threads floats that nobody reads any more), and writes them to `partials`, or to dw where
// that is null. All threads of the block call it; those past `t.threads` hold no sums.
template <typename T, int R, int S, int V>
__device__ __forceinline__ void StoreSums(const RowThreads& t, const RowUnits& u, float* shared,
                                          const float (&acc)[R][S][V], int channel0, int channels,
                                          float* partials, T* dw) {
  const int runs = u.images * t.col_tiles;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (int(threadIdx.x) < t.threads) {
#pragma unroll
      for (int s = 0; s < S; ++s) {
#pragma unroll
        for (int i = 0; i < V; ++i) shared[(s * V + i) * t.threads + threadIdx.x] = acc[r][s][i];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < S * V * t.lanes; e += blockDim.x) {
      const int si = int(t.by_lanes.Div(e)), in = e - si * t.lanes;
      float sum = 0.f;
      for (int k = 0; k < runs; ++k) sum += shared[si * t.threads + k * t.lanes + in];
      const int channel = channel0 + in * V + si % V;
      if (channel < channels) {
        const int64_t to = int64_t(r * S + si / V) * channels + channel;
        if (partials != nullptr) {
          partials[to] = sum;
        } else {
          dw[to] = FromFloat<T>(sum);
        }
      }
    }
    __syncthreads();
  }
}

// Slabs and strips that give a block up to `most` threads, and leave few of them, and few of `sms`
// multiprocessors, without work. `to` is what threads own. Columns that strips share cost a little.
// `from`: the channels of the array whose rows a stage holds, a multiple or a part of those of `to`.
// `given`: the number of slabs, or 0 to choose it. `copies`: pixels that a stage holds for a column, about.
// `dilation`: along W; a strip is whole `run` * dilation columns.
inline RowThreads ChooseThreads(RowUnits& u, const RowArray& to, int from, int vector, int item,
                                int filter, int most, int sms, int given, int copies,
                                int stride = 1, int dilation = 1, int run = kRowRun) {
  const int reach = (filter - 1) * dilation, chunk = run * dilation;
  RowThreads best{};
  double score = -1;
  // Channels of 16 bytes in both arrays, and boxes of at most 256 channels.
  const int quantum = 16 / item * std::max(1, to.channels / from);
  const int wide = std::max(to.channels, from);
  const int chunks_all = int(CeilDiv(to.w, chunk));
  const int fewest = given > 0 ? given : int(CeilDiv(wide, 256));
  const int last = given > 0 ? given : std::max(fewest, int(CeilDiv(wide * item, 128)));
  for (int wanted = fewest; wanted <= last; ++wanted) {
    const int slab = int(CeilDiv(CeilDiv(to.channels, wanted), quantum)) * quantum;
    const int slabs = int(CeilDiv(to.channels, slab));
    const int lanes = slab / vector;
    if (lanes * dilation > most || slab * int64_t(from) > int64_t(256) * to.channels) continue;
    const int staged = int(int64_t(slab) * item * from / to.channels);  // bytes of a pixel
    const int pixels = std::max(kStageBytes / (staged * copies) - reach, chunk);
    // Boxes are at most 256 pixels wide and images deep.
    const int widest = (255 + stride - reach) / stride;
    const int fit =
        std::max(1, std::min({most / (lanes * dilation), pixels / chunk, widest / chunk}));
    const int strips = int(CeilDiv(chunks_all, fit));
    const int tiles = int(CeilDiv(chunks_all, strips)) * dilation;
    const int width = tiles * run;
    const int images =
        std::max(1, std::min({most / (lanes * tiles), to.images, 256, pixels / (width + reach)}));
    const double busy = double(lanes * tiles * images) / most;
    const double useful = double(to.channels) / (slab * slabs) * to.w / (strips * width);
    const double held = slabs <= sms ? double(sms / slabs * slabs) / sms : 1;
    const double alone = double(width) / (width + 0.25 * reach);
    // Pieces of a pixel that are not whole lines: 65x65x256, dilation 2, in bf16 takes 0.0326 ms in
    // slabs of 176 bytes and 0.0279 in 128 (H200).
    const int piece = slab * item;
    const double whole = dilation == 1 || slabs == 1 || piece % 128 == 0 ? 1
                         : piece % 64 == 0                               ? 0.9
                         : piece % 32 == 0                               ? 0.85
                                                                         : 0.75;
    const double value = std::min(1.0, 0.4 + 0.6 * busy) * useful * held * alone * whole;
    if (value <= score) continue;
    score = value;
    best.lanes = lanes;
    best.col_tiles = tiles;
    best.threads = int(CeilDiv(lanes * tiles * images, 32) * 32);
    best.pixel_bytes = slab * item;
    best.by_lanes = FastDiv(lanes);
    best.by_tiles = FastDiv(tiles);
    u.images = images;
    u.width = width;
    u.slabs = slabs;
  }
  return best;
}

// Rows of `width` pixels x `slab` channels of `images` images.
inline Status EncodeRows(DType dtype, const void* base, const RowArray& a, int slab, int width,
                         int images, const std::string& what, CUtensorMap* map) {
  const int64_t c = a.channels;
  const TmaTensor tensor = {base, 4, {c, a.w, a.h, a.images}, {1, c, c * a.w, c * a.w * a.h}};
  return EncodePlain(dtype, tensor, {slab, width, 1, images, 1}, what, map);
}

// Bytes of a row in a stage: TMA writes to multiples of 128.
inline int StagedBytes(int images, int width, int pixel_bytes) {
  return int(CeilDiv(int64_t(images) * width * pixel_bytes, 128) * 128);
}

}  // namespace jaxconv::cuda::conv
