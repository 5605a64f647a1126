// fprop and dgrad for 3x3 filters, stride 1 or 2, C/G == K/G of 4, 8 or 16, 16-bit, channels-last:
//
//   dst[n, p, q, k] = sum over r, s and channels c of k's group of
//                     src[n, p * stride - pad + r, q * stride - pad + s, c] * w[r, s, c, k]
//
// (dgrad of stride 1 is that of dy with the filter reversed and transposed) on mma.m16n8k16: 16 pixels
// along W, the 8 output channels of an octet, and on K either two taps of the same octet (4 or 8
// channels a group: their filter is block-diagonal), or two octets of a group.
//
// A warp owns two neighbouring output octets (32 bytes of a pixel) and two tiles of 16 pixels of a
// unit (common/row_stream.cuh) and goes down the rows: it reads an input row from shared memory once and
// adds it to the three output rows that it contributes to, with the filter of all nine taps in
// registers for as long as the block lives. A finished row goes through the warp's own 512 bytes of
// shared memory to 16-byte stores.
//
// Stride 2: a stage has two rows of src (rows.cuh); with the sums that the rows above left they
// end a row of dst, and the second begins the next. Its dgrad: a stage has a row of dy, which meets
// three rows of dx: it ends the first, is all that the second has, and begins the third. Columns alike:
// 16 of dy make 16 even ones of dx, of two taps, and 16 odd ones, of the tap between.
//
// With statistics (fprop, conv_statistics): rows_moments.cuh.

#include <type_traits>

#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/common/row_stream.cuh"
#include "cuda/conv/grouped/domain.h"
#include "cuda/conv/grouped/kernels.h"
#include "cuda/conv/grouped/rows.cuh"
#include "cuda/conv/grouped/rows_moments.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kR = 3, kS = 3;
constexpr int kWarps = 8;
constexpr int kSlab = kGroupedSlab;
constexpr int kStaging = 512;  // bytes of a warp
[[maybe_unused]] constexpr int kMostStages = 8;

template <typename T>
struct GroupedRowsArgs {
  CUtensorMap map;  // of src
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowArray from, to;
  int pad_h, pad_w;
  int row_tiles;    // tiles of 16 pixels of a unit's row
  int group_shift;  // log2 of its channels
  bool dgrad;
  StridedColumns strided;  // of src, Meet::kGather
  StatisticsParts parts;   // kMoments; two of a block
};

// d = a * b + c, of K 16-bit numbers.
template <typename T, int K>
__device__ __forceinline__ void MmaTo(float (&d)[4], const uint32_t* a, const uint32_t* b,
                                      const float (&c)[4]) {
  if constexpr (K == 16) {
    cuda::MmaTo<T>(d, *reinterpret_cast<const uint32_t (*)[4]>(a), b[0], b[1], c);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %8, %9, %10};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %8, %9, %10};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

// Rows of the filter in shared memory at a tap: the channels of C/G (those of 4 twice, with zeros
// between the groups of an octet) x the slab's 64 of K, in TMA's swizzle.
constexpr int FilterRows(int octets) { return octets * 8; }
constexpr int FilterBytes(int octets) { return kR * kS * FilterRows(octets) * kSlab * 2; }

// Fetched by the whole block at once, and coalesced: fragments gathered from global memory by each warp
// took 4 us, in dgrad 6.
template <typename T, int kOctets>
__device__ __forceinline__ void StageFilter(const GroupedRowsArgs<T>& g, uint32_t to, int slab) {
  constexpr int kRows = FilterRows(kOctets), kChunks = kSlab / 8;
  const int size = 1 << g.group_shift;
#pragma unroll
  for (int e = threadIdx.x; e < kR * kS * kRows * kChunks; e += kWarps * 32) {
    const int row = e / kChunks, chunk = e % kChunks, tap = row / kRows, c = row % kRows;
    const int channel = slab * kSlab + chunk * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (channel < g.to.channels) {
      v = *reinterpret_cast<const uint4*>(
          g.w + int64_t(tap * size + (c & (size - 1))) * g.to.channels + channel);
    }
    if (size == 4 && c < 4) v.z = v.w = 0;
    if (size == 4 && c >= 4) v.x = v.y = 0;
    StoreShared16(to + uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4)), v);
  }
}

