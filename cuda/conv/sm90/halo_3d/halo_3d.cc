// sm90/halo_3d on the host: a 3-D ConvProblem into a Halo3dProduct or a Halo3dWgrad.
#include "cuda/conv/sm90/halo_3d/halo_3d.h"

#include <algorithm>
#include <string>

#include "cuda/core/device.h"
#include "cuda/core/tma.h"

namespace jaxconv::cuda {
namespace {

// Columns [first, first + count) of images of c channels, as images of their own.
TmaTensor Columns(const ConvProblem& p, const void* images, int64_t c, const int64_t (&extent)[3],
                  int64_t first, int64_t count) {
  const int64_t row = c * extent[2], plane = row * extent[1];
  return {static_cast<const char*>(images) + first * c * int64_t(SizeOf(p.dtype)),
          5,
          {c, count, extent[1], extent[0], p.n},
          {1, c, row, plane, plane * extent[0]}};
}

// d (of `made` channels) from x (of `summed`). Axes are W, H, D; output q reads first + q + t * dilation.
Status Halo3d(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
              const void* x, const void* w, const void* bias, void* d, void* z,
              const std::string& what) {
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  const Halo3dWalk walk = Halo3dProductWalk(p, dgrad);
  Halo3dProduct g = {};
  g.channels = int(dgrad ? p.k : p.c);
  g.n = int(dgrad ? p.c : p.k);
  g.taps = int(p.filter[1] * p.filter[2]);
  const int row = Halo3dRow(g.channels);
  for (int i = 0; i < 3; ++i) g.made[i] = int(to[2 - i]);
  g.strips = int(walk.strips);
  g.row = walk.read.first[1];
  g.planes = int(from[0]);
  g.ahead = int(walk.pad[2]);
  g.pitch = int(walk.extent[0]);
  for (int tap = 0; tap < g.taps; ++tap) {
    const int64_t r = tap / p.filter[2], s = tap % p.filter[2];
    g.shift[tap] = int(r * walk.row_shift + s * p.dilation[2]);
  }
  const int64_t pixels = Halo3dBufferBytes(walk.reach, row) / row;
  g.dgrad = dgrad;
  g.images = int(p.n);
  g.w = w;
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
  for (int i = 0; i < g.strips; ++i) {
    const Halo3dStrip strip = walk.Strip(i);
    g.column[i] = strip.walk.first[0];
    JAXCONV_RETURN_IF_ERROR(
        EncodeIm2col(p.dtype, Columns(p, x, g.channels, from, strip.read, strip.span), strip.walk,
                     int(pixels), what + " x", &g.x[i], false, row));
  }
  return p.dtype == DType::kBF16 ? LaunchHalo3dProductBf16(ctx, g, device.multiprocessors, what)
                                 : LaunchHalo3dProductF16(ctx, g, device.multiprocessors, what);
}

}  // namespace

Status Halo3dFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                   const void* w, const void* bias, void* y, void* z, const std::string& what) {
  return Halo3d(ctx, p, false, e, x, w, bias, y, z, what);
}

Status Halo3dDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                   void* dx, const std::string& what) {
  const Epilogue none = {false, Activation::kNone, 0., false};
  return Halo3d(ctx, p, true, none, dy, w, nullptr, dx, nullptr, what);
}

Status Halo3dWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                     const void* dy, void* dw, Workspace workspace, const std::string& what) {
  const Halo3dWgradWalk walk = Halo3dWgradWalkOf(p);
  const Halo3dWalk& plane = walk.plane;
  Halo3dWgrad g = {};
  g.images = int(p.n);
  g.strips = int(plane.strips);
  g.pitch = int(plane.extent[0]);
  g.row = int(-p.pad[1]);
  g.planes = int(p.in[0]);
  g.ahead = int(p.pad[0]);
  g.made = int(p.out[0]);
  g.row_shift = int(plane.row_shift);
  g.column_shift = int(p.dilation[2]);
  g.channels = int(p.c);
  g.n = int(p.k);
  g.tiles = int(walk.tiles);
  g.x_bytes = int(Halo3dWgradBytes(2 * (g.row_shift + g.column_shift)));
  g.dy_bytes = int(Halo3dWgradBytes(2 * g.column_shift));
  g.x_buffers = walk.x_buffers;
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  g.parts = int(std::min(parts, p.n * plane.strips * walk.tiles * p.out[0]));
  for (int i = 0; i < g.strips; ++i) {
    const Halo3dStrip strip = plane.Strip(i);
    g.column[i] = strip.walk.first[0];
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, Columns(p, x, p.c, p.in, strip.read, strip.span),
                                         strip.walk, g.x_bytes / 64, what + " x", &g.x[i], false,
                                         64));
    JAXCONV_RETURN_IF_ERROR(
        EncodeIm2col(p.dtype, Columns(p, dy, p.k, p.out, strip.made, strip.width), walk.Made(p),
                     g.dy_bytes / 64, what + " dy", &g.dy[i], false, 64));
  }
  return p.dtype == DType::kBF16 ? LaunchHalo3dWgradBf16(ctx, g, what)
                                 : LaunchHalo3dWgradF16(ctx, g, what);
}

}  // namespace jaxconv::cuda
