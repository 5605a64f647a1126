// 3x3 convolutions of stride 1 of 8-bit numbers on the sm_90a tensor cores, whose pixels come once for all taps; what follows the
// sums is sm90_eight.h's, each operation rounded by itself:
//
//   d[v, n] = narrow(f(scale[n] * (sum over taps and c of x[v + shift(tap), c] * w[n, tap, c]) + bias[n] + ...) * out_scale)
//
// v is a place of the line of sm90/halo/halo.cuh, so the operand of a tap is a tile's one buffer from another row on. A row is a
// pixel's channels, kRow bytes in the swizzle of as many. Filters are on the rows of wgmma and places on its columns: 64 x 256 of
// integers, which take half of the shared memory's rate (the other way round, 64 x 64, all of it); 64 x 128 of float8, whose
// chains need other sums beside the tile's. All nine taps of 64 filters stay in shared memory. Two warpgroups take turns at tiles.
//
// A thread of wgmma has rows i = lane / 4 and i + 8 of each sixteen (a warp's), and of 8-bit results the two should be neighbours:
// filter 2i + e of a sixteen lies at row 8e + i, where TMA brings it. So a thread's four sums of eight places are two filters of
// two places, 32 bits of results; stmatrix turns them: a place's sixteen filters are 16 bytes.
//
// A tile's results go to memory through a box of shared memory, a place's 64 filters a row; a residual of 8 bits comes through
// the same box before, while the products run. A table says which pixel a place is, if it is one.
//
// Sums of float8 products: a chain is the 128 products of two taps of 64 channels, or of one of 128, and chains are added up in
// float32, as in sm90_eight.cuh. Two chains are under way together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/conv/sm90/eight/halo.h"
#include "cuda/conv/sm90/halo/places.cuh"
#include "cuda/core/context.h"
#include "cuda/core/copy_async.cuh"
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/core/wgmma_eight.cuh"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_eight_numbers.cuh"
#include "cuda/gemm/sm90_epilogue.cuh"

namespace jaxconv::cuda {

template <Number kX_, Number kW_, int kRow_>
struct EightHaloTile {
  static constexpr Number kX = kX_, kW = kW_;
  static constexpr bool kIntegers = IsInteger8(kX);
  using Sum = std::conditional_t<kIntegers, int32_t, float>;
  static constexpr int kRow = kRow_;  // bytes
  static constexpr int kPlaces = int(EightHaloPlaces(kIntegers));
  static constexpr int kSums = kPlaces / 2;  // of a thread
  static constexpr int kTapBytes = 64 * kRow;
  static constexpr int kBoxBytes = kPlaces * 64;   // of a warpgroup's results
  static constexpr int kTableBytes = kPlaces * 4;  // a warpgroup has two
  static constexpr int kTapsOfChain = 128 / kRow;
  static constexpr int kChains = (kEightHaloTaps + kTapsOfChain - 1) / kTapsOfChain;
};

// Where wgmma finds 32 k of a tap: of the filter (A), of the places (B).
template <typename Tile>
struct EightHaloOperands {
  __device__ __forceinline__ EightHaloOperands(const EightHalo& p, uint32_t filter, uint32_t buffer)
      : a(uint32_t(RowsDescriptor<Tile::kRow>(filter))),
        b(uint32_t(RowsDescriptor<Tile::kRow>(buffer))),
        row(p.row_shift * (Tile::kRow / 16)),
        column(p.column_shift * (Tile::kRow / 16)) {}
  __device__ __forceinline__ uint64_t A(int tap, int k) const {
    return Of(a + tap * (Tile::kTapBytes / 16) + k * 2);
  }
  __device__ __forceinline__ uint64_t B(int tap, int k) const {
    return Of(b + tap / 3 * row + tap % 3 * column + k * 2);
  }

