// fprop and dgrad for 3x3 filters of stride 1 and few channels on both sides, channels-last:
//
//   dst[n, p, q, k] = sum over r, s, c of  src[n, p - pad + r, q - pad + s, c] * w[r, s, c, k]
//
// (dgrad is that of dy with the filter reversed and transposed) on mma.m16n8: 16 pixels of a line (strips.cuh), 32 bytes of
// a pixel's channels, and 8 output channels. A warp owns two runs of 16 pixels and 8 kOctets channels of dst, and goes down
// the rows (common/row_stream.cuh). It reads an input row from shared memory once for each column of the filter and adds it
// to the three output rows that it contributes to; the filter of all nine taps stays in registers for as long as the block
// lives. Pixels of 16 bytes: a product takes two taps of a filter's row, then the third and zeros.
//
// Reads src about once from DRAM (once a slab of up to 32 output channels), writes dst once. Both may add an array like dst:
// a residual, or another gradient. A dgrad may go back through an activation: dst = sum * f'(kept) [+ addend]. Of that, or of a
// bare dgrad, it may take the sums over images and pixels: a thread keeps those of its channels, a block leaves a part. The order
// of every addition is fixed by the problem and the number of multiprocessors.
#pragma once

#include "cuda/conv/narrow/strips.cuh"
#include "cuda/core/derivative.h"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct NarrowRowsArgs {
  CUtensorMap map;  // of src
  const T* w;
  T* dst;
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowArray from, to;
  int pad_h, pad_w;
  int columns;  // warps that share two runs of pixels; a block has 8 kOctets channels of dst for each
  int filter_at;  // in shared memory
  bool dgrad;
  // Of a dgrad that goes back through an activation.
  const T* kept;  // like dst
  DerivativePieces derivative;
  float* parts;  // (blocks of a slab, channels of dst)
  // Where something is added.
  const T* addend;  // like dst
};

// What a kernel does with its sums besides the epilogue: it adds an array, goes back through an activation, or both; it keeps
// the sums of dst's channels where it goes back, and kSum does nothing else.
enum class NarrowThen { kNothing, kAdd, kBack, kBackAdd, kSum };

constexpr bool Adds(NarrowThen then) {
  return then == NarrowThen::kAdd || then == NarrowThen::kBackAdd;
}
constexpr bool GoesBack(NarrowThen then) {
  return then == NarrowThen::kBack || then == NarrowThen::kBackAdd;
}
constexpr bool SumsUp(NarrowThen then) { return GoesBack(then) || then == NarrowThen::kSum; }

constexpr int kNarrowRuns = 2;  // of 16 pixels, of a warp
constexpr uint32_t kNowhere = ~0u;

// How many products 16 pixels of kPixel bytes and 8 channels of dst take for a row of the filter.
template <int kPixel>
constexpr int kNarrowSteps = kPixel == 16 ? 2 : kNarrowTaps * kPixel / 32;

// As many as the registers of a filter leave: 168 a thread for twelve warps, 184 for eleven.
template <int kPixel, int kOctets>
constexpr int kNarrowWarps = kPixel == 64 && kOctets == 2 ? 11 : 12;

