// fprop, and dgrad of stride 1, of at most 64 summed channels in TF32: as
// halo.cuh, with rows of 32 channels. A place is two such rows, and the filter of 9 taps takes
// 144 KiB of shared memory. So a tile is 128 places, summed over the first 32 channels and then over
// the others: two buffers hold one half each, and one is filled while the other is multiplied.
#include <algorithm>

#include "cuda/conv/sm90/halo/gradient.cuh"
#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/core/activate.cuh"
#include "cuda/core/device.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_sums.cuh"

namespace jaxconv::cuda {
namespace {

// Registers of a thread that loads, and of one that multiplies: 504 with one warpgroup of those and two of these.
constexpr int HaloProducer(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 40 : kProducerRegisters;
}
constexpr int HaloConsumer(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 232 : kConsumerRegisters;
}

constexpr int HaloSums(HaloBeside beside) {
  return beside == HaloBeside::kNormed ? 2 : beside == HaloBeside::kKept ? 1 : 0;
}

// Of a thread's upper and lower channel: z = (x - mean) * s + t. 0 of one that is not there.
struct HaloAffine {
  __device__ __forceinline__ HaloAffine(const HaloNorm& norm, int64_t channel, bool has_upper,
                                        bool has_lower) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      mean[row] = s[row] = t[row] = 0.f;
      if (row == 0 ? !has_upper : !has_lower) continue;
      const int64_t at = channel + row * 8;
      mean[row] = __ldg(norm.mean + at);
      s[row] = __ldg(norm.scale + at) * __ldg(norm.rstd + at);
      t[row] = __ldg(norm.bias + at);
    }
  }
  __device__ __forceinline__ float Of(float centred, int row) const {
    return fmaf(centred, s[row], t[row]);
  }
  float mean[2], s[2], t[2];
};

// Volatile: the compiler would work out all addresses first, and run out of registers.
__device__ __forceinline__ float LoadIf(bool there, const float* from) {
  float v = 0.f;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.f32 %0, [%1];\n}\n"
               : "+f"(v)
               : "l"(from), "r"(int(there)));
  return v;
}

// d = acc + c, or acc * f'(c) and its sums, or acc * f'(z) of the z that a norm makes of c, its sums and those of its products
// with c less its mean. A thread's accumulators are two channels of 32 places, eight at a time. What it reads of c for the next
// eight is on its way meanwhile.
template <HaloBeside kBeside, int kSums>
__device__ __forceinline__ void FinishBeside(const HaloProduct& p, int tile, int64_t channel,
                                             bool has_upper, bool has_lower, float (&acc)[64],
                                             float (&sum)[kSums][2]) {
  constexpr int kEight = 8;
  const int64_t pitch = int64_t(p.instances) * p.n;
  const float* from = static_cast<const float*>(p.c) + channel;
  float* to = static_cast<float*>(p.d) + channel;
  int pixel[2][kEight];  // -1 in a gap
  float c[2][kEight][2], part[kSums][2] = {};
  const auto load = [&](int eight) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const int place =
          tile * kHaloTf32Places + (eight * kEight + i) / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const Digits4 at = SplitDigits(place, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
      const bool made = at.digit[3] < p.made[0] && at.digit[2] < p.made[1] &&
                        at.digit[1] < p.made[2] && place < p.line.places;
      const int pixel_of = int(at.digit[0] * p.image) + at.digit[1] * p.plane +
                           at.digit[2] * p.made[0] + at.digit[3];
      const float* at_pixel = from + pixel_of * pitch;
      c[eight % 2][i][0] = LoadIf(made && has_upper, at_pixel);
      c[eight % 2][i][1] = LoadIf(made && has_lower, at_pixel + 8);
      pixel[eight % 2][i] = made ? pixel_of : -1;
    }
  };
  load(0);
  constexpr bool kNormed = kBeside == HaloBeside::kNormed;
  const HaloAffine affine(p.norm, channel, kNormed && has_upper, kNormed && has_lower);
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {
    if (eight < 3) load(eight + 1);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const int place = pixel[eight % 2][i];
      float v[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        v[row] = acc[(eight * kEight + i) / 2 * 4 + row * 2 + i % 2];
        if constexpr (kBeside == HaloBeside::kAddend) {
          v[row] += c[eight % 2][i][row];
        } else {
          const float kept = c[eight % 2][i][row];
          if constexpr (kNormed) {
            const float centred = kept - affine.mean[row];
            v[row] = p.derivative.Linear(affine.Of(centred, row), v[row]);
            part[1][row] = fmaf(place >= 0 ? v[row] : 0.f, centred, part[1][row]);
          } else {
            v[row] = p.derivative(kept, v[row]);
          }
          part[0][row] += place >= 0 ? v[row] : 0.f;
        }
      }
      if (place >= 0) {
        float* at_pixel = to + place * pitch;
        if (has_upper) at_pixel[0] = v[0];
        if (has_lower) at_pixel[8] = v[1];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sum[i][0] += part[i][0];
    sum[i][1] += part[i][1];
  }
}

