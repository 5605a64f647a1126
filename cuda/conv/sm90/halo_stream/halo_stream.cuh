// Convolutions on the sm_90a tensor cores whose pixels come once for all taps, with the halo that these
// reach, while the filter streams past:
//
//   d[pixel(phase, v), n] = sum over the phase's taps and c of x[v + shift(tap), c] * w[tap, c, n]
//
// v is a place of the line of all images (sm90/halo/halo.cuh). fprop, and dgrad of stride 1, have one
// phase. The phases of a strided dgrad are the pixels that one place makes: all are made from the
// same places of dy, which a CTA therefore fetches once and not once a tap.
//
// A CTA's tile is 128 places, in blocks of 64 channels that lie in a ring of slots; its items are
// 128 columns of a phase each. The filter comes in stages of 64 k x 128 n. The two consumer
// warpgroups take turns at items. Threads store, 64 bytes of a pixel at a time: a bulk copy of each
// pixel's 256 bytes out of shared memory took 1.3 times as long (strided dgrad of 128 channels 56^2,
// H200).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/conv/sm90/halo/halo.cuh"
#include "cuda/conv/sm90/halo_stream/halo_stream.h"

namespace jaxconv::cuda {

// A lane's u[k] and its three neighbours' become their u[lane % 4]: v[k] is lane k's.
__device__ __forceinline__ void TransposeFour(uint32_t (&u)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? u[0] : u[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? u[2] : u[3], 1);
  (odd ? u[0] : u[1]) = a;
  (odd ? u[2] : u[3]) = b;
  const uint32_t c = __shfl_xor_sync(0xffffffffu, upper ? u[0] : u[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, upper ? u[1] : u[3], 2);
  (upper ? u[0] : u[2]) = c;
  (upper ? u[1] : u[3]) = d;
}

template <typename T, bool kDgrad>
__global__ void __launch_bounds__(kSm90Threads, 1)
    HaloStreamKernel(const __grid_constant__ HaloStream p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t pixels = SharedAddress(shared_bytes);
  const uint32_t filter = pixels + p.slots * p.slot_bytes;
  const uint32_t barriers = filter + p.stages * 2 * kBlockBytes;
  const auto x_full = [&](int i) { return barriers + i * 8; };
  const auto x_empty = [&](int i) { return barriers + (kStreamSlots + i) * 8; };
  const auto w_full = [&](int i) { return barriers + (2 * kStreamSlots + i) * 8; };
  const auto w_empty = [&](int i) { return barriers + (3 * kStreamSlots + i) * 8; };
  const auto turn = [&](int i) { return barriers + (4 * kStreamSlots + i) * 8; };
  const int items = p.phases * p.blocks_n;  // of a tile
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      BarrierInit(x_full(i), 1);
      BarrierInit(x_empty(i), min(items, 2));
    }
    for (int i = 0; i < p.stages; ++i) {
      BarrierInit(w_full(i), 1);
      BarrierInit(w_empty(i), 1);
    }
    BarrierInit(turn(0), kTurnArrivals);
    BarrierInit(turn(1), kTurnArrivals);
    BarrierInitFence();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.w);
      int stage = 0;
      uint32_t parity = 1;
      for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        for (int item = 0; item < items; ++item) {
          const StreamPhase& phase = p.phase[item % p.phases];
          const int n = item / p.phases * kStreamMade;
          for (int k = 0; k < p.blocks_k; ++k) {
            for (int i = phase.first; i < phase.first + phase.taps; ++i) {
              BarrierWait(w_empty(stage), parity);
              BarrierExpect(w_full(stage), 2 * kBlockBytes);
              const uint32_t to = filter + stage * 2 * kBlockBytes;
              if (kDgrad) {
                LoadTile(to, p.w, w_full(stage), k * 64, 0, n, p.tap[i]);
              } else {
                LoadTile(to, p.w, w_full(stage), n, 0, k * 64, p.tap[i]);
                LoadTile(to + kBlockBytes, p.w, w_full(stage), n + 64, 0, k * 64, p.tap[i]);
              }
              if (++stage == p.stages) {
                stage = 0;
                parity ^= 1;
              }
            }
          }
        }
      }
    } else if (threadIdx.x == 32) {
      PrefetchMap(p.x);
      int slot = 0;
      uint32_t parity = 1;
      for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        for (int k = 0; k < p.blocks_k; ++k) {
          BarrierWait(x_empty(slot), parity);
          BarrierExpect(x_full(slot), p.slot_bytes);
          LoadPlaces(p.line, pixels + slot * p.slot_bytes, p.x, x_full(slot), k * 64,
                     tile * kStreamPlaces, true);
          if (++slot == p.slots) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    RegistersUp<kConsumerRegisters>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    int stage = 0, slot = 0;  // slot: of the tile's first block
    uint32_t parity = 0, slot_parity = 0, turns = group == 0 ? 1 : 0;
    int next = 0;  // whose turn the item is
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      int at[4][2], pixel[4];  // of this thread's rows
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = tile * kStreamPlaces + i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4;
        const int row = p.by_extent[0].Div(place), image = p.by_extent[1].Div(row);
        at[i][0] = place < p.line.places ? place - row * p.line.extent[0] : 1 << 30;
        at[i][1] = row - image * p.line.extent[1];
        pixel[i] = image * p.image + at[i][1] * p.step[1] + at[i][0] * p.step[0];
      }
      for (int item = 0; item < items; ++item) {
        const StreamPhase& phase = p.phase[item % p.phases];
        const int n = item / p.phases * kStreamMade;
        const bool mine = next == group;
        next ^= 1;
        if (!mine) {
          const int to = stage + phase.taps * p.blocks_k;
          parity ^= (to / p.stages) & 1;
          stage = to % p.stages;
          continue;
        }
        ColumnBias<T, kStreamMade> bias;
        bias.Load(p.epilogue, 0, n, p.n);
        float acc[2][64];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int i = 0; i < 64; ++i) acc[m][i] = 0.f;
        }
        BarrierWait(turn(group), turns);
        turns ^= 1;
        int before = -1, read = slot;
        uint32_t read_parity = slot_parity;
