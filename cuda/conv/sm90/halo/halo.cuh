// Convolutions with stride 1 and few channels on the sm_90a tensor cores. With 64 channels the taps of a
// filter read nearly the same 128-byte rows of pixels, and fetching them once a tap is what limits
// the general loop (sm90_product.cuh). Here a tile's pixels come once, with the halo that the taps
// reach:
//
// All images are one line of places, row after row, with a gap of max(pad_lo, pad_hi) places after
// every row and as many rows after every image, which read as zeros. TMA walks exactly
// this line (im2col mode, its box reaching past the image). On the line tap (r, s) of the output at
// place v reads place v + r * dilation * row + s * dilation: a shift that does not depend on v. So
// the operand of every tap is the same buffer in shared memory, from another row of 128 bytes on.
// Places whose outputs do not exist (a gap's) are computed and dropped by the store, or for wgrad
// read as zero dy: (56/57)^2 of the products of a 56 x 56 layer are useful.
//
//   fprop, dgrad   d[v, n] = sum over taps and c of x[v + shift(tap), c] * w[tap, c, n]
//     Filter on the rows of wgmma, 256 places on its columns: less shared memory traffic than the
//     other way round. All taps of 64 output channels stay in shared memory. The two consumer
//     warpgroups take turns at tiles.
//   wgrad          dw[tap, c, k] = sum over v of x[v + shift(tap), c] * dy[v, k]
//     64 of k on the rows, the three taps of a filter row times 64 c on the columns (the blocks of
//     64 of the operand lie column_shift rows apart: they overlap); a warpgroup a filter row.
//
// The grid has for each block of 64 channels made the CTAs that share its tiles (wgrad: its steps of 128
// places, of which a CTA leaves all 9 x 64 x 64 sums for a second kernel), about a CTA a multiprocessor. x
// is read once a block, with a reach's places at the seams of tiles; then the tensor cores bound it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/sm90/halo/gradient.cuh"
#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/conv/sm90/halo/places.cuh"
#include "cuda/conv/sm90/wgrad/sums.cuh"
#include "cuda/core/context.h"
#include "cuda/core/convert.cuh"
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"

