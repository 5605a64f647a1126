// sm90/halo on the host: a ConvProblem into a HaloProduct or a HaloWgrad.
#include "cuda/conv/sm90/halo/halo.h"

#include <algorithm>
#include <string>

#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda {
namespace {

// d (of `made` channels) from x (of `summed`), fprop or dgrad of stride 1. `dbias`: not null where c is what e's derivative is
// computed from, `norm` where c is what a batch-norm in front of e's activation was given; else c is added, or null.
Status HaloForward(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                   const void* x, const void* w, const void* bias, const void* c, void* d, void* z,
                   void* dbias, const HaloNorm* norm, Workspace workspace,
                   const std::string& what) {
  const bool tf32 = p.dtype == DType::kF32;
  const int places = tf32 ? kHaloTf32Places : kHaloPlaces;
  const HaloWalk walk(p, dgrad);
  HaloProduct g = {};
  g.line = walk.line;
  g.channels = int(dgrad ? p.group_k() : p.group_c());
  g.n = int(dgrad ? p.group_c() : p.group_k());
  g.taps = int(p.filter_size());
  for (int tap = 0; tap < g.taps; ++tap) {
    int64_t rest = tap, shift = 0;
    for (int i = 0; i < 3; ++i) {
      shift += rest % p.filter[2 - i] * walk.shift[i];
      rest /= p.filter[2 - i];
    }
    g.shift[tap] = int(shift);
  }
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  g.flip = dgrad;
  g.instances = int(p.groups);
  g.tiles = int((g.line.places + places - 1) / places);
  if (dbias == nullptr && norm == nullptr) {
    g.epilogue.activation = e.activation;
    g.epilogue.slope = float(e.slope);
  } else {
    g.derivative = DerivativePieces(e.activation, e.slope);
    g.parts = static_cast<float*>(workspace.data);
  }
  if (e.bias) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kRow;
    g.epilogue.stride_bias = g.n;
  }
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  const int rank = g.line.rank;
  const TmaTensor source = ImageTensor(x, rank, g.channels * p.groups, from, p.n);
  g.d = d;
  g.c = c;
  g.z = e.save_preactivation ? z : nullptr;
  for (int i = 0; i < 3; ++i) g.made[i] = int(to[2 - i]);
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, source, walk.read,
                                       int(HaloBufferBytes(places, walk.reach) / 128), what + " x",
                                       &g.x, tf32));
  if (tf32 && !dgrad) {
    JAXCONV_RETURN_IF_ERROR(TransposeFloats(ctx, g.taps, p.group_c(), p.k, what, &w, &workspace));
  }
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, tf32 && !dgrad ? TransposedFilterTensor(p, w) : FilterTensor(p, w, 1),
                  {0, 1, 64, 1}, what + " w", &g.w, tf32));
  if (norm != nullptr) {
    g.norm = *norm;
    return LaunchHaloNormGradientTf32(ctx, g, device.multiprocessors, what);
  }
  if (dbias != nullptr) {
    const auto launch = tf32                      ? LaunchHaloGradientTf32
                        : p.dtype == DType::kBF16 ? LaunchHaloGradientBf16
                                                  : LaunchHaloGradientF16;
    return launch(ctx, g, dbias, device.multiprocessors, what);
  }
  if (tf32) return LaunchHaloProductTf32(ctx, g, device.multiprocessors, what);
  return p.dtype == DType::kBF16
             ? LaunchHaloProductBf16(ctx, g, dgrad, device.multiprocessors, what)
             : LaunchHaloProductF16(ctx, g, dgrad, device.multiprocessors, what);
}

}  // namespace

Status HaloFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                 const void* w, const void* bias, const void* residual, void* y, void* z,
                 Workspace workspace, const std::string& what) {
  return HaloForward(ctx, p, false, e, x, w, bias, residual, y, z, nullptr, nullptr, workspace,
                     what);
}

// dx[h] sums dy[h + pad - t * dilation]: taps backwards, from h + pad - (taps - 1) * dilation on.
Status HaloDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                 const void* c, void* dx, const std::string& what) {
  const Epilogue none = {false, Activation::kNone, 0., false};
  return HaloForward(ctx, p, true, none, dy, w, nullptr, c, dx, nullptr, nullptr, nullptr, {},
                     what);
}

Status HaloGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* dy,
                    const void* w, const void* kept, void* dz, void* dbias, Workspace workspace,
                    const std::string& what) {
  const Epilogue back = {false, e.activation, e.slope, false};
  return HaloForward(ctx, p, true, back, dy, w, nullptr, kept, dz, nullptr, dbias, nullptr,
                     workspace, what);
}

Status HaloNormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* dy,
                        const void* w, const void* x, const HaloNorm& norm, void* dz,
                        Workspace workspace, const std::string& what) {
  const Epilogue back = {false, e.activation, e.slope, false};
  return HaloForward(ctx, p, true, back, dy, w, nullptr, x, dz, nullptr, nullptr, &norm, workspace,
                     what);
}

Status HaloWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                   const void* dy, void* dw, Workspace workspace, const std::string& what) {
  const HaloWalk walk(p, false);
  HaloWgrad g = {};
  g.line = walk.line;
  g.row_shift = int(walk.shift[1]);
  g.column_shift = int(p.dilation[2]);
  g.instances = int(p.groups);
  g.channels = int(p.group_c());
  g.n = int(p.group_k());
  g.pitch = p.k;
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  g.steps = int((g.line.places + kHaloStep - 1) / kHaloStep);
  g.parts = int(std::min<int64_t>(parts, g.steps));
  const int rank = g.line.rank;
  const TmaTensor source = ImageTensor(x, rank, p.c, p.in, p.n);
  const TmaTensor out = ImageTensor(dy, rank, p.k, p.out, p.n);
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, source, walk.read,
                                       int(HaloBufferBytes(kHaloStep, walk.reach) / 128),
                                       what + " x", &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, out, walk.made, kHaloStep, what + " dy", &g.dy));
  return p.dtype == DType::kBF16 ? LaunchHaloWgradBf16(ctx, g, what)
                                 : LaunchHaloWgradF16(ctx, g, what);
}

}  // namespace jaxconv::cuda
