// Implicit GEMM on the host: a ConvProblem into extents, gathers and grids.
#include "cuda/conv/implicit_gemm/implicit_gemm.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "cuda/conv/implicit_gemm/domain.h"
#include "cuda/conv/implicit_gemm/instances.h"
#include "cuda/core/describe.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {
namespace {

// Of a plan that conv.cu has confirmed.
Tile TileOf(const Plan& plan) {
  return plan.tile == Name(Tile::k128x128)  ? Tile::k128x128
         : plan.tile == Name(Tile::k128x64) ? Tile::k128x64
                                            : Tile::k64x64;
}

bool Whole(int64_t count, DType dtype) { return count * int64_t(SizeOf(dtype)) % 16 == 0; }

int64_t TileKOf(DType dtype) { return kTileKBytes / int64_t(SizeOf(dtype)); }

int64_t Up(int64_t count, int64_t multiple) { return CeilDiv(count, multiple) * multiple; }

// x as fprop and wgrad read it.
Gather InputGather(const ConvProblem& p) {
  Gather g;
  for (int i = 0; i < 3; ++i) {
    g.source[i] = int(p.in[i]);
    g.rows[i] = int(p.out[i]);
    g.row_step[i] = int(p.stride[i]);
    g.origin[i] = int(-p.pad[i]);
    g.tap_step[i] = int(p.dilation[i]);
    g.taps[i] = int(p.filter[i]);
  }
  g.channels = int(p.group_c());
  g.pitch = p.c;
  SetTileK(g, int(TileKOf(p.dtype)));
  return g;
}

// The inverse of a modulo n, both positive and coprime; 0 if n is 1.
int64_t Inverse(int64_t a, int64_t n) {
  int64_t r0 = n, r1 = a % n, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t q = r0 / r1;
    std::swap(r0 -= q * r1, r1);
    std::swap(t0 -= q * t1, t1);
  }
  return ((t0 % n) + n) % n;
}

#define JAXCONV_LAUNCH_IMPLICIT(Op, p, ctx, launch, what)              \
  ((p).dtype == DType::kBF16  ? Launch##Op##Bf16(ctx, launch, what)    \
   : (p).dtype == DType::kF16 ? Launch##Op##F16(ctx, launch, what)     \
   : (p).full_float32         ? Launch##Op##Float32(ctx, launch, what) \
                              : Launch##Op##Tf32(ctx, launch, what))

}  // namespace

Status ImplicitGemmFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                         const Plan& plan, const void* x, const void* w, const void* bias,
                         const void* residual, void* y, void* z, Workspace) {
  const int64_t pixels = p.n * p.out_size();
  ConvLaunch<FpropParams> launch;
  const int64_t k = p.filter_size() * p.group_c();
  launch.grid = Grid{int(pixels), int(p.group_k()), int(k), 0,
                     0,           int(p.groups),    1,      int(Up(k, TileKOf(p.dtype)))};
  launch.grid.stride_a = p.group_c();
  launch.grid.stride_b = p.group_k();
  launch.view = {InputGather(p), p.k};
  launch.a = x;
  launch.b = w;
  launch.vector_a = Whole(p.group_c(), p.dtype);
  launch.vector_b = Whole(p.group_k(), p.dtype);
  launch.tile = TileOf(plan);

  EpilogueParams& out = launch.epilogue;
  out.d = y;
  out.z = e.save_preactivation ? z : nullptr;
  out.ldd = p.k;
  out.stride_d = p.group_k();
  if (residual != nullptr) {
    out.c = residual;
    out.ldc = p.k;
    out.stride_c = p.group_k();
    out.beta = 1.f;
  }
  if (e.bias) {
    out.bias = bias;
    out.bias_kind = BiasKind::kColumn;
    out.stride_bias = p.group_k();
  }
  out.activation = e.activation;
  out.slope = float(e.slope);
  out.vector = Whole(p.group_k(), p.dtype);
  return JAXCONV_LAUNCH_IMPLICIT(Fprop, p, ctx, launch, Describe("conv_fprop", p, plan));
}

