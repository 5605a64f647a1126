// dw[r, s, c] = sum over n, p, q of  x[n, p - pad + r, q - pad + s * dilation, c] * dy[n, p, q, c]
//
// for 16-bit channels-last stride 1, as in mma.cuh: with the 16 streams on K, for
// channel c and every filter row r
//
//   acc_r[i, j] += sum over streams of  x[its row + r, 8 seg + i] * dy[its row, 8 seg + j]
//
// is an mma of 16 x 8 (i, j), or kDeep of them where the filter row spans more than 9 pixels, and
// dw[r, s] is the sum of its diagonal i - j = s * dilation, taken once, at the end.
//
// Grid: splits x groups of R filter rows x channel tiles (fastest) of 8 kOctets channels; a warp
// owns kOctets of them, 2 but for long filter rows. A block walks over a contiguous part of the
// tiles with two buffers: the next tile's cells are on their way while this one's are summed. Reads
// x about once per row group, its halo rows from L2, and dy once; writes dw or, with several
// splits, a partial sum each.
//
// A product of elements that are no tap of each other stays in an entry of acc that is not used;
// only at the ragged end of a row or image does an infinity in x meet zeros that stand for no dy.
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/mma.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct MmaWgradArgs {
  const T* x;
  const T* dy;
  T* dw;            // with one split
  float* partials;  // (splits, R*S, K) otherwise; null with one
  Plane in, out;
  TileShape tile;
  int64_t split_tiles;
  int channel_tiles;
  int pad_h, pad_w, dilation;
  int filter_h, filter_w;
  int row_groups;                 // of R filter rows, each the work of other blocks
  uint32_t out_at, buffer_bytes;  // dy's cells in a buffer; a buffer. Two, then 16 bytes of zeros
};

// One channel: slot `i` of its cells, of which `x_cell` and `dy_cell` are this lane's in its
// streams' first rows.
template <typename T, int R, int kDeep, int kOctets>
__device__ __forceinline__ void Accumulate(int rows, int i, uint32_t x_cell, int x_phase,
                                           uint32_t x_row, int x_turn, uint32_t dy_cell,
                                           int dy_phase, uint32_t dy_row, int dy_turn,
                                           float (&acc)[R][kDeep][4]) {
  uint32_t in[R][kDeep][4];
  const auto load = [&](uint32_t (&to)[kDeep][4]) {
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      LoadMatrixTransposed(
          to[d], x_cell + uint32_t(2 * d * kOctets * 128 + ((i ^ ((x_phase + 2 * d) & 7)) << 4)));
    }
    x_cell += x_row;
    x_phase += x_turn;
  };
#pragma unroll
  for (int r = 0; r + 1 < R; ++r) load(in[r]);
  for (int row0 = 0; row0 < rows; row0 += R) {
#pragma unroll
    for (int u = 0; u < R; ++u) {
      if (row0 + u < rows) {
        load(in[(u + R - 1) % R]);
        uint32_t b0, b1;
        // The slot of zeros is no cell: dy_row is 0 there, and so must the channel's part be.
        const uint32_t part = uint32_t((i ^ (dy_phase & 7)) << 4);
        LoadMatrix2Transposed(b0, b1, dy_cell + (dy_row != 0 ? part : 0));
        dy_cell += dy_row;
        dy_phase += dy_turn;
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int d = 0; d < kDeep; ++d) Mma<T>(acc[r][d], in[(u + r) % R][d], b0, b1);
        }
      }
    }
  }
}

// Blocks an SM that the registers are to allow. Below sm_90 one fewer: ptxas would spill 16 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kFewer = 1;
#else
constexpr int kFewer = 0;
#endif

