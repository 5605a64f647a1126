// Depthwise convolution of channels-first arrays, stride 1, a plane (n, c) after the other:
//
//   dst[plane, p, q] = sum over r, s of  src[plane, p - pad + r, q - pad + s] * w[c, r, s]
//   dw[c, r, s]      = sum over n, p, q of  x[n, c, p - pad + r, q - pad + s] * dy[n, c, p, q]
//
// (dgrad is the first with src = dy and the filter reversed.) A lane owns kRun = 7 neighbouring
// columns of a plane: the extents of the usual networks are multiples of 7, and lanes 7 words apart
// read shared memory without conflicts. A warp owns as many whole rows of planes as fill its 32
// lanes and goes down the rows on its own: it brings row after row by cp.async into its ring, whose
// rows have zeros at both ends, so that the columns' edges need no test. As in rows.cu the
// sums of the R output rows that an input row contributes to stay in registers, and the filter too;
// for wgrad the R rows of dy that it meets and the R * S sums.
//
// Outputs go through shared memory to stores of whole words. Reads src about once and writes dst
// once; wgrad writes dw or, with several splits of the images, a partial sum each.
#include "cuda/conv/depthwise/planes.h"

#include <algorithm>

#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/common/row_stream.cuh"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kRun = 7;
constexpr int kAhead = 5;  // rows on their way
constexpr int kWarps = 4;

// Rows of a warp's planes in shared memory.
struct PlaneRows {
  int h, w;          // of a plane
  int left, pitch;   // elements before column 0, and from a plane's row to the next plane's
  int row_elements;  // of all planes' rows together, in shared memory
  int64_t plane_bytes;
  FastDiv by_pieces;  // copies of `piece` bytes that make a row
};

template <typename T>
struct PlanesArgs {
  const T* src;
  const T* w;
  T* dst;
  float* partials;  // wgrad: (splits, K, R*S); null with one split
  EpilogueArgs<T> epilogue;
  PlaneRows from, to;  // wgrad: x and dy
  int64_t planes;      // N * C * D
  int64_t units;       // fprop, dgrad: groups of planes x bands; wgrad: channel groups x splits
  int depth, channels;
  FastDiv by_tiles, by_bands, by_depth, by_channels;
  int tiles, group;  // lanes of a plane; planes of a warp
  int band;          // rows
  int pad_h, pad_w;
  int piece;  // bytes of a copy: 16, 8, 4 or 2
  int warp_bytes;
  bool reverse;
  int64_t images, splits;  // wgrad
};

// Row h of `live` planes from `src` on into `to`, in pieces of `bytes`. Planes beyond stay as they
// are: nobody stores them.
template <typename T>
__device__ __forceinline__ void LoadRow(const PlaneRows& rows, int bytes, const T* src, int h,
                                        int live, uint32_t to) {
  const char* row = reinterpret_cast<const char*>(src + int64_t(h) * rows.w);
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < live * int(rows.by_pieces.d); at += 32) {
    const int plane = int(rows.by_pieces.Div(at));
    const int byte = (at - plane * int(rows.by_pieces.d)) * bytes;
    const char* from = row + int64_t(plane) * rows.plane_bytes + byte;
    const uint32_t slot = to + uint32_t((plane * rows.pitch + rows.left) * int(sizeof(T)) + byte);
    if (bytes == 16) {
      CopyAsync<16>(slot, from, 16);
    } else if (bytes == 8) {
      CopyAsync<8>(slot, from, 8);
    } else if (bytes == 4) {
      CopyAsync<4>(slot, from, 4);
    } else {
      const uint16_t bits = __ldg(reinterpret_cast<const uint16_t*>(from));
      asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(slot), "h"(bits) : "memory");
    }
  }
}

// The same way back.
template <typename T>
__device__ __forceinline__ void StoreRow(const PlaneRows& rows, int bytes, T* dst, int live,
                                         uint32_t from) {
  char* row = reinterpret_cast<char*>(dst);
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < live * int(rows.by_pieces.d); at += 32) {
    const int plane = int(rows.by_pieces.Div(at));
    const int byte = (at - plane * int(rows.by_pieces.d)) * bytes;
    char* to = row + int64_t(plane) * rows.plane_bytes + byte;
    const uint32_t slot = from + uint32_t(plane * rows.pitch * int(sizeof(T)) + byte);
    if (bytes == 16) {
      __stwb(reinterpret_cast<uint4*>(to), LoadShared16(slot));
    } else if (bytes == 8) {
      uint2 v;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "r"(slot));
      __stwb(reinterpret_cast<uint2*>(to), v);
    } else if (bytes == 4) {
      uint32_t v;
      asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(slot));
      *reinterpret_cast<uint32_t*>(to) = v;
    } else {
      uint16_t v;
      asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(v) : "r"(slot));
      *reinterpret_cast<uint16_t*>(to) = v;
    }
  }
}

