// dw[r, s, c] = sum over n, p, q of  x[n, p - pad + r, q - pad + s, c] * dy[n, p, q, c]
//
// for 16-bit channels-last stride 1. With the 16 streams of dy (rows_mma.cuh) on K, a row h of
// x of channel c adds to all R rows of the filter
//
//   acc_r[i, j] += sum over streams of  x[h][stream, i] * dy[h + pad - r][stream, j],  i < 16, j < 8,
//
// and dw[r, s] is the sum of acc_r's diagonal i - j = s, taken once, at the end. A warp owns two
// neighbouring channels: all acc_r of theirs, and the operands of the last R rows of dy, in registers.
//
// A stage brings row h of x and row h + pad of dy, the last row of dy that meets it. One barrier a
// row: before it the block transposes the next stage into one of two buffers and multiplies from the other;
// after it the first thread refills that stage.
//
// A block stays with its slab of channels: a split is the parts of all slabs with one number. Reads x
// and dy about once; writes dw or, with several splits, a partial sum each.
//
// A product of elements that are no tap of each other stays in an entry of acc that is not used; only
// at the ragged end of a row or image does an infinity in x meet zeros that stand for no dy.
#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/rows_mma.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kThreads = kBandOctets * 128;

// Of a thread: where it reads and writes when its warp transposes cells of one octet, four at a
// time; the octet's four warps share them.
template <int kMost>  // times 16 cells
struct CellMover {
  uint32_t from[kMost], to[kMost];
  int times;

  // `cells` of them, `pitch` of an image, which count `segs` phases.
  __device__ __forceinline__ CellMover(int cells, int pitch, int segs) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, octet = warp / 4, i = lane % 8;
    times = (cells - warp % 4 * 4 + 15) / 16;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      // A lane past the end repeats the last cell: equal values to equal addresses.
      const int cell = min(k * 16 + warp % 4 * 4 + lane / 8, cells - 1);
      const int phase = cell - cell / pitch * (pitch - segs);
      const int pixel = cell * 8 + i;
      const int turn = pixel * kBandOctets >> 3;  // of the swizzle, a chunk each 128 bytes
      from[k] = uint32_t((pixel * kBandOctets + (octet ^ (turn & (kBandOctets - 1)))) * 16);
      to[k] = uint32_t(((cell * kBandOctets + octet) * 8 + (i ^ (phase & 7))) * 16);
      Keep(from[k]);
      Keep(to[k]);
    }
  }
  __device__ __forceinline__ void Move(uint32_t stage, uint32_t cells) const {
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k < times) {
        uint32_t r[4];
        LoadMatrixTransposed(r, stage + from[k]);
        StoreMatrix4(cells + to[k], r);
      }
    }
  }
};

template <typename T>
struct BandsWgradArgs {
  CUtensorMap x, dy;
  T* dw;            // with one split
  float* partials;  // (splits, R*S, K) otherwise; null with one
  RowUnits u;       // of dy's columns and x's rows
  RowArray in, out;
  int pad_h, pad_w;
  int segs;
  uint32_t x_bytes, dy_bytes;  // of a row's cells
  uint32_t dy_at;              // in a stage
};

