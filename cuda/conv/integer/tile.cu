// "integer/tile": a matrix product of the pixels of y (N*O*P*Q rows), their taps and channels (the reduction, T*R*S*C, channels
// fastest), and the output channels of a group (columns). A block of 256 threads makes 64 x 64 outputs, a thread 4 x 4.
//
// Chunks of the reduction, 16 words long, go through registers to shared memory: a word is four elements of 8 bits, which
// dp4a multiplies and sums up, or one element of any other type, as wide as the sum. Where the chunk's taps and channels lie
// in x and w is found once for the block, by a thread an element. The next chunk is on its way while one is multiplied.
// Any order of axes is read as it lies in memory; threads walk along what is contiguous.
#include <cstdint>
#include <type_traits>

#include "common/integer.h"
#include "cuda/conv/integer/domain.h"
#include "cuda/conv/integer/integer.h"
#include "cuda/core/divmod.h"

namespace jaxconv::cuda::conv::integer {
namespace {

constexpr int kWords = 16;                      // of a chunk
constexpr int kBlock = 256;                     // threads
constexpr int kSide = 4;                        // outputs of a thread, along rows and columns
constexpr int kOutside = -(1 << 30);            // a coordinate that no tap brings into x
constexpr int kEach = kRows * kWords / kBlock;  // words of an operand that a thread loads
static_assert(kRows == kColumns && kRows == 16 * kSide);

// What does not depend on the block.
struct Args {
  IntegerConvProblem p;
  const void* x;
  const void* w;
  void* y;
  FastDiv c, r, s;  // channels of a group, R, S
  int64_t column_tiles, row_tiles;
  int reduced;   // T*R*S*C
  bool x_along;  // x's channels are contiguous: threads walk along the reduction, else along pixels
  bool
      w_along;  // w's input channels are contiguous: along the reduction, else along output channels
  bool x_words, w_words;  // four neighbours of 8 bits are a word in memory, aligned
  bool y_words;           // four neighbouring columns are 16 bytes of y, aligned
  bool dilated;           // x is
};

// A pixel of y.
struct Pixel {
  int64_t x, y;  // where its image and group start in x, and where it lies in y
  int first[3];  // of its window, in x dilated
};

// An element of the reduction.
struct Tap {
  int64_t x, w;  // its channel's place in x, its own in w
  int at[3];     // from the window's first pixel
};

// 8 bits: four elements a word, a byte each.
template <bool kSignedX, bool kSignedW>
struct Packed {
  using Sum = uint32_t;
  using Word = uint32_t;
  static constexpr int kElements = 4;
  static __device__ __forceinline__ void Add(Sum& sum, Word a, Word b) {
    if constexpr (kSignedX && kSignedW) {
      sum = Sum(__dp4a(int(a), int(b), int(sum)));
    } else if constexpr (!kSignedX && !kSignedW) {
      sum = __dp4a(a, b, sum);
    } else if constexpr (kSignedX) {
      asm("dp4a.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    } else {
      asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    }
  }
  static __device__ __forceinline__ Word Load(Integer, const void* from, int64_t i) {
    return static_cast<const uint8_t*>(from)[i];
  }
};

// Any type, an element a word.
template <typename T>
struct Wide {
  using Sum = T;
  using Word = T;
  static constexpr int kElements = 1;
  static __device__ __forceinline__ void Add(Sum& sum, Word a, Word b) { sum += a * b; }
  static __device__ __forceinline__ Word Load(Integer type, const void* from, int64_t i) {
    switch (type) {
      case Integer::kS8:
        return Word(static_cast<const int8_t*>(from)[i]);
      case Integer::kU8:
        return Word(static_cast<const uint8_t*>(from)[i]);
      case Integer::kS16:
        return Word(static_cast<const int16_t*>(from)[i]);
      case Integer::kU16:
        return Word(static_cast<const uint16_t*>(from)[i]);
      case Integer::kS32:
        return Word(static_cast<const int32_t*>(from)[i]);
      case Integer::kU32:
        return Word(static_cast<const uint32_t*>(from)[i]);
      default:
        return Word(static_cast<const uint64_t*>(from)[i]);
    }
  }
};

// Four words of shared memory, aligned.
template <typename Word>
__device__ __forceinline__ void ReadFour(const Word* from, Word (&to)[kSide]) {
  if constexpr (sizeof(Word) == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    const ulonglong2 a = reinterpret_cast<const ulonglong2*>(from)[0];
    const ulonglong2 b = reinterpret_cast<const ulonglong2*>(from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
  }
}

// Where a tap of a pixel lies in x; -1: nowhere.
__device__ __forceinline__ int64_t PlaceInX(const Args& args, const Pixel& pixel, const Tap& tap) {
  int64_t place = pixel.x + tap.x;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    int at = pixel.first[d] + tap.at[d];
    if (args.dilated) {
      at = jaxconv::integer::InX(args.p, d, at);
    }
    if (unsigned(at) >= unsigned(args.p.in[d])) return -1;
    place += int64_t(at) * args.p.x_at[d];
  }
  return place;
}

template <typename Loop>
__global__ void __launch_bounds__(kBlock, 2) TileKernel(const __grid_constant__ Args args) {
  using Word = typename Loop::Word;
  using Sum = typename Loop::Sum;
  constexpr int kElements = Loop::kElements, kChunk = kWords * kElements;
  constexpr int kPitch = kRows + 16 / int(sizeof(Word));  // 16-byte rows, in other banks
  __shared__ __align__(16) Word xs[kWords][kPitch];
  __shared__ __align__(16) Word ws[kWords][kPitch];
  __shared__ Pixel pixels[kRows];
  __shared__ Tap taps[2][kChunk];

  const IntegerConvProblem& p = args.p;
  const int thread = int(threadIdx.x);
  int64_t block = blockIdx.x;
  const int64_t column_tile = block % args.column_tiles;
  block /= args.column_tiles;
  const int64_t row_tile = block % args.row_tiles, group = block / args.row_tiles;
  const int64_t columns = p.group_k() - column_tile * kColumns;  // from this tile's first on
  const int64_t first_k = group * p.group_k() + column_tile * kColumns;

  if (thread < kRows) {
    const int64_t row = row_tile * kRows + thread;
    int64_t rest = row;
    Pixel pixel;
    int64_t o[3];
    for (int d = 2; d >= 0; --d) {
      o[d] = rest % p.out[d];
      rest /= p.out[d];
    }
    const bool there = rest < p.n;
    pixel.x =
        p.batch_groups > 1 ? (group * p.n + rest) * p.x_n : rest * p.x_n + group * p.c * p.x_c;
    pixel.y = there ? rest * p.y_n + first_k * p.y_k : -1;
    for (int d = 0; d < 3; ++d) {
      pixel.first[d] = there ? int(o[d] * p.stride[d] - p.pad[d]) : kOutside;
      pixel.y += there ? o[d] * p.y_at[d] : 0;
    }
    pixels[thread] = pixel;
  }
  // Elements behind the last one lie nowhere in x.
  const auto find = [&](int chunk) {
    if (thread >= kChunk) return;
    const int i = chunk * kChunk + thread;
    Tap tap{0, 0, {kOutside, 0, 0}};
    if (i < args.reduced) {
      const uint32_t all = args.c.Div(uint32_t(i)), c = uint32_t(i) - all * args.c.d;
      const uint32_t rows = args.s.Div(all), s = all - rows * args.s.d;
      const uint32_t t = args.r.Div(rows), r = rows - t * args.r.d;
      tap.x = c * p.x_c;
      tap.w = c * p.w_c + t * p.w_at[0] + r * p.w_at[1] + s * p.w_at[2];
      tap.at[0] = int(t * p.w_dilation[0]);
      tap.at[1] = int(r * p.w_dilation[1]);
      tap.at[2] = int(s * p.w_dilation[2]);
    }
    taps[chunk & 1][thread] = tap;
  };

  // The word and the row (column) of a thread's i-th word.
  const auto word_of = [&](bool along, int i) {
    return along ? thread % kWords : thread / kRows + i * (kBlock / int(kRows));
  };
  const auto row_of = [&](bool along, int i) {
    return along ? thread / kWords + i * (kBlock / kWords) : thread % int(kRows);
  };
  Word x_next[kEach], w_next[kEach];
  const auto load = [&](int chunk) {
    const Tap* found = taps[chunk & 1];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Pixel& pixel = pixels[row_of(args.x_along, i)];
      const Tap* tap = found + word_of(args.x_along, i) * kElements;
      Word word = 0;
      if (kElements > 1 && args.x_words) {
        const int64_t at = PlaceInX(args, pixel, tap[0]);
        if (at >= 0) {
          word = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(args.x) + at);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int64_t at = PlaceInX(args, pixel, tap[e]);
          if (at >= 0) word |= Loop::Load(p.x_type, args.x, at) << (8 * e);
        }
      }
      x_next[i] = word;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = row_of(args.w_along, i);
      const Tap* tap = found + word_of(args.w_along, i) * kElements;
      const int64_t start = (first_k + column) * p.w_k;
      Word word = 0;
      // What lies behind the reduction is multiplied by x's zeros: its place, 0, is in w.
      if (column < columns) {
        if (kElements > 1 && args.w_words) {
          word = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(args.w) + start +
                                                    tap[0].w);
        } else {
#pragma unroll
          for (int e = 0; e < kElements; ++e)
            word |= Loop::Load(p.w_type, args.w, start + tap[e].w) << (8 * e);
        }
      }
      w_next[i] = word;
    }
  };

