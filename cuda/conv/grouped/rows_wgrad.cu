// dw[r, s, c, k] = sum over n, p, q of  x[n, p * stride - pad + r, q * stride - pad + s, c] * dy[n, p, q, k]
//
// for the problems of rows.cu, c and k of one group. On mma.m16n8k16 with 16 pixels on K, 8
// channels of dy (an octet) on N, and on M two units of 8 channels of x: an octet at taps s = 0 and
// 1, or two octets at one tap.
//
// A warp owns two neighbouring octets of dy (groups of 16: one, so that twice as many warps' sums fit the
// registers) and two tiles of 16 pixels of a unit (common/row_stream.cuh) and goes down the rows: a stage brings
// row h of x and row h + pad of dy, the last row of dy that meets it. Row h of x is read from shared
// memory once and multiplied with the three rows of dy that it meets, which stay in registers; so do all
// the warp's sums, until the block ends. Then the two warps of an octet pair are added, and what lies
// between different groups is dropped. Stride 2: a stage brings row p of dy and two rows of x
// (rows.cuh), which meet it and the row above it.
//
// Reads x and dy about once; writes dw or, with several splits, a partial sum each.
#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/grouped/kernels.h"
#include "cuda/conv/grouped/rows.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kR = 3, kS = 3;
[[maybe_unused]] constexpr int kTiles = 2;  // of 16 pixels, of a warp
constexpr int kUnitTiles = 4;               // of a unit: two warps' for each pair of octets
constexpr int kSlab = kGroupedSlab;

template <typename T>
struct GroupedRowsWgradArgs {
  CUtensorMap x, dy;
  T* dw;            // with one split
  float* partials;  // (splits, elements of dw) otherwise; null with one
  RowUnits u;       // of dy's columns and x's rows (stride 2: dy's)
  RowArray in, out;
  int pad_h, pad_w;
  int row_tiles;   // tiles of 16 pixels of a unit's row
  int group;       // channels
  uint32_t dy_at;  // in a stage
  int64_t splits;
  StridedColumns strided;  // of x, stride 2
};

// Of an octet of dy, or two.
constexpr int WarpsOf(int owned) { return 16 / owned; }