// kOctets: octets of a group (1: groups of 4 or 8). kTiles: of 16 pixels, of a warp; a strip's
// row has two warps' for each pair of octets. kMoments: fprop with statistics, and without an epilogue.
template <typename T, Meet kMeet, int kOctets, int kTiles, int kBlocks, bool kMoments>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    GroupedRowsKernel(const __grid_constant__ GroupedRowsArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Words of the filter for an output octet and row: kOctets == 1: taps s = 0, 1 on K, then s = 2.
  constexpr int kWords = kOctets == 1 ? 3 : kS * kOctets;
  extern __shared__ __align__(1024) unsigned char cells[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  const uint32_t staging = ring_at + uint32_t(u.stages * u.stage_bytes);
  const uint32_t filter_at = staging + kWarps * kStaging;
  RowRing ring(ring_at, filter_at + FilterBytes(kOctets), u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) ring.Init(kWarps);
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t begin = blockIdx.x / unsigned(u.slabs) * u.share;
  const int64_t end = min(begin + u.share, u.rows);
  // Stages of a unit: rows of src, or pairs of them.
  const auto first_row = [&](const RowUnit& at) {
    if constexpr (kMeet == Meet::kGather) return at.p;
    if constexpr (kMeet == Meet::kSpread) return at.p - 1;
    return max(at.p - g.pad_h, 0);
  };
  const auto last_row = [&](const RowUnit& at) {  // past it
    if constexpr (kMeet == Meet::kGather) return at.end + 1;
    if constexpr (kMeet == Meet::kSpread) return at.end;
    return min(at.end - g.pad_h + kR - 1, g.from.h);
  };
  const int pitch =
      u.width + (kMeet == Meet::kOne ? kS - 1 : 1);  // pixels of a row in shared memory

  // The first thread is also the producer, a ring ahead of its warp: a ninth warp would leave 96
  // registers to each of two blocks' threads.
  const uint32_t bytes =
      kMeet == Meet::kGather ? StridedBytes(u) : uint32_t(u.images * pitch) * 128;
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_w = 0, next_h = 0, next_end = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_w = next.q - (kMeet == Meet::kOne ? g.pad_w : kMeet == Meet::kSpread ? 1 : 0);
      next_h = first_row(next);
      next_end = last_row(next);
    }
    const uint32_t full = ahead.Claim(bytes);
    if constexpr (kMeet == Meet::kGather) {
      const int row = 2 * next_h - g.pad_h - 1;
      LoadStrided(ahead.At(), g.strided, full, slab * kSlab, next_w, row, next_image);
    } else {
      LoadTile(ahead.At(), g.map, full, slab * kSlab, next_w, next_h, next_image);
    }
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 1; s < u.stages; ++s) feed();
  }

  const int pair = warp % 4;  // octets 2 pair and the next, of the slab
  const int channel0 = slab * kSlab + pair * 16;
  const int tile0 = warp / 4 * kTiles;
  const uint32_t mine = staging + uint32_t(warp * kStaging);

  // Fragments: column lane / 4, rows 2 (lane % 4) and the next, of 8 source channels. Shared memory has
  // source channels along rows (dgrad: along columns, and the taps reversed; of stride 2 in the order
  // s = 0, 2, 1, so that the two of an even column are one step of K).
  const bool dgrad = kMeet == Meet::kOne ? g.dgrad : kMeet == Meet::kSpread;
  StageFilter<T, kOctets>(g, filter_at, slab);
  __syncthreads();
  uint32_t filter[2][kR][kWords];
  constexpr int kTaps = kR * kS;
  const auto fragments = [&](uint32_t (&f)[4], int tap, int row8, int octet) {
    const int of = kMeet == Meet::kSpread ? tap / kS * kS + (kS - tap % kS) % kS
                   : dgrad                ? kTaps - 1 - tap
                                          : tap;
    const int row = (of * kOctets + row8) * 8 + lane % 8;
    const uint32_t at = filter_at + uint32_t(row * 128 + ((octet ^ (row & 7)) << 4));
    if (dgrad) {
      LoadMatrix(f, at);
    } else {
      LoadMatrixTransposed(f, at);
    }
  };
  const int matrix = lane / 8;  // that a lane gives an address of
  if constexpr (kOctets == 1) {
#pragma unroll
    for (int t = 0; t < kTaps; t += 2) {  // taps t, t + 1 of both octets
      uint32_t f[4];
      fragments(f, min(t + matrix / 2, kTaps - 1), 0, pair * 2 + matrix % 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tap = t + i / 2;
        if (tap < kTaps) filter[i % 2][tap / kS][tap % kS] = f[i];
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {  // [output octet][source octet]
      uint32_t f[4];
      const int out = matrix / 2, in = matrix % 2;
      fragments(f, t, dgrad ? out : in, pair * 2 + (dgrad ? in : out));
#pragma unroll
      for (int i = 0; i < 4; ++i) filter[i / 2][t / kS][t % kS * 2 + i % 2] = f[i];
    }
  }

  // Where a lane's rows of ldmatrix lie in a stage. kOctets == 1: [0] has the first octet at two taps,
  // s = 0 and 1 (kSpread: 0 and 2), [1] both octets at tap s = 2. Else [i] has two octets at tap s = i
  // (kSpread: 0 and 2).
  constexpr int kAt = kMeet == Meet::kSpread ? kOctets : kOctets == 1 ? 2 : kS;
  constexpr int kHalves = kMeet == Meet::kGather ? 2 : 1;  // rows of a stage
  uint32_t at_tile[kTiles][kHalves][kAt];
  int image_of[kTiles], col_of[kTiles];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int tile = tile0 + m;
    image_of[m] = tile / g.row_tiles;
    col_of[m] = (tile - image_of[m] * g.row_tiles) * 16;
    const int col = col_of[m] + lane % 16;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kAt; ++i) {
        const bool two_taps = kOctets == 1 && i == 0;
        const int at = two_taps ? lane / 16 : kOctets == 1 ? 2 : i;
        const int octet = pair * 2 + (two_taps ? 0 : lane / 16);
        // Columns past the unit's last, of pixels that do not exist, repeat it.
        if constexpr (kMeet == Meet::kGather) {
          at_tile[m][half][i] = StridedAt(u, g.strided, image_of[m], half, col, at, octet);
        } else {
          const int shift = kMeet == Meet::kSpread ? 1 - at : at;
          const int row = min(image_of[m] * pitch + col + shift, u.images * pitch - 1);
          at_tile[m][half][i] = uint32_t(row * 128 + ((octet ^ (row & 7)) << 4));
        }
      }
    }
  }

  float bias[2][2] = {};
  if (!kMoments && g.epilogue.bias != nullptr) {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const int channel = channel0 + o * 8 + lane % 4 * 2;
      if (channel < g.to.channels) {
        bias[o][0] = ToFloat(g.epilogue.bias[channel]);
        bias[o][1] = ToFloat(g.epilogue.bias[channel + 1]);
      }
    }
  }
  // Staging: 16-byte slots [pixel of 16][octet of 2], swapped for every other four pixels.
  const int to_pixel = lane % 16, to_octet = lane / 16;
  const uint32_t put = mine + uint32_t((to_pixel * 2 + (to_octet ^ (to_pixel >> 2 & 1))) << 4);
  const int out_pixel = lane / 2, out_octet = lane % 2;
  const uint32_t get = mine + uint32_t((out_pixel * 2 + (out_octet ^ (out_pixel >> 2 & 1))) << 4);
  const int64_t row_elements = int64_t(g.to.w) * g.to.channels;
  [[maybe_unused]] RowMoments<T> moments;
  // Of dst's pixels in a tile of a unit, those that exist.
  [[maybe_unused]] const auto columns_of = [&](const RowUnit& at, int m) {
    const bool image = image_of[m] < u.images && at.image + image_of[m] < g.to.images;
    return image ? min(max(min(u.width, g.to.w - at.q) - col_of[m], 0), 16) : 0;
  };

  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    const int h0 = first_row(at), h1 = last_row(at);
    // Of dst: the row at hand, and the unit's first column.
    int p = kMeet == Meet::kGather   ? at.p - 1
            : kMeet == Meet::kSpread ? 2 * h0 - g.pad_h
                                     : h0 + g.pad_h - (kR - 1);
    const int q = kMeet == Meet::kSpread ? 2 * at.q - g.pad_w : at.q;
    const int64_t out =
        ((int64_t(at.image) * g.to.h + p) * g.to.w + q) * g.to.channels + channel0 + out_octet * 8;
    constexpr int kSpread = kMeet == Meet::kSpread ? 2 : 1;
    bool live[kTiles][kSpread];
    T* to[kTiles];
    [[maybe_unused]] int columns[kTiles];  // of the tile that exist
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int col = col_of[m] + out_pixel;
      const bool real = image_of[m] < u.images && at.image + image_of[m] < g.to.images &&
                        col < u.width && channel0 + out_octet * 8 < g.to.channels;
