// Tile "planes" on the host: a 3-D ConvProblem into a PlanesProduct.
#include <algorithm>
#include <string>

#include "cuda/conv/sm90/halo_3d/halo_3d.h"
#include "cuda/core/tma.h"

namespace jaxconv::cuda {
namespace {

// d (of `made` channels) from x (of `summed`). Axes are W, H, D; output q reads first + q + t * dilation.
Status Planes(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
              const void* x, const void* w, const void* bias, void* d, void* z,
              const std::string& what) {
  const auto no = [&](const std::string& why) {
    return Status::Unimplemented(what + ": tile \"planes\" " + why);
  };
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return no("needs bfloat16 or float16");
  if (p.groups != 1) return no("takes no groups");
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1) return no("needs stride 1");
  if (p.filter[0] != 3 || p.dilation[0] != 1) return no("needs three planes of taps, not dilated");
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  PlanesProduct g = {};
  g.channels = int(dgrad ? p.k : p.c);
  g.n = int(dgrad ? p.c : p.k);
  if (g.channels > 64) return no("sums over at most 64 channels");
  g.taps = int(p.filter[1] * p.filter[2]);
  if (p.filter[1] * p.filter[2] > kPlanesTaps) {
    return no("takes at most " + std::to_string(kPlanesTaps) + " taps in a plane");
  }
  const int row = PlanesRow(g.channels);
  TmaWalk walk;
  int64_t pad[3], extent[3];
  for (int i = 0; i < 3; ++i) {
    const int at = 2 - i;
    const int64_t window = (p.filter[at] - 1) * p.dilation[at];
    pad[i] = dgrad ? window - p.pad[at] : p.pad[at];
    g.made[i] = int(to[at]);
    if (i == 2) break;
    if (pad[i] < 0) return no("takes no negative padding of rows and columns");
    const int64_t high = to[at] - 1 + window - pad[i] - (from[at] - 1);
    extent[i] = std::max(from[at] + std::max(pad[i], high), to[at]);
    walk.first[i] = g.first[i] = int(-pad[i]);
    walk.count[i] = int(extent[i]);
    walk.step[i] = 1;
  }
  walk.first[2] = 0;
  walk.count[2] = g.planes = int(from[0]);
  walk.step[2] = 1;
  if (pad[2] > 2) return no("has no outputs that read no plane");
  g.ahead = int(pad[2]);
  g.pitch = int(extent[0]);
  for (int tap = 0; tap < g.taps; ++tap) {
    const int64_t r = tap / p.filter[2], s = tap % p.filter[2];
    const int64_t shift = r * p.dilation[1] * extent[0] + s * p.dilation[2];
    g.shift[tap] = int(std::min<int64_t>(shift, 1 << 20));
  }
  const int64_t reach = g.shift[g.taps - 1];
  const int64_t pixels = PlanesBufferBytes(reach, row) / row;
  if (pixels > 1024 || PlanesShared(g.taps, reach, row, 2) > kPlanesShared) {
    return no("has no room for this filter's reach in shared memory");
  }
  if (double(p.n) * double(extent[0]) * double(extent[1]) * double(to[0]) > double(1 << 30)) {
    return no("takes at most 2^30 places");
  }
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
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  const int64_t c = g.channels;
  const TmaTensor tensor = {
      x,
      5,
      {c, from[2], from[1], from[0], p.n},
      {1, c, c * from[2], c * from[2] * from[1], c * from[2] * from[1] * from[0]}};
  const int none[3] = {};
  const std::string refusal = RefuseWalk(5, tensor.extent, walk, none);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  JAXCONV_RETURN_IF_ERROR(
      EncodeIm2col(p.dtype, tensor, walk, int(pixels), what + " x", &g.x, false, row));
  return p.dtype == DType::kBF16 ? LaunchPlanesProductBf16(ctx, g, multiprocessors, what)
                                 : LaunchPlanesProductF16(ctx, g, multiprocessors, what);
}

}  // namespace

Status PlanesFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                   const void* w, const void* bias, void* y, void* z, const std::string& what) {
  return Planes(ctx, p, false, e, x, w, bias, y, z, what);
}

Status PlanesDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                   void* dx, const std::string& what) {
  const Epilogue none = {false, Activation::kNone, 0., false};
  return Planes(ctx, p, true, none, dy, w, nullptr, dx, nullptr, what);
}