#pragma unroll 1
        for (int k = 0; k < p.blocks_k; ++k) {
          BarrierWait(x_full(read), read_parity);
          const uint32_t block = pixels + read * p.slot_bytes;
#pragma unroll 1
          for (int i = phase.first; i < phase.first + phase.taps; ++i) {
            BarrierWait(w_full(stage), parity);
            const uint64_t a = OperandDescriptor<true>(block + p.shift[i] * 128);
            const uint64_t b = OperandDescriptor<kDgrad>(filter + stage * 2 * kBlockBytes);
            Pin(acc[0]);
            Pin(acc[1]);
            WgmmaFence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
#pragma unroll
              for (int m = 0; m < 2; ++m) {
                Wgmma<T, true, kDgrad>(acc[m],
                                       a + m * (kBlockBytes / 16) + step * kOperandStep<true>,
                                       b + step * kOperandStep<kDgrad>, 1);
              }
            }
            WgmmaCommit();
            WgmmaWait<1>();
            if (before >= 0 && threadIdx.x % 128 == 0) BarrierArrive(w_empty(before));
            before = stage;
            if (++stage == p.stages) {
              stage = 0;
              parity ^= 1;
            }
          }
          if (++read == p.slots) {
            read = 0;
            read_parity ^= 1;
          }
        }
        PassTurn(turn(group ^ 1));
        Pin(acc[0]);
        Pin(acc[1]);
        WgmmaWait<0>();
        Pin(acc[0]);
        Pin(acc[1]);
        if (threadIdx.x % 128 == 0) {
          if (before >= 0) BarrierArrive(w_empty(before));
          if (item + 2 >= items) {  // this group's last of the tile
            for (int k = 0, i = slot; k < p.blocks_k; ++k) {
              BarrierArrive(x_empty(i));
              if (++i == p.slots) i = 0;
            }
          }
        }
        const auto put = [&](void* out) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool made = at[i][0] < phase.made[0] && at[i][1] < phase.made[1];
            T* to =
                static_cast<T*>(out) + int64_t(pixel[i] + phase.offset) * p.n + n + lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
              uint32_t u[4];
#pragma unroll
              for (int l = 0; l < 4; ++l) {
                const float* v = &acc[i / 2][(j + l) * 4 + i % 2 * 2];
                u[l] = PackHalves(v[0], v[1], T());
              }
              TransposeFour(u);
              if (made && n + j * 8 + lane % 4 * 8 < p.n) {
                *reinterpret_cast<uint4*>(to + j * 8) = make_uint4(u[0], u[1], u[2], u[3]);
              }
            }
          }
        };
        ScaleAndBias(p.epilogue, 0, 0, 0, bias, acc[0]);
        ScaleAndBias(p.epilogue, 0, 0, 0, bias, acc[1]);
        if (p.z != nullptr) put(p.z);
        ActivateFast<T>(p.epilogue.activation, p.epilogue.slope,
                        reinterpret_cast<float (&)[128]>(acc[0][0]));
        put(p.d);
      }
      slot += p.blocks_k;
      if (slot >= p.slots) {
        slot -= p.slots;
        slot_parity ^= 1;
      }
    }
  }
#endif
}

template <typename T, bool kDgrad>
Status LaunchHaloStream(const Context& ctx, HaloStream& p, int reach, int multiprocessors,
                        const std::string& what) {
  p.blocks_k = (p.channels + 63) / 64;
  p.blocks_n = (p.n + kStreamMade - 1) / kStreamMade;
  p.tiles = int((p.line.places + kStreamPlaces - 1) / kStreamPlaces);
  p.slot_bytes = int(StreamSlotBytes(reach));
  p.by_extent[0] = FastDiv(p.line.extent[0]);
  p.by_extent[1] = FastDiv(p.line.extent[1]);
  // Three stages of the filter, then pixels up to two tiles, then more stages.
  p.stages = 3;
  p.slots = p.blocks_k;
  while (p.slots < std::min(2 * p.blocks_k, kStreamSlots) &&
         StreamShared(reach, p.slots + 1, p.stages) <= kHaloShared) {
    ++p.slots;
  }
  while (p.stages < 8 && StreamShared(reach, p.slots, p.stages + 1) <= kHaloShared) ++p.stages;
  const int shared = int(StreamShared(reach, p.slots, p.stages));
  auto kernel = HaloStreamKernel<T, kDgrad>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(std::min(p.tiles, multiprocessors)), kSm90Threads, shared, ctx.stream>>>(p);
  return LaunchStatus(what);
}

}  // namespace jaxconv::cuda
