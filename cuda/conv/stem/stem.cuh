// What the kernels between a narrow image (1 to 8 channels) and a wide one share: which element of w meets which byte of
// a window, and how narrow pixels come to shared memory. geometry.h says where they lie there.
//
// In shared memory a narrow pixel is padded to whole units of 8 bytes (four 16-bit channels or two of float32), so that a
// lane fetches what it needs of a tap in one access whatever the stride.
#pragma once

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/matrix.cuh"
#include "cuda/conv/stem/geometry.h"
#include "cuda/core/mma.cuh"

namespace jaxconv::cuda::conv {

template <typename T>
inline constexpr int kUnit = kUnitBytes / int(sizeof(T));  // channels

struct StemOrigin {
  int image, h, w;  // of the first wide pixel
};

JAXCONV_HD StemOrigin OriginOf(const StemGeometry& g, int64_t tile) {
  const QuotRem w = DivMod(tile, g.by_tiles_w);
  const QuotRem h = DivMod(w.quot, g.by_tiles_h);
  return {int(h.quot), h.rem * g.rows, w.rem * g.cols};
}

// The tap that meets the pixel at row r, column s of a window.
JAXCONV_HD int TapAt(const StemGeometry& g, int r, int s) {
  const int tap = r * g.taps_w + s;
  return g.flip ? g.taps - 1 - tap : tap;
}

// Where a unit of a window lies from its first pixel, in bytes; units are in the order of pixels.
JAXCONV_HD int UnitOffset(const StemGeometry& g, int unit) {
  const int pixel = unit / g.pixel_units, part = unit - pixel * g.pixel_units;
  const int r = pixel / g.taps_w, s = pixel - r * g.taps_w;
  return (r * g.step[0] * g.narrow_cols + s * g.step[1]) * g.pitch + part * kUnitBytes;
}

// The same of a pair of units, from the window's first pixel less `skip`.
JAXCONV_HD int PairOffset(const StemGeometry& g, int pair) {
  const int r = pair / g.row_pairs;
  return r * g.step[0] * g.narrow_cols * g.pitch + (pair - r * g.row_pairs) * 16;
}

// A channel of a tap, or -1.
struct StemElement {
  int tap, channel;
};

// What `byte` of a pair is, or of a unit.
JAXCONV_HD StemElement PairElement(const StemGeometry& g, int pair, int byte, int size) {
  const int r = pair / g.row_pairs, at = (pair - r * g.row_pairs) * 16 + byte;
  const int pixel = at / g.pitch, s = pixel - g.skip, c = (at - pixel * g.pitch) / size;
  const bool inside = r * g.taps_w < g.taps && s >= 0 && s < g.taps_w && c < g.channels;
  return inside ? StemElement{TapAt(g, r, s), c} : StemElement{-1, 0};
}
JAXCONV_HD StemElement UnitElement(const StemGeometry& g, int unit, int byte, int size) {
  const int pixel = unit / g.pixel_units;
  const int c = ((unit - pixel * g.pixel_units) * kUnitBytes + byte) / size;
  const int r = pixel / g.taps_w;
  return unit < g.units && c < g.channels ? StemElement{TapAt(g, r, pixel - r * g.taps_w), c}
                                          : StemElement{-1, 0};
}

// The element of w that column n needs at offset (dh, dw), or -1.
template <typename Args>
__device__ __forceinline__ int64_t FilterAt(const Args& a, int n, int dh, int dw) {
  const StemGeometry& g = a.g;
  const int phase = n / g.channels, c = n - phase * g.channels;
  const int ph = phase / g.stride[1], pw = phase - ph * g.stride[1];
  int r = ph - g.stride[0] * dh, s = pw - g.stride[1] * dw;
  r = g.flip ? a.pad[0] - r : r + a.pad[0];
  s = g.flip ? a.pad[1] - s : s + a.pad[1];
  if (n >= a.columns || r < 0 || s < 0 || r % g.step[0] != 0 || s % g.step[1] != 0) return -1;
  r /= g.step[0];
  s /= g.step[1];
  if (r >= g.taps / g.taps_w || s >= g.taps_w) return -1;
  return (r * g.taps_w + s) * g.w_tap + c * g.w_narrow;
}

__device__ __forceinline__ uint32_t NarrowBits(const float* p) {
  return RoundToTf32(__float_as_uint(__ldg(p)));
}
__device__ __forceinline__ uint32_t NarrowBits(const __nv_bfloat16* p) {
  return __ldg(reinterpret_cast<const unsigned short*>(p));
}
__device__ __forceinline__ uint32_t NarrowBits(const __half* p) {
  return __ldg(reinterpret_cast<const unsigned short*>(p));
}

__device__ __forceinline__ void StoreShared8(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

// The narrow pixels of a tile, from (h0, w0) on, zero outside the array. A warp takes a row; kBatch
// pixels of a lane have their loads in flight together.
template <typename T, int kThreads, int kBatch>
__device__ __forceinline__ void LoadNarrow(uint32_t shared, const T* __restrict__ narrow,
                                           const StemGeometry& g, int image, int h0, int w0) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < g.narrow_rows; row += kThreads / 32) {
    const int h = h0 + row;
    const bool inside = unsigned(h) < unsigned(g.narrow[0]);
    const T* line = narrow + image * g.narrow_n + (inside ? h * g.narrow_h : 0);
    const uint32_t to = shared + uint32_t(row * g.narrow_cols * g.pitch);
    for (int part = 0; part < g.pixel_units; ++part) {
      for (int col0 = lane; col0 < g.narrow_cols; col0 += 32 * kBatch) {
        uint32_t bits[kBatch][kUnit<T>];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int w = w0 - g.lead + col0 + i * 32;
          const bool valid = inside && unsigned(w) < unsigned(g.narrow[1]);
          const T* from = line + w * g.narrow_w + part * kUnit<T> * g.narrow_c;
#pragma unroll
          for (int c = 0; c < kUnit<T>; ++c) {
            bits[i][c] =
                valid && part * kUnit<T> + c < g.channels ? NarrowBits(from + c * g.narrow_c) : 0;
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int col = col0 + i * 32;
          uint2 v;
          if constexpr (sizeof(T) == 2) {
            v = make_uint2(bits[i][0] | bits[i][1] << 16, bits[i][2] | bits[i][3] << 16);
          } else {
            v = make_uint2(bits[i][0], bits[i][1]);
          }
          if (col < g.narrow_cols) StoreShared8(to + col * g.pitch + part * kUnitBytes, v);
        }
      }
    }
  }
}

