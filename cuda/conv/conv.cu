// The convolution entry points of common/launch.h: empty sums first, then the plan's algorithm.
// Launches nothing itself but the fill of an output that no product reaches.
#include <cuda_runtime_api.h>

#include <string>

#include "common/launch.h"
#include "cuda/conv/depthwise/depthwise.h"
#include "cuda/conv/direct/direct.h"
#include "cuda/conv/grouped/grouped.h"
#include "cuda/conv/im2col/im2col.h"
#include "cuda/conv/implicit_gemm/implicit_gemm.h"
#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/stem/stem.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {
namespace {

enum class Algorithm { kDirect, kDepthwise, kGrouped, kIm2col, kImplicitGemm, kStem, kWgmma };

Status Refuse(const char* op, const ConvProblem& p, const Plan& plan, Algorithm& algorithm) {
  if (p.dtype == DType::kF64) {
    return Status::Unimplemented(std::string(op) +
                                 ": float64 has no CUDA kernel; expected float32, bfloat16 or "
                                 "float16");
  }
  if (plan.algorithm == "direct") {
    algorithm = Algorithm::kDirect;
  } else if (plan.algorithm == "depthwise") {
    algorithm = Algorithm::kDepthwise;
  } else if (plan.algorithm == "grouped") {
    algorithm = Algorithm::kGrouped;
  } else if (plan.algorithm == "im2col") {
    algorithm = Algorithm::kIm2col;
  } else if (plan.algorithm == "implicit_gemm") {
    algorithm = Algorithm::kImplicitGemm;
  } else if (plan.algorithm == "stem") {
    algorithm = Algorithm::kStem;
  } else if (plan.algorithm == "wgmma") {
    algorithm = Algorithm::kWgmma;
  } else {
    return Status::Invalid(std::string(op) + ": unknown algorithm \"" +
                           std::string(plan.algorithm) +
                           "\"; expected direct, depthwise, grouped, im2col, implicit_gemm, "
                           "stem or wgmma");
  }
  return Status::Ok();
}

// All bits zero is the number zero in every dtype.
Status Zero(const Context& ctx, void* out, int64_t count, DType dtype, const char* op) {
  return CudaStatus(cudaMemsetAsync(out, 0, size_t(count) * SizeOf(dtype), ctx.stream),
                    std::string(op) + " zero fill");
}

Status Copy(const Context& ctx, const void* from, void* to, int64_t count, DType dtype,
            const char* op) {
  if (from == to) return Status::Ok();
  return CudaStatus(cudaMemcpyAsync(to, from, size_t(count) * SizeOf(dtype),
                                    cudaMemcpyDeviceToDevice, ctx.stream),
                    std::string(op) + " copy");
}

int64_t SizeX(const ConvProblem& p) { return p.n * p.c * p.in_size(); }
int64_t SizeW(const ConvProblem& p) {
  return p.groups > 0 ? p.k * p.group_c() * p.filter_size() : 0;
}
int64_t SizeY(const ConvProblem& p) { return p.n * p.k * p.out_size(); }

// A filter that steps by its own width reads each element of x once, and the S*C elements under a
// filter row are neighbours: a convolution over pixels of S*C channels with a filter of width 1.
// Where the same holds along H, every output row is an image of its own of R rows, which saves the
// stride; not for dgrad, whose phases (one tap each) the stride makes. jaxconv/_problem.py plans
// for the same problem.
ConvProblem FoldPatches(ConvProblem p, bool dgrad) {
  const auto patches = [&](int i) { return p.filter[i] > 1 && p.steps_by_filter(i); };
  if (!p.channels_last || p.groups != 1 || !patches(2)) return p;
  p.c *= p.filter[2];
  p.in[2] = p.out[2];
  p.filter[2] = p.stride[2] = 1;
  const bool flat = p.filter[0] == 1 && p.steps_by_filter(0);
  if (!dgrad && flat && patches(1)) {
    p.n *= p.in[0] * p.out[1];
    p.in[0] = p.out[0] = p.out[1] = p.stride[1] = 1;
    p.in[1] = p.filter[1];
  }
  return p;
}

}  // namespace