namespace jaxconv::cuda {

// Outputs of a warp on their way to memory: 16 rows of channels of 32 places (columns) at a time,
// through 1 KiB of shared memory that no other warp touches. (TMA stops the kernel with
// an illegal instruction where a column of pixels to store reaches out of its image.)
template <typename T>
struct HaloOutbox {
  // acc: 16 channels x 256 places, in the order of wgmma's registers. A place's 16 channels are two
  // 16-byte chunks, which change sides every four places: no bank is met twice.
  __device__ __forceinline__ void PutTile(const HaloProduct& p, T* to, int tile, int channel,
                                          const float (&acc)[128]) const {
    const int lane = threadIdx.x % 32;
    const int first = tile * kHaloPlaces + lane / 2;
    Digits4 at = SplitDigits(first, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
    const int pitch = p.instances * p.n;
    to += channel;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const float* u = acc + (chunk * 4 + j) * 4;
        const int place = (j + lane / 16) * 8 + lane % 8;  // [0, 32)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                box + place * 32 + ((lane / 8 ^ place / 4) % 2) * 16),
            "r"(PackHalves(u[0], u[1], T())), "r"(PackHalves(u[2], u[3], T())),
            "r"(PackHalves(u[4], u[5], T())), "r"(PackHalves(u[6], u[7], T()))
            : "memory");
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = lane / 2 + i * 16;
        uint4 u;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
                     : "r"(box + place * 32 + ((lane ^ place / 4) % 2) * 16)
                     : "memory");
        const bool made = at.digit[3] < p.made[0] && at.digit[2] < p.made[1] &&
                          at.digit[1] < p.made[2] && first + chunk * 32 + i * 16 < p.line.places &&
                          wanted;
        const int64_t pixel = int64_t(at.digit[0]) * p.image + at.digit[1] * p.plane +
                              at.digit[2] * p.made[0] + at.digit[3];
        if (made) *reinterpret_cast<uint4*>(to + pixel * pitch) = u;
        AddDigits(at, p.sixteen, p.line.extent[2], p.line.extent[1], p.line.extent[0]);
      }
      __syncwarp();
    }
  }

  // acc += the tile's part of `from`, which lies as PutTile's `to`.
  __device__ __forceinline__ void AddTile(const HaloProduct& p, const T* from, int tile,
                                          int channel, float (&acc)[128]) const {
    ReadTile<false>(p, from, tile, channel, [&](int i, int, float2 two, bool, bool) {
      acc[i] += two.x;
      acc[i + 1] += two.y;
    });
  }

  // acc *= f' of the tile's part of `kept`, rounded; sum += its sums of the thread's upper and lower channel.
  __device__ __forceinline__ void GoBack(const HaloProduct& p, const T* kept, int tile, int channel,
                                         float (&acc)[128], float (&sum)[2]) const {
    float part[2] = {};
    ReadTile<true>(
        p, kept, tile, channel, [&](int i, int row, float2 two, bool first, bool second) {
          const uint32_t pair =
              PackHalves(p.derivative(two.x, acc[i]), p.derivative(two.y, acc[i + 1]), T());
          const float2 d = UnpackPair(pair, T());
          acc[i] = d.x;
          acc[i + 1] = d.y;
          part[row] += (first ? d.x : 0.f) + (second ? d.y : 0.f);
        });
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // use(i, row, two, first, second) of the tile's part of `from`, PutTile's way backwards, eight loads at a time: `two` belongs
  // to acc[i] and acc[i + 1], of the upper or the lower row; kWhere: whether these places exist.
  template <bool kWhere, typename Use>
  __device__ __forceinline__ void ReadTile(const HaloProduct& p, const T* from, int tile,
                                           int channel, const Use& use) const {
    const int lane = threadIdx.x % 32;
    const int first = tile * kHaloPlaces + lane / 2;
    Digits4 at = SplitDigits(first, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
    const int pitch = p.instances * p.n;
    from += channel;
#pragma unroll
    for (int part = 0; part < 8; part += 4) {
      uint4 u[8];
      uint32_t where[8];  // bits 2k and 2k + 1: place k
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool exists = at.digit[3] < p.made[0] && at.digit[2] < p.made[1] &&
                            at.digit[1] < p.made[2] && first + part * 32 + i * 16 < p.line.places;
        const bool made = exists && wanted;
        if constexpr (kWhere) where[i] = __ballot_sync(0xffffffffu, exists);
        const int64_t pixel = int64_t(at.digit[0]) * p.image + at.digit[1] * p.plane +
                              at.digit[2] * p.made[0] + at.digit[3];
        // Volatile: the compiler would work out all addresses first, and run out of registers.
        u[i] = make_uint4(0, 0, 0, 0);
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
            "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
            : "+r"(u[i].x), "+r"(u[i].y), "+r"(u[i].z), "+r"(u[i].w)
            : "l"(from + pixel * pitch), "r"(int(made)));
        AddDigits(at, p.sixteen, p.line.extent[2], p.line.extent[1], p.line.extent[0]);
      }
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = lane / 2 + i * 16;
          const uint4 v = u[chunk * 2 + i];
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(
                           box + place * 32 + ((lane ^ place / 4) % 2) * 16),
                       "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                       : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int place = (j + lane / 16) * 8 + lane % 8;  // [0, 32)
          uint32_t pair[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                       : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                       : "r"(box + place * 32 + ((lane / 8 ^ place / 4) % 2) * 16)
                       : "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            bool exist[2] = {true, true};
            if constexpr (kWhere) {
              const uint32_t mine = where[chunk * 2 + j / 2] >> lane % 4 * 4;
              exist[0] = mine >> i / 2 * 16 & 1;
              exist[1] = mine >> i / 2 * 16 & 4;
            }
            use(((part + chunk) * 4 + j) * 4 + i * 2, i % 2, UnpackPair(pair[i], T()), exist[0],
                exist[1]);
          }
        }
        __syncwarp();
      }
      // Never: a branch keeps the compiler from beginning with what follows, for which it has no registers.
      if (kWhere && p.taps == 0) return;
    }
  }

  uint32_t box;
  bool wanted;  // this lane's channels exist
};