template <HaloBeside kBeside>
__global__ void __launch_bounds__(kSm90Threads, 1)
    HaloProductTf32Kernel(const __grid_constant__ HaloProduct p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const int halves = p.channels > 32 ? 2 : 1;
  const uint32_t filter = SharedAddress(shared_bytes);  // [tap][half], 64 rows of 32 channels
  const uint32_t buffers = filter + p.taps * halves * kBlockBytes;
  const uint32_t barriers = buffers + 2 * p.buffer_bytes;
  const auto full = [&](int i) { return barriers + i * 8; };
  const auto empty = [&](int i) { return barriers + 16 + i * 8; };
  const auto turn = [&](int i) { return barriers + 32 + i * 8; };
  const uint32_t loaded = barriers + 48;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 7; ++i) BarrierInit(barriers + i * 8, i / 2 == 2 ? kTurnArrivals : 1);
    BarrierInitFence();
  }
  __syncthreads();
  const int block = blockIdx.x / p.ctas, instance = block / p.blocks;
  const int n = block % p.blocks * 64;
  const int first = blockIdx.x % p.ctas;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;  // uniform
  if (group < 0) {
    RegistersDown<HaloProducer(kBeside)>();
    if (threadIdx.x == 0) {
      PrefetchMap(p.x);
      BarrierExpect(loaded, p.taps * halves * kBlockBytes);
      for (int tap = 0; tap < p.taps; ++tap) {
        for (int half = 0; half < halves; ++half) {
          LoadTile(filter + (tap * halves + half) * kBlockBytes, p.w, loaded, half * 32, instance,
                   n, p.flip ? p.taps - 1 - tap : tap);
        }
      }
      int slot = 0;
      uint32_t parity = 1;
      const int none[3] = {};
      for (int tile = first; tile < p.tiles; tile += p.ctas) {
        const Digits4 at =
            SplitDigits(tile * kHaloTf32Places, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
        int from[3];
        for (int i = 0; i < 3; ++i) from[i] = at.digit[3 - i] + p.line.first[i];
        for (int half = 0; half < halves; ++half) {
          BarrierWait(empty(slot), parity);
          BarrierExpect(full(slot), p.buffer_bytes);
          LoadColumn(p.line.rank, buffers + slot * p.buffer_bytes, p.x, full(slot),
                     instance * p.channels + half * 32, from, at.digit[0], none);
          slot ^= 1;
          parity ^= slot == 0;
        }
      }
    }
  } else {
    RegistersUp<HaloConsumer(kBeside)>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int upper = n + warp * 16 + lane / 4, lower = upper + 8;  // channels
    const bool has_upper = upper < p.n, has_lower = lower < p.n;
    const int64_t pitch = int64_t(p.instances) * p.n, channel = int64_t(instance) * p.n + upper;
    float bias[2] = {};
    if (p.epilogue.bias_kind == BiasKind::kRow) {
      const float* from = static_cast<const float*>(p.epilogue.bias) + channel;
      if (has_upper) bias[0] = __ldg(from);
      if (has_lower) bias[1] = __ldg(from + 8);
    }
    constexpr int kSums = HaloSums(kBeside);
    float sum[kSums > 0 ? kSums : 1][2] = {};  // of d's upper and lower channel
    BarrierWait(loaded, 0);
    uint32_t turns = group == 0 ? 1 : 0;
    int64_t buffer = group * halves;  // buffers before this tile's, of all tiles
    for (int tile = first + group * p.ctas; tile < p.tiles; tile += 2 * p.ctas) {
      float acc[64];
      BarrierWait(turn(group), turns);
      turns ^= 1;
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = 0.f;
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        const int slot = int(buffer + half) % 2;
        BarrierWait(full(slot), uint32_t((buffer + half) / 2 % 2));
        Pin(acc);
        WgmmaFence();
#pragma unroll 1
        for (int tap = 0; tap < p.taps; ++tap) {
          const uint64_t a = OperandDescriptor<true>(filter + (tap * halves + half) * kBlockBytes);
          const uint64_t b =
              OperandDescriptor<true>(buffers + slot * p.buffer_bytes + p.shift[tap] * 128);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            Wgmma<float, true, true>(acc, a + k * kOperandStep<true>, b + k * kOperandStep<true>,
                                     1);
          }
        }
        WgmmaCommit();
        if (half + 1 == halves) PassTurn(turn(group ^ 1));
        if (half > 0) {
          WgmmaWait<1>();
          if (threadIdx.x % 128 == 0) BarrierArrive(empty(slot ^ 1));
        }
      }
      Pin(acc);
      WgmmaWait<0>();
      Pin(acc);
      if (threadIdx.x % 128 == 0) BarrierArrive(empty(int(buffer + halves - 1) % 2));
      buffer += 2 * halves;

      if constexpr (kBeside == HaloBeside::kNothing) {
#pragma unroll
        for (int i = 0; i < 64; ++i) acc[i] += bias[i / 2 % 2];
        const auto store = [&](void* to) {
          float* const out = static_cast<float*>(to) + channel;
#pragma unroll
          for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int place = tile * kHaloTf32Places + j * 8 + lane % 4 * 2 + e;
              const Digits4 at = SplitDigits(place, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
              if (at.digit[3] >= p.made[0] || at.digit[2] >= p.made[1] ||
                  at.digit[1] >= p.made[2] || place >= p.line.places) {
                continue;
              }
              const int64_t pixel = at.digit[0] * p.image + at.digit[1] * p.plane +
                                    at.digit[2] * p.made[0] + at.digit[3];
              if (has_upper) out[pixel * pitch] = acc[j * 4 + e];
              if (has_lower) out[pixel * pitch + 8] = acc[j * 4 + 2 + e];
            }
          }
        };
        if (p.z != nullptr) store(p.z);
        ActivateAll(p.epilogue.activation, p.epilogue.slope, acc);
        store(p.d);
      } else {
        FinishBeside<kBeside>(p, tile, channel, has_upper, has_lower, acc, sum);
      }
    }
    if constexpr (kSums > 0)
      WriteHaloSums(p, first * 2 + group, channel, has_upper, has_lower, sum);
  }