// kStep: the stride. kOctets: octets of a group (1: groups of 4 or 8). kOwned: octets of dy of a warp.
template <typename T, int kStep, int kOctets, int kOwned, int kBlocks>
__global__ void __launch_bounds__(WarpsOf(kOwned) * 32, kBlocks)
    GroupedRowsWgradKernel(const __grid_constant__ GroupedRowsWgradArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Products of a row of x with a row of dy, for each octet of dy. kOctets == 1: [0] taps 0 and 1 of
  // its own octet, [1] both octets at tap 2. Else tap by tap, both octets of the group.
  constexpr int kProducts = kOctets == 1 ? 2 : kS;
  constexpr int kWarps = WarpsOf(kOwned), kParts = kWarps / 2;  // warps with different octets of dy
  static_assert(kOwned == 2 || kOctets == 2);
  extern __shared__ __align__(1024) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  const uint32_t zeros = ring_at + uint32_t(u.ring_bytes);
  RowRing ring(ring_at, zeros + 16, u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    StoreShared16(zeros, make_uint4(0, 0, 0, 0));
    ring.Init(kWarps);
  }
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t part = blockIdx.x / unsigned(u.slabs);
  const int64_t begin = part * u.share, end = min(begin + u.share, u.rows);
  const int pitch = u.width + kS - 1;  // pixels of a row of x in shared memory
  // The rows of x above the unit's first bring the rows of dy that the first one meets.
  // Stride 2: units are rows of dy, stage p of them has row p of dy and the rows of x that it and the
  // row above it meet; the last stage has no row of dy.
  const auto first_row = [&](const RowUnit& at) {
    return kStep == 2 ? at.p : max(at.p - (kR - 1), -g.pad_h);
  };
  const auto last_row = [&](const RowUnit& at) {
    return kStep == 2 ? at.end + 1 : at.end;
  };  // past it

  // The first thread is also the producer, a ring ahead of its warp.
  const uint32_t x_bytes = kStep == 2 ? StridedBytes(u) : uint32_t(u.images * pitch) * 128;
  const uint32_t dy_bytes = uint32_t(u.images * u.width) * 128;
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_q = 0, next_h = 0, next_end = 0, next_p = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_q = next.q;
      next_p = next.p;
      next_h = first_row(next);
      next_end = last_row(next);
    }
    const int channel = slab * kSlab;
    if constexpr (kStep == 2) {
      const bool has_dy = next_h + 1 < next_end;
      const uint32_t full = ahead.Claim(has_dy ? x_bytes + dy_bytes : x_bytes);
      const int x_row = 2 * next_h - g.pad_h - 1;
      LoadStrided(ahead.At(), g.strided, full, channel, next_q, x_row, next_image);
      if (has_dy) LoadTile(ahead.At() + g.dy_at, g.dy, full, channel, next_q, next_h, next_image);
    } else {
      const bool both = next_h >= next_p;
      const uint32_t full = ahead.Claim(both ? x_bytes + dy_bytes : dy_bytes);
      if (both) LoadTile(ahead.At(), g.x, full, channel, next_q - g.pad_w, next_h, next_image);
      LoadTile(ahead.At() + g.dy_at, g.dy, full, channel, next_q, next_h + g.pad_h, next_image);
    }
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 1; s < u.stages; ++s) feed();
  }

  const int pair = warp % kParts * kOwned / 2;    // octets 2 pair and the next, of the slab
  const int octet0 = kOwned == 2 ? 0 : warp % 2;  // of the pair, the warp's first of dy
  const int channel0 = slab * kSlab + pair * 16;
  const int tile0 = warp / kParts * kTiles;

  // Where a lane's rows of ldmatrix.trans lie in a stage. x: matrices (unit 0, pixels 0 to 7), (unit
  // 1, the same), then pixels 8 to 15; kOctets == 1: [0] the first octet at taps 0 and 1, [1] both
  // octets at tap 2. dy: (octet 0, pixels 0 to 7), (the same octet, pixels 8 to 15), then octet 1, or, of
  // one octet, the second tile's.
  constexpr int kAt = kOctets == 1 ? 2 : kS;
  constexpr int kHalves = kStep;               // rows of x in a stage
  constexpr int kLoads = kTiles * kOwned / 2;  // of dy
  uint32_t x_tile[kTiles][kHalves][kAt], dy_tile[kLoads];
  bool real[kLoads];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int tile = tile0 + m, image = tile / g.row_tiles;
    const int col = (tile - image * g.row_tiles) * 16 + lane / 16 * 8 + lane % 8;
    const int unit = lane / 8 % 2;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kAt; ++i) {
        const bool two_taps = kOctets == 1 && i == 0;
        const int s = kOctets == 1 ? (two_taps ? unit : 2) : i;
        const int octet = pair * 2 + (two_taps ? 0 : unit);
        if constexpr (kStep == 2) {
          x_tile[m][half][i] = StridedAt(u, g.strided, image, half, col, s, octet);
        } else {
          const int row = min(image * pitch + col + s, u.images * pitch - 1);
          x_tile[m][half][i] = uint32_t(row * 128 + ((octet ^ (row & 7)) << 4));
        }
      }
    }
  }