// kDgrad: the filter is k-major for its product (it sums over the axis that is fastest in w). kAddend: p.c may be null.
template <typename T, bool kDgrad, HaloBeside kBeside>
__global__ void __launch_bounds__(kSm90Threads, 1)
    HaloProductKernel(const __grid_constant__ HaloProduct p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t filter = SharedAddress(shared_bytes);
  const uint32_t buffers = filter + p.taps * kBlockBytes;
  const uint32_t outboxes = buffers + p.buffers * p.buffer_bytes;
  const uint32_t barriers = outboxes + kHaloOutbox;
  const auto full = [&](int i) { return barriers + i * 8; };
  const auto empty = [&](int i) { return barriers + 24 + i * 8; };
  const auto turn = [&](int i) { return barriers + 48 + i * 8; };
  const uint32_t loaded = barriers + 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 9; ++i) BarrierInit(barriers + i * 8, i / 2 == 3 ? kTurnArrivals : 1);
    BarrierInitFence();
  }
  __syncthreads();
  const int block = blockIdx.x / p.ctas, instance = block / p.blocks;
  const int n = block % p.blocks * 64;
  const int first = blockIdx.x % p.ctas;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      BarrierExpect(loaded, p.taps * kBlockBytes);
      for (int tap = 0; tap < p.taps; ++tap) {
        LoadTile(filter + tap * kBlockBytes, p.w, loaded, kDgrad ? 0 : n, instance, kDgrad ? n : 0,
                 p.flip ? p.taps - 1 - tap : tap);
      }
      int slot = 0;
      uint32_t parity = 1;
      for (int tile = first; tile < p.tiles; tile += p.ctas) {
        BarrierWait(empty(slot), parity);
        BarrierExpect(full(slot), p.buffer_bytes);
        LoadPlaces(p.line, buffers + slot * p.buffer_bytes, p.x, full(slot), instance * p.channels,
                   tile * kHaloPlaces, true);
        if (++slot == p.buffers) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    HaloOutbox<T> outbox;
    outbox.box = outboxes + (group * 4 + warp) * 1024;
    const int in_block = n + warp * 16 + lane % 2 * 8;  // the first of this lane's 8
    const int channel = instance * p.n + in_block;
    outbox.wanted = in_block < p.n;
    const ColumnBias<T, 64> no_columns = {};
    float sum[1][2] = {};  // of d's upper and lower channel
    BarrierWait(loaded, 0);
    uint32_t turns = group == 0 ? 1 : 0, parity = 0;
    int slot = group;  // group 1 begins with the second tile
    for (int tile = first + group * p.ctas; tile < p.tiles; tile += 2 * p.ctas) {
      float acc[128];
      // One group multiplies at a time, so that the other's epilogue has the SM's other units, and
      // a slot's earlier contents were awaited by whom they were for.
      BarrierWait(turn(group), turns);
      turns ^= 1;
      BarrierWait(full(slot), parity);
      const uint32_t buffer = buffers + slot * p.buffer_bytes;
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] = 0.f;
      Pin(acc);
      WgmmaFence();
#pragma unroll 1
      for (int tap = 0; tap < p.taps; ++tap) {
        const uint64_t a = OperandDescriptor<kDgrad>(filter + tap * kBlockBytes);
        const uint64_t b = OperandDescriptor<true>(buffer + p.shift[tap] * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<T, kDgrad, true>(acc, a + k * kOperandStep<kDgrad>, b + k * kOperandStep<true>, 1);
        }
      }
      WgmmaCommit();
      PassTurn(turn(group ^ 1));
      WgmmaWait<0>();
      Pin(acc);
      if (threadIdx.x % 128 == 0) BarrierArrive(empty(slot));
      slot += 2;
      if (slot >= p.buffers) {
        slot -= p.buffers;
        parity ^= 1;
      }

      ScaleAndBias(p.epilogue, instance, n + warp * 16 + lane / 4, p.n, no_columns, acc);
      if constexpr (kBeside == HaloBeside::kAddend) {
        if (p.c != nullptr) outbox.AddTile(p, static_cast<const T*>(p.c), tile, channel, acc);
      }
      if constexpr (kBeside == HaloBeside::kKept) {
        // Always: a branch, as in ReadTile.
        if (p.c != nullptr)
          outbox.GoBack(p, static_cast<const T*>(p.c), tile, channel, acc, sum[0]);
      } else {
        if (p.z != nullptr) outbox.PutTile(p, static_cast<T*>(p.z), tile, channel, acc);
        ActivateFast<T>(p.epilogue.activation, p.epilogue.slope, acc);
      }
      outbox.PutTile(p, static_cast<T*>(p.d), tile, channel, acc);
    }
    if constexpr (kBeside == HaloBeside::kKept) {
      const int upper = n + warp * 16 + lane / 4;
      WriteHaloSums(p, first * 2 + group, int64_t(instance) * p.n + upper, upper < p.n,
                    upper + 8 < p.n, sum);
    }
  }
