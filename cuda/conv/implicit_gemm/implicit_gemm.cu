// Implicit GEMM on the host: a ConvProblem into extents, gathers and grids; the domain in
// sentences.
#include "cuda/conv/implicit_gemm/implicit_gemm.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>

#include "cuda/conv/implicit_gemm/instances.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {
namespace {

constexpr int64_t kCoordinateLimit = int64_t(1) << 30;

Status Check(const ConvProblem& p, const Plan& plan, int64_t max_splits, const std::string& what) {
  const auto no = [&](const std::string& why) { return Status::Unimplemented(what + ": " + why); };
  if (plan.kernel != "implicit_gemm") {
    return Status::Internal(what + ": called for algorithm \"" + std::string(plan.kernel) + "\"");
  }
  if (!p.channels_last) return no("implicit_gemm needs channels-last arrays, given channels-first");
  if (p.dtype == DType::kF64) return no("no float64 on a GPU");
  if (plan.splits < 1 || plan.splits > max_splits) {
    return Status::Invalid(what + ": splits=" + std::to_string(plan.splits) + " must be in [1, " +
                           std::to_string(max_splits) + "]");
  }
  const auto bounded = [](double value, int64_t limit) { return value <= double(limit); };
  const double taps = double(p.filter[0]) * double(p.filter[1]) * double(p.filter[2]);
  if (!bounded(double(p.n) * double(p.out[0]) * double(p.out[1]) * double(p.out[2]), kMaxExtent) ||
      !bounded(double(p.n) * double(p.in[0]) * double(p.in[1]) * double(p.in[2]), kMaxExtent)) {
    return no("N*D*H*W and N*O*P*Q must be at most " + std::to_string(kMaxExtent) + " pixels");
  }
  if (!bounded(taps * double(std::max(p.group_c(), p.group_k())), kMaxExtent) ||
      !bounded(double(std::max(p.c, p.k)), kMaxExtent)) {
    return no("T*R*S*max(C, K)/groups, C and K must be at most " + std::to_string(kMaxExtent));
  }
  for (int i = 0; i < 3; ++i) {
    const double reach = std::max<double>(double(p.out[i]) * double(p.stride[i]) +
                                              double(p.filter[i]) * double(p.dilation[i]) +
                                              double(std::llabs(p.pad[i])),
                                          double(p.in[i]) + double(p.stride[i]));
    if (!bounded(reach, kCoordinateLimit - 1)) {
      return no(
          "out*stride + filter*dilation + |pad| and in + stride must be below 2^30 on spatial "
          "axis " +
          std::to_string(i) + ", given " + std::to_string(reach));
    }
  }
  return Status::Ok();
}

std::string Describe(const char* op, const ConvProblem& p, Tile tile, const Plan& plan) {
  return std::string(op) + "[implicit_gemm " + Name(p.dtype) +
         (p.dtype == DType::kF32 ? (p.full_float32 ? " full" : " tf32") : "") + " " + Name(tile) +
         " splits=" + std::to_string(plan.splits) + "]";
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
    g.taps[i] = int(std::max<int64_t>(p.filter[i], 1));
  }
  g.channels = int(std::max<int64_t>(p.group_c(), 1));
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
                         const Plan& plan, const void* x, const void* w, const void* bias, void* y,
                         void* z, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 1, "conv_fprop"));
  const int64_t pixels = p.n * p.out_size();
  Tile tile;
  JAXCONV_RETURN_IF_ERROR(
      ChooseTile(plan.tile, pixels, p.group_k(), p.groups, "conv_fprop", &tile));
  if (pixels == 0 || p.k == 0) return Status::Ok();

  ConvLaunch<FpropParams> launch;
  const int64_t k = p.filter_size() * p.group_c();
  launch.grid = Grid{int(pixels), int(p.group_k()), int(k), 0,
                     0,           int(p.groups),    1,      int(Up(k, TileKOf(p.dtype)))};
  launch.grid.stride_a = p.group_c();
  launch.grid.stride_b = p.group_k();
  launch.view = {InputGather(p), p.k};
  launch.a = x;
  launch.b = w;
  launch.vector_a = Aligned16(x) && Whole(p.group_c(), p.dtype);
  launch.vector_b = Aligned16(w) && Whole(p.group_k(), p.dtype);
  launch.tile = launch.vector_b ? tile : kElementTile;

  EpilogueParams& out = launch.epilogue;
  out.d = y;
  out.z = e.save_preactivation ? z : nullptr;
  out.ldd = p.k;
  out.stride_d = p.group_k();
  if (e.bias) {
    out.bias = bias;
    out.bias_kind = BiasKind::kColumn;
    out.stride_bias = p.group_k();
  }
  out.activation = e.activation;
  out.slope = float(e.slope);
  out.vector = Aligned16(y) && Aligned16(out.z) && Whole(p.group_k(), p.dtype);
  return JAXCONV_LAUNCH_IMPLICIT(Fprop, p, ctx, launch,
                                 Describe("conv_fprop", p, launch.tile, plan));
}