#pragma unroll
  for (int l = 0; l < kLoads; ++l) {
    const int tile = tile0 + (kOwned == 2 ? l : lane / 16), image = tile / g.row_tiles;
    const int dy_col = (tile - image * g.row_tiles) * 16 + lane % 16;
    const int row = image * u.width + dy_col;
    const int octet = pair * 2 + (kOwned == 2 ? lane / 16 : octet0);
    real[l] = image < u.images && dy_col < u.width;
    dy_tile[l] = g.dy_at + uint32_t(row * 128 + ((octet ^ (row & 7)) << 4));
  }

  float acc[kR][kOwned][kProducts][4] = {};
  constexpr int kWords = kTiles * kOwned * 2;  // of a row of dy: [tile][octet][half]
  // The stage's row of x times `count` rows of dy, of[j] with row first + j * apart of the filter.
  const auto multiply = [&](int half, const auto& of, int first, int apart) {
    constexpr int kCount = int(sizeof(of) / sizeof(of[0]));
    const uint32_t from = ring.At();
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const uint32_t (&at)[kAt] = x_tile[m][half];
      if constexpr (kOctets == 1) {
        uint32_t a[2][4], last[4];
        LoadMatrixTransposed(a[0], from + at[0]);
        LoadMatrixTransposed(a[1], (from + at[0]) ^ 16);
        LoadMatrixTransposed(last, from + at[1]);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
          for (int o = 0; o < 2; ++o) {
            const uint32_t* b = of[j] + 4 * m + 2 * o;
            Mma<T>(acc[first + j * apart][o][0], a[o], b[0], b[1]);
            Mma<T>(acc[first + j * apart][o][1], last, b[0], b[1]);
          }
        }
      } else {
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          uint32_t a[4];
          LoadMatrixTransposed(a, from + at[s]);
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int o = 0; o < kOwned; ++o) {
              const uint32_t* b = of[j] + (m * kOwned + o) * 2;
              Mma<T>(acc[first + j * apart][o][s], a, b[0], b[1]);
            }
          }
        }
      }
    }
  };
  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    // grad[r] is row h + pad - r of dy; stride 2: row h - r.
    uint32_t grad[kStep == 2 ? 2 : kR][kWords] = {};
    constexpr int kGrads = kStep == 2 ? 2 : kR;
    for (int h = first_row(at); h < last_row(at); ++h) {
      if (threadIdx.x == 0) feed();
#pragma unroll
      for (int r = kGrads - 1; r > 0; --r) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) grad[r][i] = grad[r - 1][i];
      }
      __syncwarp();
      ring.Await();
      const bool has_dy = kStep == 1 || h < at.end;
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        uint32_t row[4];
        LoadMatrixTransposed(row, real[l] && has_dy ? ring.At() + dy_tile[l] : zeros);
#pragma unroll
        for (int i = 0; i < 4; ++i) grad[0][4 * l + i] = row[i];
      }
      if constexpr (kStep == 2) {
        multiply(0, reinterpret_cast<const uint32_t (&)[1][kWords]>(grad[1]), 1, 0);
        multiply(1, grad, 0, 2);
      } else if (h >= at.p) {
        multiply(0, grad, 0, 1);
      }
      ring.GiveBack();
    }
  }

  // The second warp of the same octets hands its sums to the first, over the ring, which nobody reads any more.
  __syncthreads();
  float* sums =
      reinterpret_cast<float*>(cells) + warp % kParts * (kR * kOwned * kProducts * 4 * 32) + lane;
  const auto each = [&](auto visit) {
    int slot = 0;
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int o = 0; o < kOwned; ++o) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) visit(r, o, i, e, slot++);
        }
      }
    }
  };
  if (warp >= kParts) {
    each([&](int r, int o, int i, int e, int slot) { sums[slot * 32] = acc[r][o][i][e]; });
  }
  __syncthreads();
  if (warp >= kParts) return;
  each([&](int r, int o, int i, int e, int slot) {
    const float sum = acc[r][o][i][e] + sums[slot * 32];
    const int unit = e / 2;
    const int s = kOctets == 1 ? (i == 0 ? unit : 2) : i;
    const int octet = pair * 2 + (kOctets == 1 && i == 0 ? o : unit);
    const int c = slab * kSlab + octet * 8 + lane / 4;
    const int k = channel0 + (octet0 + o) * 8 + lane % 4 * 2 + e % 2;
    const int group = k / g.group;
    if (c / g.group != group || k >= g.out.channels) return;
    const int64_t to = (int64_t(r * kS + s) * g.group + c - group * g.group) * g.out.channels + k;
    if (g.partials != nullptr) {
      g.partials[part * (kR * kS * int64_t(g.group) * g.out.channels) + to] = sum;
    } else {
      g.dw[to] = FromFloat<T>(sum);
    }
  });
