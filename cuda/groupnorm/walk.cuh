// What the group-norm kernels share: the activation over a vector, a thread's place in a
// pixel, sums over a block's pixels, over a group's channels or an image's items, and the order of the items of an
// "interleaved" launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/activation.h"
#include "cuda/core/raw.cuh"
#include "cuda/groupnorm/domain.h"
#include "cuda/groupnorm/groupnorm.h"

namespace jaxconv::cuda::groupnorm {

// `at` counts vectors. kAgain: what is read will be read again, by a block that writes.
template <bool kAgain, typename T, int V>
__device__ __forceinline__ Raw<T, V> Read(const T* base, uint32_t at) {
  const Raw<T, V>* p = reinterpret_cast<const Raw<T, V>*>(base) + at;
  return kAgain ? __ldg(p) : __ldcs(p);
}

// V numbers from p on, which is aligned to 16 bytes where V > 1.
template <int V>
__device__ __forceinline__ void ReadNumbers(const float* p, float (&v)[V]) {
  if constexpr (V == 1) {
    v[0] = p[0];
  } else {
#pragma unroll
    for (int j = 0; j < V; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + j);
      v[j] = four.x;
      v[j + 1] = four.y;
      v[j + 2] = four.z;
      v[j + 3] = four.w;
    }
  }
}

// Rounds to nearest even, and leaves the L2 cache to what is read again.
template <typename T, int V>
__device__ __forceinline__ void Write(T* base, uint32_t at, const float (&v)[V]) {
  __stcs(reinterpret_cast<Raw<T, V>*>(base) + at, Pack<T, V>(v));
}

// A kernel is compiled for one activation, or (kAny) for whichever it is given.
constexpr int kAny = -1;

// silu' = g + z (1 - g) g with g = sigmoid(z), for a 16-bit result: four instructions and two of the special function
// unit. Of finite z, unlike activation.h's: an infinite one is of a group that is NaN.
__device__ __forceinline__ float ShortSiluGrad(float z) {
  const float gate = Gate<false, float, true>(z);
  return fmaf(fmaf(-z, gate, z), gate, gate);
}

// v[j] = kGrad ? v[j] * f'(z[j]) : f(z[j]), for a result of T. Of kAny the branches are uniform and outside the loop over
// the vector, one for each activation.
template <bool kGrad, int kFixed, typename T, int V, int kFrom = 0>
__device__ __forceinline__ void Apply(Activation a, float slope, const float (&z)[V],
                                      float (&v)[V]) {
  constexpr bool kShort = sizeof(T) == 2;
  if constexpr (kFixed == kAny && kFrom < kActivationCount) {
    if (a == static_cast<Activation>(kFrom)) {
      Apply<kGrad, kFrom, T>(a, slope, z, v);
    } else {
      Apply<kGrad, kAny, T, V, kFrom + 1>(a, slope, z, v);
    }
  } else if constexpr (kFixed != kAny) {
    constexpr Activation kThis = static_cast<Activation>(kFixed);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (kShort && kThis == Activation::kSilu) {
        v[j] = kGrad ? v[j] * ShortSiluGrad(z[j]) : z[j] * Gate<false, float, true>(z[j]);
        continue;
      }
      v[j] = kGrad ? v[j] * ActivateGrad<float, kShort>(kThis, z[j], slope)
                   : Activate<float, kShort>(kThis, z[j], slope);
    }
  }
}

// What moments of an image's group are taken about (forward.cu).
template <typename T>
__device__ __forceinline__ float Shift(const Walk& w, const T* image, int group) {
  const T* first = image + int64_t(group) * w.group_channels;
  const auto at = [&](uint32_t pixel, int channel) {
    return ToFloat(first[int64_t(pixel) * w.channels + channel]);
  };
  const float a = at(0, 0), b = at(w.pixels / 2, w.group_channels / 2),
              c = at(w.pixels - 1, w.group_channels - 1);
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// 1 / sqrt(v), right to float32. A root and a division in float64 would be a chain of some forty instructions, for which the
// whole block waits.
__device__ __forceinline__ float ReciprocalRoot(double v) {
  if (!(v > 1e-30 && v < 1e30)) return static_cast<float>(1.0 / sqrt(v));
  const double r = rsqrtf(static_cast<float>(v));
  return static_cast<float>(r * (1.5 - 0.5 * v * r * r));
}

// Of a group, whose sums of x - shift and of its square are given. `rest` is what rounding took from the mean.
struct Moments {
  float mean, rest, rstd;
};

__device__ __forceinline__ Moments MomentsOf(const Walk& w, float shift, float2 sum) {
  const double offset = sum.x * w.inv_n, mean = shift + offset;
  double var = sum.y * w.inv_n - offset * offset;
  if (var < 0) var = 0;  // NaN stays
  const float rounded = static_cast<float>(mean);
  return {rounded, static_cast<float>(mean - rounded), ReciprocalRoot(var + w.epsilon)};
}

// A thread's vector of a pixel and its pixels of an item.
struct Place {
  int lane, row;        // [0, lanes), [0, rows]: in the last row there may be too few threads
  uint32_t first, end;  // pixels
};

__device__ __forceinline__ Place PlaceOf(const Walk& w, uint32_t item) {
  const int row = int(threadIdx.x) / w.lanes, lane = int(threadIdx.x) - row * w.lanes;
  const uint32_t end = min(w.pixels, (item + 1) * w.chunk);
  return {lane, row, row < w.rows ? item * w.chunk + row : end, end};
}

// f(j, group) for the channels first + j of a vector.
template <int V, typename F>
__device__ __forceinline__ void ForChannels(const Walk& w, int first, const F& f) {
  int group = first / w.group_channels,
      left = w.group_channels - (first - group * w.group_channels);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    f(j, group);
    if (--left == 0) {
      ++group;
      left = w.group_channels;
    }
  }
}

