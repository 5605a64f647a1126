// Code that the two kernels of resident_team share: the positions of a group that a thread holds, copies into shared
// memory, and sums over a team.
//
// A team is several CTAs. It takes groups of channels in turn, and `teams` teams run at once. A thread takes U
// positions of its CTA's share of a group in each of `steps` steps. It walks over them twice. The walk forwards adds
// them up. When the team has its sums, the walk backwards writes the results.
//
// The positions pass through `slots` steps of shared memory. Only the thread that copied a position reads it, so there
// is no barrier. The first slots - in_flight steps stay in shared memory. The others pass through a ring of in_flight
// slots, and are copied again for the walk backwards, which begins with the last ones, because the L2 cache has these.
// (If the last steps stayed in shared memory, the L2 cache would hold the same data as shared memory.) If slots >=
// steps, everything is read once.
//
// Two CTAs of different teams share a multiprocessor: while one waits for its team, the other keeps the memory busy.
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "cuda/batchnorm/channel.cuh"
#include "cuda/batchnorm/domain.h"
#include "cuda/core/copy_async.cuh"
#include "cuda/core/reduce.cuh"

namespace jaxconv::cuda::batchnorm {

constexpr int kTeamLanes = 8;              // the most threads side by side across channels
constexpr int kTeamTile = kTeamLanes * 8;  // channels in a group: 8 bf16 * 8 lanes
constexpr int kTeamScratch = kTeamThreads / 32 * kTeamTile * 2;

// How a team's CTAs meet.
enum class Meet {
  kAlone,  // a team is one CTA
  kAll,    // every CTA reads the sums of every other
  kParts,  // a CTA adds up some of the columns, and every CTA reads the totals
};

struct Team {
  int ctas;        // of a team
  int teams;       // in the grid
  int64_t groups;  // channel tiles of all instances
  uint32_t steps;  // of a CTA in a group
  uint32_t slots;  // steps that shared memory holds; at least in_flight
  int in_flight;   // steps whose copies are on their way
  Meet meet;
  // (teams, 2, ctas + 1, columns): a float and the round it belongs to, from 1. The last row is of totals; kParts keeps
  // the others as (columns, ctas).
  uint64_t* partials;
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
// `bytes` of them, which may be none or more; zeros for the rest.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from, int64_t bytes) {
  const int there = bytes < 0 ? 0 : bytes > 16 ? 16 : static_cast<int>(bytes);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(there)
               : "memory");
}
// A word.
__device__ __forceinline__ void CopyWord(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(SharedAddress(to)), "l"(from)
               : "memory");
}
// Until fewer than `in_flight` of this thread's groups of copies are on their way: in_flight is 4, 8 or 16.
__device__ __forceinline__ void CopyWaitFor(int in_flight) {
  if (in_flight == 16) {
    CopyWait<15>();
  } else if (in_flight == 8) {
    CopyWait<7>();
  } else {
    CopyWait<3>();
  }
}

// A CTA's place in its team. In step i a team takes ctas * U * stride neighbouring positions, and each of its CTAs
// takes one stretch of these. So the team reads in one moving window, which suits DRAM.
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
template <int V, bool kLast, int U>
struct Walk {
  int64_t instance, tile;
  int64_t at;  // channels-last: the vector of `position`; otherwise the group's first element
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
    if (kLast) {
      end = tile * a.lanes + s.lane < a.row ? a.positions : 0;
      at = Base<kLast>(a, instance, tile, s.lane) + Step<kLast>(a, position);
    } else {
      end = a.positions;
      at = FirstElement(a, instance, tile);
    }
  }
  // The u-th position of the step that is `by` positions, or `at_by` vectors, further: f(its piece) if there is one.
  template <typename F>
  __device__ __forceinline__ void Visit(const Layout& a, const Share& s, int u, uint32_t by,
                                        int64_t at_by, F&& f) const {
    const uint32_t there = position + by + u * s.stride;
    if (there >= end) return;
    if (kLast) {
      f(Piece{at + at_by + u * s.hop, 0});
    } else {
      f(PieceOf<V>(a, at, there));
    }
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

template <typename T, int V, bool kLast>
__device__ __forceinline__ void CopyPiece(const Layout& a, uint32_t to, const void* base,
                                          const Piece& piece) {
  const auto* from = static_cast<const Raw<T, V>*>(base) + piece.at;
  if (kLast || !a.pieces) {
    CopyAsync(to, from);
  } else {  // the array's last vector may not be whole
    CopyAsync(to, from, (a.elements - piece.at * V) * static_cast<int64_t>(sizeof(T)));
  }
}

// z = x * scale + offset for 16-bit x, which has too few bits for this form to lose any; (x - mean) * scale + offset
// for float32.
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

// A sum and its round are one word, so a reader sees both or neither. No fence has to wait for the tensor's writes.
__device__ __forceinline__ void StoreSum(uint64_t* to, uint32_t round, float sum) {
  const uint64_t word = uint64_t{round + 1} << 32 | __float_as_uint(sum);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(to), "l"(word) : "memory");
}

