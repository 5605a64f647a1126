// sm90/halo_stream on the host: a ConvProblem into a HaloStream.
#include "cuda/conv/sm90/halo_stream/halo_stream.h"

#include <algorithm>
#include <string>

#include "cuda/core/device.h"
#include "cuda/core/tma.h"

namespace jaxconv::cuda {
namespace {

Status Stream(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
              const void* x, const void* w, const void* bias, void* d, void* z,
              const std::string& what) {
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  const StreamWalk walk(p, dgrad);
  HaloStream g = {};
  g.channels = int(dgrad ? p.k : p.c);
  g.n = int(dgrad ? p.c : p.k);
  g.line = walk.line;
  g.phases = walk.phases;
  std::copy_n(walk.phase, walk.phases, g.phase);
  std::copy_n(walk.shift, walk.taps, g.shift);
  std::copy_n(walk.tap, walk.taps, g.tap);
  g.step[0] = int(dgrad ? p.stride[2] : 1);
  g.step[1] = int((dgrad ? p.stride[1] : 1) * to[2]);
  g.image = int(to[1] * to[2]);
  g.d = d;
  g.z = e.save_preactivation ? z : nullptr;
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  if (e.bias) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kColumn;
  }
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const int64_t c = g.channels;
  const TmaTensor image = {
      x, 4, {c, from[2], from[1], p.n}, {1, c, c * from[2], c * from[2] * from[1]}};
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, image, walk.walk,
                                       int(StreamSlotBytes(walk.reach) / 128), what + " x", &g.x));
  const TmaTensor filter = {w, 4, {p.k, 1, p.c, p.filter_size()}, {1, p.k, p.k, p.k * p.c}};
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, filter, {0, 1, dgrad ? kStreamMade : 64, 1}, what + " w", &g.w));
  return p.dtype == DType::kBF16
             ? LaunchHaloStreamBf16(ctx, g, dgrad, int(walk.reach), device.multiprocessors, what)
             : LaunchHaloStreamF16(ctx, g, dgrad, int(walk.reach), device.multiprocessors, what);
}

}  // namespace

Status HaloStreamFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                       const void* w, const void* bias, void* y, void* z, const std::string& what) {
  return Stream(ctx, p, false, e, x, w, bias, y, z, what);
}

Status HaloStreamDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                       void* dx, const std::string& what) {
  const Epilogue none = {false, Activation::kNone, 0., false};
  return Stream(ctx, p, true, none, dy, w, nullptr, dx, nullptr, what);
}

}  // namespace jaxconv::cuda
