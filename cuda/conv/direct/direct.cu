// fprop, dgrad and wgrad are one tiled sum
//
//   out[row, col] = sum over red of  A[row, red] * B[red, col]
//   A[row, red] = inside(row.pos + red.pos) ? a[row.offset + red.offset] : 0
//
//   op      row                      red                      col           A from  B from
//   fprop   pixel of y               (tap, input channel)     k of a group  x       w
//   dgrad   pixel of dx, one phase   (tap, output channel)    c of a group  dy      w
//   wgrad   (tap, input channel)     pixel of y               k of a group  x       dy
//
// In each, the address and the coordinates of an element of A are a part of the row plus a part of
// the reduction index; both are computed once a tile, so the loop loads with additions only.
//
// dgrad: the pixels i of dx with (i + pad) mod stride alike (a phase) are reached by the same taps.
// A tile holds pixels i = phase + stride * j of one phase, walks only those taps, and their outputs
// o = j + const(tap): an fprop of stride 1.
//
// A block of 128 threads owns rows x cols = 4096 outputs (8 x 4 a thread), from 64 x 64 to 512 x 8
// as the group's channels ask, and reads A and B through shared memory 16 reduction indices at a
// time. Reads: A once per column tile, B once per row tile, mostly from L2. Writes each output
// once.
#include "cuda/conv/direct/direct.h"

#include <algorithm>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/reduce.h"

namespace jaxconv::cuda {
namespace conv {
namespace {

constexpr int kThreads = 128;
constexpr int kThreadRows = 8;  // two groups of four, half a tile apart
constexpr int kThreadCols = 4;
constexpr int kDepth = 16;  // reduction indices in shared memory
constexpr int kPad = 4;     // floats behind a row of shared memory: other banks, still 16-byte rows

// A tile as powers of two: cols = 4 * 2^log_threads, rows = 4096 / cols.
struct Tile {
  int log_rows, log_cols;

