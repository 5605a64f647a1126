// From wide to narrow on sm_90a (dgrad where C is small, fprop where K is; geometry.h):
//
//   narrow[j * stride + phase, c] = sum over offsets d, channels k of wide[j + d, k] * w[tap(phase - stride * d), c, k]
//
// The product's rows are (phase, c) of several rows of j, its columns the N pixels of one row of wide: wide is read from
// shared memory once for 64 rows, not once for the 8 or 16 that a row of j has. A warpgroup walks down an image. The sums
// of row j live in block j mod kBlocks of its 64 rows, and wide row f adds offset f - j to each: the filter's blocks are
// turned by one from a row to the next, which is another address in an operand that holds them twice. The block that has
// met its last offset is stored and begins again.
//
// The grid shares the rows of j of all images evenly, in strips of up to 112 columns (row_stream.cuh); a warpgroup reads
// its rows of wide once, with their halo, by TMA and writes its rows of narrow once: bound by the wide image's traffic.
#include <algorithm>

#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/conv/stem/sm90.cuh"
#include "cuda/conv/stem/stem.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kGroupThreads = 160;  // of a warpgroup and the warp that writes for it

template <typename T>
struct NarrowOutArgs {
  CUtensorMap map;  // of wide
  StemGeometry g;
  const T* w;
  T* narrow;
  EpilogueArgs<T> epilogue;
  RowUnits u;  // of rows of j
  int pad[2];
  int count_w, offset_w[kMaxOffsets], least[2], greatest_h, span_w;
  int columns, line;  // line: stride[1] * channels, elements of narrow a pixel of j and phase of h
  int blocks, block_rows;          // of the 64 rows of the product
  int channel_blocks, last_shift;  // of 128 bytes; log2 of the halves that the last has
  uint32_t tile_bytes;             // of the operand at an offset of w and channel block
  uint32_t ring_at, barriers_at, boxes_at, box_bytes;
  int row_shift;                  // log2 of block_rows
  bool pairs;                     // narrow is written in pairs of 16-bit elements
  int unit_line;                  // units (pairs, or elements) of a line of a box
  FastDiv by_line, by_unit_line;  // by_line: units of a pixel
  uint32_t units_at;
};

// Where element n of pixel q lies in a box, bytes. 16-bit boxes are [pixel][n], in chunks of 16 bytes
// that change places from pixel to pixel; float32 ones [n][pixel].
template <typename T, int kN>
__device__ __forceinline__ uint32_t BoxAt(int row_shift, int q, int n) {
  if constexpr (sizeof(T) == 4) {
    return uint32_t(n * (kN + 8) + q) * 4;
  } else {
    const int turn = (q << row_shift >> 6) & ((1 << row_shift >> 3) - 1);
    return uint32_t((q << (row_shift + 1)) + ((n >> 3) ^ turn) * 16 + n % 8 * 2);
  }
}