  // Addresses, the lowest 14 bits, do not overflow.
  __device__ __forceinline__ static uint64_t Of(uint32_t low) {
    return RowsDescriptor<Tile::kRow>(0) >> 32 << 32 | low;
  }
  uint32_t a, b, row, column;
};

// The products of `taps` taps from `first` on make new sums, or with kAdd are added to what is there.
template <bool kAdd, typename Tile>
__device__ __forceinline__ void MultiplyTaps(const EightHaloOperands<Tile>& operands, int first,
                                             int taps, typename Tile::Sum (&acc)[Tile::kSums]) {
  Pin(acc);
  WgmmaFence();
#pragma unroll
  for (int tap = 0; tap < kEightHaloTaps; ++tap) {
    if (tap < first || tap >= first + taps) continue;
#pragma unroll
    for (int k = 0; k < Tile::kRow / 32; ++k) {
      WgmmaEight<Tile::kW, Tile::kX>(acc, operands.A(tap, k), operands.B(tap, k),
                                     kAdd || tap > first || k > 0);
    }
  }
  WgmmaCommit();
}

// A tile's sums, which begin at a bias of integers. `issued` is called when all products are on their way.
template <typename Tile, typename Issued>
__device__ __forceinline__ void EightHaloSums(const EightHaloOperands<Tile>& operands,
                                              const int32_t (&first)[2],
                                              int32_t (&sum)[Tile::kSums], Issued&& issued) {
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) sum[i] = first[i / 2 % 2];
  MultiplyTaps<true>(operands, 0, kEightHaloTaps, sum);
  issued();
  WgmmaWait<0>();
  Pin(sum);
}

// The same of float8. Chain 0 makes the sums; each other one is added to them while the next one's products run.
template <typename Tile, typename Issued>
__device__ __forceinline__ void EightHaloSums(const EightHaloOperands<Tile>& operands,
                                              const int32_t (&)[2], float (&sum)[Tile::kSums],
                                              Issued&& issued) {
  constexpr int kChains = Tile::kChains;
  static_assert(kChains >= 3);
  float even[Tile::kSums], odd[Tile::kSums];
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) sum[i] = even[i] = odd[i] = 0.f;
  const auto issue = [&](int chain, float (&acc)[Tile::kSums]) {
    MultiplyTaps<false>(operands, chain * Tile::kTapsOfChain, Tile::kTapsOfChain, acc);
  };
  const auto add = [&](float (&acc)[Tile::kSums]) {
    Pin(acc);
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) sum[i] = __fadd_rn(sum[i], acc[i]);
    Pin(sum);
  };
  issue(0, sum);
  issue(1, odd);
#pragma unroll
  for (int chain = 2; chain < kChains; ++chain) {
    WgmmaWait<1>();
    if (chain == 2) {
      Pin(sum);
    } else {
      add(chain % 2 == 0 ? even : odd);
    }
    issue(chain, chain % 2 == 0 ? even : odd);
  }
  issued();
  WgmmaWait<1>();
  add(kChains % 2 == 0 ? even : odd);
  WgmmaWait<0>();
  add(kChains % 2 == 0 ? odd : even);
}

// ---------------------------------------------------------------------------------------------------------------------
// The epilogue. acc[4j ..] of a thread are (filter, place): (0, 0), (0, 1), (1, 0), (1, 1), places 8j + lane % 4 * 2 on.

// A tile's way out, of one warpgroup.
template <typename Tile>
struct EightHaloOutbox {
  static constexpr int kPlaces = Tile::kPlaces;