  Sum sums[kSide][kSide] = {};
  const int row = thread / 16 * kSide, column = thread % 16 * kSide;
  const int chunks = (args.reduced + kChunk - 1) / kChunk;
  find(0);
  __syncthreads();
  load(0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool more = chunk + 1 < chunks;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      xs[word_of(args.x_along, i)][row_of(args.x_along, i)] = x_next[i];
      ws[word_of(args.w_along, i)][row_of(args.w_along, i)] = w_next[i];
    }
    if (more) find(chunk + 1);
    __syncthreads();
    if (more) load(chunk + 1);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      Word a[kSide], b[kSide];
      ReadFour(&xs[k][row], a);
      ReadFour(&ws[k][column], b);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) Loop::Add(sums[i][j], a[i], b[j]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t start = pixels[row + i].y;
    if (start < 0) continue;
    if constexpr (sizeof(Sum) == 4) {
      if (args.y_words && column + kSide <= columns) {
        uint4* to = reinterpret_cast<uint4*>(static_cast<uint32_t*>(args.y) + start + column);
        *to = make_uint4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        continue;
      }
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (column + j < columns) {
        jaxconv::integer::Store(p.y_type, args.y, start + (column + j) * p.y_k, sums[i][j]);
      }
    }
  }
}

bool Aligned(const void* array, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(array) % bytes == 0;
}