template <typename T>
__device__ __forceinline__ float ReadShared(uint32_t address) {
  if constexpr (sizeof(T) == 4) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(address));
    return v;
  } else {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(address));
    return ToFloat(*reinterpret_cast<const T*>(&bits));
  }
}

template <typename T>
__device__ __forceinline__ void WriteShared(uint32_t address, float v) {
  const T t = FromFloat<T>(v);
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address), "f"(t) : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(address),
                 "h"(*reinterpret_cast<const uint16_t*>(&t))
                 : "memory");
  }
}

// Zeros in `bytes` of the warp's shared memory, a multiple of 16.
__device__ __forceinline__ void ZeroShared(uint32_t at, int bytes) {
  for (int i = int(threadIdx.x % 32) * 16; i < bytes; i += 512) {
    StoreShared16(at + i, make_uint4(0, 0, 0, 0));
  }
}

template <typename T, int R, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    DepthwisePlanesKernel(const __grid_constant__ PlanesArgs<T> g) {
  constexpr int S = R, kCols = kRun + S - 1, kItem = int(sizeof(T));
  extern __shared__ __align__(128) unsigned char cells[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + warp;
  if (unit >= g.units) return;
  const uint32_t ring = SharedAddress(cells) + uint32_t(warp * g.warp_bytes);
  const int stage_bytes = g.from.row_elements * kItem;
  const uint32_t outbox = ring + uint32_t((kAhead + 1) * stage_bytes);

  const QuotRem band = DivMod(unit, g.by_bands);
  const int64_t plane0 = band.quot * g.group;
  const int live = int(min(int64_t(g.group), g.planes - plane0));
  const int p0 = band.rem * g.band, p1 = min(p0 + g.band, g.to.h);
  const int h0 = max(p0 - g.pad_h, 0), h1 = min(p1 - g.pad_h + R - 1, g.from.h);

  ZeroShared(ring, (kAhead + 1) * stage_bytes);
  __syncwarp();
  const T* src = g.src + plane0 * (int64_t(g.from.h) * g.from.w);
  int put = 0, get = 0;  // stages
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (h0 + i < h1) LoadRow(g.from, g.piece, src, h0 + i, live, ring + put * stage_bytes);
    CopyAsyncCommit();
    ++put;
  }

  const int plane = min(int(g.by_tiles.Div(lane)), live - 1);
  const int col = (lane - int(g.by_tiles.Div(lane)) * g.tiles) * kRun;
  const int channel = DivMod(DivMod(plane0 + plane, g.by_depth).quot, g.by_channels).rem;
  float w[R][S];
#pragma unroll
  for (int t = 0; t < R * S; ++t) {
    w[t / S][t % S] = ToFloat(g.w[int64_t(channel) * (R * S) + (g.reverse ? R * S - 1 - t : t)]);
  }
  const float bias = g.epilogue.bias != nullptr ? ToFloat(g.epilogue.bias[channel]) : 0.f;

  // Lanes past the last plane repeat the last one's work; they must not overtake in the outbox.
  const bool real = int(g.by_tiles.Div(lane)) < live;
  const uint32_t mine = uint32_t((plane * g.from.pitch + g.from.left + col - g.pad_w) * kItem);
  const uint32_t out_mine = outbox + uint32_t((plane * g.to.pitch + col) * kItem);
  int64_t out = plane0 * (int64_t(g.to.h) * g.to.w);  // of the warp's first plane, row p
  int p = h0 + g.pad_h - (R - 1);
  out += int64_t(p) * g.to.w;

  const auto copy_out = [&](T* to) {
    __syncwarp();
    StoreRow(g.to, g.piece, to, live, outbox);
    __syncwarp();
  };
  const auto store = [&](float (&row)[kRun]) {
    if (p >= p0 && p < p1) {
      if (g.epilogue.z != nullptr) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (real) WriteShared<T>(out_mine + e * kItem, row[e]);
        }
        copy_out(g.epilogue.z + out);
      }
      ApplyActivation(g.epilogue.activation, row, g.epilogue.slope);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (real) WriteShared<T>(out_mine + e * kItem, row[e]);
      }
      copy_out(g.dst + out);
    }
    ++p;
    out += g.to.w;
  };

  // sum[j] is output row p + j before input row h, p = h + pad - (R - 1).
  float sum[R][kRun];
