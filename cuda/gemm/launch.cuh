// Host side of the main loop, shared by its views: extents to a grid, the tile's name to an
// instance, the launch.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "cuda/core/context.h"
#include "cuda/core/device.h"
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/simt.cuh"
#include "cuda/gemm/sm80.cuh"

namespace jaxconv::cuda {

// Extents of a product go into int with room for one tile past the end.
inline constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 4096;

// Null is aligned.
inline bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename Math, typename View>
Status LaunchMatrix(const Context& ctx, KernelParams<View> p, const std::string& what) {
  p.grid.tiles_m = int(CeilDiv(p.grid.m, Math::kTileM));
  p.grid.tiles_n = int(CeilDiv(p.grid.n, Math::kTileN));
  const double ctas =
      double(p.grid.tiles_m) * p.grid.tiles_n * double(p.grid.instances) * p.grid.parts;
  if (ctas > double(std::numeric_limits<int32_t>::max())) {
    return Status::Unimplemented(what + ": needs " + std::to_string(ctas) +
                                 " CTAs, a grid has at most 2147483647");
  }
  constexpr int kBytes = kSharedBytes<Math>;
  auto kernel = MatrixKernel<Math, View>;
  if constexpr (kBytes >
                40 * 1024) {  // static shared memory comes on top; 48 KiB need no permission
    JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  }
  const int blocks = p.grid.tiles_m * p.grid.tiles_n * p.grid.instances * p.grid.parts;
  kernel<<<blocks, Math::kThreads, kBytes, ctx.stream>>>(p);
  return LaunchStatus(what);
}

// Second pass of a split reduction; see split.cu.
//   d = epilogue(sum over s of partials[s, instance, m, n])
struct SplitSum {
  const float* partials;  // (splits, instances, m, n)
  int64_t splits;
  int64_t instances, m, n;
};
Status LaunchSplitSum(const Context& ctx, DType dtype, const SplitSum& sum,
                      const EpilogueParams& epilogue, const std::string& what);

}  // namespace jaxconv::cuda
