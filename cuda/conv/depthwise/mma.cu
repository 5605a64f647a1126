// fprop, and dgrad as fprop of dy with the filter reversed, for 16-bit channels-last stride 1:
//
//   dst[n, p, q, c] = sum over r, s of  src[n, p - pad + r, q - pad + s * dilation, c] * w[r, s, c]
//
// as in mma.cuh: for channel c, with the 16 streams on M,
//
//   acc[stream, j] += sum over i < 16 of  src[stream's row + r, 8 seg + i] * band_r[i, j],
//   band_r[i, j] = w[r, (i - j) / dilation] where that is a tap, else 0.
//
// Grid: tiles x channel tiles (fastest, so that the sectors of a pixel are read together). A block
// of 8 warps loads its input cells, transposes them, lets each warp convolve pairs of channels
// down the rows, transposes back and stores. A stream holds its last R rows of inputs in registers,
// so an output row replaces the input row R - 1 below it in shared memory: all have read that one,
// because the strip below started with it and goes down at the same pace.
//
// Products are exact and sums float32. The zeros of a band meet real inputs, so an infinity in src
// makes NaN in outputs up to 15 columns away, where a sum over the taps alone would not see it.
#include "cuda/conv/depthwise/kernels.h"

#include "cuda/conv/depthwise/mma.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct MmaArgs {
  const T* src;
  const T* w;
  const T* bias;  // or null
  T* dst;
  Plane from, to;
  TileShape tile;
  int channel_tiles;
  int pad_h, pad_w, dilation;
  int filter_h, filter_w;
  bool reverse;
  Activation activation;
  float slope;
};

// The band of two neighbouring channels from `w` on: band[channel][r] is the b operand of an mma.
template <typename T, int R>
__device__ __forceinline__ void LoadBands(const MmaArgs<T>& g, const T* w, int channels,
                                          uint32_t (&band)[2][R][2]) {
  const int lane = threadIdx.x % 32;
  int tap[4];  // of the rows 2t, 2t + 1, 2t + 8, 2t + 9 of the band, in its column lane / 4; or -1
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int reach = lane % 4 * 2 + (e & 1) + (e >> 1) * 8 - lane / 4;
    const int s = reach / g.dilation;
    tap[e] = reach >= 0 && s * g.dilation == reach && s < g.filter_w
                 ? (g.reverse ? g.filter_w - 1 - s : s)
                 : -1;
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = g.reverse ? g.filter_h - 1 - r : r;
    uint32_t pair[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      pair[e] = 0;
      if (r < g.filter_h && tap[e] >= 0) {
        pair[e] = __ldg(
            reinterpret_cast<const unsigned*>(w + (int64_t(row) * g.filter_w + tap[e]) * channels));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      band[0][r][half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x5410);
      band[1][r][half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x7632);
    }
  }
}

// kWide channels, from channel `first` of the band on, down all rows of the tile. `cell` is this
// lane's cell of its stream's first row; the channel is slot `i` of it before the swizzle, which is
// `phase` at that row.
template <typename T, int R, int kWide>
__device__ __forceinline__ void Convolve(const MmaArgs<T>& g, const uint32_t (&band)[2][R][2],
                                         const float (&bias)[2], int first, uint32_t cell,
                                         int phase, int i, uint32_t row_bytes) {
  const int turn = g.tile.in.turn;
  const auto slot = [&] { return cell + uint32_t((i ^ (phase & 7)) << 4); };  // i is even
  uint32_t in[kWide][R][4];
#pragma unroll
  for (int r = 0; r + 1 < R; ++r) {
#pragma unroll
    for (int k = 0; k < kWide; ++k) LoadMatrix(in[k][r], slot() ^ uint32_t((first + k) << 4));
    cell += row_bytes;
    phase += turn;
  }
  for (int row0 = 0; row0 < g.tile.rows; row0 += R) {
#pragma unroll
    for (int u = 0; u < R; ++u) {
      if (row0 + u < g.tile.rows) {
        const uint32_t at = slot();
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
          LoadMatrix(in[k][(u + R - 1) % R], at ^ uint32_t((first + k) << 4));
        }
        float acc[kWide][4] = {};
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int k = 0; k < kWide; ++k) {
            Mma<T>(acc[k], in[k][(u + r) % R], band[first + k][r][0], band[first + k][r][1]);
          }
        }
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[k][e] += bias[first + k];
          ApplyActivation(g.activation, acc[k], g.slope);
          StoreMatrix2(at ^ uint32_t((first + k) << 4), PackPair(acc[k][0], acc[k][1], T()),
                       PackPair(acc[k][2], acc[k][3], T()));
        }
        cell += row_bytes;
        phase += turn;
      }
    }
  }
}