template <typename T, int R, int kDeep, int kOctets>
__global__ void __launch_bounds__(kTileThreads, kDeep > 1 ? 1
                                                : R > 3   ? 2 - kFewer
                                                          : 3 - kFewer)
    DepthwiseMmaWgradKernel(const __grid_constant__ MmaWgradArgs<T> g) {
  extern __shared__ __align__(128) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const TileShape& t = g.tile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel0 = int(blockIdx.x % unsigned(g.channel_tiles)) * (8 * kOctets);
  const int64_t rest = blockIdx.x / unsigned(g.channel_tiles);
  const int64_t split = rest / g.row_groups;
  const int first_row = int(rest - split * g.row_groups) * R;  // of the filter
  constexpr int kChannels = kOctets;                           // of a warp: 8 warps, 8 * kOctets
  const int octet = warp * kChannels / 8, i = warp * kChannels % 8;
  const int channel = channel0 + octet * 8 + i;
  const bool live = channel < g.in.channels;  // of the whole warp

  const uint32_t zeros = shared + 2 * g.buffer_bytes;
  if (threadIdx.x == 0) StoreShared16(zeros, make_uint4(0, 0, 0, 0));

  const auto load = [&](int64_t tile, uint32_t buffer) {
    const TileOrigin o = OriginOf(t, tile);
    LoadCells<kOctets>(t.in, t.line, buffer, g.x, g.in, o.image, o.p - g.pad_h + first_row,
                       o.q - g.pad_w, channel0);
    LoadCells<kOctets>(t.out, t.line, buffer + g.out_at, g.dy, g.out, o.image, o.p, o.q, channel0);
    CopyCommit();
  };

  // The lane's place in ldmatrix: a operand, matrices (streams 0 to 7, seg), (the same, seg + 1),
  // then streams 8 to 15; b operand, streams 0 to 7 and 8 to 15.
  const auto place = [&](int stream, const Cells& c, int& row, int& seg) {
    const int strip = min(stream / t.segs, t.strips - 1);
    const int of = strip / t.bands;
    row = of * c.image_rows + (strip - of * t.bands) * t.rows;
    seg = stream % t.segs;
  };
  int x_row, x_seg, dy_row, dy_seg;
  place(lane / 16 * 8 + lane % 8, t.in, x_row, x_seg);
  x_seg += lane / 8 % 2;
  place(lane % 16, t.out, dy_row, dy_seg);
  const bool real = lane % 16 < t.strips * t.segs;
  const uint32_t x_step = uint32_t(t.in.pitch) * CellBytes<kOctets>();
  const uint32_t dy_step = real ? uint32_t(t.out.pitch) * CellBytes<kOctets>() : 0;
  const uint32_t x_at = uint32_t((x_row * t.in.pitch + x_seg) * kOctets + octet) * 128;
  const uint32_t dy_at =
      g.out_at + uint32_t((dy_row * t.out.pitch + dy_seg) * kOctets + octet) * 128;
  const int x_phase = x_seg + t.in.turn * x_row + octet * (8 / kOctets);
  const int dy_phase = dy_seg + t.out.turn * dy_row + octet * (8 / kOctets);

  float acc[kChannels][R][kDeep][4] = {};
  const int64_t begin = split * g.split_tiles;
  const int64_t end = min(t.tiles, begin + g.split_tiles);
  uint32_t buffer = shared, other = shared + g.buffer_bytes;
  if (begin < end) load(begin, buffer);
  for (int64_t tile = begin; tile < end; ++tile) {
    CopyWait<0>();
    __syncwarp();
    TransposeCells<kOctets>(t.in, buffer);
    TransposeCells<kOctets>(t.out, buffer + g.out_at);
    __syncthreads();  // and every warp is done with `other`
    if (tile + 1 < end) load(tile + 1, other);
    if (live) {
      const uint32_t dy_cell = real ? buffer + dy_at : zeros;
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        Accumulate<T, R, kDeep, kOctets>(t.rows, i + k, buffer + x_at, x_phase, x_step, t.in.turn,
                                         dy_cell, dy_phase, dy_step, t.out.turn, acc[k]);
      }
    }
    const uint32_t swap = buffer;
    buffer = other;
    other = swap;
  }
  __syncthreads();
  if (!live) return;

  // The diagonals: a lane a tap of the row, its 8 entries in order.
  float* square = reinterpret_cast<float*>(cells) + warp * (kDeep * 16 * 8);
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      __syncwarp();
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          square[(d * 16 + lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = acc[k][r][d][e];
        }
      }
      __syncwarp();
      if (first_row + r >= g.filter_h) continue;
      for (int s = lane; s < g.filter_w; s += 32) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += square[(j + s * g.dilation) * 8 + j];
        const int64_t at = (int64_t(first_row + r) * g.filter_w + s) * g.in.channels + channel + k;
        if (g.partials != nullptr) {
          g.partials[split * g.filter_h * g.filter_w * g.in.channels + at] = sum;
        } else {
          g.dw[at] = FromFloat<T>(sum);
        }
      }
    }
  }
}