// Adds s1 and s2 of a tile's channels up over the block's rows of threads, in order: sums (2, channels), of which the
// tile's are written. `scratch`: (2, kThreads * V), free after the next barrier.
template <int V>
__device__ __forceinline__ void SumRows(const Walk& w, const Place& at, int tile,
                                        const float (&s1)[V], const float (&s2)[V], float* scratch,
                                        float* sums) {
  const int columns = w.lanes * V;
  if (at.row < w.rows) {
    float* mine = scratch + at.row * columns + at.lane * V;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      mine[j] = s1[j];
      mine[kThreads * V + j] = s2[j];
    }
  }
  __syncthreads();
  const int first = tile * columns, end = min(columns, w.channels - first);
  for (int i = threadIdx.x; i < 2 * columns; i += kThreads) {
    const int which = i >= columns, column = i - which * columns;
    if (column >= end) continue;
    const float* from = scratch + which * kThreads * V + column;
    float total = from[0];
#pragma unroll 4
    for (int row = 1; row < w.rows; ++row) total += from[row * columns];
    sums[which * w.channels + first + column] = total;
  }
  __syncthreads();
}

// put(group, sums of get(group, i) for i in [0, count)) for every group, by the block; a few lanes share a group. The order
// of a sum depends on `count` only.
template <typename Get, typename Put>
__device__ __forceinline__ void ForGroups(const Walk& w, int count, const Get& get,
                                          const Put& put) {
  int width = 1;
  while (width < count && width < 32) width *= 2;
  const int lane = int(threadIdx.x) & (width - 1), step = kThreads / width;
  for (int group = int(threadIdx.x) / width, first = 0; first < w.groups;
       first += step, group += step) {
    float2 sum = make_float2(0.f, 0.f);
    if (group < w.groups) {
#pragma unroll 4
      for (int i = lane; i < count; i += width) {
        const float2 v = get(group, i);
        sum.x += v.x;
        sum.y += v.y;
      }
    }
    for (int o = width / 2; o > 0; o /= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
    }
    if (group < w.groups && lane == 0) put(group, sum);
  }
}

// The two sums of an image's groups, from its items'. They may have been written in this launch.
template <typename Put>
__device__ __forceinline__ void MergeParts(const Walk& w, const float2* parts, int64_t image,
                                           const Put& put) {
  const float2* mine = parts + image * w.groups * w.splits;
  ForGroups(
      w, int(w.splits),
      [&](int group, int i) { return __ldcg(mine + int64_t(group) * w.splits + i); }, put);
}

// ---------------------------------------------------------------------------------------------------------------------
// Items

struct Item {
  int64_t image;
  uint32_t index;  // in the image
};

__device__ __forceinline__ Item ItemOf(const Walk& w, uint32_t item) {
  return {item / w.splits, item % w.splits};
}

// What a block of an "interleaved" launch does. Tickets, not block numbers, order the blocks: whoever waits, waits for
// tickets that running blocks hold. `lead` items are summed up; then one is summed up and one is written, in turn; last the
// rest is written. lead >= splits, so that an image's items are summed up or being so when its first is written.
struct Turn {
  bool writes;
  uint32_t item;
};

__device__ __forceinline__ Turn TakeTurn(const Walk& w, unsigned* counters) {
  __shared__ unsigned ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(counters, 1u);
  __syncthreads();
  const uint32_t t = ticket, items = uint32_t(w.images) * w.splits, ahead = items - w.lead;
  if (t < w.lead) return {false, t};
  const uint32_t later = t - w.lead;
  if (later >= 2 * ahead) return {true, later - ahead};
  return later % 2 == 0 ? Turn{false, w.lead + later / 2} : Turn{true, later / 2};
}

// After an item's sums are in the workspace.
__device__ __forceinline__ void SayItIsSummed(unsigned* counters, int64_t image) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counters + 1 + image, 1u);
  }
}

// Returns to all threads when the image's items are summed up.
__device__ __forceinline__ void AwaitSums(const Walk& w, const unsigned* counters, int64_t image) {
  if (threadIdx.x == 0) {
    unsigned done;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(done)
                   : "l"(counters + 1 + image)
                   : "memory");
    } while (done < w.splits);
  }
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches, on the host

// f(T{}, std::integral_constant<int, V>{}, std::integral_constant<int, activation or kAny>{}): what is not read in vectors is
// compiled for any activation only.
template <typename T, typename F>
Status WithActivation(const GroupNormProblem& p, bool vectors, const F& f) {
  constexpr int V = 16 / sizeof(T);
  const auto fixed = [&](auto activation) {
    return f(T{}, std::integral_constant<int, V>{}, activation);
  };
  if (!vectors)
    return f(T{}, std::integral_constant<int, 1>{}, std::integral_constant<int, kAny>{});
  if (p.activation == Activation::kSilu)
    return fixed(std::integral_constant<int, int(Activation::kSilu)>{});
  if (p.activation == Activation::kRelu)
    return fixed(std::integral_constant<int, int(Activation::kRelu)>{});
  return fixed(std::integral_constant<int, kAny>{});
}

template <typename F>
Status WithInstance(const GroupNormProblem& p, bool aligned, const F& f) {
  const bool vectors = aligned && Vector(p) > 1;
  if (p.dtype == DType::kF32) return WithActivation<float>(p, vectors, f);
  if (p.dtype == DType::kBF16) return WithActivation<__nv_bfloat16>(p, vectors, f);
  return WithActivation<__half>(p, vectors, f);
}

}  // namespace jaxconv::cuda::groupnorm
