// What the two kernels of resident_team share: who holds which positions of which group, copies into shared memory, and
// sums over a team.
//
// A team of CTAs takes groups of channels in turn, `teams` of them at once. Every thread takes U positions of its CTA's
// share of a group a step, in `steps` steps, twice: a walk onwards adds them up, and a walk backwards, once the team's
// sums have met, writes what becomes of them. The positions pass through a ring of `slots` steps in shared memory that
// only the thread that copied them reads: no barrier guards them. What the walk onwards copied last is still there; the
// rest is copied again, last things first, since these are in the L2 cache if anything is. Where slots >= steps
// everything is read once.
//
// Two CTAs share a multiprocessor: while one waits for its team, the other, which is of another team, keeps the memory
// busy.
#pragma once

#include <cooperative_groups.h>

#include "cuda/batchnorm/channel.cuh"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {

constexpr int kTeamThreads = 256;
constexpr int kTeamBlocks = 2;  // CTAs of a multiprocessor, unless a kernel says otherwise
constexpr int kTeamLanes = 8;   // the most threads side by side across channels
constexpr int kTeamTile = kTeamLanes * 8;  // channels in a group: 8 bf16 * 8 lanes
constexpr int kTeamScratch = kTeamThreads / 32 * kTeamTile * 2;

struct Team {
  int ctas;            // of a team
  int teams;           // in the grid
  int64_t groups;      // channel tiles of all instances
  uint32_t steps;      // of a CTA in a group
  uint32_t slots;      // steps that shared memory holds; at least in_flight
  int in_flight;       // steps whose copies are on their way
  uint64_t* partials;  // (teams, 2, ctas, columns): a float and the round it belongs to, from 1
};

// 16 bytes to a vector: [slot][position of the step][tensor][thread].
extern __shared__ uint4 slab[];