  // Which pixels the tile's places are, -1 where one is none. Behind the barrier all threads have it, and the box is free.
  __device__ __forceinline__ void Locate(const EightHalo& p, int tile) {
    table = tables - table;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kPlaces; i += 128) {
      const int place = tile * kPlaces + i + thread;
      const Digits4 at = SplitDigits(place, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
      const bool made = at.digit[3] < p.made[0] && at.digit[2] < p.made[1] &&
                        at.digit[1] < p.made[2] && place < p.line.places;
      const int pixel =
          at.digit[0] * p.image + at.digit[1] * p.plane + at.digit[2] * p.made[0] + at.digit[3];
      asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(table + (i + thread) * 4),
                   "r"(made ? pixel : -1)
                   : "memory");
    }
    NamedBarrier(barrier, 128);
  }

  // f(i, place in the box, pixel or -1) of this thread's chunks of a place's 16 filters.
  template <typename F>
  __device__ __forceinline__ void EachChunk(const F& f) const {
    const int place = threadIdx.x % 128 / 4;
    const uint32_t in_box = box + ChunkOf<64>(place, threadIdx.x % 4), in_table = table + place * 4;
#pragma unroll
    for (int i = 0; i < kPlaces / 32; ++i) {
      int pixel;
      asm volatile("ld.shared.s32 %0, [%1];\n"
                   : "=r"(pixel)
                   : "r"(in_table + i * 32 * 4)
                   : "memory");
      f(i, in_box + i * 32 * 64, pixel);
    }
  }
  // Their first filter.
  __device__ __forceinline__ int Chunk() const { return n + threadIdx.x % 4 * 16; }

  // A residual of 8 bits: on its way into the box.
  __device__ __forceinline__ void Fetch(const EightHalo& p) const {
    const auto* residual = static_cast<const uint8_t*>(p.epilogue.residual) + Chunk();
    EachChunk([&](int, uint32_t to, int pixel) {
      if (pixel >= 0 && Chunk() < p.n)
        CopyAsync(to, reinterpret_cast<const uint4*>(residual + RowOf(p, pixel)));
    });
    CopyCommit();
  }

  // v += that residual.
  template <typename Unpack>
  __device__ __forceinline__ void AddFetched(float scale, float (&v)[Tile::kSums],
                                             const Unpack& unpack) const {
#pragma unroll
    for (int j = 0; j < kPlaces / 8; j += 4) {
      uint32_t four[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                   : "r"(Row(j))
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* u = v + (j + i) * 4;
        float r[4];
        unpack(four[i], r);
        AddScaled(r, scale, u, u + 2, u + 1, u + 3);
      }
    }
  }
  __device__ __forceinline__ void AddFetched(const EightHalo& p, float scale,
                                             float (&v)[Tile::kSums]) const {
    CopyWait<0>();
    NamedBarrier(barrier, 128);  // all threads' copies have come
    const Number type = p.epilogue.residual_type;
    if (type == Number::kE4M3) {
      AddFetched(scale, v, [](uint32_t four, float (&r)[4]) { Bytes::Floats<__NV_E4M3>(four, r); });
    } else if (type == Number::kE5M2) {
      AddFetched(scale, v, [](uint32_t four, float (&r)[4]) { Bytes::Floats<__NV_E5M2>(four, r); });
    } else {
      const bool is_signed = type == Number::kS8;
      AddFetched(scale, v,
                 [=](uint32_t four, float (&r)[4]) { Bytes::Integers(four, is_signed, r); });
    }
    __syncwarp();  // results take the place of what its lanes have read
  }

  // f(element of d, u) of each place that is a pixel: its two filters are u[0] and u[2].
  template <typename F>
  __device__ __forceinline__ void EachTwo(const EightHalo& p, float (&v)[Tile::kSums],
                                          const F& f) const {
    const int lane = threadIdx.x % 32, first = n + Warp() * 16 + lane / 4 * 2;
    if (first >= p.n) return;
#pragma unroll
    for (int j = 0; j < kPlaces / 8; ++j) {
      int pixel[2];
      asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];\n"
                   : "=r"(pixel[0]), "=r"(pixel[1])
                   : "r"(table + (j * 8 + lane % 4 * 2) * 4)
                   : "memory");
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pixel[i] >= 0) f(RowOf(p, pixel[i]) + first, v + j * 4 + i);
      }
    }
  }

  // v += a residual of 16 or 32 bits, from where it lies.
  __device__ __forceinline__ void AddWide(const EightHalo& p, float scale,
                                          float (&v)[Tile::kSums]) const {
    const void* residual = p.epilogue.residual;
    const auto add = [=](float2 r, float* u) {
      u[0] = __fadd_rn(u[0], __fmul_rn(r.x, scale));
      u[2] = __fadd_rn(u[2], __fmul_rn(r.y, scale));
    };
    const auto add_halves = [&](auto zero) {
      using T = decltype(zero);
      EachTwo(p, v, [&](int64_t at, float* u) {
        const auto* from = static_cast<const T*>(residual) + at;
        add(UnpackPair(__ldg(reinterpret_cast<const uint32_t*>(from)), zero), u);
      });
    };
    if (p.epilogue.residual_type == Number::kBF16) {
      add_halves(__nv_bfloat16());
    } else if (p.epilogue.residual_type == Number::kF16) {
      add_halves(__half());
    } else {
      EachTwo(p, v, [&](int64_t at, float* u) {
        const auto* from = static_cast<const float*>(residual) + at;
        add(__ldg(reinterpret_cast<const float2*>(from)), u);
      });
    }
  }

  // All of v, rounded to kType, through the box.
  template <Number kType>
  __device__ __forceinline__ void Put(const EightHalo& p, const float (&v)[Tile::kSums]) const {
#pragma unroll
    for (int j = 0; j < kPlaces / 8; j += 4) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* u = v + (j + i) * 4;
        four[i] = Narrowed<kType>(u[0], u[2], u[1], u[3]);
      }
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(Row(j)),
          "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3])
          : "memory");
    }
    NamedBarrier(barrier, 128);
    uint4 u[kPlaces / 32];
    int pixels[kPlaces / 32];
    EachChunk([&](int i, uint32_t from, int pixel) {
      pixels[i] = pixel;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(u[i].x), "=r"(u[i].y), "=r"(u[i].z), "=r"(u[i].w)
                   : "r"(from)
                   : "memory");
    });
    auto* d = static_cast<uint8_t*>(p.epilogue.d) + Chunk();