#pragma unroll
  for (int j = 0; j < R; ++j) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) sum[j][e] = bias;
  }
  for (int h = h0; h < h1; ++h) {
    CopyAsyncWait<kAhead - 1>();
    __syncwarp();  // row h is here, and all have read row h - 1
    const uint32_t from = ring + uint32_t(get * stage_bytes) + mine;
    get = get == kAhead ? 0 : get + 1;
    float in[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c) in[c] = ReadShared<T>(from + c * kItem);
    if (h + kAhead < h1) {
      LoadRow(g.from, g.piece, src, h + kAhead, live, ring + put * stage_bytes);
    }
    CopyAsyncCommit();
    put = put == kAhead ? 0 : put + 1;
#pragma unroll
    for (int j = 0; j < R; ++j) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int s = 0; s < S; ++s) sum[j][e] = fmaf(in[e + s], w[R - 1 - j][s], sum[j][e]);
      }
    }
    store(sum[0]);
#pragma unroll
    for (int j = 0; j + 1 < R; ++j) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) sum[j][e] = sum[j + 1][e];
    }
#pragma unroll
    for (int e = 0; e < kRun; ++e) sum[R - 1][e] = bias;
  }
#pragma unroll
  for (int j = 0; j + 1 < R; ++j) store(sum[j]);
}

template <typename T, int R, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    DepthwisePlanesWgradKernel(const __grid_constant__ PlanesArgs<T> g) {
  constexpr int S = R, kCols = kRun + S - 1, kItem = int(sizeof(T));
  extern __shared__ __align__(128) unsigned char cells[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + warp;
  if (unit >= g.units) return;
  const uint32_t ring = SharedAddress(cells) + uint32_t(warp * g.warp_bytes);
  const int x_bytes = g.from.row_elements * kItem;
  const int stage_bytes = x_bytes + g.to.row_elements * kItem;

  const int64_t split = unit / (g.units / g.splits);
  const int channel0 = int(unit - split * (g.units / g.splits)) * g.group;
  const int live = min(g.group, g.channels - channel0);
  ZeroShared(ring, (kAhead + 1) * stage_bytes);
  __syncwarp();
  const int plane = min(int(g.by_tiles.Div(lane)), live - 1);
  const int col = (lane - int(g.by_tiles.Div(lane)) * g.tiles) * kRun;
  const uint32_t mine = uint32_t((plane * g.from.pitch + g.from.left + col - g.pad_w) * kItem);
  const uint32_t dy_mine = uint32_t(x_bytes + (plane * g.to.pitch + col) * kItem);

  // Steps t of an image: x's row t - pad (where there is one) and dy's row t (likewise).
  const int steps = min(g.from.h + g.pad_h, g.to.h + R - 1);
  float acc[R][S] = {};
  for (int64_t image = split; image < g.images; image += g.splits) {
    const T* x = g.src + (image * g.channels + channel0) * (int64_t(g.from.h) * g.from.w);
    const T* dy = g.w + (image * g.channels + channel0) * (int64_t(g.to.h) * g.to.w);
    const auto load = [&](int t, int stage) {
      const uint32_t at = ring + uint32_t(stage * stage_bytes);
      if (t < steps) {
        if (t >= g.pad_h) LoadRow(g.from, g.piece, x, t - g.pad_h, live, at);
        if (t < g.to.h) LoadRow(g.to, g.piece, dy, t, live, at + x_bytes);
      }
      CopyAsyncCommit();
    };
    __syncwarp();  // all have read the last image's rows
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, i);
    int put = kAhead, get = 0;
    float grad[R][kRun] = {};  // grad[r] is row t - r of dy
    for (int t = 0; t < steps; ++t) {
#pragma unroll
      for (int r = R - 1; r > 0; --r) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) grad[r][e] = grad[r - 1][e];
      }
      CopyAsyncWait<kAhead - 1>();
      __syncwarp();
      const uint32_t from = ring + uint32_t(get * stage_bytes);
      get = get == kAhead ? 0 : get + 1;
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        grad[0][e] = t < g.to.h ? ReadShared<T>(from + dy_mine + e * kItem) : 0.f;
      }
      float in[kCols];