#endif
}

template <HaloBeside kBeside>
Status Launch(const Context& ctx, HaloProduct& p, int multiprocessors, const std::string& what) {
  p.blocks = (p.n + 63) / 64;
  const int blocks = p.blocks * p.instances;
  p.ctas = int(HaloCtas(multiprocessors, blocks, p.tiles));
  const int reach = p.shift[p.taps - 1];
  p.buffer_bytes = int(HaloBufferBytes(kHaloTf32Places, reach));
  for (int i = 0; i < 3; ++i) p.by_extent[i] = FastDiv(p.line.extent[i]);
  p.plane = p.made[0] * p.made[1];
  p.image = int64_t(p.plane) * p.made[2];
  const int shared = int(HaloTf32Shared(p.taps, p.channels, reach));
  auto kernel = HaloProductTf32Kernel<kBeside>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks * p.ctas), kSm90Threads, shared, ctx.stream>>>(p);
  return LaunchStatus(what);
}

}  // namespace

Status LaunchHaloProductTf32(const Context& ctx, HaloProduct& p, int multiprocessors,
                             const std::string& what) {
  return p.c == nullptr ? Launch<HaloBeside::kNothing>(ctx, p, multiprocessors, what)
                        : Launch<HaloBeside::kAddend>(ctx, p, multiprocessors, what);
}

Status LaunchHaloGradientTf32(const Context& ctx, HaloProduct& p, void* dbias, int multiprocessors,
                              const std::string& what) {
  multiprocessors = std::min<int>(multiprocessors, kHaloMostCtas);
  JAXCONV_RETURN_IF_ERROR(Launch<HaloBeside::kKept>(ctx, p, multiprocessors, what));
  return AddHaloSums<float>(ctx, p, dbias, what);
}

Status LaunchHaloNormGradientTf32(const Context& ctx, HaloProduct& p, int multiprocessors,
                                  const std::string& what) {
  multiprocessors = std::min<int>(multiprocessors, kHaloMostCtas);
  JAXCONV_RETURN_IF_ERROR(Launch<HaloBeside::kNormed>(ctx, p, multiprocessors, what));
  return LaunchColumnTotals<32, 2>(ctx, p.parts, 2 * p.ctas, p.instances * p.n,
                                   Sm90NormTotals{p.norm.rstd, p.norm.dscale, p.norm.dbias}, what);
}

}  // namespace jaxconv::cuda