template <typename T, int kPixel, int kOctets, NarrowThen kThen>
__global__ void __launch_bounds__(kNarrowWarps<kPixel, kOctets> * 32, 1)
    NarrowRowsKernel(const __grid_constant__ NarrowRowsArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kAdd = Adds(kThen), kBack = GoesBack(kThen), kSum = SumsUp(kThen);
  constexpr int R = kNarrowTaps, S = kNarrowTaps, kItem = int(sizeof(T));
  constexpr int kSteps = kNarrowSteps<kPixel>;
  constexpr int kParts = std::max(kPixel / 32, 1);  // products of a tap
  constexpr int kHalf = 16 / kItem;                 // channels of 16 bytes
  constexpr int kWord = 4 / kItem;                  // of a register
  extern __shared__ __align__(1024) unsigned char cells[];
  __shared__ __align__(16) uint4 zero;  // which ldmatrix reads in place of a fourth tap
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(cells);
  const int size = 8 * kOctets * g.columns;  // channels of the block
  RowRing ring(ring_at, ring_at + uint32_t(u.ring_bytes), u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (threadIdx.x == 0) {
    PrefetchMap(g.map);
    ring.Init(warps);
    zero = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int64_t begin = blockIdx.x / unsigned(u.slabs) * u.share;
  const int64_t end = min(begin + u.share, u.rows);
  const int slab0 = slab * size, pitch = u.width + S - 1;
  const auto first_row = [&](const RowUnit& at) { return max(at.p - g.pad_h, 0); };
  const auto last_row = [&](const RowUnit& at) {  // past it
    return min(at.end - g.pad_h + R - 1, g.from.h);
  };

  // The first thread is also the producer, a ring but one stage ahead of its warp.
  const uint32_t bytes = uint32_t(u.images * pitch * kPixel);
  RowRing ahead = ring;
  int64_t next_row = begin;
  int next_image = 0, next_w = 0, next_h = 0, next_end = 0;
  const auto feed = [&] {
    if (next_h == next_end) {
      if (next_row >= end) return;
      const RowUnit next = UnitOf(u, next_row, end);
      next_row += next.end - next.p;
      next_image = next.image;
      next_w = next.q - g.pad_w;
      next_h = first_row(next);
      next_end = last_row(next);
    }
    const uint32_t full = ahead.Claim(bytes);
    LoadTile(ahead.At(), g.map, full, 0, next_w, next_h, next_image);
    ahead.Advance();
    ++next_h;
  };
  if (threadIdx.x == 0) {
    for (int s = 2; s < u.stages; ++s) feed();
  }

  // The block's part of the filter as the lanes of a warp want it, [column][row, step and octet][lane][half]. Fragments have
  // column lane / 4. With two octets the columns 2 t and 2 t + 1 of both stand for neighbouring channels, which a lane stores
  // together.
  const int group = lane / 4, in_group = lane % 4;
  constexpr int kFragments = R * kSteps * kOctets;
  uint32_t* const staged = reinterpret_cast<uint32_t*>(cells + g.filter_at);
  {
    const int summed = g.from.channels, made = g.to.channels;
    const int by_in = g.dgrad ? 1 : made, by_out = g.dgrad ? summed : 1;
    constexpr int kBatch = 4;  // fragments of a warp that are on their way together
    const int fragments = g.columns * kFragments;
    for (int first = warp; first < fragments; first += warps * kBatch) {
      T v[kBatch][2][kWord];
#pragma unroll
      for (int e = 0; e < kBatch; ++e) {
        const int at = first + e * warps, fragment = at % kFragments;
        const int o = fragment % kOctets, i = fragment / kOctets % kSteps;
        const int r = fragment / (kOctets * kSteps);
        const int in_block = kOctets == 2 ? group / 2 * 4 + o * 2 + group % 2 : group;
        const int out = slab0 + at / kFragments * 8 * kOctets + in_block;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int s = kPixel == 16 ? i * 2 + half : i / kParts;
          const int in0 = (kPixel == 16 ? 0 : (i % kParts * 2 + half) * kHalf) + in_group * kWord;
          const int tap = g.dgrad ? R * S - 1 - (r * S + s) : r * S + s;
          const T* const from = g.w + int64_t(tap) * summed * made + int64_t(out) * by_out;
          const bool real = at < fragments && s < S && out < made;
#pragma unroll
          for (int word = 0; word < kWord; ++word) {
            const int in = in0 + word;
            v[e][half][word] = real && in < summed ? __ldg(from + in * by_in) : FromFloat<T>(0.f);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kBatch; ++e) {
        const int at = first + e * warps;
        if (at >= fragments) break;
        uint32_t words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (kItem == 4) {
            words[half] = RoundToTf32(__float_as_uint(v[e][half][0]));
          } else {
            words[half] = PackPair(ToFloat(v[e][half][0]), ToFloat(v[e][half][1]), T());
          }
        }
        *reinterpret_cast<uint2*>(staged + (at * 32 + lane) * 2) = make_uint2(words[0], words[1]);
      }
    }
  }
  __syncthreads();
  const int column = warp % g.columns, channel0 = column * 8 * kOctets;  // in the slab
  uint32_t filter[R][kSteps][kOctets][2];
#pragma unroll
  for (int e = 0; e < kFragments; ++e) {
    const uint2 v =
        *reinterpret_cast<const uint2*>(staged + ((column * kFragments + e) * 32 + lane) * 2);
    uint32_t (&to)[2] = filter[e / (kOctets * kSteps)][e / kOctets % kSteps][e % kOctets];
    to[0] = v.x;
    to[1] = v.y;
  }

  // Where a lane's row of ldmatrix lies in a stage, tap by tap, of the first run; that of the second is so many bytes behind.
  const int pixel0 = warp / g.columns * kNarrowRuns * kNarrowPixels;
  constexpr uint32_t kRunBytes = kNarrowPixels * kPixel;
  uint32_t at_tap[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int shift = kPixel == 16 && s == 0 ? lane / 16 : s;
    at_tap[s] = ChunkAt<kPixel>(pixel0 + lane % 16 + shift, kPixel == 16 ? 0 : lane / 16);
  }
  const bool upper = lane >= 16;  // whose rows of the last step of 16-byte pixels are zeros
  const uint32_t zero_at = SharedAddress(&zero);

  constexpr int kEach = 2 * kOctets;  // channels of a lane
  float total[kEach] = {};            // of a lane's channels
  const int channel = slab0 + channel0 + in_group * kEach;
  const int64_t row_elements = int64_t(g.to.w) * g.to.channels;

  for (int64_t row = begin; row < end;) {
    const RowUnit at = UnitOf(u, row, end);
    row += at.end - at.p;
    const int h0 = first_row(at), h1 = last_row(at);
    int p = h0 + g.pad_h - (R - 1);  // of dst: the row that is done with row h of src
    // Of that row: where the strip's begins, and each pixel's place from there on.
    T* to = g.dst + ((int64_t(at.image) * g.to.h + p) * g.to.w + at.q) * g.to.channels + channel;
    uint32_t place[kNarrowRuns][2];
#pragma unroll
    for (int m = 0; m < kNarrowRuns; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = pixel0 + m * kNarrowPixels + group + half * 8;
        const int image = pixel / pitch, col = pixel - image * pitch;
        const bool live = image < u.images && at.image + image < g.to.images && col < u.width &&
                          at.q + col < g.to.w && channel < g.to.channels;
        const uint32_t pixels = uint32_t(image) * uint32_t(g.to.h) * uint32_t(g.to.w);
        place[m][half] = live ? (pixels + uint32_t(col)) * uint32_t(g.to.channels) : kNowhere;
      }
    }
    // What row p's derivative is computed from, and what is added: on their way while the row's last products run.
    Vec<T, kEach> kept[kNarrowRuns][2] = {}, added[kNarrowRuns][2] = {};
    const auto load = [&] {
      if (p < at.p || p >= at.end) return;
#pragma unroll
      for (int m = 0; m < kNarrowRuns; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (place[m][half] == kNowhere) continue;
          if constexpr (kBack) {
            const T* const from = g.kept + (to + place[m][half] - g.dst);
            kept[m][half] = *reinterpret_cast<const Vec<T, kEach>*>(from);
          }
          if constexpr (kAdd) {
            const T* const from = g.addend + (to + place[m][half] - g.dst);
            added[m][half] = *reinterpret_cast<const Vec<T, kEach>*>(from);
          }
        }
      }
    };
    const auto store = [&](float (&done)[kNarrowRuns][kOctets][4]) {
      const bool inside = p >= at.p && p < at.end;
#pragma unroll
      for (int m = 0; m < kNarrowRuns; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (inside && place[m][half] != kNowhere) {
            float v[kEach];
#pragma unroll
            for (int e = 0; e < kEach; ++e) v[e] = done[m][e / 2][half * 2 + e % 2];
            if (!kSum &&
                g.epilogue.bias != nullptr) {  // read again for each pixel: registers are dearer
              float bias[kEach];
              LoadVec<T, kEach>(g.epilogue.bias + channel, bias);
#pragma unroll
              for (int e = 0; e < kEach; ++e) v[e] += bias[e];
            }
            T* const where = to + place[m][half];
            const auto put = [&](T* p) {
              if constexpr (kEach * kItem == 4) {
                *reinterpret_cast<uint32_t*>(p) = PackPair(v[0], v[1], T());
              } else if constexpr (kItem == 4 && kEach == 2) {
                __stwb(reinterpret_cast<float2*>(p), make_float2(v[0], v[1]));
              } else {
                StorePacked<T, kEach>(p, v);
              }
            };
            if constexpr (kSum) {
#pragma unroll
              for (int e = 0; e < kEach; ++e) {
                float t = v[e];
                if constexpr (kBack) t = g.derivative(ToFloat(kept[m][half].v[e]), t);
                if constexpr (kAdd) t += ToFloat(added[m][half].v[e]);
                v[e] = ToFloat(FromFloat<T>(t));
                total[e] += v[e];
              }
            } else {
              if constexpr (kAdd) {
#pragma unroll
                for (int e = 0; e < kEach; ++e) v[e] += ToFloat(added[m][half].v[e]);
              }
              if (g.epilogue.z != nullptr) put(g.epilogue.z + (where - g.dst));
              ApplyActivation(g.epilogue.activation, v, g.epilogue.slope);
            }
            put(where);
          }
        }
      }
      to += row_elements;
      ++p;
    };

    float sum[R - 1][kNarrowRuns][kOctets][4] = {};  // of rows p and p + 1
    for (int h = h0; h < h1; ++h) {
      if (threadIdx.x == 0) feed();
      __syncwarp();
      if constexpr (kBack || kAdd) load();
      ring.Await();
      float done[kNarrowRuns][kOctets][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a[kNarrowRuns][4];
#pragma unroll
        for (int m = 0; m < kNarrowRuns; ++m) {
          uint32_t from;
          if constexpr (kPixel == 16) {
            from = ring.At() + at_tap[i * 2] + m * kRunBytes;
            if (i == 1 && upper) from = zero_at;
          } else {
            from = ring.At() + (at_tap[i / kParts] ^ uint32_t(i % kParts << 5)) + m * kRunBytes;
          }
          LoadMatrix(a[m], from);
        }
#pragma unroll
        for (int m = 0; m < kNarrowRuns; ++m) {
#pragma unroll
          for (int o = 0; o < kOctets; ++o) {
            const auto& f0 = filter[2][i][o];
            const auto& f1 = filter[1][i][o];
            const auto& f2 = filter[0][i][o];
            if (i == 0) {
              const float none[4] = {};
              MmaTo<T>(done[m][o], a[m], f0[0], f0[1], sum[0][m][o]);
              MmaTo<T>(sum[0][m][o], a[m], f1[0], f1[1], sum[1][m][o]);
              MmaTo<T>(sum[1][m][o], a[m], f2[0], f2[1], none);
            } else {
              Mma<T>(done[m][o], a[m], f0[0], f0[1]);
              Mma<T>(sum[0][m][o], a[m], f1[0], f1[1]);
              Mma<T>(sum[1][m][o], a[m], f2[0], f2[1]);
            }
          }
        }
      }
      ring.GiveBack();
      store(done);
    }
    // Below the image: rows that wait for no more input.
    if constexpr (kBack || kAdd) load();
    store(sum[0]);
    if constexpr (kBack || kAdd) load();
    store(sum[1]);
  }
  if constexpr (kSum) {
#pragma unroll
    for (float& v : total) {  // lanes 4 apart have other pixels of the same channels
      for (int apart = 4; apart < 32; apart *= 2) v += __shfl_xor_sync(0xffffffffu, v, apart);
    }
    __syncthreads();
    float* const totals = reinterpret_cast<float*>(cells + g.filter_at);  // (warps, 8 kOctets)
    if (lane < 4) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) totals[(warp * 4 + lane) * kEach + e] = total[e];
    }
    __syncthreads();
    if (int(threadIdx.x) < size && slab0 + int(threadIdx.x) < g.to.channels) {
      const int of_column = threadIdx.x % (8 * kOctets);
      float sum = 0.f;
      for (int w = threadIdx.x / (8 * kOctets); w < warps; w += g.columns)
        sum += totals[w * 8 * kOctets + of_column];
      g.parts[int64_t(blockIdx.x / unsigned(u.slabs)) * g.to.channels + slab0 + threadIdx.x] = sum;
    }
  }