  JAXCONV_HD int rows() const { return 1 << log_rows; }
  JAXCONV_HD int cols() const { return 1 << log_cols; }
};

// The tile that computes the fewest padded outputs; the squarest of those.
Tile ChooseTile(int64_t rows, int64_t cols) {
  Tile best{6, 6};
  int64_t best_cost = INT64_MAX;
  for (int log_cols = 6; log_cols >= 3; --log_cols) {
    const Tile tile{12 - log_cols, log_cols};
    const int64_t cost = CeilDiv(rows, tile.rows()) * CeilDiv(cols, tile.cols());
    if (cost < best_cost) best = tile, best_cost = cost;
  }
  return best;
}

struct RedInfo {
  int64_t a;   // elements from the row's offset
  int64_t b;   // elements from the column's offset; < 0 past the end of the reduction
  int pos[3];  // added to the row's; kOutside past the end
};

// Shared memory: A and B tiles, over which the output tile is laid once the sum is complete; then
// the row table.
struct Smem {
  float* a;             // [kDepth][rows + kPad]
  float* b;             // [kDepth][cols]
  float* c;             // [rows][cols + kPad] or, with row_inner, [cols][rows + kPad]
  int64_t* row_offset;  // [rows]
  int* row_pos;         // [3][rows]
};

JAXCONV_HD int TileFloats(Tile tile) {
  const int rows = tile.rows(), cols = tile.cols();
  const int ab = kDepth * (rows + kPad) + kDepth * cols;
  const int c0 = rows * (cols + kPad), c1 = cols * (rows + kPad);
  return ab > c0 ? (ab > c1 ? ab : c1) : (c0 > c1 ? c0 : c1);
}

// At most 44.8 KB (512 x 8).
size_t SmemBytes(Tile tile) { return size_t(TileFloats(tile)) * 4 + size_t(tile.rows()) * 20; }

__device__ __forceinline__ Smem CarveSmem(float4* base, Tile tile) {
  Smem s;
  s.a = reinterpret_cast<float*>(base);
  s.b = s.a + kDepth * (tile.rows() + kPad);
  s.c = s.a;
  s.row_offset = reinterpret_cast<int64_t*>(s.a + TileFloats(tile));
  s.row_pos = reinterpret_cast<int*>(s.row_offset + tile.rows());
  return s;
}

// Which index of A is adjacent in memory.
enum class Load {
  kRow,     // element by element, threads along rows
  kRed,     // element by element, threads along the reduction
  kRowVec,  // 16 bytes of adjacent rows
  kRedVec,  // 16 bytes of adjacent reduction indices
};

template <typename T>
__device__ __forceinline__ void LoadA(const T* __restrict__ a, const Extents& ext, Load load,
                                      Tile tile, const Smem& s, const RedInfo* red) {
  constexpr int V = kVecWidth<T>;
  const int rows = tile.rows(), log_rows = tile.log_rows, pitch = rows + kPad;
  const auto inside = [&](int row, const RedInfo& r) {
    return Inside(s.row_pos[row], r.pos[0], ext.v[0]) &&
           Inside(s.row_pos[rows + row], r.pos[1], ext.v[1]) &&
           Inside(s.row_pos[2 * rows + row], r.pos[2], ext.v[2]);
  };
  if (load == Load::kRedVec) {
    for (int e = threadIdx.x; e < rows * (kDepth / V); e += kThreads) {
      const int row = e & (rows - 1), r = (e >> log_rows) * V;
      float v[V] = {};
      if (inside(row, red[r])) LoadVec<T, V>(a + (s.row_offset[row] + red[r].a), v);
#pragma unroll
      for (int i = 0; i < V; ++i) s.a[(r + i) * pitch + row] = v[i];
    }
  } else if (load == Load::kRowVec) {
    const int log_groups = log_rows - (V == 8 ? 3 : 2);
    for (int e = threadIdx.x; e < rows * (kDepth / V); e += kThreads) {
      const int row = (e & ((1 << log_groups) - 1)) * V, r = e >> log_groups;
      float v[V] = {};
      if (inside(row, red[r])) LoadVec<T, V>(a + (s.row_offset[row] + red[r].a), v);
      StoreVec<float, V>(s.a + r * pitch + row, v);
    }
  } else if (load == Load::kRow) {
    for (int e = threadIdx.x; e < rows * (kDepth / 4); e += kThreads) {
      const int row = e & (rows - 1), r = (e >> log_rows) * 4;
      const T* from = a + s.row_offset[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s.a[(r + i) * pitch + row] = inside(row, red[r + i]) ? ToFloat(from[red[r + i].a]) : 0.f;
      }
    }
  } else {
#pragma unroll 4
    for (int e = threadIdx.x; e < rows * kDepth; e += kThreads) {
      const int row = e / kDepth, r = e % kDepth;
      s.a[r * pitch + row] = inside(row, red[r]) ? ToFloat(a[s.row_offset[row] + red[r].a]) : 0.f;
    }
  }
}

// cols_left: columns of the tensor from the tile's first one on.
template <typename T>
__device__ __forceinline__ void LoadB(const T* __restrict__ b, int64_t col_stride, int cols_left,
                                      bool red_adjacent, Tile tile, const Smem& s,
                                      const RedInfo* red) {
  const int cols = tile.cols();
#pragma unroll 4
  for (int e = threadIdx.x; e < kDepth * cols; e += kThreads) {
    const int r = red_adjacent ? e % kDepth : e >> tile.log_cols;
    const int col = red_adjacent ? e / kDepth : e & (cols - 1);
    s.b[r * cols + col] =
        col < cols_left && red[r].b >= 0 ? ToFloat(b[red[r].b + col * col_stride]) : 0.f;
  }
}

// Where a thread's outputs lie in the tile: rows row + {0..3} and rows / 2 + row + {0..3}, columns
// col + {0..3}. Neighbouring threads are neighbours along the dimension that is adjacent in memory.
struct ThreadPlace {
  int row, col;
};

template <bool kRowInner>
__device__ __forceinline__ ThreadPlace Place(Tile tile) {
  const int tid = threadIdx.x;
  if (kRowInner) {
    const int log = tile.log_rows - 3;
    return {(tid & ((1 << log) - 1)) * 4, (tid >> log) * 4};
  }
  const int log = tile.log_cols - 2;
  return {(tid >> log) * 4, (tid & ((1 << log) - 1)) * 4};
}

// The whole sum of one tile; on return every thread has its part of the output in s.c and may read
// all of it. The row table is complete on entry. `fill(i, info)` describes reduction index i >= 0,
// also past the end.
template <bool kRowInner, typename T, typename Fill>
__device__ __forceinline__ void SumTile(const T* __restrict__ a, const Extents& ext, Load load,
                                        const T* __restrict__ b, int64_t b_col_stride,
                                        int cols_left, bool b_red_adjacent, Tile tile,
                                        const Smem& s, int64_t red_count, Fill&& fill) {
  __shared__ RedInfo red[2][kDepth];
  const ThreadPlace place = Place<kRowInner>(tile);
  const int pitch = tile.rows() + kPad, cols = tile.cols(), half = tile.rows() / 2;
  float acc[kThreadRows][kThreadCols] = {};
  if (threadIdx.x < kDepth) fill(int64_t(threadIdx.x), red[0][threadIdx.x]);
  __syncthreads();
  int now = 0;
  for (int64_t red0 = 0; red0 < red_count; red0 += kDepth, now ^= 1) {
    LoadA(a, ext, load, tile, s, red[now]);
    LoadB(b, b_col_stride, cols_left, b_red_adjacent, tile, s, red[now]);
    if (threadIdx.x < kDepth) fill(red0 + kDepth + threadIdx.x, red[now ^ 1][threadIdx.x]);
    __syncthreads();
#pragma unroll 2
    for (int r = 0; r < kDepth; ++r) {
      const float4 a0 = *reinterpret_cast<const float4*>(s.a + r * pitch + place.row);
      const float4 a1 = *reinterpret_cast<const float4*>(s.a + r * pitch + half + place.row);
      const float4 b0 = *reinterpret_cast<const float4*>(s.b + r * cols + place.col);
      const float av[kThreadRows] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
      const float bv[kThreadCols] = {b0.x, b0.y, b0.z, b0.w};
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadCols; ++j) acc[i][j] += av[i] * bv[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = place.row + h * half;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&v)[kThreadCols] = acc[4 * h + i];
      if (!kRowInner) {
        *reinterpret_cast<float4*>(s.c + (row + i) * (cols + kPad) + place.col) =
            make_float4(v[0], v[1], v[2], v[3]);
      } else {
        const float4 column =
            make_float4(acc[4 * h][i], acc[4 * h + 1][i], acc[4 * h + 2][i], acc[4 * h + 3][i]);
        *reinterpret_cast<float4*>(s.c + (place.col + i) * pitch + row) = column;
      }
    }
  }
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------------------
// fprop and dgrad.

// One dimension of one phase: output index phase + j * dst_step reads source index j * mul + off +
// i * off_step through tap first + i * tap_step, i in [0, count).
struct TapRun {
  int first, tap_step, count, off, off_step;
};

JAXCONV_HD TapRun FpropTaps(int filter, int pad, int dilation) {
  return {0, 1, filter, -pad, dilation};
}

// The taps t with (phase + pad - t * dilation) divisible by stride; they are tap_step = stride /
// gcd apart.
JAXCONV_HD TapRun DgradTaps(int phase, int filter, int pad, int dilation, int stride) {
  int gcd = stride, b = dilation % stride;
  while (b != 0) {
    const int rest = gcd % b;
    gcd = b;
    b = rest;
  }
  const int step = stride / gcd;
  int first = 0;
  while (first < step && first < filter && (phase + pad - first * dilation) % stride != 0) ++first;
  if (first == step || first >= filter) return {0, 1, 0, 0, 0};
  return {first, step, (filter - first + step - 1) / step,
          (phase + pad - first * dilation) / stride, -(dilation / gcd)};
}

template <typename T>
struct GatherArgs {
  const T* src;
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  bool dgrad;
  int64_t images;
  Extents src_ext, dst_ext, filter, pad, dilation, stride;
  Extents phases;                             // 1 in fprop
  int64_t src_image, src_pixel, src_channel;  // strides in elements
  int64_t dst_image, dst_pixel, dst_channel;
  int64_t w_tap, w_src, w_dst, w_group;
  int src_group, dst_group;  // channels of a group
  int col_tiles, groups;
  Tile tile;
  bool w_red_adjacent;  // w lies along the reduction, not along the columns
  bool vector_load;     // 16 bytes of source channels
  bool vector_store;    // 4 outputs at once
};

// Pixels of a phase along one dimension.
JAXCONV_HD int PhasePixels(int extent, int phase, int step) {
  return (extent - phase + step - 1) / step;
}

template <typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads, 4) GatherKernel(const GatherArgs<T> g) {
  extern __shared__ float4 shared[];
  __shared__ TapRun runs[3];
  const Tile tile = g.tile;
  const Smem s = CarveSmem(shared, tile);
  const int rows = tile.rows();

  // Block: column tile fastest, then group, phase, row tile, so that blocks in flight share x and
  // its cache lines.
  int64_t block = blockIdx.x;
  const int col0 = int(block % g.col_tiles) * tile.cols();  // [0, dst_group)
  block /= g.col_tiles;
  const int group = int(block % g.groups);
  block /= g.groups;
  int phase[3];
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    phase[d] = int(block % g.phases.v[d]);
    block /= g.phases.v[d];
  }
  const int64_t row0 = block * rows;

