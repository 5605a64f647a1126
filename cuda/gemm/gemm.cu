// Gemm: checks the arguments, picks the kernel. With splits > 1 the main loop writes float32
// partial sums [splits][batch][m][n] to the workspace, and split.cu adds them and does the
// epilogue.
#include "cuda/gemm/gemm.h"

#include <algorithm>
#include <string>

#include "cuda/gemm/instances.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {
namespace {

Status LaunchByDType(const Context& ctx, const GemmArgs& g, const GemmLaunch& launch,
                     const std::string& what) {
  switch (g.dtype) {
    case DType::kBF16:
      return LaunchGemmBf16(ctx, launch, what);
    case DType::kF16:
      return LaunchGemmF16(ctx, launch, what);
    case DType::kF32:
      return g.full_float32 ? LaunchGemmFloat32(ctx, launch, what)
                            : LaunchGemmTf32(ctx, launch, what);
    case DType::kF64:
      break;
  }
  return Status::Unimplemented(what + ": no float64 on a GPU");
}

}  // namespace

Status Gemm(const Context& ctx, const GemmArgs& g, const char* name) {
  if (g.dtype == DType::kF64) {
    return Status::Unimplemented(std::string(name) + ": no float64 on a GPU");
  }
  if (g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0) {
    return Status::Invalid(
        std::string(name) + ": negative extent in batch=" + std::to_string(g.batch) +
        " m=" + std::to_string(g.m) + " n=" + std::to_string(g.n) + " k=" + std::to_string(g.k));
  }
  if (std::max({g.m, g.n, g.k, g.batch}) > kMaxExtent) {
    return Status::Unimplemented(std::string(name) + ": batch, m, n, k may be at most " +
                                 std::to_string(kMaxExtent) + "; given " + std::to_string(g.batch) +
                                 ", " + std::to_string(g.m) + ", " + std::to_string(g.n) + ", " +
                                 std::to_string(g.k));
  }
  if (g.splits < 1 || g.splits > 65535) {
    return Status::Invalid(std::string(name) + ": splits=" + std::to_string(g.splits) +
                           " must be in [1, 65535]");
  }
  if (g.accumulate && !g.float32_out && g.dtype != DType::kF32) {
    return Status::Invalid(std::string(name) + ": accumulate needs a float32 output, given " +
                           Name(g.dtype));
  }
  Tile tile;
  JAXCONV_RETURN_IF_ERROR(ToTile(g.tile, name, &tile));
  const int64_t size = int64_t(SizeOf(g.dtype));
  const int64_t vec = 16 / size;  // elements
  const auto whole = [&](int64_t count) { return count % vec == 0; };
  const bool vector = Aligned16(g.a) && Aligned16(g.b) && whole(g.lda) && whole(g.ldb) &&
                      whole(g.stride_a) && whole(g.stride_b);
  if (!vector) tile = kElementTile;
  const bool split = g.splits > 1;
  const std::string what = std::string(name) + "[gemm " + Name(g.dtype) + " " + Name(tile) +
                           (split ? " splits=" + std::to_string(g.splits) : "") + "]";
  if (g.m == 0 || g.n == 0 || g.batch == 0) return Status::Ok();

  EpilogueParams e;
  e.d = g.d;
  e.z = g.z;
  e.c = g.c;
  e.bias = g.bias;
  e.ldd = g.ldd;
  e.ldc = g.ldc;
  e.stride_d = g.stride_d;
  e.stride_c = g.stride_c;
  e.stride_bias = g.stride_bias;
  e.alpha = float(g.alpha);
  e.beta = float(g.beta);
  e.slope = float(g.slope);
  e.bias_kind = g.bias_kind;
  e.activation = g.activation;
  e.float32_out = g.float32_out || g.dtype == DType::kF32;
  e.accumulate = g.accumulate;
  e.vector = Aligned16(g.d) && Aligned16(g.z) && Aligned16(g.c) && whole(g.ldd) &&
             whole(g.stride_d) && (g.c == nullptr || (whole(g.ldc) && whole(g.stride_c)));

  GemmLaunch launch;
  const int64_t tile_k = kTileKBytes / size;
  launch.grid = Grid{
      int(g.m), int(g.n),     int(g.k),      0,
      0,        int(g.batch), int(g.splits), int(CeilDiv(CeilDiv(g.k, g.splits), tile_k) * tile_k)};
  launch.grid.stride_a = g.stride_a;
  launch.grid.stride_b = g.stride_b;
  launch.a = g.a;
  launch.b = g.b;
  launch.lda = g.lda;
  launch.ldb = g.ldb;
  launch.trans_a = g.trans_a;
  launch.trans_b = g.trans_b;
  launch.vector = vector;
  launch.tile = tile;
  launch.epilogue = e;
  if (!split) return LaunchByDType(ctx, g, launch, what);

  const double needed = double(g.splits) * double(g.batch) * double(g.m) * double(g.n) * 4;
  if (double(g.workspace.bytes) < needed) {
    return Status::Invalid(what + ": needs a workspace of " + std::to_string(int64_t(needed)) +
                           " bytes (splits * batch * m * n * 4), given " +
                           std::to_string(g.workspace.bytes));
  }
  EpilogueParams partial;
  partial.d = g.workspace.data;
  partial.ldd = g.n;
  partial.stride_d = g.m * g.n;
  partial.part_stride = g.batch * g.m * g.n;
  partial.float32_out = true;
  partial.vector = Aligned16(g.workspace.data) && g.n % 4 == 0;
  launch.epilogue = partial;
  JAXCONV_RETURN_IF_ERROR(LaunchByDType(ctx, g, launch, what));
  return LaunchSplitSum(ctx, g.dtype,
                        {static_cast<const float*>(g.workspace.data), g.splits, g.batch, g.m, g.n},
                        e, what);
}

}  // namespace jaxconv::cuda