#endif
}

template <typename T, bool kDgrad, HaloBeside kBeside>
Status LaunchHaloProduct(const Context& ctx, HaloProduct& p, int multiprocessors,
                         const std::string& what) {
  p.blocks = (p.n + 63) / 64;
  const int blocks = p.blocks * p.instances;
  p.ctas = int(HaloCtas(multiprocessors, blocks, p.tiles));
  const int reach = p.shift[p.taps - 1];
  p.buffers = HaloProductShared(p.taps, reach, 3) <= kHaloShared ? 3 : 2;
  p.buffer_bytes = int(HaloBufferBytes(kHaloPlaces, reach));
  for (int i = 0; i < 3; ++i) p.by_extent[i] = FastDiv(p.line.extent[i]);
  p.sixteen = SplitDigits(16, p.line.extent[2], p.line.extent[1], p.line.extent[0]);
  p.plane = p.made[0] * p.made[1];
  p.image = int64_t(p.plane) * p.made[2];
  const int shared = int(HaloProductShared(p.taps, reach, p.buffers));
  auto kernel = HaloProductKernel<T, kDgrad, kBeside>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks * p.ctas), kSm90Threads, shared, ctx.stream>>>(p);
  return LaunchStatus(what);
}

// fprop, or dgrad, which adds where there is a c.
template <typename T>
Status LaunchHaloForward(const Context& ctx, HaloProduct& p, bool dgrad, int multiprocessors,
                         const std::string& what) {
  const auto launch = !dgrad           ? LaunchHaloProduct<T, false, HaloBeside::kAddend>
                      : p.c == nullptr ? LaunchHaloProduct<T, true, HaloBeside::kNothing>
                                       : LaunchHaloProduct<T, true, HaloBeside::kAddend>;
  return launch(ctx, p, multiprocessors, what);
}

template <typename T>
Status LaunchHaloGradient(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                          const std::string& what) {
  multiprocessors = std::min<int>(multiprocessors, kHaloMostCtas);
  JAXCONV_RETURN_IF_ERROR(
      (LaunchHaloProduct<T, true, HaloBeside::kKept>(ctx, p, multiprocessors, what)));
  return AddHaloSums<T>(ctx, p, dbias, what);
}

inline constexpr int kHaloWgradThreads = 512;