  int count[3], mul[3], dst_step[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    mul[d] = g.dgrad ? 1 : g.stride.v[d];
    dst_step[d] = g.dgrad ? g.stride.v[d] : 1;
    count[d] = PhasePixels(g.dst_ext.v[d], phase[d], dst_step[d]);
    if (threadIdx.x == d) {
      runs[d] = g.dgrad
                    ? DgradTaps(phase[d], g.filter.v[d], g.pad.v[d], g.dilation.v[d], g.stride.v[d])
                    : FpropTaps(g.filter.v[d], g.pad.v[d], g.dilation.v[d]);
    }
  }
  const int64_t row_count = g.images * count[0] * count[1] * count[2];
  if (row0 >= row_count) return;  // phases after the first may have fewer pixels

  // Pixel row0 + row of the phase as (n, j0, j1, j2).
  const auto split = [&](int64_t pixel, int64_t& n, int (&j)[3]) {
    if (pixel >> 31 == 0) {
      unsigned rest = unsigned(pixel);
      j[2] = int(rest % unsigned(count[2]));
      rest /= unsigned(count[2]);
      j[1] = int(rest % unsigned(count[1]));
      rest /= unsigned(count[1]);
      j[0] = int(rest % unsigned(count[0]));
      n = rest / unsigned(count[0]);
    } else {
      j[2] = int(pixel % count[2]);
      pixel /= count[2];
      j[1] = int(pixel % count[1]);
      pixel /= count[1];
      j[0] = int(pixel % count[0]);
      n = pixel / count[0];
    }
  };

