// What the kernels of sm90_norm_gradient.h share: two numbers of each of a CTA's columns, in shared memory, and where the totals
// go.
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90_columns.cuh"
#include "cuda/gemm/sm90_gradient.cuh"
#include "cuda/gemm/sm90_norm_gradient.h"
#include "cuda/gemm/sm90_sums.cuh"

namespace jaxconv::cuda {

// Of two neighbouring columns the first number of each, then the second of each. A warpgroup has a table of its own.
template <int kColumns>
struct ColumnTable {
  static constexpr int kBytes = kColumns * 8;

  // numbers(column) of columns n, n + 1, ... before n_end; beyond they are 0.
  template <typename Numbers>
  __device__ __forceinline__ ColumnTable(uint32_t at, int n, int n_end, int barrier,
                                         const Numbers& numbers)
      : at(at) {
    for (int c = int(threadIdx.x) % 128; c < kColumns; c += 128) {
      const float2 two = n + c < n_end ? numbers(n + c) : float2{};
      const uint32_t to = at + c / 2 * 16 + c % 2 * 4;
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(two.x) : "memory");
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to + 8), "f"(two.y) : "memory");
    }
    NamedBarrier(barrier, 128);
  }

  // Of the columns `column`, even, and the next.
  __device__ __forceinline__ float4 Load(int column) const {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at + column * 8));
    return v;
  }

  uint32_t at;
};

// A tile of the streamed loop with a table for each warpgroup behind its barriers.
template <typename Base>
struct StreamedNormTile : Base {
  using Table = ColumnTable<Base::kColumns>;
  static constexpr int kTableOffset = (Base::kSharedBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kTableOffset + 2 * Table::kBytes;
  static_assert(kSharedBytes <= kSm90SharedBytes);

  // `outbox`: where the loop says that the warpgroup's is.
  static __device__ __forceinline__ uint32_t TableAt(uint32_t outbox, int group) {
    return outbox - group * Base::kOutboxBytes - Base::kStages * Base::kStageBytes + kTableOffset +
           group * Table::kBytes;
  }
};

// The means of two neighbouring columns, kept in a cache: there are no registers for all.
__device__ __forceinline__ float2 MeansOf(const float* mean, int column, int n_end) {
  return column < n_end ? __ldg(reinterpret_cast<const float2*>(mean + column)) : float2{};
}

}  // namespace jaxconv::cuda