template <typename T, int kN>
__global__ void __launch_bounds__(kMostGroups* kGroupThreads, 1)
    NarrowOutKernel(const __grid_constant__ NarrowOutArgs<T> a) {
#ifdef JAXCONV_SM90A
  constexpr int kRow = 128 / int(sizeof(T));  // channels
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const RowUnits& u = a.u;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int groups = blockDim.x / kGroupThreads, R = a.block_rows;
  const int id = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // uniform, as the compiler sees it
  const bool writes = id >= groups * 4;
  const int group = writes ? id - groups * 4 : id / 4;

  // Of row r of the product at offset iw: where its filter begins, or -1.
  int* table = reinterpret_cast<int*>(cells + a.ring_at);
  for (int e = threadIdx.x; e < a.count_w * 64; e += blockDim.x) {
    const int iw = e / 64, row = e % 64, i = row / R;
    table[e] = int(FilterAt(a, row - i * R, a.greatest_h - i, a.offset_w[iw]));
  }
  __syncthreads();
  // The filter, k-major: [channel block][offset of w][row][128 bytes of channels, swizzled], where
  // the rows are blocks 0, 1, ... kBlocks - 1, 0, 1, ... A warp takes a row.
  const int words = a.channel_blocks * a.count_w * 64;
#pragma unroll 4
  for (int e = threadIdx.x / 32; e < words; e += blockDim.x / 32) {
    const int row = e % 64, tile = e / 64, block = tile / a.count_w;
    const int from = table[(tile - block * a.count_w) * 64 + row];
#pragma unroll
    for (int k = lane; k < kRow; k += 32) {
      const int channel = block * kRow + k;
      const bool inside = from >= 0 && channel < g.wide_channels;
      const uint32_t bits = inside ? NarrowBits(a.w + from + channel * g.w_wide) : 0;
      const int at =
          row * 128 + ((k / kVecWidth<T>)^(row % 8)) * 16 + k % kVecWidth<T> * int(sizeof(T));
      unsigned char* to = cells + tile * a.tile_bytes + at;
      const bool twice = row + R < 64;
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(bits);
        if (twice) *reinterpret_cast<uint16_t*>(to + 64 * 128) = uint16_t(bits);
      } else {
        *reinterpret_cast<uint32_t*>(to) = bits;
        if (twice) *reinterpret_cast<uint32_t*>(to + 64 * 128) = bits;
      }
    }
  }
  // Where each unit of narrow lies in a box.
  uint16_t* units = reinterpret_cast<uint16_t*>(cells + a.units_at);
  for (int e = threadIdx.x; e < g.stride[0] * a.unit_line; e += blockDim.x) {
    const int r = int(a.by_unit_line.Div(e)), unit = e - r * a.unit_line;
    const int q = int(a.by_line.Div(unit));
    const int n = r * a.line + (unit - q * int(a.by_line.d)) * (a.pairs ? 2 : 1);
    units[e] = uint16_t(BoxAt<T, kN>(a.row_shift, q, n));
  }
  RowRing ring(shared + a.ring_at + group * u.stages * u.stage_bytes,
               shared + a.barriers_at + group * u.stages * 16, u);
  const uint32_t boxes = shared + a.boxes_at + group * kBoxes * a.box_bytes;
  const uint32_t box_barriers =
      shared + a.barriers_at + groups * u.stages * 16 + group * kBoxes * 16;
  const auto box_full = [&](int box) { return box_barriers + box * 16; };
  const auto box_empty = [&](int box) { return box_barriers + box * 16 + 8; };
  const int outs = a.epilogue.z != nullptr ? 2 : 1;
  if (!writes && threadIdx.x % 128 == 0) {
    ring.Init(4);
    for (int box = 0; box < kBoxes; ++box) {
      // Every lane arrives for what it stored: compute-sanitizer's racecheck sees no order where
      // one arrives for its warp after __syncwarp().
      BarrierInit(box_full(box), R <= 16 ? 32 : R * 2);
      BarrierInit(box_empty(box), 1);
    }
    BarrierInitFence();
  }
  FenceForTma();
  __syncthreads();

  const int64_t begin = (int64_t(blockIdx.x) * groups + group) * u.share;
  const int64_t end = min(begin + u.share, u.rows);
  int box = 0;
  uint32_t box_parity = 0;
  const auto next_box = [&] {
    if (++box == kBoxes) {
      box = 0;
      box_parity ^= 1;
    }
  };
  if (writes) {
    for (int64_t row = begin; row < end;) {
      const RowUnit unit = UnitOf(u, row, end);
      row += unit.end - unit.p;
      const int made = min(u.width * g.stride[1], g.narrow[1] - unit.q * g.stride[1]) * g.channels;
      const int64_t line = int64_t(g.narrow[1]) * g.channels;
      int64_t at =
          (int64_t(unit.image) * g.narrow[0] + unit.p * g.stride[0]) * line + unit.q * a.line;
      for (int j = unit.p; j < unit.end; ++j, at += line * g.stride[0]) {
        const int rows = min(g.stride[0], g.narrow[0] - j * g.stride[0]);
        for (int k = outs; k > 0; --k) {
          T* to = (k == 2 ? a.epilogue.z : a.narrow) + at;
          BarrierWait(box_full(box), box_parity);
          const unsigned char* from = cells + (boxes - shared) + box * a.box_bytes;
          for (int r = 0; r < rows; ++r, to += line) {
            const uint16_t* unit = units + r * a.unit_line;
            if (sizeof(T) == 2 && a.pairs) {
              uint32_t* pairs = reinterpret_cast<uint32_t*>(to);
#pragma unroll 8
              for (int e = lane; e < made / 2; e += 32) {
                pairs[e] = *reinterpret_cast<const uint32_t*>(from + unit[e]);
              }
            } else {
#pragma unroll 8
              for (int e = lane; e < made; e += 32) {
                to[e] = *reinterpret_cast<const T*>(from + unit[e]);
              }
            }
          }
          ReadsFirst();
          __syncwarp();
          if (lane == 0) BarrierArrive(box_empty(box));
          next_box();
        }
      }
    }
    return;
  }
  const uint32_t bytes = uint32_t(u.width + a.span_w) * 128;
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_w = 0, next_h = 0, next_end = 0, next_block = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_w = next.q + a.least[1];
      next_h = next.p + a.least[0];
      next_end = next.end + a.greatest_h;
    }
    const uint32_t full = ahead.Claim(bytes);
    LoadTile(ahead.At(), a.map, full, next_block * kRow, next_w, next_h, next_image);
    ahead.Advance();
    if (++next_block == a.channel_blocks) {
      next_block = 0;
      ++next_h;
    }
  };
  const bool feeds = threadIdx.x % 128 == 0;
  if (feeds) {
    for (int s = 1; s < u.stages; ++s) feed();
  }

  // A block of rows belongs to half a warp's rows, a warp, two or all four.
  const int owner = R == 8 ? 0 : warp * 16 / R;  // R > 8: the block
  const int n0 = R == 8 ? 0 : warp * 16 % R;     // of the warp's rows in it
  float bias[2] = {};
  if (a.epilogue.bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = n0 + half * 8 + lane / 4;
      if (n < a.columns) bias[half] = ToFloat(a.epilogue.bias[n % g.channels]);
    }
  }
  const bool plain = a.epilogue.bias == nullptr && a.epilogue.activation == Activation::kNone;
  // Where a lane's first row of stmatrix, or its first pair of pixels, goes in a box.
  const uint32_t put =
      sizeof(T) == 4 ? BoxAt<T, kN>(0, lane % 4 * 2, n0 + lane / 4)
      : R == 8       ? BoxAt<T, kN>(3, lane % 16, 0)
                     : BoxAt<T, kN>(a.row_shift, lane / 16 * 8 + lane % 8, n0 + lane / 8 % 2 * 8);

  for (int64_t row = begin; row < end;) {
    const RowUnit unit = UnitOf(u, row, end);
    row += unit.end - unit.p;
    float acc[kN / 2] = {};
    int turn = 0;  // the block whose offset is the greatest
    for (int j = unit.p + a.least[0] - a.greatest_h; j < unit.end; ++j) {
      const uint32_t filter = shared + uint32_t(turn == 0 ? 0 : 64 - turn * R) * 128;
      int block = 0;
#pragma unroll 1
      do {
        if (feeds) feed();
        __syncwarp();
        ring.Await();
        const uint64_t da = OperandDescriptor<true>(filter + block * a.count_w * a.tile_bytes);
        const uint64_t db = OperandDescriptor<true>(ring.At());
        const int shift = block + 1 == a.channel_blocks ? a.last_shift : 1;  // pairs of steps
        int e = 0;
#pragma unroll 1
        do {
          const int i = e >> shift, pair = (e - (i << shift)) * 4;
          const uint64_t d0 = da + i * (a.tile_bytes / 16) + pair;
          const uint64_t d1 = db + (a.offset_w[i] - a.least[1]) * 8 + pair;
          WgmmaFence();
          WgmmaRow<T>(acc, d0, d1, 1);
          WgmmaRow<T>(acc, d0 + 2, d1 + 2, 1);
          WgmmaCommit();
        } while (++e < a.count_w << shift);
        WgmmaWait<0>();
        Pin(acc);
        __syncwarp();
        if (lane == 0) ring.Release();
        ring.Advance();
      } while (++block < a.channel_blocks);
      const bool mine = R == 8 ? warp == turn / 2 : owner == turn;
      const bool high = R == 8 && turn % 2 == 1;
      if (++turn == a.blocks) turn = 0;
      if (mine && j >= unit.p) {
        for (int k = outs; k > 0; --k) {
          BarrierWait(box_empty(box), box_parity ^ 1);
          const uint32_t to = boxes + box * a.box_bytes + put;
#pragma unroll
          for (int i = 0; i < kN / 8; i += 2) {  // 16 pixels
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = acc[i * 4 + e];
            if (high) {
#pragma unroll
              for (int e = 0; e < 8; ++e) v[e] = acc[i * 4 + (e | 2)];
            }
            if (!plain) {
#pragma unroll
              for (int e = 0; e < 8; ++e) v[e] += bias[high ? 0 : e / 2 % 2];
              if (k == 1) ApplyActivation(a.epilogue.activation, v, a.epilogue.slope);
            }
            if constexpr (sizeof(T) == 2) {
              const uint32_t pair[4] = {PackPair(v[0], v[1], T()), PackPair(v[2], v[3], T()),
                                        PackPair(v[4], v[5], T()), PackPair(v[6], v[7], T())};
              if (R == 8) {
                StoreMatrix2Transposed(to + i * 128, pair[0], pair[2]);
              } else {
                StoreMatrix4Transposed(to + (i << (a.row_shift + 4)), pair);
              }
            } else {
#pragma unroll
              for (int e = 0; e < 8; e += 2) {
                if (R == 8 && e % 4 == 2) continue;
                StoreShared8(to + ((i + e / 4) * 8 + e / 2 % 2 * 8 * (kN + 8)) * 4,
                             make_uint2(__float_as_uint(v[e]), __float_as_uint(v[e + 1])));
              }
            }
          }
          BarrierArrive(box_full(box));
          next_box();
        }
      } else if (j >= unit.p) {
        for (int k = 0; k < outs; ++k) next_box();
      }
      // By selection: wgmma's registers must not be written in a branch.
      const bool clear[2] = {mine && !high, mine && (R > 8 || high)};
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = clear[i / 2 % 2] ? 0.f : acc[i];
      Pin(acc);
    }
  }