  for (int row = threadIdx.x; row < rows; row += kThreads) {
    int64_t n = 0;
    int j[3] = {kOutside, 0, 0};
    const bool live = row0 + row < row_count;
    if (live) split(row0 + row, n, j);
    const int h0 = live ? j[0] * mul[0] : kOutside, h1 = j[1] * mul[1], h2 = j[2] * mul[2];
    s.row_pos[row] = h0;
    s.row_pos[rows + row] = h1;
    s.row_pos[2 * rows + row] = h2;
    s.row_offset[row] = n * g.src_image + int64_t(group) * g.src_group * g.src_channel +
                        ((int64_t(h0) * g.src_ext.v[1] + h1) * g.src_ext.v[2] + h2) * g.src_pixel;
  }
  __syncthreads();  // runs, row table

  const int n1 = runs[1].count, n2 = runs[2].count;
  const int taps = runs[0].count * n1 * n2;
  const int red_count = taps * g.src_group;
  const auto fill = [&](int64_t index, RedInfo& info) {
    if (index >= red_count) {
      info = {0, -1, {kOutside, 0, 0}};
      return;
    }
    // Taps outermost where channels are adjacent in memory, innermost where pixels are.
    const int i = int(index);
    const int tap = kChannelsLast ? i / g.src_group : i % taps;
    const int channel = kChannelsLast ? i % g.src_group : i / taps;
    const int at[3] = {tap / (n1 * n2), tap / n2 % n1, tap % n2};
    int t[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      info.pos[d] = runs[d].off + at[d] * runs[d].off_step;
      t[d] = runs[d].first + at[d] * runs[d].tap_step;
    }
    info.a =
        ((int64_t(info.pos[0]) * g.src_ext.v[1] + info.pos[1]) * g.src_ext.v[2] + info.pos[2]) *
            g.src_pixel +
        channel * g.src_channel;
    info.b = ((int64_t(t[0]) * g.filter.v[1] + t[1]) * g.filter.v[2] + t[2]) * g.w_tap +
             channel * g.w_src;
  };