// The cells of a tile's outputs, laid out as `c` and `halo` rows down there, back to pixels x
// channels, and to memory. Warps and rows as in LoadCells.
template <int kOctets, typename T>
__device__ __forceinline__ void StoreCells(const MmaArgs<T>& g, const Cells& c, uint32_t shared,
                                           int halo, const TileOrigin& origin, int channel0) {
  constexpr int kUnits = 4 / kOctets;
  const TileShape& t = g.tile;
  const int lane = threadIdx.x % 32;
  const int seg0 = lane / (8 * kOctets);
  const int turn_octet = lane / 8 % kOctets;                 // transposing
  const int octet = lane % kOctets, i = lane / kOctets % 8;  // storing
  const int channel = channel0 + octet * 8;
  const int64_t step = int64_t(8 * kUnits) * g.to.channels;
  for (int row = threadIdx.x / 32; row * t.out.pitch < t.out.units; row += kTileThreads / 32) {
    const int of = t.line ? 0 : int(t.out.by_image_rows.Div(row));
    const int p = origin.p + (t.line ? 0 : row - of * t.out.image_rows);
    const int in_row = of * (c.image_rows - t.out.image_rows) + row + halo;
    const uint32_t cell = shared + uint32_t(in_row * c.pitch * kOctets) * 128;
    const int phase = c.turn * in_row;
    const bool live = origin.image + of < g.to.images && p < g.to.h && channel < g.to.channels;
    const int width = live ? g.to.w : 0;
    int q = origin.q + ((t.line ? row * t.out.pitch : 0) + seg0) * 8 + i;
    T* at =
        g.dst + ((int64_t(origin.image + of) * g.to.h + p) * g.to.w + q) * g.to.channels + channel;
    for (int first = 0; first < t.segs; first += kUnits) {
      const int seg = min(first + seg0, t.segs - 1);
      const uint32_t slot =
          cell + uint32_t((seg * kOctets + turn_octet) * 128 +
                          ((lane % 8 ^ ((phase + seg + turn_octet * (8 / kOctets)) & 7)) << 4));
      uint32_t r[4];
      LoadMatrixTransposed(r, slot);
      StoreMatrix4(slot, r);
      __syncwarp();
      if (first + seg0 < t.segs && q < width) {
        *reinterpret_cast<uint4*>(at) =
            LoadShared16(cell + uint32_t((seg * kOctets + octet) * 128 +
                                         ((i ^ ((phase + seg + octet * (8 / kOctets)) & 7)) << 4)));
      }
      q += 8 * kUnits;
      at += step;
    }
  }
}

