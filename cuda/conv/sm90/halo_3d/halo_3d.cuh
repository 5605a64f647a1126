// 3-D convolutions of stride 1 with three planes of taps and few channels on the sm_90a tensor cores.
//
//   y[o, v, k] = sum over t in [0, 3), taps (r, s) and c of
//                x[o + t - ahead, v + shift(r, s), c] * w[t, (r, s), c, k]
//
// v is a place of a plane: its pixels row after row, with a gap after every row that reads as zeros
// (sm90/halo/halo.cuh has the idea), so that a tap is a shift. A CTA goes through the planes of a tile of
// places, each of which it reads once, with the halo that its taps reach: plane i is multiplied by
// the filters of all three t at once, 3 * 32 columns, which are parts of outputs o = i + ahead - t.
// Its sums then move on by one t: those of t = 2 are complete and leave, and zeros come in for t = 0.
//
//   A  64 places x c, in rows of as many bytes as c has (32, 64 or 128) in that swizzle
//   B  (t, k) x c of a tap (r, s); all of them stay in shared memory
//
// Planes too wide for shared memory are cut into strips of columns, which are planes of their own but
// for the columns of x that both sides of a cut read.
//
// The output planes of all tiles, in one sequence, are split evenly over the CTAs; a cut costs two
// planes that both sides multiply. Blocks of 32 channels made have CTAs of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/sm90/halo_3d/halo_3d.h"
#include "cuda/conv/sm90/wgrad/sums.cuh"
#include "cuda/core/context.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"

namespace jaxconv::cuda {

// A run of output planes [begin, end) of one tile.
struct Halo3dRun {
  int image, strip, tile;
  int begin, end;
};

__device__ __forceinline__ Halo3dRun NextRun(const Halo3dProduct& p, int from, int to) {
  const int column = from / p.made[2];
  Halo3dRun run;
  const int strip = column / p.tiles;  // of all images
  run.image = strip / p.strips;
  run.strip = strip - run.image * p.strips;
  run.tile = column - strip * p.tiles;
  run.begin = from - column * p.made[2];
  run.end = min(p.made[2], run.begin + to - from);
  return run;
}

// The filter to shared memory: of every tap of a plane 96 rows (2 - t, column) of c, zeros where
// there is none. Columns are permuted so that a thread's sums are those of 8 channels that follow
// each other: 8 * j + 2 * i + e is channel 8 * i + 2 * j + e.
template <typename T, int kRow>
__device__ __forceinline__ void LoadHalo3dFilter(const Halo3dProduct& p, uint32_t to, int n) {
  constexpr int kPairs = kRow / 4, kChunks = kRow / 16;
  const T* w = static_cast<const T*>(p.w);
  const int count = 3 * p.taps * kHalo3dMade * kPairs;
#pragma unroll 4
  for (int index = threadIdx.x; index < count; index += blockDim.x) {
    // The axis that is fastest in memory is fastest here.
    const int u = p.dgrad ? index % kPairs : index / kHalo3dMade % kPairs;
    const int channel = p.dgrad ? index / kPairs % kHalo3dMade : index % kHalo3dMade;
    const int tap = index / (kHalo3dMade * kPairs);
    const int c = u * 2, t = tap / p.taps;
    T pair[2] = {FromFloat<T>(0.f), FromFloat<T>(0.f)};
    if (n + channel < p.n && c < p.channels) {
      if (p.dgrad) {
        const int64_t from = (int64_t(3 * p.taps - 1 - tap) * p.n + n + channel) * p.channels + c;
        pair[0] = w[from];
        pair[1] = w[from + 1];
      } else {
        const int64_t from = (int64_t(tap) * p.channels + c) * p.n + n + channel;
        pair[0] = w[from];
        pair[1] = w[from + p.n];
      }
    }
    const int column = channel % 8 / 2 * 8 + channel / 8 * 2 + channel % 2;
    const int row = (2 - t) * kHalo3dMade + column;
    const int chunk = u / 4 ^ (row * kRow / 128) % kChunks;
    const uint32_t at =
        to + ((tap - t * p.taps) * 3 * kHalo3dMade + row) * kRow + chunk * 16 + u % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(at),
                 "r"(*reinterpret_cast<const uint32_t*>(pair))
                 : "memory");
  }
}

// 8 channels of a place.
template <typename T>
__device__ __forceinline__ void PutPlace(void* base, int64_t at, const float* v) {
  *reinterpret_cast<uint4*>(static_cast<T*>(base) + at) =
      make_uint4(PackHalves(v[0], v[1], T()), PackHalves(v[4], v[5], T()),
                 PackHalves(v[8], v[9], T()), PackHalves(v[12], v[13], T()));
}