#pragma unroll
      for (int e = 0; e < kSpread; ++e) {
        live[m][e] = real && unsigned(q + col * kSpread + e) < unsigned(g.to.w);
      }
      to[m] = g.dst + out + image_of[m] * (g.to.h * row_elements) +
              int64_t(col) * kSpread * g.to.channels;
      if constexpr (kMoments) columns[m] = columns_of(at, m);
    }
    // 16 pixels of a finished row: [octet][fragment].
    const auto finish = [&](float (&row)[2][4], T* where, bool real, int exist) {
#pragma unroll
      for (int o = 0; o < 2 && !kMoments; ++o) {
#pragma unroll
        for (int e = 0; e < 4; ++e) row[o][e] += bias[o][e % 2];
      }
      const auto keep = [&](T* where) {
        const uint32_t word[4] = {
            PackPair(row[0][0], row[0][1], T()), PackPair(row[0][2], row[0][3], T()),
            PackPair(row[1][0], row[1][1], T()), PackPair(row[1][2], row[1][3], T())};
        __syncwarp();
        StoreMatrix4(put, word);
        if constexpr (kMoments) moments.Add(word, exist);
        __syncwarp();
        const uint4 v = LoadShared16(get);
        if (real) __stwb(reinterpret_cast<uint4*>(where), v);
      };
      if constexpr (kMeet != Meet::kSpread && !kMoments) {
        if (g.epilogue.z != nullptr) keep(g.epilogue.z + (where - g.dst));
        if (g.epilogue.activation != Activation::kNone) {
          ApplyActivation(g.epilogue.activation, row[0], g.epilogue.slope);
          ApplyActivation(g.epilogue.activation, row[1], g.epilogue.slope);
        }
      }
      keep(where);
    };
    const auto store = [&](int m, float (&row)[2][4]) {
      if constexpr (kMoments) {
        if (p >= at.p && p < at.end && columns[m] > 0) finish(row, to[m], live[m][0], columns[m]);
      } else {
        if (p >= at.p && p < at.end) finish(row, to[m], live[m][0], 16);
      }
      to[m] += row_elements;
    };
    const auto await = [&] {
      if (threadIdx.x == 0) feed();
      ring.Await();
    };
    const auto release = [&] { ring.GiveBack(); };
    // Of a row of src: kOctets == 1: the two octets at two taps, and both at tap s = 2. Else both octets tap
    // by tap.
    constexpr int kLoads = kMeet == Meet::kSpread ? 2 : kS;
    const auto load = [&](int m, int half, uint32_t (&a)[kLoads][4]) {
      const uint32_t (&at)[kAt] = at_tile[m][half];
      if constexpr (kOctets == 1) {
        const uint32_t first = ring.At() + at[0];
        LoadMatrix(a[0], first);
        LoadMatrix(a[1], first ^ 16);
        if constexpr (kMeet != Meet::kSpread) LoadMatrix(a[2], ring.At() + at[1]);
      } else {
#pragma unroll
        for (int i = 0; i < kAt; ++i) LoadMatrix(a[i], ring.At() + at[i]);
      }
    };
    // d = c + the row's products with row r of the filter, octet o of dst.
    const auto multiply = [&](const uint32_t (&a)[kLoads][4], int o, int r, float (&d)[4],
                              const float (&c)[4]) {
      if constexpr (kOctets == 1) {
        float t[4];
        MmaTo<T, 16>(t, a[o], &filter[o][r][0], c);
        MmaTo<T, 8>(d, a[2] + 2 * o, &filter[o][r][2], t);
      } else {
        float t[4] = {c[0], c[1], c[2], c[3]};
#pragma unroll
        for (int s = 0; s < kS; ++s) MmaTo<T, 16>(t, a[s], &filter[o][r][s * 2], t);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = t[e];
      }
    };
    const float zero[4] = {};

    if constexpr (kMeet == Meet::kOne) {
      // sum[m][j] is output row p + j of h + pad - (R - 1) + j, before input row h.
      float sum[kTiles][kR - 1][2][4] = {};
      for (int h = h0; h < h1; ++h) {
        await();
        float done[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t a[kLoads][4];
          load(m, 0, a);
#pragma unroll
          for (int o = 0; o < 2; ++o) {
            multiply(a, o, 2, done[m][o], sum[m][0][o]);
            multiply(a, o, 1, sum[m][0][o], sum[m][1][o]);
            multiply(a, o, 0, sum[m][1][o], zero);
          }
        }
        release();
#pragma unroll
        for (int m = 0; m < kTiles; ++m) store(m, done[m]);
        ++p;
      }
      // Below the image: rows that wait for no more input.
#pragma unroll
      for (int j = 0; j + 1 < kR; ++j) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) store(m, sum[m][j]);
        ++p;
      }
    } else if constexpr (kMeet == Meet::kGather) {
      // A stage has rows 2 h - pad - 1 and 2 h - pad of src: they end row h - 1 of dst, and the second
      // begins row h.
      float sum[kTiles][2][4] = {};
      for (int h = h0; h < h1; ++h) {
        await();
        float done[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t a[kLoads][4];
          load(m, 0, a);
#pragma unroll
          for (int o = 0; o < 2; ++o) multiply(a, o, 1, done[m][o], sum[m][o]);
          load(m, 1, a);
#pragma unroll
          for (int o = 0; o < 2; ++o) {
            multiply(a, o, 2, done[m][o], done[m][o]);
            multiply(a, o, 0, sum[m][o], zero);
          }
        }
        release();
#pragma unroll
        for (int m = 0; m < kTiles; ++m) store(m, done[m]);
        ++p;
      }
    } else {
      // Row h of dy meets rows 2 h - pad + r of dx, its last one together with row h + 1; columns
      // alike, so that even ones (counted with the padding) have two taps and odd ones the one between.
      const auto even = [&](const uint32_t (&a)[kLoads][4], int o, int r, float (&d)[4],
                            const float (&c)[4]) {
        if constexpr (kOctets == 1) {
          MmaTo<T, 16>(d, a[o], &filter[o][r][0], c);
        } else {
          float t[4];
          MmaTo<T, 16>(t, a[0], &filter[o][r][0], c);
          MmaTo<T, 16>(d, a[1], &filter[o][r][2], t);
        }
      };
      const auto odd = [&](const uint32_t (&a)[kLoads][4], int o, int r, float (&d)[4],
                           const float (&c)[4]) {
        MmaTo<T, kOctets * 8>(d, a[kOctets == 1 ? o : 0], &filter[o][r][kOctets * 2], c);
      };
      float sum[kTiles][2][2][4] = {};  // of row 2 h - pad, by rows of dy before h: [column][octet]
      for (int h = h0; h < h1; ++h) {
        await();
        uint32_t a[kTiles][kLoads][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) load(m, 0, a[m]);
        release();
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const auto column = [&](auto product, int e) {
            T* const where = to[m] + e * g.to.channels;
            float (&next)[2][4] = sum[m][e];
            float upper[2][4], lower[2][4];
#pragma unroll
            for (int o = 0; o < 2; ++o) {
              product(a[m], o, 0, upper[o], next[o]);
              product(a[m], o, 1, lower[o], zero);
              product(a[m], o, 2, next[o], zero);
            }
            if (h > h0 && unsigned(p) < unsigned(g.to.h)) finish(upper, where, live[m][e], 16);
            if (h > h0 && unsigned(p + 1) < unsigned(g.to.h)) {
              finish(lower, where + row_elements, live[m][e], 16);
            }
          };
          column(even, 0);
          column(odd, 1);
          to[m] += 2 * row_elements;
        }
        p += 2;
      }
    }
  }
  if constexpr (kMoments) {
    int count = 0;  // once more, which costs the loop above no register
    for (int64_t row = begin; row < end;) {
      const RowUnit at = UnitOf(u, row, end);
      row += at.end - at.p;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) count += columns_of(at, m) * (at.end - at.p);
    }
    moments.Write(g.parts, int(blockIdx.x / unsigned(u.slabs)) * 2 + warp / 4, channel0,
                  g.to.channels, count);
  }