#pragma unroll
    for (int i = 0; i < kPlaces / 32; ++i) {
      if (pixels[i] >= 0 && Chunk() < p.n)
        *reinterpret_cast<uint4*>(d + RowOf(p, pixels[i])) = u[i];
    }
  }

  // The same of 16 and 32 bits, from registers.
  __device__ __forceinline__ void PutWide(const EightHalo& p, float (&v)[Tile::kSums]) const {
    void* d = p.epilogue.d;
    const auto put_halves = [&](auto zero) {
      using T = decltype(zero);
      EachTwo(p, v, [&](int64_t at, const float* u) {
        *reinterpret_cast<uint32_t*>(static_cast<T*>(d) + at) = PackHalves(u[0], u[2], zero);
      });
    };
    if (p.epilogue.type == Number::kBF16) {
      put_halves(__nv_bfloat16());
    } else if (p.epilogue.type == Number::kF16) {
      put_halves(__half());
    } else {  // 32 bits as they are
      EachTwo(p, v, [&](int64_t at, const float* u) {
        *reinterpret_cast<float2*>(static_cast<float*>(d) + at) = float2{u[0], u[2]};
      });
    }
  }

  // Elements in front of a pixel of d.
  __device__ __forceinline__ static int64_t RowOf(const EightHalo& p, int pixel) {
    return int64_t(uint64_t(uint32_t(pixel)) * uint32_t(p.n));
  }
  __device__ __forceinline__ static int Warp() { return threadIdx.x % 128 / 32; }
  // Of the places from 8j on, j a multiple of 4, this lane's one: the warp's sixteen filters.
  __device__ __forceinline__ uint32_t Row(int j) const {
    return box + ChunkOf<64>(threadIdx.x % 32, Warp()) + j * 8 * 64;
  }

  uint32_t box;
  uint32_t table;   // of this tile
  uint32_t tables;  // the sum of both tables' addresses
  int barrier;      // the named barrier of this warpgroup
  int n;            // the first filter of the block
};

