// One operand's tile in shared memory, and the loader that fills it from a plain matrix. Host and
// device: the index arithmetic here runs on the host just as well.
//
// A tile has kExtent rows of the product (m of A, n of B) and kTileK = 64 bytes of the reduction k.
// It keeps the order that the operand has in global memory, so every copy is a straight 16-byte
// one:
//   k-major   row m: 64 bytes of k, four 16-byte chunks. Chunk j of row m lies at j ^ (m / 2 % 4).
//   mn-major  row k: kExtent elements of m. 16 bit: chunk j of row k lies at j ^ (k % 8); 32 bit:
//   at j ^ (2 * (k % 4)).
// With these swizzles the eight rows of an ldmatrix, and the 4 (k) x 8 (m) words a warp reads of an
// mn-major float32 tile, fall in 32 different banks.
#pragma once

#include <cstdint>

#include "common/activation.h"  // JAXCONV_HD

namespace jaxconv::cuda {

inline constexpr int kTileKBytes = 64;

template <typename T>
inline constexpr int kTileK = kTileKBytes / int(sizeof(T));

template <typename T, int kExtent>
inline constexpr int kTileBytes = kExtent * kTileKBytes;

// What a row's chunk numbers are xored with; row is m of a k-major, k of an mn-major tile. Linear
// over the row's bits: Swizzle(a ^ b) == Swizzle(a) ^ Swizzle(b).
template <typename T, bool kMajorK>
JAXCONV_HD constexpr int Swizzle(int row) {
  return kMajorK ? (row >> 1) & 3 : sizeof(T) == 2 ? row & 7 : (row & 3) << 1;
}

template <typename T, int kExtent, bool kMajorK>
inline constexpr int kRowBytes = kMajorK ? kTileKBytes : kExtent * int(sizeof(T));

// Byte offset in its tile of element (mn, k).
template <typename T, int kExtent, bool kMajorK>
JAXCONV_HD constexpr int TileOffset(int mn, int k) {
  constexpr int kPerChunk = 16 / int(sizeof(T));
  const int row = kMajorK ? mn : k;
  const int column = kMajorK ? k : mn;
  return row * kRowBytes<T, kExtent, kMajorK> +
         ((column / kPerChunk) ^ Swizzle<T, kMajorK>(row)) * 16 +
         column % kPerChunk * int(sizeof(T));
}

// Which vectors of a tile a thread copies: a fixed column (along the contiguous axis), kCount rows
// kStep apart.
template <typename T_, int kExtent_, bool kMajorK_, int kVec_, int kThreads>
struct TileMap {
  using T = T_;
  static constexpr int kExtent = kExtent_;
  static constexpr bool kMajorK = kMajorK_;
  static constexpr int kVec = kVec_;  // elements a copy moves: 16 bytes' worth, or 1
  static constexpr int kColumns = (kMajorK ? kTileK<T> : kExtent) / kVec;
  static constexpr int kRows = kMajorK ? kExtent : kTileK<T>;
  static constexpr int kStep = kThreads / kColumns;
  static constexpr int kCount = kRows / kStep;
  static_assert(kThreads % kColumns == 0 && kRows % kStep == 0 && (kStep & (kStep - 1)) == 0);

  static JAXCONV_HD int Row(int thread) { return thread / kColumns; }
  static JAXCONV_HD int Column(int thread) { return thread % kColumns * kVec; }  // in elements
  // Byte offset in the tile of the thread's first vector, and from there that of its i-th: a
  // thread's rows differ from its first in other bits than those the first has (kStep is a power of
  // two), so nothing carries.
  static JAXCONV_HD int Offset(int thread) {
    return kMajorK ? TileOffset<T, kExtent, true>(Row(thread), Column(thread))
                   : TileOffset<T, kExtent, false>(Column(thread), Row(thread));
  }
  static JAXCONV_HD int Shift(int offset, int i) {
    return (offset ^ (Swizzle<T, kMajorK>(i * kStep) * 16)) +
           i * kStep * kRowBytes<T, kExtent, kMajorK>;
  }
};

// What one copy reads: `bytes` bytes (0: nothing, the tile gets zeros) from `offset` elements past
// the operand's base. Offsets of vectors are multiples of the vector.
struct Span {
  int64_t offset;
  int bytes;
};

// The part of [begin, end) that a vector at `begin` covers, in bytes.
template <typename T, int kVec>
JAXCONV_HD int ClippedBytes(int begin, int end) {
  const int left = end - begin;
  return (left < 0 ? 0 : left < kVec ? left : kVec) * int(sizeof(T));
}

// Loaders share this shape: constructed once per tile of the output, then for each k-tile At(0) ...
// At(kCount - 1) in this order, then Advance().
//
// The plain matrix: element (mn, k) at mn * ld + k (k-major) or k * ld + mn (mn-major).
template <typename T, int kExtent, bool kMajorK, int kVec, int kThreads>
struct MatrixLoader : TileMap<T, kExtent, kMajorK, kVec, kThreads> {
  using Map = TileMap<T, kExtent, kMajorK, kVec, kThreads>;

  // mn0: the tile's first m or n; [k_begin, k_end): this CTA's part of the reduction; mn_end: the
  // matrix ends.
  JAXCONV_HD MatrixLoader(int64_t ld, int mn0, int mn_end, int k_begin, int k_end, int thread)
      : row_stride(ld * Map::kStep) {
    const int row = Map::Row(thread);
    const int column = Map::Column(thread);
    if constexpr (kMajorK) {
      offset = int64_t(mn0 + row) * ld + k_begin + column;
      advance = kTileK<T>;
      position = k_begin + column;
      end = k_end;
      rows_left = mn_end - mn0 - row;
    } else {
      offset = int64_t(k_begin + row) * ld + mn0 + column;
      advance = ld * kTileK<T>;
      position = mn0 + column;
      end = mn_end;
      rows_left = k_end - k_begin - row;
    }
  }

  JAXCONV_HD Span At(int i) const {
    const bool inside = i * Map::kStep < rows_left;
    return {offset + i * row_stride, inside ? ClippedBytes<T, kVec>(position, end) : 0};
  }

  JAXCONV_HD void Advance() {
    offset += advance;
    if constexpr (kMajorK) {
      position += kTileK<T>;
    } else {
      rows_left -= kTileK<T>;
    }
  }

  int64_t offset;      // of row 0
  int64_t row_stride;  // between this thread's rows
  int64_t advance;     // between k-tiles
  int position, end;   // along the contiguous axis
  int rows_left;       // rows from this thread's first to the matrix's end
};

}  // namespace jaxconv::cuda