Status ImplicitGemmDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                         const void* w, void* dx, Workspace) {
  int64_t rows = p.n, phases = 1;  // of the largest phase
  for (int i = 0; i < 3; ++i) {
    rows *= CeilDiv(p.in[i], p.stride[i]);
    phases *= std::min(p.stride[i], p.in[i]);
  }
  ConvLaunch<DgradParams> launch;
  const int64_t k = p.filter_size() * p.group_k();
  launch.grid = Grid{int(rows), int(p.group_c()), int(k),      0,
                     0,         int(p.groups),    int(phases), int(Up(k, TileKOf(p.dtype)))};
  launch.grid.stride_a = p.group_k();
  launch.grid.stride_b = p.group_k();
  DgradParams& view = launch.view;
  int64_t pitch = p.group_c() * p.k;  // between neighbouring taps
  for (int i = 2; i >= 0; --i) {
    const int64_t gcd = std::gcd(p.stride[i], p.dilation[i]);
    view.axis[i] = {int(p.in[i]),
                    int(p.filter[i]),
                    int(p.stride[i]),
                    int(p.pad[i]),
                    int(p.dilation[i]),
                    int(gcd),
                    int(Inverse(p.dilation[i] / gcd, p.stride[i] / gcd)),
                    int(std::min(p.stride[i], p.in[i]))};
    view.source[i] = int(p.out[i]);
    view.filter[i] = pitch;
    pitch *= p.filter[i];
  }
  view.images = int(p.n);
  view.channels = int(p.group_k());
  view.pitch = p.k;
  launch.a = dy;
  launch.b = w;
  launch.vector_a = launch.vector_b = Whole(p.group_k(), p.dtype);
  launch.tile = TileOf(plan);
  EpilogueParams& out = launch.epilogue;
  out.d = dx;
  out.ldd = p.c;
  out.stride_d = p.group_c();
  out.vector = Whole(p.group_c(), p.dtype);
  return JAXCONV_LAUNCH_IMPLICIT(Dgrad, p, ctx, launch, Describe("conv_dgrad", p, plan));
}

Status ImplicitGemmWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* dy, void* dw, Workspace workspace) {
  const int64_t m = p.filter_size() * p.group_c();
  const int64_t pixels = p.n * p.out_size();
  ConvLaunch<WgradParams> launch;
  launch.grid = Grid{int(m),
                     int(p.group_k()),
                     int(pixels),
                     0,
                     0,
                     int(p.groups),
                     int(plan.splits),
                     int(Up(CeilDiv(pixels, plan.splits), TileKOf(p.dtype)))};
  launch.grid.stride_a = p.group_c();
  launch.grid.stride_b = p.group_k();
  launch.view = {InputGather(p), p.k};
  launch.a = x;
  launch.b = dy;
  launch.vector_a = Whole(p.group_c(), p.dtype);
  launch.vector_b = Whole(p.group_k(), p.dtype);
  launch.tile = TileOf(plan);
  const std::string what = Describe("conv_wgrad", p, plan);

  EpilogueParams out;
  out.d = dw;
  out.ldd = p.k;
  out.stride_d = p.group_k();
  out.vector = Whole(p.group_k(), p.dtype);
  launch.epilogue = out;
  if (plan.splits == 1) return JAXCONV_LAUNCH_IMPLICIT(Wgrad, p, ctx, launch, what);

  launch.epilogue.d = workspace.data;
  launch.epilogue.part_stride = m * p.k;
  launch.epilogue.float32_out = true;
  JAXCONV_RETURN_IF_ERROR(JAXCONV_LAUNCH_IMPLICIT(Wgrad, p, ctx, launch, what));

  out.stride_d = 0;  // all groups at once: the partial sums lie as dw does
  return LaunchSplitSum(
      ctx, p.dtype, {static_cast<const float*>(workspace.data), plan.splits, 1, m, p.k}, out, what);
}

}  // namespace jaxconv::cuda