// A thread's two filters: scales, and biases of float32 or, for sums to begin at, of integers. -0 and 0 change nothing.
struct EightHaloScales {
  __device__ __forceinline__ EightHaloScales(const Sm90EightEpilogue& e, int n, int n_end) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = n + i < n_end, biased = e.bias != nullptr && exists;
      by[i] = e.scale != nullptr && exists ? __ldg(e.scale + n + i) : 1.f;
      const int32_t bias = biased ? __ldg(static_cast<const int32_t*>(e.bias) + n + i) : 0;
      first[i] = e.bias_of_sums ? bias : 0;
      plus[i] = e.bias_of_sums || !biased ? -0.f : __int_as_float(bias);
    }
  }
  float by[2], plus[2];
  int32_t first[2];
};

// A tile's sums on their way to d. Each step goes over all of them before the next begins (sm90_plain.cuh).
template <typename Tile>
__device__ __forceinline__ void FinishEightHalo(const EightHalo& p, const EightHaloScales& scales,
                                                float residual_scale, float out_scale,
                                                const EightHaloOutbox<Tile>& outbox,
                                                const typename Tile::Sum (&acc)[Tile::kSums]) {
  const Sm90EightEpilogue& e = p.epilogue;
  float v[Tile::kSums];
  if constexpr (Tile::kIntegers) {
    if (e.type == Number::kS32) {
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) v[i] = __int_as_float(acc[i]);
      outbox.PutWide(p, v);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) v[i] = __fmul_rn(SumAsFloat(acc[i]), scales.by[i / 2 % 2]);
  if (!e.bias_of_sums) {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) v[i] = __fadd_rn(v[i], scales.plus[i / 2 % 2]);
  }
  if (e.residual != nullptr) {
    if (SizeOf(e.residual_type) == 1) {
      outbox.AddFetched(p, residual_scale, v);
    } else {
      outbox.AddWide(p, residual_scale, v);
    }
  }
  ActivateFast<__half>(e.activation, e.slope, v);
  if (e.out_scale != nullptr) {
#pragma unroll
    for (float& z : v) z = __fmul_rn(z, out_scale);
  }
  switch (e.type) {
    case Number::kS8:
      return outbox.template Put<Number::kS8>(p, v);
    case Number::kU8:
      return outbox.template Put<Number::kU8>(p, v);
    case Number::kE4M3:
      return outbox.template Put<Number::kE4M3>(p, v);
    case Number::kE5M2:
      return outbox.template Put<Number::kE5M2>(p, v);
    default:
      outbox.PutWide(p, v);
  }
}