template <typename T, int R, int kOctets>
__global__ void __launch_bounds__(kTileThreads, kOctets* R >= 14 ? 2 : 3)
    DepthwiseMmaKernel(const __grid_constant__ MmaArgs<T> g) {
  extern __shared__ __align__(128) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const TileShape& t = g.tile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel0 = int(blockIdx.x % unsigned(g.channel_tiles)) * (8 * kOctets);
  const TileOrigin origin = OriginOf(t, blockIdx.x / unsigned(g.channel_tiles));

  LoadCells<kOctets>(t.in, t.line, shared, g.src, g.from, origin.image, origin.p - g.pad_h,
                     origin.q - g.pad_w, channel0);
  CopyCommit();

  // The lane's place in ldmatrix.x4: matrices of streams 0 to 7, 8 to 15, then the next segs of
  // both. Streams past the last repeat it, and store what it stores.
  const int stream = lane % 16;
  const int strip = min(stream / t.segs, t.strips - 1);
  const int of = strip / t.bands;
  const int row = of * t.in.image_rows + (strip - of * t.bands) * t.rows;
  const int seg = stream % t.segs + lane / 16;
  const uint32_t row_bytes = uint32_t(t.in.pitch) * CellBytes<kOctets>();

  CopyWait<0>();
  __syncwarp();
  TransposeCells<kOctets>(t.in, shared);

  for (int pair = warp; pair < 4 * kOctets; pair += kTileThreads / 32) {
    const int octet = pair / 4, i = pair % 4 * 2;
    const int channel = channel0 + octet * 8 + i;
    const bool live = channel < g.to.channels;  // of the whole warp
    uint32_t band[2][R][2];
    float bias[2] = {0.f, 0.f};
    if (live) {
      LoadBands<T, R>(g, g.w + channel, g.to.channels, band);
      if (g.bias != nullptr) {
        bias[0] = ToFloat(g.bias[channel]);
        bias[1] = ToFloat(g.bias[channel + 1]);
      }
    }
    if (pair == warp) __syncthreads();  // all cells are transposed
    if (!live) continue;
    const uint32_t cell = shared + uint32_t((row * t.in.pitch + seg) * kOctets + octet) * 128;
    const int phase = seg + t.in.turn * row + octet * (8 / kOctets);
    if constexpr (R <= 3) {
      Convolve<T, R, 2>(g, band, bias, 0, cell, phase, i, row_bytes);
    } else {
      Convolve<T, R, 1>(g, band, bias, 0, cell, phase, i, row_bytes);
      Convolve<T, R, 1>(g, band, bias, 1, cell, phase, i, row_bytes);
    }
  }
  __syncthreads();
  StoreCells<kOctets>(g, t.in, shared, R - 1, origin, channel0);
}