template <typename T, int R>
__global__ void __launch_bounds__(kThreads, 1)
    DepthwiseRowsMmaWgradKernel(const __grid_constant__ BandsWgradArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int S = R;
  extern __shared__ __align__(1024) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  const uint32_t cells_at = ring_at + uint32_t(u.ring_bytes);
  const uint32_t buffer_bytes = g.x_bytes + g.dy_bytes;
  const uint32_t zeros = cells_at + 2 * buffer_bytes;
  RowRing ring(ring_at, zeros + 16, u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.Init(1);
    StoreShared16(zeros, make_uint4(0, 0, 0, 0));
  }
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int part = int(blockIdx.x / unsigned(u.slabs));
  const int begin = int(min(part * u.share, u.rows)), end = int(min(begin + u.share, u.rows));
  // The rows of x above the unit's first bring the rows of dy that the first one meets.
  const auto first_row = [&](const RowUnit& at) { return max(at.p - (R - 1), -g.pad_h); };
  const int pitch = g.segs + 1;  // cells of an image's row of x

  int next_row = begin;
  int next_image = 0, next_q = 0, next_h = 0, next_both = 0, next_end = 0;
  const auto feed = [&](int stage) {  // which is free
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_q = next.q;
      next_h = first_row(next);
      next_both = next.p;
      next_end = next.end;
    }
    const uint32_t full = ring.barriers + stage * 16;
    const uint32_t to = ring.ring + stage * u.stage_bytes;
    const bool both = next_h >= next_both;
    BarrierExpect(full, both ? g.x_bytes + g.dy_bytes : g.dy_bytes);
    if (both) {
      LoadTile(to, g.x, full, slab * kBandOctets * 8, next_q - g.pad_w, next_h, next_image);
    }
    LoadTile(to + g.dy_at, g.dy, full, slab * kBandOctets * 8, next_q, next_h + g.pad_h,
             next_image);
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < u.stages; ++s) feed(s);
  }

  const CellMover<2> x_mover(u.images * pitch, pitch, g.segs);
  const CellMover<1> dy_mover(u.images * g.segs, g.segs, g.segs);
  const int octet = warp / 4, i = warp % 4 * 2;  // this warp's channels of the octet: i and i + 1
  const int channel = (slab * kBandOctets + octet) * 8 + i;
  const int streams = u.images * g.segs;
  // Where the lane's row of ldmatrix lies in a buffer; ^ 16: channel i + 1. Matrices of x: streams 0 to
  // 7 of their cell, then of the next; then streams 8 to 15. Of dy: streams 0 to 7 and 8 to 15 of channel
  // i, then of i + 1; streams past the last are zeros.
  uint32_t x_take, dy_take;
  bool real;
  {
    const int stream = min(lane / 16 * 8 + lane % 8, streams - 1), image = stream / g.segs;
    const int right = lane / 8 % 2, phase = stream + right;
    const int cell = stream + image + right;
    x_take = uint32_t(((cell * kBandOctets + octet) * 8 + (i ^ (phase & 7))) * 16);
  }
  {
    const int stream = lane % 16;
    real = stream < streams;
    dy_take =
        uint32_t(((stream * kBandOctets + octet) * 8 + ((i + lane / 16) ^ (stream & 7))) * 16);
  }

  Keep(x_take);
  Keep(dy_take);

  float acc[2][R][4] = {};
  uint32_t now = 0;
  if (begin < end) {
    ring.Await();
    x_mover.Move(ring.At(), cells_at);
    dy_mover.Move(ring.At() + g.dy_at, cells_at + g.x_bytes);
    __syncthreads();
    if (threadIdx.x == 0) feed(ring.stage);
    ring.Advance();
  }
  for (int row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    uint32_t grad[R][4] = {};  // grad[r] is row h + pad - r of dy: b operands of i, of i + 1
    for (int h = first_row(at); h < at.end; ++h) {
      const uint32_t buffer = cells_at + now * buffer_bytes;
#pragma unroll
      for (int r = R - 1; r > 0; --r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) grad[r][e] = grad[r - 1][e];
      }
      LoadMatrixTransposed(grad[0], real ? buffer + g.x_bytes + dy_take : zeros);
      if (h >= at.p) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t in[4];
          LoadMatrixTransposed(in, (buffer + x_take) ^ (k * 16));
#pragma unroll
          for (int r = 0; r < R; ++r) {
            Mma<T>(acc[k][r], in, grad[r][2 * k], grad[r][2 * k + 1]);
          }
        }
      }
      now ^= 1;
      if (h + 1 < at.end || row < end) {
        ring.Await();
        const uint32_t other = cells_at + now * buffer_bytes;
        x_mover.Move(ring.At(), other);
        dy_mover.Move(ring.At() + g.dy_at, other + g.x_bytes);
        __syncthreads();
        if (threadIdx.x == 0) feed(ring.stage);
        ring.Advance();
      }
    }
  }

  // The diagonals: a lane a tap of the row, its 8 entries in order.
  __syncthreads();
  if (channel >= g.out.channels) return;
  float* square = reinterpret_cast<float*>(cells) + warp * (16 * 8);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      __syncwarp();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        square[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = acc[k][r][e];
      }
      __syncwarp();
      if (lane < S) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += square[(j + lane) * 8 + j];
        const int64_t to = int64_t(r * S + lane) * g.out.channels + channel + k;
        if (g.partials != nullptr) {
          g.partials[int64_t(part) * (R * S) * g.out.channels + to] = sum;
        } else {
          g.dw[to] = FromFloat<T>(sum);
        }
      }
    }
  }
#endif
}

template <typename T, int R>
Status Launch(const Context& ctx, BandsWgradArgs<T> g, int64_t splits, const void* x,
              const void* dy, DType dtype, const std::string& what) {
  RowUnits& u = g.u;
  g.segs = BandSegs(u, g.out.images, g.out.w);
  u.slabs = int(CeilDiv(g.out.channels, kBandOctets * 8));
  ShareRows(u, g.in.images, g.in.h, g.out.w, splits);
  g.x_bytes = uint32_t(u.images * (g.segs + 1) * kBandOctets * 128);
  g.dy_bytes = uint32_t(u.images * g.segs * kBandOctets * 128);
  g.dy_at = uint32_t(CeilDiv(int(g.x_bytes), 1024) * 1024);
  u.stage_bytes = int(g.dy_at + CeilDiv(int(g.dy_bytes), 1024) * 1024);
  u.stages = std::clamp(160 * 1024 / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(EncodeBands(dtype, x, g.in, (g.segs + 1) * 8, u.images, what, &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeBands(dtype, dy, g.out, g.segs * 8, u.images, what, &g.dy));
  const int64_t blocks = splits * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  CoverSums(u, kBandOctets * 4 * 512);  // the squares of a block's warps
  const int bytes = u.ring_bytes + 2 * int(g.x_bytes + g.dy_bytes) + 16 + u.stages * 16;
  const auto kernel = DepthwiseRowsMmaWgradKernel<T, R>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kThreads, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status DepthwiseRowsMmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits,
                             const void* x, const void* dy, void* dw, float* partials,
                             const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    BandsWgradArgs<T> g{};
    g.dw = static_cast<T*>(dw);
    g.partials = partials;
    g.in = RowsOfX(p);
    g.out = RowsOfY(p);
    g.pad_h = int(p.pad[1]);
    g.pad_w = int(p.pad[2]);
    if (p.filter[1] == 5) return Launch<T, 5>(ctx, g, splits, x, dy, p.dtype, what);
    return Launch<T, 7>(ctx, g, splits, x, dy, p.dtype, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