#endif
}

// About how many cycles the blocks take: stages of the busiest, each as long as its products (1.6 cycles of a multiprocessor
// each) or its bytes (12 a cycle), and 400 of its own.
template <int kPixel, int kOctets>
double RowsTime(const RowUnits& u, int columns) {
  const int runs = int(CeilDiv(ProductsOf(u), kNarrowRuns)) * kNarrowRuns;
  const double products = 1.6 * runs * columns * kOctets * kNarrowSteps<kPixel> * kNarrowTaps;
  const double bytes = u.stage_bytes / 12.0;
  return double(u.share + kNarrowTaps - 1) * (std::max(products, bytes) + 400);
}

// *parts: how many blocks leave a part of the sums.
template <typename T, int kPixel, int kOctets, NarrowThen kThen>
Status LaunchRows(const Context& ctx, NarrowRowsArgs<T> g, DType dtype, const void* src,
                  int64_t* parts, const std::string& what) {
  constexpr int kWarps = kNarrowWarps<kPixel, kOctets>, kFragment = 8 * kOctets;
  RowUnits& u = g.u;
  // Places in a strip are 32 bits.
  const int64_t image = int64_t(g.to.h) * g.to.w * g.to.channels;
  const int64_t most_images = kNowhere / std::max<int64_t>(image, 1);
  double best = -1;
  for (int columns = 1; columns <= 4 / kOctets; columns *= 2) {
    if (columns > 1 && g.to.channels <= kFragment * columns / 2) break;
    RowUnits tried{};
    ChooseStrips(tried, g.to, kWarps / columns * kNarrowRuns, most_images);
    tried.slabs = int(CeilDiv(g.to.channels, kFragment * columns));
    const int sms =
        SumsUp(kThen) ? std::min(Multiprocessors(), int(narrow::kMostParts)) : Multiprocessors();
    ShareRows(tried, g.to.images, g.to.h, g.to.w, std::max(1, sms / tried.slabs));
    // Products reach past the line's end.
    const int pixels = int(CeilDiv(ProductsOf(tried), kNarrowRuns)) * kNarrowRuns * kNarrowPixels;
    tried.stage_bytes = int(CeilDiv((pixels + kNarrowTaps) * kPixel, 1024) * 1024);
    const double time = RowsTime<kPixel, kOctets>(tried, columns);
    if (best >= 0 && time >= best) continue;
    best = time;
    u = tried;
    g.columns = columns;
  }
  const int filter = g.columns * kNarrowTaps * kNarrowSteps<kPixel> * kOctets * 64 * 4;
  const int room = kNarrowShared - 1024 - filter - kNarrowMostStages * 16;
  u.stages = std::clamp(room / u.stage_bytes, 3, kNarrowMostStages);
  u.ring_bytes = u.stages * u.stage_bytes;
  g.filter_at = u.ring_bytes + u.stages * 16;
  JAXCONV_RETURN_IF_ERROR(EncodeRows(dtype, src, g.from, kPixel, u, what, &g.map));
  *parts = CeilDiv(u.rows, u.share);
  const int64_t blocks = *parts * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int warps = int(CeilDiv(ProductsOf(u), kNarrowRuns)) * g.columns;
  const auto kernel = NarrowRowsKernel<T, kPixel, kOctets, kThen>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), warps * 32, g.filter_at + filter, ctx.stream>>>(g);
  return LaunchStatus(what);
}