  const int cols_left = g.dst_group - col0;
  const T* w = g.w + group * g.w_group + col0 * g.w_dst;
  SumTile<!kChannelsLast>(g.src, g.src_ext,
                          kChannelsLast && g.vector_load ? Load::kRedVec : Load::kRow, w, g.w_dst,
                          cols_left, g.w_red_adjacent, tile, s, red_count, fill);

  for (int row = threadIdx.x; row < rows; row += kThreads) {
    int64_t offset = -1;
    if (row0 + row < row_count) {
      int64_t n;
      int j[3];
      split(row0 + row, n, j);
      offset = n * g.dst_image;
      offset += ((int64_t(phase[0] + j[0] * dst_step[0]) * g.dst_ext.v[1] + phase[1] +
                  j[1] * dst_step[1]) *
                     g.dst_ext.v[2] +
                 phase[2] + j[2] * dst_step[2]) *
                g.dst_pixel;
    }
    s.row_offset[row] = offset;
  }
  __syncthreads();

  // Four adjacent outputs a thread: channels of a pixel, or pixels of a channel.
  const int channel0 = group * g.dst_group + col0;
  for (int e = threadIdx.x * 4; e < rows * tile.cols(); e += kThreads * 4) {
    const int row = kChannelsLast ? e >> tile.log_cols : e & (rows - 1);
    const int col = kChannelsLast ? e & (tile.cols() - 1) : e >> tile.log_rows;
    const int64_t at = s.row_offset[row] + (channel0 + col) * g.dst_channel;
    if (s.row_offset[row] < 0 || col >= cols_left) continue;
    const float* c =
        kChannelsLast ? s.c + row * (tile.cols() + kPad) + col : s.c + col * (rows + kPad) + row;
    float z[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = channel0 + (kChannelsLast ? min(col + i, cols_left - 1) : col);
      z[i] = c[i];
      if (g.epilogue.bias != nullptr) z[i] += ToFloat(g.epilogue.bias[k]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = ApplyActivation(g.epilogue.activation, z[i], g.epilogue.slope);
    }
    if (g.vector_store) {
      StorePacked<T, 4>(g.dst + at, y);
      if (g.epilogue.z != nullptr) StorePacked<T, 4>(g.epilogue.z + at, z);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int64_t to = at + i;
      if (kChannelsLast) {
        if (col + i >= cols_left) break;
      } else {
        if (s.row_offset[row + i] < 0) break;
        to = s.row_offset[row + i] + (channel0 + col) * g.dst_channel;
      }
      g.dst[to] = FromFloat<T>(y[i]);
      if (g.epilogue.z != nullptr) g.epilogue.z[to] = FromFloat<T>(z[i]);
    }
  }
}

template <typename T>
Status LaunchGather(const Context& ctx, const ConvProblem& p, bool dgrad, const void* src,
                    const void* w, void* dst, const EpilogueArgs<T>& epilogue,
                    const std::string& what) {
  GatherArgs<T> g{};
  g.src = static_cast<const T*>(src);
  g.w = static_cast<const T*>(w);
  g.dst = static_cast<T*>(dst);
  g.epilogue = epilogue;
  g.dgrad = dgrad;
  g.images = p.n;
  g.src_ext = ToExtents(dgrad ? p.out : p.in);
  g.dst_ext = ToExtents(dgrad ? p.in : p.out);
  g.filter = ToExtents(p.filter);
  g.pad = ToExtents(p.pad);
  g.dilation = ToExtents(p.dilation);
  g.stride = ToExtents(p.stride);
  const int64_t src_channels = dgrad ? p.k : p.c, dst_channels = dgrad ? p.c : p.k;
  const int64_t src_size = dgrad ? p.out_size() : p.in_size();
  const int64_t dst_size = dgrad ? p.in_size() : p.out_size();
  const bool last = p.channels_last;
  g.src_image = src_channels * src_size;
  g.src_pixel = last ? src_channels : 1;
  g.src_channel = last ? 1 : src_size;
  g.dst_image = dst_channels * dst_size;
  g.dst_pixel = last ? dst_channels : 1;
  g.dst_channel = last ? 1 : dst_size;
  const int64_t cg = p.group_c(), kg = p.group_k(), taps = p.filter_size();
  const int64_t w_c = last ? p.k : taps, w_k = last ? 1 : cg * taps;
  g.w_tap = last ? cg * p.k : 1;
  g.w_src = dgrad ? w_k : w_c;
  g.w_dst = dgrad ? w_c : w_k;
  g.w_group = kg * w_k;
  g.w_red_adjacent = last == dgrad;
  g.src_group = int(dgrad ? kg : cg);
  g.dst_group = int(dgrad ? cg : kg);
  g.groups = int(p.groups);

  int64_t phases = 1, rows = p.n;  // rows of the largest phase
  for (int d = 0; d < 3; ++d) {
    const int64_t step = dgrad ? p.stride[d] : 1;
    g.phases.v[d] = int(std::min<int64_t>(step, g.dst_ext.v[d]));
    phases *= g.phases.v[d];
    rows *= PhasePixels(g.dst_ext.v[d], 0, int(step));
  }
  g.tile = ChooseTile(rows, g.dst_group);
  g.col_tiles = int(CeilDiv(g.dst_group, g.tile.cols()));
  g.vector_load = last && g.src_group % kVecWidth<T> == 0 && Aligned16(src);
  g.vector_store = Aligned16(dst) && Aligned16(epilogue.z) &&
                   (last ? g.dst_group % 4 == 0 : phases == 1 && dst_size % 4 == 0);

  const int64_t blocks = CeilDiv(rows, g.tile.rows()) * phases * g.groups * g.col_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const size_t smem = SmemBytes(g.tile);
  if (last) {
    GatherKernel<T, true><<<unsigned(blocks), kThreads, smem, ctx.stream>>>(g);
  } else {
    GatherKernel<T, false><<<unsigned(blocks), kThreads, smem, ctx.stream>>>(g);
  }
  return LaunchStatus(what);
}

// ---------------------------------------------------------------------------------------------------------------------
// wgrad.

template <typename T>
struct WgradArgs {
  const T* x;
  const T* dy;
  T* dw;            // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  Extents in, filter, out, stride, pad, dilation;
  FastDiv by_p, by_q, by_o;             // out[1], out[2], out[0]
  int64_t x_image, x_pixel, x_channel;  // strides in elements
  int64_t dy_image, dy_pixel, dy_channel;
  int64_t dw_row, dw_col, dw_group, dw_count;
  int64_t pixels, split_pixels;
  int group_c, group_k, taps, row_tiles, col_tiles, groups;
  Tile tile;
  bool vector_load;
};

template <typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads, 4) DirectWgradKernel(const WgradArgs<T> g) {
  extern __shared__ float4 shared[];
  const Tile tile = g.tile;
  const Smem s = CarveSmem(shared, tile);
  const int rows = tile.rows();

  // Block: column tile fastest, then row tile, group, split.
  int64_t block = blockIdx.x;
  const int col0 = int(block % g.col_tiles) * tile.cols();  // [0, K/G)
  block /= g.col_tiles;
  const int row0 = int(block % g.row_tiles) * rows;  // [0, C/G * T*R*S)
  block /= g.row_tiles;
  const int group = int(block % g.groups);
  const int64_t split = block / g.groups;
  const int64_t pixel0 = split * g.split_pixels;
  const int64_t pixel_count = min(g.split_pixels, g.pixels - pixel0);  // <= 0 in an empty split

  const int row_count = g.group_c * g.taps;
  for (int row = threadIdx.x; row < rows; row += kThreads) {
    int pos[3] = {kOutside, 0, 0};
    int64_t offset = 0;
    const int r = row0 + row;
    if (r < row_count) {
      const int tap = kChannelsLast ? r / g.group_c : r % g.taps;
      const int channel = kChannelsLast ? r % g.group_c : r / g.taps;
      const int t[3] = {tap / (g.filter.v[1] * g.filter.v[2]), tap / g.filter.v[2] % g.filter.v[1],
                        tap % g.filter.v[2]};
#pragma unroll
      for (int d = 0; d < 3; ++d) pos[d] = t[d] * g.dilation.v[d] - g.pad.v[d];
      offset = ((int64_t(pos[0]) * g.in.v[1] + pos[1]) * g.in.v[2] + pos[2]) * g.x_pixel +
               (int64_t(group) * g.group_c + channel) * g.x_channel;
    }
    s.row_pos[row] = pos[0];
    s.row_pos[rows + row] = pos[1];
    s.row_pos[2 * rows + row] = pos[2];
    s.row_offset[row] = offset;
  }

  const auto fill = [&](int64_t index, RedInfo& info) {
    if (index >= pixel_count) {
      info = {0, -1, {kOutside, 0, 0}};
      return;
    }
    const QuotRem q = DivMod(pixel0 + index, g.by_q);
    const QuotRem p = DivMod(q.quot, g.by_p);
    const QuotRem o = DivMod(p.quot, g.by_o);
    info.pos[0] = o.rem * g.stride.v[0];
    info.pos[1] = p.rem * g.stride.v[1];
    info.pos[2] = q.rem * g.stride.v[2];
    info.a =
        o.quot * g.x_image +
        ((int64_t(info.pos[0]) * g.in.v[1] + info.pos[1]) * g.in.v[2] + info.pos[2]) * g.x_pixel;
    info.b = o.quot * g.dy_image +
             ((int64_t(o.rem) * g.out.v[1] + p.rem) * g.out.v[2] + q.rem) * g.dy_pixel;
  };

  const int cols_left = g.group_k - col0;
  const T* dy = g.dy + (int64_t(group) * g.group_k + col0) * g.dy_channel;
  const Load load = !kChannelsLast ? Load::kRed : g.vector_load ? Load::kRowVec : Load::kRow;
  SumTile<!kChannelsLast>(g.x, g.in, load, dy, g.dy_channel, cols_left, !kChannelsLast, tile, s,
                          pixel_count, fill);

  const int64_t base = group * g.dw_group + row0 * g.dw_row + col0 * g.dw_col;
  for (int e = threadIdx.x; e < rows * tile.cols(); e += kThreads) {
    const int row = kChannelsLast ? e >> tile.log_cols : e & (rows - 1);
    const int col = kChannelsLast ? e & (tile.cols() - 1) : e >> tile.log_rows;
    if (row0 + row >= row_count || col >= cols_left) continue;
    const float v =
        kChannelsLast ? s.c[row * (tile.cols() + kPad) + col] : s.c[col * (rows + kPad) + row];
    const int64_t to = base + row * g.dw_row + col * g.dw_col;
    if (g.partials != nullptr) {
      g.partials[split * g.dw_count + to] = v;
    } else {
      g.dw[to] = FromFloat<T>(v);
    }
  }
}

template <typename T>
Status LaunchWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                   const void* dy, void* dw, float* partials, const std::string& what) {
  WgradArgs<T> g{};
  g.x = static_cast<const T*>(x);
  g.dy = static_cast<const T*>(dy);
  g.dw = static_cast<T*>(dw);
  g.partials = partials;
  g.in = ToExtents(p.in);
  g.filter = ToExtents(p.filter);
  g.out = ToExtents(p.out);
  g.stride = ToExtents(p.stride);
  g.pad = ToExtents(p.pad);
  g.dilation = ToExtents(p.dilation);
  g.by_o = FastDiv(p.out[0]);
  g.by_p = FastDiv(p.out[1]);
  g.by_q = FastDiv(p.out[2]);
  const bool last = p.channels_last;
  const int64_t taps = p.filter_size(), cg = p.group_c(), kg = p.group_k();
  g.x_image = p.c * p.in_size();
  g.x_pixel = last ? p.c : 1;
  g.x_channel = last ? 1 : p.in_size();
  g.dy_image = p.k * p.out_size();
  g.dy_pixel = last ? p.k : 1;
  g.dy_channel = last ? 1 : p.out_size();
  g.dw_row = last ? p.k : 1;
  g.dw_col = last ? 1 : cg * taps;
  g.dw_group = kg * g.dw_col;
  g.dw_count = p.k * cg * taps;
  g.pixels = p.n * p.out_size();
  g.split_pixels = CeilDiv(CeilDiv(g.pixels, splits), kDepth) * kDepth;
  g.group_c = int(cg);
  g.group_k = int(kg);
  g.taps = int(taps);
  g.groups = int(p.groups);
  g.tile = ChooseTile(cg * taps, kg);
  g.row_tiles = int(CeilDiv(cg * taps, g.tile.rows()));
  g.col_tiles = int(CeilDiv(kg, g.tile.cols()));
  g.vector_load = last && cg % kVecWidth<T> == 0 && Aligned16(x);

  const int64_t blocks = splits * g.groups * g.row_tiles * g.col_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const size_t smem = SmemBytes(g.tile);
  if (last) {
    DirectWgradKernel<T, true><<<unsigned(blocks), kThreads, smem, ctx.stream>>>(g);
  } else {
    DirectWgradKernel<T, false><<<unsigned(blocks), kThreads, smem, ctx.stream>>>(g);
  }
  return LaunchStatus(what);
}

}  // namespace
}  // namespace conv