#endif
}

// `written`: how many parts kMoments makes.
template <typename T, Meet kMeet, int kOctets, int kTiles, int kBlocks, bool kMoments>
Status Launch(const Context& ctx, GroupedRowsArgs<T> g, const void* src, DType dtype,
              const std::string& what, int* written) {
  RowUnits& u = g.u;
  RowArray runs = g.to;  // what blocks share; kSpread: pairs of rows and of columns
  if (kMeet == Meet::kSpread) {
    runs.h = int(CeilDiv(g.to.h + g.pad_h, 2));
    runs.w = int(CeilDiv(g.to.w + g.pad_w, 2));
  }
  const int units_w = int(CeilDiv(runs.w, 2 * kTiles * 16));
  u.width = int(CeilDiv(runs.w, units_w));
  g.row_tiles = int(CeilDiv(u.width, 16));
  u.images = std::min(2 * kTiles / g.row_tiles, runs.images);
  u.slabs = int(CeilDiv(g.to.channels, kSlab));
  int64_t parts = std::max<int64_t>(1, int64_t(Multiprocessors()) * kBlocks / u.slabs);
  if (kMoments) parts = std::min(parts, grouped::MostBlocks(g.to.channels));
  ShareRows(u, runs.images, runs.h, runs.w, parts);
  constexpr int kElse = kWarps * kStaging + FilterBytes(kOctets) + kMostStages * 16;
  int ring = 160 * 1024 / kBlocks;
  if constexpr (kMeet == Meet::kGather) {
    JAXCONV_RETURN_IF_ERROR(EncodeStrided(dtype, src, g.from, g.pad_w, u, what, &g.strided));
    u.stage_bytes = StridedStage(u, g.strided);
    ring = kSharedOfAll / kBlocks - 1024 - kElse;
  } else {
    const int64_t c = g.from.channels;
    const TmaTensor tensor = {src,
                              4,
                              {c, g.from.w, g.from.h, g.from.images},
                              {1, c, c * g.from.w, c * g.from.w * g.from.h}};
    const int pitch = u.width + (kMeet == Meet::kOne ? kS - 1 : 1);
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(dtype, tensor, {0, pitch, 1, u.images, 1}, what, &g.map));
    u.stage_bytes = int(CeilDiv(u.images * pitch * 128, 1024) * 1024);
  }
  u.stages = std::clamp(ring / u.stage_bytes, 2, kMostStages);
  const int64_t blocks = CeilDiv(u.rows, u.share) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int bytes = u.stages * u.stage_bytes + kElse;
  if (kMoments) *written = 2 * int(CeilDiv(u.rows, u.share));
  const auto kernel = GroupedRowsKernel<T, kMeet, kOctets, kTiles, kBlocks, kMoments>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kWarps * 32, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