template <NarrowThen kThen, typename T>
Status LaunchRowsOf(const Context& ctx, const NarrowRowsArgs<T>& g, DType dtype, const void* src,
                    int64_t* parts, const std::string& what) {
  const auto launch = [&](auto one, auto two) {  // octets of a warp
    return (g.to.channels <= 8 ? one : two)(ctx, g, dtype, src, parts, what);
  };
  const int bytes = PixelBytes(g.from.channels, dtype);
  if (bytes == 16) return launch(LaunchRows<T, 16, 1, kThen>, LaunchRows<T, 16, 2, kThen>);
  if (bytes == 32) return launch(LaunchRows<T, 32, 1, kThen>, LaunchRows<T, 32, 2, kThen>);
  if constexpr (sizeof(T) == 4) {
    // Two octets' filter leaves registers for eight warps: 1.3 times as long.
    if (bytes == 128) return LaunchRows<T, 128, 1, kThen>(ctx, g, dtype, src, parts, what);
  }
  if constexpr (kThen == NarrowThen::kNothing)
    return launch(LaunchRows<T, 64, 1, kThen>, LaunchRows<T, 64, 2, kThen>);
  // Two octets' filter leaves no registers for another array.
  return LaunchRows<T, 64, 1, kThen>(ctx, g, dtype, src, parts, what);
}