Status ConvFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace) {
  Algorithm algorithm;
  JAXCONV_RETURN_IF_ERROR(Refuse("conv_fprop", p, plan, algorithm));
  if (SizeY(p) == 0) return Status::Ok();
  // y = f(bias) everywhere: direct sums over nothing, whatever the plan says.
  if (SizeX(p) == 0 || SizeW(p) == 0) algorithm = Algorithm::kDirect;
  switch (algorithm) {
    case Algorithm::kDepthwise:
      return DepthwiseFprop(ctx, p, e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kGrouped:
      return GroupedFprop(ctx, p, e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kIm2col:
      return Im2colFprop(ctx, p, e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kImplicitGemm:
      return ImplicitGemmFprop(ctx, FoldPatches(p, false), e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kWgmma:
      return WgmmaFprop(ctx, FoldPatches(p, false), e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kStem:
      return StemFprop(ctx, p, e, plan, x, w, bias, y, z, workspace);
    case Algorithm::kDirect:
      break;
  }
  return DirectFprop(ctx, p, e, plan, x, w, bias, y, z, workspace);
}

Status ConvStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, void* y, void* mean, void* var, Workspace workspace) {
  Algorithm algorithm;
  JAXCONV_RETURN_IF_ERROR(Refuse("conv_statistics", p, plan, algorithm));
  if (algorithm != Algorithm::kWgmma) {
    return Status::Unimplemented("conv_statistics: only wgmma sums up what it writes, given \"" +
                                 std::string(plan.algorithm) + "\"");
  }
  return WgmmaStatistics(ctx, FoldPatches(p, false), plan, x, w, y, mean, var, workspace);
}

Status ConvDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace) {
  Algorithm algorithm;
  JAXCONV_RETURN_IF_ERROR(Refuse("conv_dgrad", p, plan, algorithm));
  if (c != nullptr && algorithm != Algorithm::kWgmma) {
    return Status::Unimplemented("conv_dgrad: only wgmma takes an addend, given \"" +
                                 std::string(plan.algorithm) + "\"");
  }
  if (SizeX(p) == 0) return Status::Ok();
  if (SizeY(p) == 0 || SizeW(p) == 0) {
    return c == nullptr ? Zero(ctx, dx, SizeX(p), p.dtype, "conv_dgrad")
                        : Copy(ctx, c, dx, SizeX(p), p.dtype, "conv_dgrad");
  }
  switch (algorithm) {
    case Algorithm::kDepthwise:
      return DepthwiseDgrad(ctx, p, plan, dy, w, dx, workspace);
    case Algorithm::kGrouped:
      return GroupedDgrad(ctx, p, plan, dy, w, dx, workspace);
    case Algorithm::kIm2col:
      return Im2colDgrad(ctx, p, plan, dy, w, dx, workspace);
    case Algorithm::kImplicitGemm:
      return ImplicitGemmDgrad(ctx, FoldPatches(p, true), plan, dy, w, dx, workspace);
    case Algorithm::kWgmma:
      if (c != nullptr &&
          p.stride[0] * p.stride[1] * p.stride[2] > 1) {  // it adds to what is there
        JAXCONV_RETURN_IF_ERROR(Copy(ctx, c, dx, SizeX(p), p.dtype, "conv_dgrad"));
        c = dx;
      }
      return WgmmaDgrad(ctx, FoldPatches(p, true), plan, dy, w, c, dx, workspace);
    case Algorithm::kStem:
      return StemDgrad(ctx, p, plan, dy, w, dx, workspace);
    case Algorithm::kDirect:
      break;
  }
  return DirectDgrad(ctx, p, plan, dy, w, dx, workspace);
}

Status ConvWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace) {
  Algorithm algorithm;
  JAXCONV_RETURN_IF_ERROR(Refuse("conv_wgrad", p, plan, algorithm));
  if (SizeW(p) == 0) return Status::Ok();
  if (SizeX(p) == 0 || SizeY(p) == 0) return Zero(ctx, dw, SizeW(p), p.dtype, "conv_wgrad");
  switch (algorithm) {
    case Algorithm::kDepthwise:
      return DepthwiseWgrad(ctx, p, plan, x, dy, dw, workspace);
    case Algorithm::kGrouped:
      return GroupedWgrad(ctx, p, plan, x, dy, dw, workspace);
    case Algorithm::kIm2col:
      return Im2colWgrad(ctx, p, plan, x, dy, dw, workspace);
    case Algorithm::kImplicitGemm:
      return ImplicitGemmWgrad(ctx, FoldPatches(p, false), plan, x, dy, dw, workspace);
    case Algorithm::kWgmma:
      return WgmmaWgrad(ctx, FoldPatches(p, false), plan, x, dy, dw, workspace);
    case Algorithm::kStem:
      return StemWgrad(ctx, p, plan, x, dy, dw, workspace);
    case Algorithm::kDirect:
      break;
  }
  return DirectWgrad(ctx, p, plan, x, dy, dw, workspace);
}

}  // namespace jaxconv::cuda
