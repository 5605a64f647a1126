// The warps of a block of rows_mma.cu, and the ring of transposed rows (rows_mma.cuh) between
// those that transpose and those that multiply.
#pragma once

#include <cstdint>

#include "cuda/conv/depthwise/rows_mma.cuh"

namespace jaxconv::cuda::conv {

constexpr int kBandWarps = kBandOctets * 4;
constexpr int kBandThreads = (kBandWarps + 4) * 32;
constexpr int kBandRegisters = 104, kBandHelperRegisters = 64;  // of a thread
// A block starts with this for all threads, which is what the two kinds share then.
constexpr int kBandLaunchRegisters = 65536 / kBandThreads / 8 * 8;
static_assert(kBandWarps * kBandRegisters + 4 * kBandHelperRegisters <=
              (kBandWarps + 4) * kBandLaunchRegisters);
constexpr int kBandRows = 4;  // of cells
// Bytes of a row of `cells` cells: transposed four at a time.
JAXCONV_HD int BandRowBytes(int cells) { return (cells + 3) / 4 * (4 * kBandOctets * 128); }

// Goes round a ring of kCount places.
template <int kCount>
struct BandPlaces {
  uint32_t at = 0, parity = 0;
  __device__ __forceinline__ void Advance() {
    at = (at + 1) % kCount;
    parity ^= at == 0;
  }
};

// What the multiplying warps do with a row of cells.
constexpr uint32_t kBandFirst = 1, kBandInput = 2, kBandOutput = 4, kBandLast = 8;

// The ring of cells in shared memory: barriers and tokens of its kBandRows places, for each half of the
// octets. A place's barriers: full, and empty 8 bytes after it.
struct BandCells {
  uint32_t cells, bytes;  // of a row
  uint32_t barriers, tokens;

  static constexpr int kExtra = kBandRows * 2 * (16 + 4);  // bytes of shared memory besides cells
  __device__ __forceinline__ void Init() const {
    for (int k = 0; k < kBandRows * 2; ++k) {
      BarrierInit(barriers + k * 16, 1);
      BarrierInit(barriers + k * 16 + 8, kBandWarps / 2);
    }
  }
  __device__ __forceinline__ uint32_t Full(uint32_t place, int half) const {
    return barriers + (place * 2 + half) * 16;
  }
  __device__ __forceinline__ uint32_t Empty(uint32_t place, int half) const {
    return Full(place, half) + 8;
  }
  __device__ __forceinline__ uint32_t At(uint32_t place) const { return cells + place * bytes; }
  __device__ __forceinline__ void PutToken(uint32_t place, int half, uint32_t token) const {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(tokens + (place * 2 + half) * 4), "r"(token)
                 : "memory");
  }
  __device__ __forceinline__ uint32_t Token(uint32_t place, int half) const {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];\n"
                 : "=r"(v)
                 : "r"(tokens + (place * 2 + half) * 4)
                 : "memory");
    return v;
  }
};

// A helper's places when it transposes the cells of octets 2 half and the next of an array, four at a
// time.
struct BandMover {
  uint32_t from, to[8];
  int cells;

  // `cells` of them, `pitch` of an image, which count `segs` phases.
  __device__ __forceinline__ BandMover(int cells, int pitch, int segs, int half) : cells(cells) {
    const int lane = threadIdx.x % 32, i = lane % 8;
    const int pixel = lane / 8 * 8 + i;
    const int turn = pixel * kBandOctets >> 3;  // of the swizzle, a chunk each 128 bytes
    from = uint32_t((pixel * kBandOctets + ((half * 2) ^ (turn & (kBandOctets - 1)))) * 16);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int cell = k * 4 + lane / 8;
      const int phase = cell - cell / pitch * (pitch - segs);
      to[k] = uint32_t(((cell * kBandOctets + half * 2) * 8 + (i ^ (phase & 7))) * 16);
    }
  }
  // before(): until `cells` may be written.
  template <typename Before>
  __device__ __forceinline__ void Move(uint32_t stage, uint32_t row, const Before& before) const {
    constexpr uint32_t kFour = 4 * kBandOctets * 128;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      if (k * 4 >= cells) break;
      uint32_t r[2][2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if ((k + m) * 4 < cells) {
          LoadMatrixTransposed(r[m][0], stage + from + (k + m) * kFour);
          LoadMatrixTransposed(r[m][1], (stage + from + (k + m) * kFour) ^ 16);
        }
      }
      if (k == 0) before();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if ((k + m) * 4 < cells) {
          StoreMatrix4(row + to[k + m], r[m][0]);
          StoreMatrix4(row + to[k + m] + 128, r[m][1]);
        }
      }
    }
  }
};

}  // namespace jaxconv::cuda::conv