#endif
}

template <typename T, int kStep, int kOctets, int kOwned, int kBlocks>
Status Launch(const Context& ctx, GroupedRowsWgradArgs<T> g, const void* x, const void* dy,
              DType dtype, const std::string& what) {
  RowUnits& u = g.u;
  const int units_w = int(CeilDiv(g.out.w, kUnitTiles * 16));
  u.width = int(CeilDiv(g.out.w, units_w));
  g.row_tiles = int(CeilDiv(u.width, 16));
  u.images = std::min(kUnitTiles / g.row_tiles, g.out.images);
  u.slabs = int(CeilDiv(g.out.channels, kSlab));
  ShareRows(u, g.in.images, kStep == 2 ? g.out.h : g.in.h, g.out.w, g.splits);
  if constexpr (kStep == 2) {
    JAXCONV_RETURN_IF_ERROR(EncodeStrided(dtype, x, g.in, g.pad_w, u, what, &g.strided));
    g.dy_at = uint32_t(StridedStage(u, g.strided));
  } else {
    g.dy_at = uint32_t(CeilDiv(u.images * (u.width + kS - 1) * 128, 1024) * 1024);
  }
  u.stage_bytes = int(g.dy_at + CeilDiv(u.images * u.width * 128, 1024) * 1024);
  const int ring = kStep == 2 ? kSharedOfAll / kBlocks - 2048 : 192 * 1024 / kBlocks;
  u.stages = std::clamp(ring / u.stage_bytes, 2, 8);

  const auto tensor = [](const void* base, const RowArray& a) {
    const int64_t c = a.channels;
    return TmaTensor{base, 4, {c, a.w, a.h, a.images}, {1, c, c * a.w, c * a.w * a.h}};
  };
  if constexpr (kStep == 1) {
    JAXCONV_RETURN_IF_ERROR(
        EncodeTiled(dtype, tensor(x, g.in), {0, u.width + kS - 1, 1, u.images, 1}, what, &g.x));
  }
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(dtype, tensor(dy, g.out), {0, u.width, 1, u.images, 1}, what, &g.dy));
  const int64_t blocks = g.splits * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  constexpr int kSums = 4 * kR * 2 * (kOctets == 1 ? 2 : kS) * 4 * 128;
  CoverSums(u, kSums);
  const int bytes = u.ring_bytes + u.stages * 16 + 16;
  const auto kernel = GroupedRowsWgradKernel<T, kStep, kOctets, kOwned, kBlocks>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), WarpsOf(kOwned) * 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status GroupedRowsWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                        const void* dy, void* dw, float* partials, const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    GroupedRowsWgradArgs<T> g{};
    g.dw = static_cast<T*>(dw);
    g.partials = partials;
    g.in = RowsOfX(p);
    g.out = RowsOfY(p);
    g.pad_h = int(p.pad[1]);
    g.pad_w = int(p.pad[2]);
    g.group = int(p.group_c());
    g.splits = splits;
    const auto launch = [&](auto one, auto two) {  // octets of a group
      return (g.group <= 8 ? one : two)(ctx, g, x, dy, p.dtype, what);
    };
    return p.stride[2] == 2 ? launch(Launch<T, 2, 1, 2, 2>, Launch<T, 2, 2, 1, 1>)
                            : launch(Launch<T, 1, 1, 2, 2>, Launch<T, 1, 2, 1, 1>);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