// The problem's arrays and the kernel that runs it; `parts` is null where no statistics are wanted.
Status Run(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e, const void* src,
           const void* w, const void* bias, void* dst, void* z, StatisticsParts* parts,
           const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    GroupedRowsArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    const bool strided = p.stride[2] == 2;
    SetRows(g, p, dgrad, dgrad && !strided);
    while (1 << g.group_shift < p.group_c()) ++g.group_shift;
    g.dgrad = dgrad;
    int* written = nullptr;
    if (parts != nullptr) {
      g.parts = *parts;
      written = &parts->parts;
    }
    const auto launch = [&](auto one, auto two) {  // octets of a group
      return (g.group_shift <= 3 ? one : two)(ctx, g, src, p.dtype, what, written);
    };
    constexpr Meet kOne = Meet::kOne, kGather = Meet::kGather, kSpread = Meet::kSpread;
    if (parts != nullptr) {
      return strided ? launch(Launch<T, kGather, 1, 2, 2, true>, Launch<T, kGather, 2, 1, 2, true>)
                     : launch(Launch<T, kOne, 1, 2, 2, true>, Launch<T, kOne, 2, 1, 2, true>);
    }
    if (!strided) return launch(Launch<T, kOne, 1, 2, 2, false>, Launch<T, kOne, 2, 1, 2, false>);
    return dgrad ? launch(Launch<T, kSpread, 1, 2, 2, false>, Launch<T, kSpread, 2, 1, 2, false>)
                 : launch(Launch<T, kGather, 1, 2, 2, false>, Launch<T, kGather, 2, 1, 2, false>);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace

Status GroupedRows(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                   const void* src, const void* w, const void* bias, void* dst, void* z,
                   const std::string& what) {
  return Run(ctx, p, dgrad, e, src, w, bias, dst, z, nullptr, what);
}

Status GroupedRowsStatistics(const Context& ctx, const ConvProblem& p, const void* x, const void* w,
                             void* y, StatisticsParts* parts, const std::string& what) {
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  return Run(ctx, p, false, bare, x, w, nullptr, y, nullptr, parts, what);
}

}  // namespace jaxconv::cuda::conv