// The sums of a team. kBatch: words of a thread that are on their way together, each of another CTA.
template <int kBatch>
class Meeting {
 public:
  // `columns`: sums of a CTA, a power of two in [2, kTeamTile * 2]. Says that this CTA's words may be looked for.
  __device__ __forceinline__ Meeting(const Team& q, const Share& s, int columns)
      : q_(q), s_(s), columns_(columns) {
    if (q.meet == Meet::kAlone) return;
    Clear();
    token_ = cooperative_groups::this_grid().barrier_arrive();
  }

  // scratch[0, columns) = the team's sums of these columns in this round, in an order that depends on the shape alone.
  // Begins after a barrier and ends with one. In the first round the CTA waits until all CTAs have said so.
  __device__ __forceinline__ void Sum(uint32_t round, float* scratch) {
    if (q_.meet == Meet::kAlone) return;
    Publish(round, scratch);
    if (round == 0) cooperative_groups::this_grid().barrier_wait(std::move(token_));
    if (q_.meet == Meet::kParts) return CollectParts(round, scratch);
    CollectAll(round, scratch);
  }

 private:
  __device__ __forceinline__ uint64_t* Partials(uint32_t round) const {
    return q_.partials + (int64_t{s_.team} * 2 + round % 2) * (q_.ctas + 1) * columns_;
  }
  // From one of this CTA's partial sums to the next, and its first.
  __device__ __forceinline__ int Pitch() const { return q_.meet == Meet::kParts ? q_.ctas : 1; }
  __device__ __forceinline__ int First() const {
    return q_.meet == Meet::kParts ? s_.rank : s_.rank * columns_;
  }

  // No sum of this CTA belongs to a round. Other CTAs may look for some once the grid has met.
  __device__ __forceinline__ void Clear() const {
#pragma unroll 1
    for (uint32_t r = 0; r < 2; ++r) {
      uint64_t* all = Partials(r);
      uint64_t *mine = all + First(), *totals = all + q_.ctas * columns_;
#pragma unroll 1
      for (int c = threadIdx.x; c < columns_; c += kTeamThreads) {
        mine[c * Pitch()] = 0;
        if (c % q_.ctas == s_.rank) totals[c] = 0;
      }
    }
  }

  // Ends with a barrier: nobody writes to scratch before all have read it.
  __device__ __forceinline__ void Publish(uint32_t round, const float* scratch) const {
    uint64_t* mine = Partials(round) + First();
#pragma unroll 1
    for (int c = threadIdx.x; c < columns_; c += kTeamThreads) {
      StoreSum(mine + c * Pitch(), round, scratch[c]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void CollectAll(uint32_t round, float* scratch) const {
    const uint64_t* from = Partials(round);
    const int pairs = columns_ / 2;
    const int column = threadIdx.x % pairs, step = kTeamThreads / pairs;
    float sum[2] = {};
#pragma unroll 1
    for (int r = threadIdx.x / pairs; r < q_.ctas; r += kBatch * step) {
      uint64_t word[kBatch][2];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (r + k * step < q_.ctas) {
            asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n"
                         : "=l"(word[k][0]), "=l"(word[k][1])
                         : "l"(from + int64_t{r + k * step} * columns_ + 2 * column)
                         : "memory");
          }
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (r + k * step < q_.ctas)
            there = there && word[k][0] >> 32 == round + 1 && word[k][1] >> 32 == round + 1;
        }
      } while (!there);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (r + k * step < q_.ctas) {
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
#pragma unroll 1
      for (int k = 1; k < step; ++k) {
        total.x += rows[k * pairs + threadIdx.x].x;
        total.y += rows[k * pairs + threadIdx.x].y;
      }
      rows[threadIdx.x] = total;
    }
    __syncthreads();
  }

  static __device__ __forceinline__ uint64_t LoadSum(const uint64_t* from) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];\n" : "=l"(word) : "l"(from) : "memory");
    return word;
  }

  // CTA r adds up columns r, r + ctas, ..., a warp each.
  __device__ __forceinline__ void CollectParts(uint32_t round, float* scratch) const {
    uint64_t *from = Partials(round), *totals = from + q_.ctas * columns_;
#pragma unroll 1
    for (int c = s_.rank + threadIdx.x / 32 * q_.ctas; c < columns_;
         c += kTeamThreads / 32 * q_.ctas) {
      float sum = 0.f;
#pragma unroll 1
      for (int r = threadIdx.x % 32; r < q_.ctas; r += kBatch * 32) {
        uint64_t word[kBatch];
        bool there;
        do {
          there = true;
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            if (r + k * 32 < q_.ctas) word[k] = LoadSum(from + c * q_.ctas + r + k * 32);
          }
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            if (r + k * 32 < q_.ctas) there = there && word[k] >> 32 == round + 1;
          }
        } while (!there);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (r + k * 32 < q_.ctas) sum += __uint_as_float(static_cast<uint32_t>(word[k]));
        }
      }
      sum = WarpColumnSum(sum);
      if (threadIdx.x % 32 == 0) StoreSum(totals + c, round, sum);
    }
    if (static_cast<int>(threadIdx.x) < columns_) {
      uint64_t word;
      do {
        word = LoadSum(totals + threadIdx.x);
      } while (word >> 32 != round + 1);
      scratch[threadIdx.x] = __uint_as_float(static_cast<uint32_t>(word));
    }
    __syncthreads();
  }

  const Team& q_;
  const Share& s_;
  const int columns_;
  cooperative_groups::grid_group::arrival_token token_{};
};

}  // namespace jaxconv::cuda::batchnorm