// Shared memory: the filter, the buffers of x, a box a warpgroup, two tables each, barriers (EightHaloShared).
template <typename Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    EightHaloKernel(const __grid_constant__ EightHalo p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t filter = SharedAddress(shared_bytes);
  const uint32_t buffers = filter + kEightHaloTaps * Tile::kTapBytes;
  const uint32_t boxes = buffers + p.buffers * p.buffer_bytes;
  const uint32_t tables = boxes + 2 * Tile::kBoxBytes;
  const uint32_t barriers = tables + 4 * Tile::kTableBytes;
  const auto full = [&](int i) { return barriers + i * 8; };
  const auto empty = [&](int i) { return full(kEightHaloMostBuffers + i); };
  const auto turn = [&](int i) { return full(2 * kEightHaloMostBuffers + i); };
  const uint32_t loaded = full(2 * kEightHaloMostBuffers + 2);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.buffers; ++i) {
      BarrierInit(full(i), 1);
      BarrierInit(empty(i), 1);
    }
    for (int i = 0; i < 2; ++i) BarrierInit(turn(i), kTurnArrivals);
    BarrierInit(loaded, 1);
    BarrierInitFence();
  }
  __syncthreads();
  const int n = blockIdx.x / p.ctas * 64, first = blockIdx.x % p.ctas;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      BarrierExpect(loaded, kEightHaloTaps * Tile::kTapBytes);
      for (int tap = 0; tap < kEightHaloTaps; ++tap)
        LoadTile(filter + tap * Tile::kTapBytes, p.w, loaded, 0, tap, 0, 0, n / 16);
      int slot = 0;
      uint32_t parity = 1;
      for (int tile = first; tile < p.tiles; tile += p.ctas) {
        BarrierWait(empty(slot), parity);
        BarrierExpect(full(slot), p.buffer_bytes);
        LoadPlaces(p.line, buffers + slot * p.buffer_bytes, p.x, full(slot), 0,
                   tile * Tile::kPlaces, true);
        if (++slot == p.buffers) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const Sm90EightEpilogue& e = p.epilogue;
    const int lane = threadIdx.x % 32;
    const EightHaloScales scales(e, n + EightHaloOutbox<Tile>::Warp() * 16 + lane / 4 * 2, p.n);
    const float residual_scale = e.residual_scale == nullptr ? 1.f : __ldg(e.residual_scale);
    const float out_scale = e.out_scale == nullptr ? 1.f : __ldg(e.out_scale);
    const bool fetches = e.residual != nullptr && SizeOf(e.residual_type) == 1;
    EightHaloOutbox<Tile> outbox;
    outbox.box = boxes + group * Tile::kBoxBytes;
    outbox.table = tables + 2 * group * Tile::kTableBytes;
    outbox.tables = 2 * outbox.table + Tile::kTableBytes;
    outbox.barrier = group + 1;
    outbox.n = n;
    BarrierWait(loaded, 0);
    uint32_t turns = group == 0 ? 1 : 0, parity = 0;
    int slot = group;  // group 1 begins with the second tile
    for (int tile = first + group * p.ctas; tile < p.tiles; tile += 2 * p.ctas) {
      // One group multiplies at a time, so that the other's epilogue has the SM's other units, and
      // a slot's earlier contents were awaited by whom they were for.
      BarrierWait(turn(group), turns);
      turns ^= 1;
      BarrierWait(full(slot), parity);
      const EightHaloOperands<Tile> operands(p, filter, buffers + slot * p.buffer_bytes);
      typename Tile::Sum acc[Tile::kSums];
      EightHaloSums(operands, scales.first, acc, [&] {
        PassTurn(turn(group ^ 1));
        outbox.Locate(p, tile);
        if (fetches) outbox.Fetch(p);
      });
      if (threadIdx.x % 128 == 0) BarrierArrive(empty(slot));
      slot += 2;
      if (slot >= p.buffers) {
        slot -= p.buffers;
        parity ^= 1;
      }
      FinishEightHalo(p, scales, residual_scale, out_scale, outbox, acc);
    }
  }
#endif
}

template <typename Tile>
Status LaunchEightHaloTile(const Context& ctx, EightHalo& p, int multiprocessors,
                           const std::string& what) {
  const int blocks = (p.n + 63) / 64;
  const int64_t reach = 2 * (int64_t(p.row_shift) + p.column_shift);
  p.ctas = int(HaloCtas(multiprocessors, blocks, p.tiles));
  p.buffer_bytes = int(EightHaloPixels(Tile::kIntegers, Tile::kRow, reach) * Tile::kRow);
  const auto shared = [&] {
    return EightHaloShared(Tile::kIntegers, Tile::kRow, reach, p.buffers);
  };
  for (p.buffers = kEightHaloMostBuffers; shared() > kHaloShared;) --p.buffers;
  for (int i = 0; i < 3; ++i) p.by_extent[i] = FastDiv(p.line.extent[i]);
  p.plane = p.made[0] * p.made[1];
  p.image = p.plane * p.made[2];
  const auto kernel = EightHaloKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks * p.ctas), kSm90Threads, unsigned(shared()), ctx.stream>>>(p);
  return LaunchStatus(what);
}

template <Number kX, Number kW>
Status LaunchEightHalo(const Context& ctx, EightHalo& p, int64_t row, int multiprocessors,
                       const std::string& what) {
  const auto launch = row == 64 ? LaunchEightHaloTile<EightHaloTile<kX, kW, 64>>
                                : LaunchEightHaloTile<EightHaloTile<kX, kW, 128>>;
  return launch(ctx, p, multiprocessors, what);
}

}  // namespace jaxconv::cuda