// A vector of this thread, `at` bytes from its first.
template <typename R>
__device__ __forceinline__ R Slot(const char* mine, int at) {
  return *reinterpret_cast<const R*>(mine + at);
}
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory, past L1.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
// A word.
__device__ __forceinline__ void CopyWord(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(SharedAddress(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void CopyCommit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Until fewer than `in_flight` of this thread's groups of copies are on their way: in_flight is 4 or 8.
__device__ __forceinline__ void CopyWaitFor(int in_flight) {
  if (in_flight == 8) {
    CopyWait<7>();
  } else {
    CopyWait<3>();
  }
}

// A CTA's place in its team. In step i a team takes ctas * U * stride neighbouring positions, its CTAs one stretch each
// of them: all of them read in one moving window, as DRAM likes it.
struct Share {
  int team, rank, lane;
  uint32_t first;        // the thread's position in step 0
  uint32_t stride;       // from one of the U to the next
  uint32_t jump;         // from one step to the next
  int64_t hop, at_jump;  // channels-last: stride and jump, in vectors
};

template <int U>
__device__ __forceinline__ Share MyShare(const Layout& a, const Team& q) {
  Share s;
  s.team = blockIdx.x / q.ctas;
  s.rank = blockIdx.x - s.team * q.ctas;
  s.lane = threadIdx.x & (a.lanes - 1);
  s.stride = kTeamThreads / a.lanes;
  s.jump = q.ctas * U * s.stride;
  s.first = s.rank * U * s.stride + threadIdx.x / a.lanes;
  s.hop = s.stride * a.row;
  s.at_jump = s.jump * a.row;
  return s;
}

// A group, and a thread's place in it.
template <bool kLast, int U>
struct Walk {
  int64_t instance, tile;
  int64_t at;         // channels-last: the vector of `position`; otherwise the group's first vector
  uint32_t position;  // below zero it wraps: outside
  uint32_t end;

  __device__ __forceinline__ Walk(const Layout& a, const Share& s, int64_t group) {
    instance = 0;
    tile = group;
    if (a.batch > 1) {
      instance = group / a.tiles;
      tile -= instance * a.tiles;
    }
    position = s.first;
    end = !kLast || tile * a.lanes + s.lane < a.row ? a.positions : 0;
    at =
        Base<kLast>(a, instance, tile, kLast ? s.lane : 0) + (kLast ? Step<kLast>(a, position) : 0);
  }
  // The u-th position of the step that is `by` positions, or `at_by` vectors, further: f(its offset) if there is one.
  template <typename F>
  __device__ __forceinline__ void Visit(const Layout& a, const Share& s, int u, uint32_t by,
                                        int64_t at_by, F&& f) const {
    const uint32_t there = position + by + u * s.stride;
    if (there < end) f(kLast ? at + at_by + u * s.hop : at + Step<kLast>(a, there));
  }
  __device__ __forceinline__ bool Inside(const Share& s, int u) const {
    return position + u * s.stride < end;
  }
  __device__ __forceinline__ void Onwards(const Share& s) {
    position += s.jump;
    if (kLast) at += s.at_jump;
  }
  __device__ __forceinline__ void Backwards(const Share& s) {
    position -= s.jump;
    if (kLast) at -= s.at_jump;
  }
};

// z = x * scale + offset for 16-bit x, whose few bits leave nothing of the mean in the deviation's place that this could
// lose; (x - mean) * scale + offset for float32.
template <typename T>
__device__ __forceinline__ Affine Fold(Affine k) {
  if (sizeof(T) == 2)
    k.offset = static_cast<float>(k.offset - static_cast<double>(k.mean) * k.scale);
  return k;
}
template <typename T>
__device__ __forceinline__ float Preactivation(float x, const Affine& k) {
  return sizeof(T) == 2 ? fmaf(x, k.scale, k.offset) : fmaf(x - k.mean, k.scale, k.offset);
}

__device__ __forceinline__ uint64_t* Partials(const Team& q, const Share& s, uint32_t round,
                                              int columns) {
  return q.partials + (int64_t{s.team} * 2 + round % 2) * q.ctas * columns;
}

// No partial sum of this CTA belongs to a round. Other CTAs may look for some once the grid has met.
__device__ __forceinline__ void ClearPartials(const Team& q, const Share& s, int columns) {
  for (uint32_t r = 0; r < 2; ++r) {
    uint64_t* mine = Partials(q, s, r, columns) + s.rank * columns;
    for (int c = threadIdx.x; c < columns; c += kTeamThreads) mine[c] = 0;
  }
}

// This CTA's sums of a round, scratch[0, columns), to the team. A sum and its round are one word, which is there or not:
// no fence waits for the writes of the tensor. Ends with a barrier.
__device__ __forceinline__ void Publish(const Team& q, const Share& s, uint32_t round, int columns,
                                        const float* scratch) {
  uint64_t* mine = Partials(q, s, round, columns) + s.rank * columns;
  for (int c = threadIdx.x; c < columns; c += kTeamThreads) {
    const uint64_t word = uint64_t{round + 1} << 32 | __float_as_uint(scratch[c]);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(mine + c), "l"(word) : "memory");
  }
  __syncthreads();
}

// scratch[0, columns) = the team's sums of a round, in an order that the shape alone decides. `columns` is a power of two
// in [2, kTeamTile * 2].
__device__ __forceinline__ void Collect(const Team& q, const Share& s, uint32_t round, int columns,
                                        float* scratch) {
  constexpr int kBatch = 8;  // rows whose words are on their way
  const uint64_t* from = Partials(q, s, round, columns);
  const int pairs = columns / 2;
  const int column = threadIdx.x % pairs, step = kTeamThreads / pairs;
  float sum[2] = {};
  for (int r = threadIdx.x / pairs; r < q.ctas; r += kBatch * step) {
    uint64_t word[kBatch][2];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (r + k * step < q.ctas) {
          asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n"
                       : "=l"(word[k][0]), "=l"(word[k][1])
                       : "l"(from + int64_t{r + k * step} * columns + 2 * column)
                       : "memory");
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (r + k * step < q.ctas)
          there = there && word[k][0] >> 32 == round + 1 && word[k][1] >> 32 == round + 1;
      }
    } while (!there);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (r + k * step < q.ctas) {
        sum[0] += __uint_as_float(static_cast<uint32_t>(word[k][0]));
        sum[1] += __uint_as_float(static_cast<uint32_t>(word[k][1]));
      }
    }
  }
  if (pairs <= 32) {  // threads of one pair are in a warp
    BlockColumnSums(sum, pairs, scratch);
    return;
  }
  float2* rows = reinterpret_cast<float2*>(scratch);
  rows[threadIdx.x] = make_float2(sum[0], sum[1]);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < pairs) {
    float2 total = rows[threadIdx.x];
    for (int k = 1; k < step; ++k) {
      total.x += rows[k * pairs + threadIdx.x].x;
      total.y += rows[k * pairs + threadIdx.x].y;
    }
    rows[threadIdx.x] = total;
  }
  __syncthreads();
}

}  // namespace jaxconv::cuda::batchnorm