template <typename Loop>
Status Launch(const Context& ctx, const Args& args, const std::string& what) {
  TileKernel<Loop><<<static_cast<unsigned>(Tiles(args.p)), kBlock, 0, ctx.stream>>>(args);
  return LaunchStatus(what);
}

}  // namespace

Status Tile(const Context& ctx, const IntegerConvProblem& p, const void* x, const void* w, void* y,
            const std::string& what) {
  Args args{p, x, w, y, FastDiv(p.c), FastDiv(p.filter[1]), FastDiv(p.filter[2])};
  args.column_tiles = CeilDivide(p.group_k(), kColumns);
  args.row_tiles = CeilDivide(p.n * p.out_size(), kRows);
  args.reduced = static_cast<int>(p.c * p.filter_size());
  args.x_along = p.x_c == 1;
  args.w_along = p.w_c == 1 && p.w_k != 1;
  // Every step but the channel's is a multiple of four, and a word's four channels are of one tap.
  const auto fours = [](const int64_t (&steps)[3], int64_t other) {
    return steps[0] % 4 == 0 && steps[1] % 4 == 0 && steps[2] % 4 == 0 && other % 4 == 0;
  };
  args.x_words = p.x_c == 1 && p.c % 4 == 0 && fours(p.x_at, p.x_n) && Aligned(x, 4);
  args.w_words = p.w_c == 1 && p.c % 4 == 0 && fours(p.w_at, p.w_k) && Aligned(w, 4);
  args.y_words = p.y_k == 1 && SizeOf(p.y_type) == 4 && p.group_k() % 4 == 0 &&
                 fours(p.y_at, p.y_n) && Aligned(y, 16);
  args.dilated = p.x_dilation[0] != 1 || p.x_dilation[1] != 1 || p.x_dilation[2] != 1;
  if (SizeOf(p.y_type) == 8) return Launch<Wide<uint64_t>>(ctx, args, what);
  if (SizeOf(p.x_type) > 1) return Launch<Wide<uint32_t>>(ctx, args, what);
  if (IsSigned(p.x_type)) {
    return IsSigned(p.w_type) ? Launch<Packed<true, true>>(ctx, args, what)
                              : Launch<Packed<true, false>>(ctx, args, what);
  }
  return IsSigned(p.w_type) ? Launch<Packed<false, true>>(ctx, args, what)
                            : Launch<Packed<false, false>>(ctx, args, what);
}

}  // namespace jaxconv::cuda::conv::integer