template <typename T>
__global__ void __launch_bounds__(kHaloWgradThreads, 1)
    HaloWgradKernel(const __grid_constant__ HaloWgrad p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = SharedAddress(shared_bytes);
  constexpr int kBytesDy = kHaloStep * 128;
  const int stage_bytes = p.buffer_bytes + kBytesDy;
  const uint32_t barriers = shared + p.stages * stage_bytes;
  const auto full = [&](int i) { return barriers + i * 8; };
  const auto empty = [&](int i) { return barriers + 64 + i * 8; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      BarrierInit(full(i), 1);
      BarrierInit(empty(i), 3);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int block = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int instance = block / p.blocks, n = block % p.blocks * 64;
  const int begin = int(int64_t(p.steps) * part / p.parts);
  const int end = int(int64_t(p.steps) * (part + 1) / p.parts);
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<32>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      PrefetchMap(p.dy);
      int slot = 0;
      uint32_t parity = 1;
      for (int step = begin; step < end; ++step) {
        BarrierWait(empty(slot), parity);
        BarrierExpect(full(slot), stage_bytes);
        const uint32_t to = shared + slot * stage_bytes;
        LoadPlaces(p.line, to, p.x, full(slot), instance * p.channels, step * kHaloStep, true);
        LoadPlaces(p.line, to + p.buffer_bytes, p.dy, full(slot), instance * p.n + n,
                   step * kHaloStep, false);
        if (++slot == p.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    RegistersUp<160>();
    float acc[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) acc[i] = 0.f;
    Pin(acc);
    const uint64_t between = uint64_t(p.column_shift) * (128 / 16) << 16;
    const uint64_t lead = ~(uint64_t(0x3FFF) << 16);
    int slot = 0, before = -1;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      BarrierWait(full(slot), parity);
      const uint32_t stage = shared + slot * stage_bytes;
      const uint64_t a = OperandDescriptor<false>(stage + p.buffer_bytes);
      const uint64_t b =
          (OperandDescriptor<false>(stage + group * p.row_shift * 128) & lead) | between;
      Pin(acc);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kHaloStep / 16; ++k) {
        Wgmma<T, false, false>(acc, a + k * kOperandStep<false>, b + k * kOperandStep<false>, 1);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (before >= 0 && threadIdx.x % 128 == 0) BarrierArrive(empty(before));
      before = slot;
      if (++slot == p.stages) {
        slot = 0;
        parity ^= 1;
      }
    }
    Pin(acc);
    WgmmaWait<0>();
    Pin(acc);
    // In the order of the registers: [filter row][j][thread], 16 bytes each.
    float4* sums = reinterpret_cast<float4*>(p.partials) +
                   (int64_t(blockIdx.x) * 3 + group) * (24 * 128) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 24; ++j) {
      sums[j * 128] = make_float4(acc[j * 4], acc[j * 4 + 1], acc[j * 4 + 2], acc[j * 4 + 3]);
    }
  }
#endif
}

// A block adds 32 fours of sums, a warp an eighth of the parts.
template <typename T>
__global__ void __launch_bounds__(256) HaloWgradSumKernel(const __grid_constant__ HaloWgrad p) {
  constexpr int kFours = 3 * 24 * 128;
  const int index = blockIdx.x * 32 + threadIdx.x % 32;
  const int block = blockIdx.y;
  const float4* from =
      reinterpret_cast<const float4*>(p.partials) + int64_t(block) * p.parts * kFours + index;
  float4 sum;
  if (!SumParts<8>(0, p.parts, [&](int part) { return from + int64_t(part) * kFours; }, &sum)) {
    return;
  }
  const int thread = index % 128, j = index / 128 % 24, row = index / 128 / 24;
  const int k = block % p.blocks * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int c = j % 8 * 8 + thread % 4 * 2, tap = row * 3 + j / 8;
  if (c >= p.channels) return;
  T* out = static_cast<T*>(p.dw) + (int64_t(tap) * p.channels + c) * p.pitch +
           block / p.blocks * p.n + k;
  if (k < p.n) {
    out[0] = FromFloat<T>(sum.x);
    out[p.pitch] = FromFloat<T>(sum.y);
  }
  if (k + 8 < p.n) {
    out[8] = FromFloat<T>(sum.z);
    out[p.pitch + 8] = FromFloat<T>(sum.w);
  }
}

template <typename T>
Status LaunchHaloWgrad(const Context& ctx, HaloWgrad& p, const std::string& what) {
  p.blocks = (p.n + 63) / 64;
  const int blocks = p.blocks * p.instances;
  const int64_t reach = 2 * (int64_t(p.row_shift) + p.column_shift);
  p.buffer_bytes = int(HaloBufferBytes(kHaloStep, reach));
  p.stages = 2;
  while (p.stages < 6 && HaloWgradShared(reach, p.stages + 1) <= kHaloShared) ++p.stages;
  auto kernel = HaloWgradKernel<T>;
  const int shared = int(HaloWgradShared(reach, p.stages));
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks * p.parts), kHaloWgradThreads, shared, ctx.stream>>>(p);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  HaloWgradSumKernel<T><<<dim3(3 * 24 * 128 / 32, unsigned(blocks)), 256, 0, ctx.stream>>>(p);
  return LaunchStatus(what + " (sum of parts)");
}

}  // namespace jaxconv::cuda