template <typename T, int R, int kDeep, int kOctets>
Status Launch(const Context& ctx, const MmaWgradArgs<T>& args, int64_t splits, int64_t budget,
              const std::string& what) {
  MmaWgradArgs<T> g = args;
  g.tile = ChooseTile<kOctets>(g.out.images, g.out.h, g.out.w, R, 2 * kDeep - 1, budget, true);
  g.split_tiles = CeilDiv(g.tile.tiles, splits);
  g.row_groups = int(CeilDiv(g.filter_h, R));
  g.channel_tiles = int(CeilDiv(g.in.channels, 8 * kOctets));
  const int64_t in_bytes = CellsBytes<kOctets>(g.tile.in);
  g.out_at = uint32_t(in_bytes);
  g.buffer_bytes = uint32_t(in_bytes + CellsBytes<kOctets>(g.tile.out));
  const int64_t blocks = splits * g.row_groups * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  // The squares of 8 warps, 512 kDeep bytes each, lie over the buffers.
  const int64_t bytes = std::max<int64_t>(2 * int64_t(g.buffer_bytes) + 16, 8 * 512 * kDeep);
  const auto kernel = DepthwiseMmaWgradKernel<T, R, kDeep, kOctets>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kTileThreads, size_t(bytes), ctx.stream>>>(g);
  return LaunchStatus(what);
}

// Shared memory for one of the two buffers: three blocks an SM up to 3 filter rows, two with more, one
// for a long filter row. Both buffers stay below the 99 KB of the smallest devices.
DepthwiseMmaTile WgradTile(const ConvProblem& p) {
  const bool large = (p.filter[2] - 1) * p.dilation[2] >= 9;
  return {(large ? 46 : p.filter[1] <= 3 ? 36 : 48) * 1024};
}

}  // namespace

Status DepthwiseMmaWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                         const void* dy, void* dw, float* partials, const std::string& what) {
  const DepthwiseMmaTile tile = WgradTile(p);
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    MmaWgradArgs<T> g{};
    g.x = static_cast<const T*>(x);
    g.dy = static_cast<const T*>(dy);
    g.dw = static_cast<T*>(dw);
    g.partials = partials;
    g.in = {int(p.n * p.in[0]), int(p.in[1]), int(p.in[2]), int(p.c)};
    g.out = {g.in.images, int(p.out[1]), int(p.out[2]), int(p.k)};
    g.filter_h = int(p.filter[1]);
    g.filter_w = int(p.filter[2]);
    g.dilation = int(p.dilation[2]);
    g.pad_h = int(p.pad[1]);
    g.pad_w = int(p.pad[2]);
    if ((g.filter_w - 1) * g.dilation >= kMaxSpan) {
      return Launch<T, 7, 3, 1>(ctx, g, splits, tile.budget, what);
    }
    if (g.filter_h == 1) return Launch<T, 1, 1, 2>(ctx, g, splits, tile.budget, what);
    if (g.filter_h <= 3) return Launch<T, 3, 1, 2>(ctx, g, splits, tile.budget, what);
    if (g.filter_h <= 5) return Launch<T, 5, 1, 2>(ctx, g, splits, tile.budget, what);
    return Launch<T, 7, 1, 2>(ctx, g, splits, tile.budget, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