#pragma unroll
      for (int c = 0; c < kCols; ++c) in[c] = ReadShared<T>(from + mine + c * kItem);
      load(t + kAhead, put);
      put = put == kAhead ? 0 : put + 1;
      if (t >= g.pad_h) {
#pragma unroll
        for (int r = R - 1; r >= 0; --r) {
#pragma unroll
          for (int s = 0; s < S; ++s) {
#pragma unroll
            for (int e = 0; e < kRun; ++e) acc[r][s] = fmaf(in[e + s], grad[r][e], acc[r][s]);
          }
        }
      }
    }
  }

  // The lanes of a plane, in order.
  CopyAsyncWait<0>();
  __syncwarp();
  float* sums = reinterpret_cast<float*>(cells + warp * g.warp_bytes);  // [lane][R * S]
#pragma unroll
  for (int t = 0; t < R * S; ++t) sums[lane * (R * S) + t] = acc[t / S][t % S];
  __syncwarp();
  for (int e = lane; e < live * R * S; e += 32) {
    const int of = e / (R * S), t = e - of * (R * S);
    float sum = 0.f;
    for (int k = 0; k < g.tiles; ++k) sum += sums[(of * g.tiles + k) * (R * S) + t];
    const int64_t to = int64_t(channel0) * (R * S) + e;
    if (g.partials != nullptr) {
      g.partials[split * g.channels * (R * S) + to] = sum;
    } else {
      g.dst[to] = FromFloat<T>(sum);
    }
  }
}

// The pitch that lets the lanes, kRun elements apart, read with the fewest conflicts: the least of
// 16 candidates.
int ChoosePitch(int least, int tiles, int group, int item) {
  const int step = 16 / item;
  int best = 0, fewest = 33;
  for (int pitch = (least + step - 1) / step * step, i = 0; i < 16; pitch += step, ++i) {
    int worst = 0;
    int count[32] = {}, last[32];
    std::fill(last, last + 32, -1);
    for (int lane = 0; lane < tiles * group; ++lane) {
      const int word = (lane / tiles * pitch + lane % tiles * kRun) * item / 4;
      if (last[word % 32] != word) worst = std::max(worst, ++count[word % 32]);
      last[word % 32] = word;
    }
    if (worst < fewest) {
      fewest = worst;
      best = pitch;
    }
  }
  return best;
}

// Rows of a band, of `rows` in all, so that `streams` of them keep `slots` warps busy for the shortest
// time: a band costs its rows, those above and below it, `halo` in all, where it meets others, and
// about two rows to begin and end.
int BandRows(int64_t streams, int rows, int halo, int64_t slots) {
  int best = rows;
  int64_t least = INT64_MAX;
  for (int bands = 1; bands <= std::min(rows, 16); ++bands) {
    const int band = int(CeilDiv(rows, bands));
    const int more = bands == 1 ? 0 : bands == 2 ? (halo + 1) / 2 : halo;
    const int64_t cost = CeilDiv(streams * CeilDiv(rows, band), slots) * (band + more + 2);
    if (cost < least) {
      least = cost;
      best = band;
    }
  }
  return best;
}

// `columns` that lanes reach, from `left` before column 0 on.
PlaneRows MakeRows(int h, int w, int left, int columns, int tiles, int group, int item, int piece) {
  PlaneRows r{};
  r.h = h;
  r.w = w;
  r.left = left;
  r.pitch = ChoosePitch(std::max(left + w, columns), tiles, group, item);
  r.by_pieces = FastDiv(w * item / piece);
  r.plane_bytes = int64_t(h) * w * item;
  r.row_elements = group * r.pitch;
  return r;
}

template <typename T>
void SetPlanes(PlanesArgs<T>& g, const ConvProblem& p, bool dgrad, bool wgrad) {
  const int64_t* from = dgrad ? p.out : p.in;
  const int64_t* to = dgrad ? p.in : p.out;
  const int item = int(sizeof(T)), S = int(p.filter[2]);
  // wgrad's lanes lie along dy as fprop's do along y.
  g.tiles = int(CeilDiv(to[2], kRun));
  g.group = 32 / g.tiles;
  g.pad_h = int(dgrad ? p.filter[1] - 1 - p.pad[1] : p.pad[1]);
  g.pad_w = int(dgrad ? S - 1 - p.pad[2] : p.pad[2]);
  g.piece = 16;
  while (from[2] * item % g.piece != 0 || to[2] * item % g.piece != 0) g.piece /= 2;
  const int left = int(CeilDiv(g.pad_w * item, 16) * 16) / item;
  g.from = MakeRows(int(from[1]), int(from[2]), left, left - g.pad_w + g.tiles * kRun + S - 1,
                    g.tiles, g.group, item, g.piece);
  g.to = MakeRows(int(to[1]), int(to[2]), 0, g.tiles * kRun, g.tiles, g.group, item, g.piece);
  g.depth = int(p.in[0]);
  g.channels = int(p.c);
  g.planes = p.n * p.c * p.in[0];
  g.by_tiles = FastDiv(g.tiles);
  g.by_depth = FastDiv(g.depth);
  g.by_channels = FastDiv(g.channels);
  const int rows = wgrad ? (kAhead + 1) * (g.from.row_elements + g.to.row_elements)
                         : (kAhead + 1) * g.from.row_elements + g.to.row_elements;
  g.warp_bytes = std::max(rows * item, wgrad ? int(p.filter_size()) * 128 : 0);
}