Status PlanesWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                     const void* dy, void* dw, Workspace workspace, const std::string& what) {
  const auto no = [&](const std::string& why) {
    return Status::Unimplemented(what + ": tile \"planes\" " + why);
  };
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return no("needs bfloat16 or float16");
  if (p.groups != 1) return no("takes no groups");
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1) return no("needs stride 1");
  if (p.filter[0] != 3 || p.filter[1] != 3 || p.filter[2] != 3 || p.dilation[0] != 1) {
    return no("needs a 3 x 3 x 3 filter, its planes not dilated");
  }
  if (p.pad[0] > 2) return no("has no outputs that read no plane");
  if (p.pad[1] < 0 || p.pad[2] < 0) return no("takes no negative padding of rows and columns");
  PlanesWgrad g = {};
  const int64_t high = p.out[2] - 1 + 2 * p.dilation[2] - p.pad[2] - (p.in[2] - 1);
  const int64_t pitch = std::max(p.in[2] + std::max(p.pad[2], high), p.out[2]);
  const int64_t row_shift = std::min<int64_t>(p.dilation[1] * pitch, 1 << 16);
  const int64_t column_shift = p.dilation[2];
  const int64_t x_bytes = (kPlanesWgradPlaces + 2 * (row_shift + column_shift) + 15) / 16 * 16 * 64;
  const int64_t dy_bytes = (kPlanesWgradPlaces + 2 * column_shift + 15) / 16 * 16 * 64;
  if (x_bytes > 1024 * 64 || 2 * column_shift > pitch ||
      PlanesWgradShared(row_shift, column_shift, 3) > kPlanesShared) {
    return no("has no room for this filter's reach in shared memory");
  }
  g.images = int(p.n);
  g.pitch = int(pitch);
  g.first[0] = int(-p.pad[2]);
  g.first[1] = int(-p.pad[1]);
  g.planes = int(p.in[0]);
  g.ahead = int(p.pad[0]);
  g.made = int(p.out[0]);
  g.row_shift = int(row_shift);
  g.column_shift = int(column_shift);
  g.channels = int(p.c);
  g.n = int(p.k);
  // dy is read up to two columns before a place.
  g.tiles =
      int((p.out[1] * pitch + 2 * column_shift + kPlanesWgradPlaces - 1) / kPlanesWgradPlaces);
  const double total = double(p.n) * g.tiles * double(p.out[0]);
  if (total * kPlanesWgradPlaces > double(1 << 30)) return no("takes at most 2^30 places");
  g.x_bytes = int(x_bytes);
  g.dy_bytes = int(dy_bytes);
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  g.parts = int(std::min<int64_t>(parts, int64_t(total)));
  // Rows past the last output's are zeros of both, not those of the next plane.
  const int rows = int((int64_t(g.tiles) * kPlanesWgradPlaces + pitch - 1) / pitch);
  TmaWalk read, made;
  read.first[0] = g.first[0], read.first[1] = g.first[1], read.first[2] = 0;
  read.count[0] = int(pitch), read.count[1] = rows + int(2 * p.dilation[1]) + 2;
  read.count[2] = int(p.in[0]);
  made.first[0] = 0, made.first[1] = -1, made.first[2] = 0;
  made.count[0] = int(pitch), made.count[1] = rows + 2, made.count[2] = int(p.out[0]);
  for (int i = 0; i < 3; ++i) read.step[i] = made.step[i] = 1;
  const auto image = [&](const void* base, int64_t c, const int64_t (&extent)[3]) {
    return TmaTensor{
        base,
        5,
        {c, extent[2], extent[1], extent[0], p.n},
        {1, c, c * extent[2], c * extent[2] * extent[1], c * extent[2] * extent[1] * extent[0]}};
  };
  const TmaTensor source = image(x, p.c, p.in), out = image(dy, p.k, p.out);
  const int none[3] = {};
  std::string refusal = RefuseWalk(5, source.extent, read, none);
  if (refusal.empty()) refusal = RefuseWalk(5, out.extent, made, none);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  JAXCONV_RETURN_IF_ERROR(
      EncodeIm2col(p.dtype, source, read, int(x_bytes / 64), what + " x", &g.x, false, 64));
  JAXCONV_RETURN_IF_ERROR(
      EncodeIm2col(p.dtype, out, made, int(dy_bytes / 64), what + " dy", &g.dy, false, 64));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  return p.dtype == DType::kBF16 ? LaunchPlanesWgradBf16(ctx, g, workspace.bytes, what)
                                 : LaunchPlanesWgradF16(ctx, g, workspace.bytes, what);
}

}  // namespace jaxconv::cuda