#endif
}

template <typename T, int kN>
Status Launch(const Context& ctx, NarrowOutArgs<T> a, const NarrowOutSizes& sizes, DType dtype,
              const void* wide, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const StemGeometry& g = a.g;
  RowUnits& u = a.u;
  a.unit_line = kN * int(a.by_line.d);
  a.by_unit_line = FastDiv(a.unit_line);
  a.box_bytes = uint32_t(sizes.box_bytes);
  u.stage_bytes = sizes.stage_bytes;
  // As many warpgroups as have at least as many stages each; the domain promises one with two.
  int groups = kMostGroups;
  while (groups > 1 && sizes.Stages(groups) < groups) --groups;
  u.stages = sizes.Stages(groups);
  a.ring_at = uint32_t(sizes.operand);
  a.boxes_at = a.ring_at + uint32_t(groups * u.stages * u.stage_bytes);
  a.barriers_at = a.boxes_at + uint32_t(groups * kBoxes) * a.box_bytes;
  a.units_at = a.barriers_at + uint32_t(groups * (u.stages + kBoxes)) * 16;
  const int bytes = int(a.units_at) + sizes.units_bytes;
  u.images = u.slabs = 1;
  const int height = int(CeilDiv(g.narrow[0], g.stride[0]));
  const int width = int(CeilDiv(g.narrow[1], g.stride[1]));
  ShareRows(u, g.images, height, width, int64_t(device.multiprocessors) * groups);
  const int64_t c = g.wide_channels;
  const TmaTensor tensor = {wide,
                            4,
                            {c, g.wide[1], g.wide[0], g.images},
                            {1, c, c * g.wide[1], c * g.wide[1] * g.wide[0]}};
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(dtype, tensor, {0, u.width + a.span_w, 1, 1, 1}, what, &a.map, sizeof(T) == 4));
  const int64_t blocks = CeilDiv(CeilDiv(u.rows, u.share), groups);
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const auto kernel = NarrowOutKernel<T, kN>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), groups * kGroupThreads, bytes, ctx.stream>>>(a);
  return LaunchStatus(what);
}