template <typename T>
inline constexpr int kPieceBytes = 4 * int(sizeof(T));

// Starts the copies of a tile's narrow pixels, from (h0, w0) on, into `raw`, which is private to each
// thread: the one that copies an item unpacks it.
template <typename T, int kThreads>
__device__ __forceinline__ void StageNarrow(uint32_t raw, const T* __restrict__ narrow,
                                            const StemGeometry& g, int image, int h0, int w0) {
  const T* base = narrow + image * g.narrow_n;
  for (int item = threadIdx.x; item < g.items; item += kThreads) {
    const int row = int(g.by_quads.Div(item));
    const int h = h0 + row, w = w0 - g.lead + (item - row * int(g.by_quads.d)) * 4;
    const bool inside = unsigned(h) < unsigned(g.narrow[0]) && unsigned(w) < unsigned(g.narrow[1]);
    const T* from = inside ? base + int64_t(h * g.narrow[1] + w) * 3 : narrow;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      CopyAsync<kPieceBytes<T>>(raw + (item * 3 + i) * kPieceBytes<T>, from + (inside ? i * 4 : 0),
                                inside ? kPieceBytes<T> : 0);
    }
  }
}

// After this thread's copies have arrived.
template <typename T, int kThreads>
__device__ __forceinline__ void UnpackNarrow(uint32_t shared, uint32_t raw, const StemGeometry& g) {
  for (int item = threadIdx.x; item < g.items; item += kThreads) {
    const uint32_t from = raw + item * 3 * kPieceBytes<T>;
    if constexpr (sizeof(T) == 2) {
      const uint2 a = LoadShared8(from), b = LoadShared8(from + 8), c = LoadShared8(from + 16);
      const uint32_t to = shared + item * 32;
      StoreShared16(to, make_uint4(a.x, a.y & 0xffff, __byte_perm(a.y, b.x, 0x5432), b.x >> 16));
      StoreShared16(to + 16,
                    make_uint4(b.y, c.x & 0xffff, __byte_perm(c.x, c.y, 0x5432), c.y >> 16));
    } else {
      const uint4 a = LoadShared16(from), b = LoadShared16(from + 16), c = LoadShared16(from + 32);
      const uint32_t to = shared + item * 64;
      const auto store = [&](int i, uint32_t x, uint32_t y, uint32_t z) {
        StoreShared16(to + i * 16, make_uint4(RoundToTf32(x), RoundToTf32(y), RoundToTf32(z), 0));
      };
      store(0, a.x, a.y, a.z);
      store(1, a.w, b.x, b.y);
      store(2, b.z, b.w, c.x);
      store(3, c.y, c.z, c.w);
    }
  }
}

__device__ __forceinline__ void LoadMatrix2(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

}  // namespace jaxconv::cuda::conv