// kRow: bytes of a place. A consumer warpgroup has two of a tile's blocks of 64 places. (Three
// warpgroups take as long; four with a block each spill.)
template <typename T, int kRow>
__global__ void __launch_bounds__(kSm90Threads, 1)
    Halo3dProductKernel(const __grid_constant__ Halo3dProduct p) {
#ifdef JAXCONV_SM90A
  constexpr int kBlocks = 2;
  constexpr int kTapBytes = 3 * kHalo3dMade * kRow;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t filter = SharedAddress(shared_bytes);
  const uint32_t buffers = filter + p.taps * kTapBytes;
  const uint32_t barriers = buffers + p.buffers * p.buffer_bytes;
  const auto full = [&](int i) { return barriers + i * 8; };
  const auto empty = [&](int i) { return barriers + 64 + i * 8; };
  const auto turn = [&](int i) { return barriers + 128 + i * 8; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.buffers; ++i) {
      BarrierInit(full(i), 1);
      BarrierInit(empty(i), 2);
    }
    BarrierInit(turn(0), kTurnArrivals);
    BarrierInit(turn(1), kTurnArrivals);
    BarrierInitFence();
  }
  const int n = blockIdx.x / p.ctas * kHalo3dMade, part = blockIdx.x % p.ctas;
  LoadHalo3dFilter<T, kRow>(p, filter, n);
  FenceForTma();  // the tensor cores read it as TMA does
  __syncthreads();
  const int64_t total = int64_t(p.images) * p.strips * p.tiles * p.made[2];
  int from = int(total * part / p.ctas);
  const int to = int(total * (part + 1) / p.ctas);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < p.strips; ++i) PrefetchMap(p.x[i]);
      const int none[3] = {};
      int slot = 0;
      uint32_t parity = 1;
      while (from < to) {
        const Halo3dRun run = NextRun(p, from, to);
        from += run.end - run.begin;
        const int place = run.tile * kHalo3dPlaces;
        const int first = max(run.begin - p.ahead, 0);
        const int last = min(run.end + 2 - p.ahead, p.planes);
        int at[3] = {place % p.pitch + p.column[run.strip], place / p.pitch + p.row, 0};
        for (int plane = first; plane < last; ++plane) {
          BarrierWait(empty(slot), parity);
          BarrierExpect(full(slot), p.buffer_bytes);
          at[2] = plane;
          LoadColumn(5, buffers + slot * p.buffer_bytes, p.x[run.strip], full(slot), 0, at,
                     run.image, none);
          if (++slot == p.buffers) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int channel = n + lane % 4 * 8;  // the first of this thread's 8
    float bias[8] = {};
    if (p.epilogue.bias_kind != BiasKind::kNone && channel < p.n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bias[i] = ToFloat(static_cast<const T*>(p.epilogue.bias)[channel + i]);
      }
    }
    const int plane_size = p.made[0] * p.made[1];
    int slot = 0;
    uint32_t parity = 0, turns = group == 0 ? 1 : 0;
    while (from < to) {
      const Halo3dRun run = NextRun(p, from, to);
      from += run.end - run.begin;
      const int begin = p.made[0] * run.strip / p.strips;
      const int width = p.made[0] * (run.strip + 1) / p.strips - begin;
      int pixel[kBlocks][2];  // of a plane; negative: none
#pragma unroll
      for (int i = 0; i < kBlocks * 2; ++i) {
        const int place = run.tile * kHalo3dPlaces + (group * kBlocks + i / 2) * 64 + warp * 16 +
                          lane / 4 + i % 2 * 8;
        const int row = place / p.pitch, column = place - row * p.pitch;
        const bool made = column < width && row < p.made[1] && channel < p.n;
        pixel[i / 2][i % 2] = made ? row * p.made[0] + begin + column : -1;
      }
      float acc[kBlocks][48];
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 48; ++i) acc[m][i] = 0.f;
      }
      // Output `made` is complete: it leaves, and the sums move on by a plane.
      const auto finish = [&](int made) {
        float v[(kBlocks + 1) / 2 * 32];
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            v[m * 16 + i] = acc[m][i] + bias[i / 4 * 2 + i % 2];
            acc[m][i] = acc[m][i + 16];
            acc[m][i + 16] = acc[m][i + 32];
            acc[m][i + 32] = 0.f;
          }
        }
        if (made < run.begin) return;
        const int64_t base = (int64_t(run.image) * p.made[2] + made) * plane_size;
        const auto put = [&](void* out) {
#pragma unroll
          for (int i = 0; i < kBlocks * 2; ++i) {
            const int at = pixel[i / 2][i % 2];
            if (at >= 0) PutPlace<T>(out, (base + at) * p.n + channel, v + i / 2 * 16 + i % 2 * 2);
          }
        };
        if (p.z != nullptr) put(p.z);
        ActivateFast<T>(p.epilogue.activation, p.epilogue.slope, v);
        put(p.d);
      };
      const int first = max(run.begin - p.ahead, 0);
      const int last = min(run.end + 2 - p.ahead, p.planes);