template <typename T>
Status LaunchPlanes(const Context& ctx, const PlanesArgs<T>& g, void (*kernel)(PlanesArgs<T>),
                    const std::string& what) {
  const int64_t blocks = CeilDiv(g.units, kWarps);
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int bytes = kWarps * g.warp_bytes;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what));
  kernel<<<unsigned(blocks), kWarps * 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status CheckDepthwisePlanes(const ConvProblem& p, const std::string& what) {
  bool ok = !p.channels_last && p.k == p.c && p.filter[0] == 1 && p.pad[0] == 0 &&
            p.in[0] == p.out[0] && p.filter[1] == p.filter[2] &&
            (p.filter[1] == 3 || p.filter[1] == 5 || p.filter[1] == 7) && p.in[2] <= 32 * kRun &&
            p.out[2] <= 32 * kRun;
  for (int d = 0; d < 3; ++d) {
    ok = ok && p.stride[d] == 1 && p.dilation[d] == 1 && p.padded_below_filter(d);
  }
  if (ok) return Status::Ok();
  return Status::Invalid(what +
                         ": tile \"planes\" expects channels-first arrays with k == c, rows of "
                         "up to 224 pixels, stride and dilation 1, a filter of 3x3, 5x5 or "
                         "7x7 and padding below its extent");
}

Status DepthwisePlanes(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                       const void* src, const void* w, const void* bias, void* dst, void* z,
                       const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckDepthwisePlanes(p, what));
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PlanesArgs<T> g{};
    SetPlanes(g, p, dgrad, false);
    if (!Aligned16(src) || !Aligned16(dst) || !Aligned16(z)) {
      return Status::Invalid(what + ": expected 16-byte aligned arrays");
    }
    g.src = static_cast<const T*>(src);
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    g.reverse = dgrad;
    const int64_t groups = CeilDiv(g.planes, g.group);
    const int warps = p.filter[1] == 3 ? 20 : p.filter[1] == 5 ? 16 : 12;  // of a multiprocessor
    g.band = BandRows(groups, g.to.h, int(p.filter[1]) - 1, int64_t(Multiprocessors()) * warps);
    const int bands = int(CeilDiv(g.to.h, g.band));
    g.by_bands = FastDiv(bands);
    g.units = groups * bands;
    if (p.filter[1] == 3) return LaunchPlanes(ctx, g, DepthwisePlanesKernel<T, 3, 5>, what);
    if (p.filter[1] == 5) return LaunchPlanes(ctx, g, DepthwisePlanesKernel<T, 5, 4>, what);
    return LaunchPlanes(ctx, g, DepthwisePlanesKernel<T, 7, 3>, what);
  });
}

Status DepthwisePlanesWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                            const void* dy, void* dw, float* partials, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(CheckDepthwisePlanes(p, what));
  if (p.in[0] != 1) return Status::Invalid(what + ": tile \"planes\" expects one plane a channel");
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PlanesArgs<T> g{};
    SetPlanes(g, p, false, true);
    if (!Aligned16(x) || !Aligned16(dy)) {
      return Status::Invalid(what + ": expected 16-byte aligned arrays");
    }
    g.src = static_cast<const T*>(x);
    g.w = static_cast<const T*>(dy);
    g.dst = static_cast<T*>(dw);
    g.partials = partials;
    g.images = p.n;
    g.splits = splits;
    g.units = CeilDiv(p.c, g.group) * splits;
    if (p.filter[1] == 3) return LaunchPlanes(ctx, g, DepthwisePlanesWgradKernel<T, 3, 5>, what);
    if (p.filter[1] == 5) return LaunchPlanes(ctx, g, DepthwisePlanesWgradKernel<T, 5, 4>, what);
    return LaunchPlanes(ctx, g, DepthwisePlanesWgradKernel<T, 7, 3>, what);
  });
}

}  // namespace jaxconv::cuda::conv