template <typename T, int R, int kOctets>
Status Launch(const Context& ctx, const MmaArgs<T>& args, int64_t budget, const std::string& what) {
  MmaArgs<T> g = args;
  g.tile = ChooseTile<kOctets>(g.to.images, g.to.h, g.to.w, R, 1, budget, false);
  g.channel_tiles = int(CeilDiv(g.to.channels, 8 * kOctets));
  const int64_t blocks = g.tile.tiles * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int64_t bytes = CellsBytes<kOctets>(g.tile.in);
  const auto kernel = DepthwiseMmaKernel<T, R, kOctets>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kTileThreads, size_t(bytes), ctx.stream>>>(g);
  return LaunchStatus(what);
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters past 7 rows or a span of 9: the same product with kDeep mma steps, 16 kDeep inputs, to a
// run of 8 outputs. A warp owns one channel of 8 and works on kLargeRows output rows at a time: as
// the filter row goes down, each input row that it loads serves all of them, from registers. The
// bands are read from shared memory out of the filter rows, padded by zeros and kept in two copies,
// one shifted by an element, so that any pair of neighbours is an aligned word.
constexpr int kLargeRows = 7;

template <typename T, int kDeep>
__global__ void __launch_bounds__(kTileThreads, 1)
    DepthwiseLargeKernel(const __grid_constant__ MmaArgs<T> g) {
  extern __shared__ __align__(128) unsigned char cells[];
  constexpr int kWords = CopyWords(kDeep);
  const uint32_t shared = SharedAddress(cells);
  const TileShape& t = g.tile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel0 = int(blockIdx.x % unsigned(g.channel_tiles)) * 8;
  const TileOrigin origin = OriginOf(t, blockIdx.x / unsigned(g.channel_tiles));
  const uint32_t out_at = shared + uint32_t(t.in.units) * 128;
  // [channel of 8][row][copy][word]
  uint32_t* filter = reinterpret_cast<uint32_t*>(cells + (t.in.units + t.out.units) * 128);

  LoadCells<1>(t.in, t.line, shared, g.src, g.from, origin.image, origin.p - g.pad_h,
               origin.q - g.pad_w, channel0);
  CopyCommit();

  for (int e = threadIdx.x; e < g.filter_h * kWords; e += kTileThreads) {
    const int r = e / kWords, word = e - r * kWords;
    const int row = g.reverse ? g.filter_h - 1 - r : r;
    // Elements j - 1, j, j + 1 of the row, all 8 channels. Copy 0 has (j, j + 1), copy 1
    // (j - 1, j).
    uint16_t v[3][8] = {};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const int j = word * 2 - 8 + k - 1, s = j / g.dilation;
      if (j < 0 || s * g.dilation != j || s >= g.filter_w) continue;
      const int tap = row * g.filter_w + (g.reverse ? g.filter_w - 1 - s : s);
      const uint4 octet =
          *reinterpret_cast<const uint4*>(g.w + int64_t(tap) * g.to.channels + channel0);
      const uint32_t part[4] = {octet.x, octet.y, octet.z, octet.w};
#pragma unroll
      for (int c = 0; c < 8; ++c) v[k][c] = uint16_t(part[c / 2] >> (c % 2 * 16));
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint32_t* to = filter + (c * g.filter_h + r) * 2 * kWords + word;
      to[0] = v[1][c] | uint32_t(v[2][c]) << 16;
      to[kWords] = v[0][c] | uint32_t(v[1][c]) << 16;
    }
  }

  CopyWait<0>();
  __syncwarp();
  TransposeCells<1>(t.in, shared);
  __syncthreads();

  const int stream = lane % 16;
  const int strip = min(stream / t.segs, t.strips - 1);
  const int of = strip / t.bands;
  const int band_row = (strip - of * t.bands) * t.rows;
  const int row0 = of * t.in.image_rows + band_row;
  const int seg = stream % t.segs;
  const int last = t.rows + g.filter_h - 2;  // of a strip's input rows
  const float bias = g.bias != nullptr ? ToFloat(g.bias[channel0 + warp]) : 0.f;
  // Column lane / 4 of the band begins at element -(lane / 4), its rows 2 (lane % 4) and the next:
  // an even element is a word of copy 0, an odd one of copy 1.
  const int element = 8 + lane % 4 * 2 - lane / 4;
  const uint32_t* band = filter + warp * g.filter_h * 2 * kWords +
                         (element % 2 == 0 ? element / 2 : kWords + (element + 1) / 2);

  uint32_t in[kLargeRows][kDeep][4];
  const auto load = [&](uint32_t (&to)[kDeep][4], int row) {  // of the strip
    const int at = row0 + min(row, last);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int cell = seg + lane / 16 + 2 * d;
      LoadMatrix(to[d], shared + uint32_t((at * t.in.pitch + cell) * 128 +
                                          ((warp ^ ((cell + t.in.turn * at) & 7)) << 4)));
    }
  };
  for (int top = 0; top < t.rows; top += kLargeRows) {
    float acc[kLargeRows][4] = {};
#pragma unroll
    for (int a = 0; a + 1 < kLargeRows; ++a) load(in[a], top + a);
    for (int first = 0; first < g.filter_h; first += kLargeRows) {
#pragma unroll
      for (int u = 0; u < kLargeRows; ++u) {
        const int r = first + u;
        if (r < g.filter_h) {
          load(in[(u + kLargeRows - 1) % kLargeRows], top + r + kLargeRows - 1);
          const uint32_t* at = band + r * 2 * kWords;
#pragma unroll
          for (int d = 0; d < kDeep; ++d) {
            const uint32_t b0 = at[8 * d], b1 = at[8 * d + 4];
#pragma unroll
            for (int a = 0; a < kLargeRows; ++a) {
              Mma<T>(acc[a], in[(u + a) % kLargeRows][d], b0, b1);
            }
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kLargeRows; ++a) {
      if (top + a < t.rows) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[a][e] += bias;
        ApplyActivation(g.activation, acc[a], g.slope);
        const int at = of * t.out.image_rows + band_row + top + a;
        StoreMatrix2(out_at + uint32_t((at * t.out.pitch + seg) * 128 +
                                       ((warp ^ ((seg + t.out.turn * at) & 7)) << 4)),
                     PackPair(acc[a][0], acc[a][1], T()), PackPair(acc[a][2], acc[a][3], T()));
      }
    }
  }
  __syncthreads();
  StoreCells<1>(g, t.out, out_at, 0, origin, channel0);
}

template <typename T, int kDeep>
Status LaunchLarge(const Context& ctx, const MmaArgs<T>& args, const std::string& what) {
  MmaArgs<T> g = args;
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const int64_t shared_memory = device.shared_memory();
  const int64_t filter_bytes = LargeFilterBytes(kDeep, g.filter_h);
  g.tile = ChooseTile<1>(g.to.images, g.to.h, g.to.w, g.filter_h, 2 * kDeep - 1,
                         shared_memory - filter_bytes, true);
  g.channel_tiles = g.to.channels / 8;
  const int64_t blocks = g.tile.tiles * g.channel_tiles;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int64_t bytes = CellsBytes<1>(g.tile.in) + CellsBytes<1>(g.tile.out) + filter_bytes;
  const auto kernel = DepthwiseLargeKernel<T, kDeep>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kTileThreads, size_t(bytes), ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <typename T>
Status Run(const Context& ctx, const MmaArgs<T>& g, const DepthwiseMmaTile& tile,
           const std::string& what) {
  const int span = (g.filter_w - 1) * g.dilation + 1;
  if (g.filter_h > kMaxFilterRows || span > kMaxSpan) {
    return span <= 16 * 2 - 7 ? LaunchLarge<T, 2>(ctx, g, what) : LaunchLarge<T, 3>(ctx, g, what);
  }
  if (g.filter_h == 1) return Launch<T, 1, 2>(ctx, g, tile.budget, what);
  if (g.filter_h <= 3) return Launch<T, 3, 2>(ctx, g, tile.budget, what);
  if (g.filter_h <= 5) return Launch<T, 5, 2>(ctx, g, tile.budget, what);
  return Launch<T, 7, 2>(ctx, g, tile.budget, what);
}

}  // namespace

Status DepthwiseMma(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                    const void* src, const void* w, const void* bias, void* dst, void* z,
                    const std::string& what) {
  const DepthwiseMmaTile tile;
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    MmaArgs<T> g{};
    g.src = static_cast<const T*>(src);
    g.w = static_cast<const T*>(w);
    g.bias = e.bias ? static_cast<const T*>(bias) : nullptr;
    g.dst = static_cast<T*>(dst);
    const Plane x = {int(p.n * p.in[0]), int(p.in[1]), int(p.in[2]), int(p.c)};
    const Plane y = {x.images, int(p.out[1]), int(p.out[2]), int(p.k)};
    g.from = dgrad ? y : x;
    g.to = dgrad ? x : y;
    g.filter_h = int(p.filter[1]);
    g.filter_w = int(p.filter[2]);
    g.dilation = int(p.dilation[2]);
    g.pad_h = dgrad ? g.filter_h - 1 - int(p.pad[1]) : int(p.pad[1]);
    g.pad_w = dgrad ? (g.filter_w - 1) * g.dilation - int(p.pad[2]) : int(p.pad[2]);
    g.reverse = dgrad;
    g.activation = e.activation;
    g.slope = float(e.slope);
    if (e.save_preactivation) {
      // z first, as an output of its own: rounded z would give another y.
      MmaArgs<T> first = g;
      first.dst = static_cast<T*>(z);
      first.activation = Activation::kNone;
      JAXCONV_RETURN_IF_ERROR(Run<T>(ctx, first, tile, what));
    }
    return Run<T>(ctx, g, tile, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