#pragma unroll 1
      for (int plane = first; plane < last; ++plane) {
        // One group multiplies at a time: side by side they also finish at the same time, and the
        // tensor cores then wait for both (14 %, 32 channels, H200).
        BarrierWait(turn(group), turns);
        turns ^= 1;
        BarrierWait(full(slot), parity);
        const uint32_t buffer = buffers + slot * p.buffer_bytes + group * (kBlocks * 64 * kRow);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) Pin(acc[m]);
        WgmmaFence();
#pragma unroll 1
        for (int tap = 0; tap < p.taps; ++tap) {
          const uint64_t a = RowsDescriptor<kRow>(buffer + p.shift[tap] * kRow);
          const uint64_t b = RowsDescriptor<kRow>(filter + tap * kTapBytes);
#pragma unroll
          for (int k = 0; k < kRow / 32; ++k) {
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) {
              Wgmma<T, true, true>(acc[m], a + m * (64 * kRow / 16) + k * 2, b + k * 2, 1);
            }
          }
        }
        WgmmaCommit();
        PassTurn(turn(group ^ 1));
        WgmmaWait<0>();
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) Pin(acc[m]);
        if (threadIdx.x % 128 == 0) BarrierArrive(empty(slot));
        if (++slot == p.buffers) {
          slot = 0;
          parity ^= 1;
        }
        finish(plane + p.ahead - 2);
      }
      // Outputs past the last plane that is read.
      for (int made = last + p.ahead - 2; made < run.end; ++made) finish(made);
    }
  }
#endif
}

template <typename T, int kRow>
Status LaunchHalo3dRow(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                       const std::string& what) {
  p.blocks = (p.n + kHalo3dMade - 1) / kHalo3dMade;
  p.tiles = (p.pitch * p.made[1] + kHalo3dPlaces - 1) / kHalo3dPlaces;
  const int64_t total = int64_t(p.images) * p.strips * p.tiles * p.made[2];
  p.ctas = int(std::min<int64_t>(std::max(multiprocessors / p.blocks, 1), total));
  const int reach = p.shift[p.taps - 1];
  p.buffers = 2;
  while (p.buffers < 6 &&
         Halo3dProductShared(p.taps, reach, kRow, p.buffers + 1) <= kHalo3dShared) {
    ++p.buffers;
  }
  p.buffer_bytes = int(Halo3dBufferBytes(reach, kRow));
  const int shared = int(Halo3dProductShared(p.taps, reach, kRow, p.buffers));
  auto kernel = Halo3dProductKernel<T, kRow>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(p.blocks * p.ctas), kSm90Threads, shared, ctx.stream>>>(p);
  return LaunchStatus(what);
}

template <typename T>
Status LaunchHalo3dProduct(const Context& ctx, Halo3dProduct& p, int multiprocessors,
                           const std::string& what) {
  switch (Halo3dRow(p.channels)) {
    case 32:
      return LaunchHalo3dRow<T, 32>(ctx, p, multiprocessors, what);
    case 64:
      return LaunchHalo3dRow<T, 64>(ctx, p, multiprocessors, what);
    default:
      return LaunchHalo3dRow<T, 128>(ctx, p, multiprocessors, what);
  }
}