Status ImplicitGemmDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                         const void* w, void* dx, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 1, "conv_dgrad"));
  int64_t rows = p.n, phases = 1;  // of the largest phase
  for (int i = 0; i < 3; ++i) {
    rows *= CeilDiv(p.in[i], p.stride[i]);
    phases *= std::min(p.stride[i], p.in[i]);
  }
  if (rows == 0 || p.c == 0) return Status::Ok();
  if (phases > kMaxExtent) {
    return Status::Unimplemented("conv_dgrad: implicit_gemm has one phase per stride residue, " +
                                 std::to_string(phases) + " is too many");
  }
  Tile tile;
  JAXCONV_RETURN_IF_ERROR(
      ChooseTile(plan.tile, rows, p.group_c(), p.groups * phases, "conv_dgrad", &tile));

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
    view.axis[i] = {
        int(p.in[i]),
        p.k == 0 ? 0 : int(p.filter[i]),  // without output channels no tap reaches anything
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
  view.channels = int(std::max<int64_t>(p.group_k(), 1));
  view.pitch = p.k;
  launch.a = dy;
  launch.b = w;
  launch.vector_a = launch.vector_b = Aligned16(dy) && Aligned16(w) && Whole(p.group_k(), p.dtype);
  launch.tile = launch.vector_b ? tile : kElementTile;
  EpilogueParams& out = launch.epilogue;
  out.d = dx;
  out.ldd = p.c;
  out.stride_d = p.group_c();
  out.vector = Aligned16(dx) && Whole(p.group_c(), p.dtype);
  return JAXCONV_LAUNCH_IMPLICIT(Dgrad, p, ctx, launch,
                                 Describe("conv_dgrad", p, launch.tile, plan));
}

Status ImplicitGemmWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                         const void* dy, void* dw, Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 65535, "conv_wgrad"));
  const int64_t m = p.filter_size() * p.group_c();
  const int64_t pixels = p.n * p.out_size();
  Tile tile;
  JAXCONV_RETURN_IF_ERROR(
      ChooseTile(plan.tile, m, p.group_k(), p.groups * plan.splits, "conv_wgrad", &tile));
  if (m == 0 || p.k == 0) return Status::Ok();

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
  for (int& rows : launch.view.gather.rows) rows = std::max(rows, 1);  // no pixels: nothing is read
  launch.a = x;
  launch.b = dy;
  launch.vector_a = Aligned16(x) && Whole(p.group_c(), p.dtype);
  launch.vector_b = Aligned16(dy) && Whole(p.group_k(), p.dtype);
  launch.tile = launch.vector_b ? tile : kElementTile;
  const std::string what = Describe("conv_wgrad", p, launch.tile, plan);

  EpilogueParams out;
  out.d = dw;
  out.ldd = p.k;
  out.stride_d = p.group_k();
  out.vector = Aligned16(dw) && Whole(p.group_k(), p.dtype);
  launch.epilogue = out;
  if (plan.splits == 1) return JAXCONV_LAUNCH_IMPLICIT(Wgrad, p, ctx, launch, what);

  const double needed = double(plan.splits) * double(m) * double(p.k) * 4;
  if (double(workspace.bytes) < needed) {
    return Status::Invalid(what + ": needs a workspace of " + std::to_string(int64_t(needed)) +
                           " bytes (splits * T*R*S * C/G * K * 4), given " +
                           std::to_string(workspace.bytes));
  }
  launch.epilogue.d = workspace.data;
  launch.epilogue.part_stride = m * p.k;
  launch.epilogue.float32_out = true;
  launch.epilogue.vector = Aligned16(workspace.data) && Whole(p.group_k(), p.dtype);
  JAXCONV_RETURN_IF_ERROR(JAXCONV_LAUNCH_IMPLICIT(Wgrad, p, ctx, launch, what));

  out.stride_d = 0;  // all groups at once: the partial sums lie as dw does
  return LaunchSplitSum(
      ctx, p.dtype, {static_cast<const float*>(workspace.data), plan.splits, 1, m, p.k}, out, what);
}

}  // namespace jaxconv::cuda