template <typename T>
Status Run(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* wide,
           const void* w, const void* bias, void* narrow, void* z, const std::string& what) {
  NarrowOutArgs<T> a{};
  a.g = MakeGeometry(p);
  const StemGeometry& g = a.g;
  NarrowOffsets o{};
  SetOffsets(o, g, p);
  const int kernel_columns = NarrowOutSizes::KernelColumns(g);
  const NarrowOutSizes sizes(g, o, kernel_columns, sizeof(T));
  a.w = static_cast<const T*>(w);
  a.narrow = static_cast<T*>(narrow);
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  a.columns = o.columns;
  a.block_rows = sizes.block_rows;
  a.row_shift = sizes.row_shift;
  a.blocks = sizes.blocks;
  for (int d = 0; d < 2; ++d) {
    a.pad[d] = o.pad[d];
    a.least[d] = o.least[d];
  }
  a.greatest_h = o.offset[0][o.count[0] - 1];
  a.count_w = o.count[1];
  std::copy(o.offset[1], o.offset[1] + a.count_w, a.offset_w);
  a.span_w = sizes.span_w;
  a.line = g.stride[1] * g.channels;
  constexpr int kRow = 128 / int(sizeof(T));
  a.channel_blocks = sizes.channel_blocks;
  a.last_shift = g.wide_channels - (a.channel_blocks - 1) * kRow > kRow / 2;
  a.tile_bytes = sizes.tile_bytes;
  a.pairs = sizes.pairs;
  a.by_line = FastDiv(a.pairs ? a.line / 2 : a.line);
  a.u.width = RowColumns(int(CeilDiv(g.narrow[1], g.stride[1])));
  return kernel_columns == 64 ? Launch<T, 64>(ctx, a, sizes, p.dtype, wide, what)
                              : Launch<T, 112>(ctx, a, sizes, p.dtype, wide, what);
}

}  // namespace

Status StemNarrowOut(const Context& ctx, ConvOp, const ConvProblem& p, const Epilogue& e,
                     const void* src, const void* w, const void* bias, void* dst, void* z,
                     const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Run<T>(ctx, p, e, src, w, bias, dst, z, what);
  });
}

}  // namespace jaxconv::cuda::conv