// dw[t, r, s, c, k] = sum over o and v of x[o + t - ahead, v + shift(r, s), c] * dy[o, v, k]
//
// for 32 of C and 32 of K: c on the rows of wgmma, k on its columns, both blocks of 32 as often as it
// takes. A warpgroup makes the nine taps of one t, as shifts of x's rows (blocks of A) and of dy's
// (blocks of B), where x from v + a on and dy from v - b on make tap a + b:
//
//   r 0, 1        A: x from v and from v + row          B: dy from v - 2, v - 1 and v
//   r 2           A: x from v + 2 row and one column on   B: dy from v - 2 and v; column 3 is dropped
//
// A CTA goes through the planes of a tile of places: dy's are read once, x's are kept for three of
// dy's. Places past the outputs read zeros of dy. Strips of wide planes are a part of the sum each: a
// strip's dy ends where its columns do, and its x goes on into the next one's.
template <typename T>
__global__ void __launch_bounds__(512, 1) Halo3dWgradKernel(const __grid_constant__ Halo3dWgrad p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t x = SharedAddress(shared_bytes), dy = x + p.x_buffers * p.x_bytes;
  const uint32_t barriers = dy + kHalo3dDyBuffers * p.dy_bytes;
  const auto x_full = [&](int i) { return barriers + i * 8; };
  const auto x_empty = [&](int i) { return barriers + 40 + i * 8; };
  const auto dy_full = [&](int i) { return barriers + 80 + i * 8; };
  const auto dy_empty = [&](int i) { return barriers + 104 + i * 8; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.x_buffers; ++i) {
      BarrierInit(x_full(i), 1);
      BarrierInit(x_empty(i), 3);
    }
    for (int i = 0; i < kHalo3dDyBuffers; ++i) {
      BarrierInit(dy_full(i), 1);
      BarrierInit(dy_empty(i), 3);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int block = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int blocks_n = (p.n + 31) / 32;
  const int c = block / blocks_n * 32, n = block % blocks_n * 32;
  const int64_t total = int64_t(p.images) * p.strips * p.tiles * p.made;
  int from = int(total * part / p.parts);
  const int to = int(total * (part + 1) / p.parts);
  int x_slot = 0, dy_slot = 0;
  uint32_t x_parity = 0, dy_parity = 0;
  const auto next_x = [&] {
    if (++x_slot == p.x_buffers) {
      x_slot = 0;
      x_parity ^= 1;
    }
  };
  const auto next_dy = [&] {
    if (++dy_slot == kHalo3dDyBuffers) {
      dy_slot = 0;
      dy_parity ^= 1;
    }
  };
  const auto next_run = [&] {
    const int column = from / p.made;
    Halo3dRun run;
    const int strip = column / p.tiles;  // of all images
    run.image = strip / p.strips;
    run.strip = strip - run.image * p.strips;
    run.tile = column - strip * p.tiles;
    run.begin = from - column * p.made;
    run.end = min(p.made, run.begin + to - from);
    from += run.end - run.begin;
    return run;
  };
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<32>();
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < p.strips; ++i) {
        PrefetchMap(p.x[i]);
        PrefetchMap(p.dy[i]);
      }
      const int none[3] = {};
      while (from < to) {
        const Halo3dRun run = next_run();
        const int place = run.tile * kHalo3dWgradPlaces;
        // dy's walk begins a row before the first.
        const int shifted = place + p.pitch - 2 * p.column_shift;
        int at_x[3] = {place % p.pitch + p.column[run.strip], place / p.pitch + p.row, 0};
        int at_dy[3] = {shifted % p.pitch, shifted / p.pitch - 1, 0};
        const int last = min(run.end - p.ahead + 2, p.planes);
        int plane = max(run.begin - p.ahead, 0);
        const auto load_x = [&] {
          BarrierWait(x_empty(x_slot), x_parity ^ 1);
          BarrierExpect(x_full(x_slot), p.x_bytes);
          at_x[2] = plane++;
          LoadColumn(5, x + x_slot * p.x_bytes, p.x[run.strip], x_full(x_slot), c, at_x, run.image,
                     none);
          next_x();
        };
        for (int made = run.begin; made < run.end; ++made) {
          const int until = min(made - p.ahead + 3, last);
          if (plane < until) load_x();
          BarrierWait(dy_empty(dy_slot), dy_parity ^ 1);
          BarrierExpect(dy_full(dy_slot), p.dy_bytes);
          at_dy[2] = made;
          LoadColumn(5, dy + dy_slot * p.dy_bytes, p.dy[run.strip], dy_full(dy_slot), n, at_dy,
                     run.image, none);
          next_dy();
          while (plane < until) load_x();
        }
      }
    }
  } else {
    RegistersUp<152>();
    float acc[48], rest[32];
#pragma unroll
    for (int i = 0; i < 48; ++i) acc[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) rest[i] = 0.f;
    const bool leader = threadIdx.x % 128 == 0;
    while (from < to) {
      const Halo3dRun run = next_run();
      const int last = min(run.end - p.ahead + 2, p.planes);
      int plane = max(run.begin - p.ahead, 0);  // the next of x
      const auto skip_x = [&](int until) {
        for (; plane < until; ++plane) {
          BarrierWait(x_full(x_slot), x_parity);
          if (leader) BarrierArrive(x_empty(x_slot));
          next_x();
        }
      };
      skip_x(min(run.begin - p.ahead + group, last));
#pragma unroll 1
      for (int made = run.begin; made < run.end; ++made) {
        BarrierWait(dy_full(dy_slot), dy_parity);
        if (plane == made - p.ahead + group && plane < last) {
          BarrierWait(x_full(x_slot), x_parity);
          const uint32_t from_x = x + x_slot * p.x_bytes, from_dy = dy + dy_slot * p.dy_bytes;
          const uint64_t a = NarrowDescriptor(from_x, p.row_shift);
          const uint64_t b = NarrowDescriptor(from_dy, p.column_shift);
          const uint64_t a_rest = NarrowDescriptor(from_x + 2 * p.row_shift * 64, p.column_shift);
          const uint64_t b_rest = NarrowDescriptor(from_dy, 2 * p.column_shift);
          Pin(acc);
          Pin(rest);
          WgmmaFence();
#pragma unroll 4
          for (int k = 0; k < kHalo3dWgradPlaces / 16; ++k) {
            Wgmma<T, false, false>(acc, a + k * 64, b + k * 64, 1);
            Wgmma<T, false, false>(rest, a_rest + k * 64, b_rest + k * 64, 1);
          }
          WgmmaCommit();
          WgmmaWait<0>();
          Pin(acc);
          Pin(rest);
          if (leader) BarrierArrive(x_empty(x_slot));
          next_x();
          ++plane;
        }
        if (leader) BarrierArrive(dy_empty(dy_slot));
        next_dy();
      }
      skip_x(last);
    }
    // In the order of the registers: [t][j][thread], 16 bytes each.
    float4* sums = reinterpret_cast<float4*>(p.partials) +
                   (int64_t(blockIdx.x) * 3 + group) * (20 * 128) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 12; ++j) {
      sums[j * 128] = make_float4(acc[j * 4], acc[j * 4 + 1], acc[j * 4 + 2], acc[j * 4 + 3]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[(12 + j) * 128] =
          make_float4(rest[j * 4], rest[j * 4 + 1], rest[j * 4 + 2], rest[j * 4 + 3]);
    }
  }