Status DirectFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan&,
                   const void* x, const void* w, const void* bias, void* y, void* z, Workspace) {
  const std::string what = std::string("conv_fprop[direct ") + Name(p.dtype) + "]";
  JAXCONV_RETURN_IF_ERROR(conv::CheckIndexable(p, what.c_str()));
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::LaunchGather<T>(ctx, p, false, x, w, y, conv::MakeEpilogue<T>(e, bias, z), what);
  });
}

Status DirectDgrad(const Context& ctx, const ConvProblem& p, const Plan&, const void* dy,
                   const void* w, void* dx, Workspace) {
  const std::string what = std::string("conv_dgrad[direct ") + Name(p.dtype) + "]";
  JAXCONV_RETURN_IF_ERROR(conv::CheckIndexable(p, what.c_str()));
  return conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::LaunchGather<T>(ctx, p, true, dy, w, dx, {nullptr, nullptr, Activation::kNone, 0},
                                 what);
  });
}

Status DirectWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace) {
  const std::string what = std::string("conv_wgrad[direct ") + Name(p.dtype) +
                           " splits=" + std::to_string(plan.splits) + "]";
  JAXCONV_RETURN_IF_ERROR(conv::CheckIndexable(p, what.c_str()));
  if (plan.splits < 1) return Status::Invalid(what + ": expected splits of at least 1");
  const int64_t count = p.k * p.group_c() * p.filter_size();
  float* partials = nullptr;
  if (plan.splits > 1) {
    JAXCONV_RETURN_IF_ERROR(conv::CheckWorkspace(workspace, plan.splits * count * 4, what));
    partials = static_cast<float*>(workspace.data);
  }
  JAXCONV_RETURN_IF_ERROR(conv::ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return conv::LaunchWgrad<T>(ctx, p, plan.splits, x, dy, dw, partials, what);
  }));
  if (partials == nullptr) return Status::Ok();
  return conv::SumPartials(ctx, p.dtype, partials, plan.splits, count, {}, dw, what.c_str());
}

}  // namespace jaxconv::cuda