// The arguments that every call has.
template <typename T>
NarrowRowsArgs<T> RowsArgs(const ConvProblem& p, bool dgrad, const void* w, void* dst) {
  NarrowRowsArgs<T> g{};
  g.w = static_cast<const T*>(w);
  g.dst = static_cast<T*>(dst);
  SetRows(g, p, dgrad, dgrad);
  g.dgrad = dgrad;
  return g;
}

template <typename T>
Status NarrowRows(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                  const void* src, const void* w, const void* bias, const void* addend, void* dst,
                  void* z, const std::string& what) {
  NarrowRowsArgs<T> g = RowsArgs<T>(p, dgrad, w, dst);
  g.epilogue = MakeEpilogue<T>(e, bias, z);
  g.addend = static_cast<const T*>(addend);
  const auto launch =
      addend == nullptr ? LaunchRowsOf<NarrowThen::kNothing, T> : LaunchRowsOf<NarrowThen::kAdd, T>;
  int64_t parts;
  return launch(ctx, g, p.dtype, src, &parts, what);
}

template <typename T>
Status NarrowRowsBack(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* dy,
                      const void* w, const void* kept, const void* addend, void* dz, float* sums,
                      int64_t* parts, const std::string& what) {
  NarrowRowsArgs<T> g = RowsArgs<T>(p, true, w, dz);
  g.kept = static_cast<const T*>(kept);
  g.derivative = DerivativePieces(e.activation, e.slope);
  g.parts = sums;
  g.addend = static_cast<const T*>(addend);
  const auto launch = addend != nullptr                   ? LaunchRowsOf<NarrowThen::kBackAdd, T>
                      : e.activation == Activation::kNone ? LaunchRowsOf<NarrowThen::kSum, T>
                                                          : LaunchRowsOf<NarrowThen::kBack, T>;
  return launch(ctx, g, p.dtype, dy, parts, what);
}

}  // namespace
}  // namespace jaxconv::cuda::conv