#endif
}

// A block adds 32 fours of sums, a warp an eighth of the parts.
template <typename T>
__global__ void __launch_bounds__(256) Halo3dWgradSumKernel(const __grid_constant__ Halo3dWgrad p) {
  constexpr int kFours = 3 * 20 * 128;
  const int index = blockIdx.x * 32 + threadIdx.x % 32;
  const int block = blockIdx.y;
  const float4* from =
      reinterpret_cast<const float4*>(p.partials) + int64_t(block) * p.parts * kFours + index;
  float4 sum;
  if (!SumParts<8>(0, p.parts, [&](int part) { return from + int64_t(part) * kFours; }, &sum)) {
    return;
  }
  const int thread = index % 128, j = index / 128 % 20, t = index / 128 / 20;
  const int row = thread / 32 * 16 + thread % 32 / 4, half = row / 32;  // and row + 8
  const int r = j < 12 ? half : 2;
  const int s = j < 12 ? 2 - j / 4 : half + (j < 16 ? 2 : 0);
  const int blocks_n = (p.n + 31) / 32;
  const int c = block / blocks_n * 32 + row % 32;
  const int k = block % blocks_n * 32 + j % 4 * 8 + thread % 4 * 2;
  if (s > 2 || k >= p.n) return;
  T* out = static_cast<T*>(p.dw) + ((int64_t(t) * 9 + r * 3 + s) * p.channels + c) * p.n + k;
  if (c < p.channels) {
    out[0] = FromFloat<T>(sum.x);
    out[1] = FromFloat<T>(sum.y);
  }
  if (c + 8 < p.channels) {
    out[int64_t(8) * p.n] = FromFloat<T>(sum.z);
    out[int64_t(8) * p.n + 1] = FromFloat<T>(sum.w);
  }
}

template <typename T>
Status LaunchHalo3dWgrad(const Context& ctx, Halo3dWgrad& p, const std::string& what) {
  const int blocks = (p.channels + 31) / 32 * ((p.n + 31) / 32);
  const int shared = int(Halo3dWgradShared(p.row_shift, p.column_shift, p.x_buffers));
  auto kernel = Halo3dWgradKernel<T>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks * p.parts), 512, shared, ctx.stream>>>(p);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  Halo3dWgradSumKernel<T><<<dim3(3 * 20 * 128 / 32, unsigned(blocks)), 256, 0, ctx.stream>>>(p);
  return LaunchStatus(what + " (sum of parts)");
}

}  // namespace jaxconv::cuda
