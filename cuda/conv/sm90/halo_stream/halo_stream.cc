// Tile "128x128h" on the host: a ConvProblem into a HaloStream.
#include <algorithm>
#include <numeric>
#include <string>

#include "cuda/conv/common/gather.h"  // the phases of a dgrad
#include "cuda/conv/sm90/halo_stream/halo_stream.h"
#include "cuda/core/tma.h"

namespace jaxconv::cuda {
namespace {

// One axis of a phase: place q reads first + q + t * between.
struct PhaseAxis {
  int64_t first, between;
  int taps, made;
  int tap, tap_step;  // filter index of tap 0, and to the next
  int residue;        // its pixels are residue + q * stride
};

// axes: of each axis (W, H) one or, for a strided dgrad, several residues' phases.
Status Stream(const Context& ctx, const ConvProblem& p, bool dgrad, const PhaseAxis (&axes)[2][8],
              const int (&residues)[2], const Epilogue& e, const void* x, const void* w,
              const void* bias, void* d, void* z, const std::string& what) {
  const auto no = [&](const std::string& why) {
    return Status::Unimplemented(what + ": tile \"128x128h\" " + why);
  };
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  HaloStream g = {};
  g.channels = int(dgrad ? p.k : p.c);
  g.n = int(dgrad ? p.c : p.k);
  g.line.rank = 4;
  g.line.places = p.n;
  g.line.extent[2] = 1;
  TmaWalk walk;
  int64_t lowest[2];
  for (int i = 0; i < 2; ++i) {
    int64_t low = 0, high = 0, made = 1;
    for (int j = 0; j < residues[i]; ++j) {
      const PhaseAxis& a = axes[i][j];
      if (a.taps == 0) continue;
      low = std::min(low, a.first);
      high = std::max(high, a.first + (a.taps - 1) * a.between + a.made - from[2 - i]);
    }
    for (int j = 0; j < residues[i]; ++j) made = std::max<int64_t>(made, axes[i][j].made);
    lowest[i] = low;
    const int64_t extent = std::max(from[2 - i] + std::max(-low, high), made);
    g.line.extent[i] = walk.count[i] = int(extent);
    g.line.first[i] = walk.first[i] = int(low);
    walk.step[i] = 1;
    g.line.places *= extent;
  }
  int64_t reach = 0;
  int used = 0;
  for (int h = 0; h < residues[1]; ++h) {
    for (int v = 0; v < residues[0]; ++v) {
      const PhaseAxis &a = axes[0][v], &b = axes[1][h];
      StreamPhase& phase = g.phase[g.phases++];
      phase.first = used;
      phase.taps = a.taps * b.taps;
      phase.made[0] = a.made;
      phase.made[1] = b.made;
      phase.offset = int(b.residue * to[2] + a.residue);
      for (int r = 0; r < b.taps; ++r) {
        for (int s = 0; s < a.taps; ++s) {
          if (used == kStreamTaps) {
            return no("takes at most " + std::to_string(kStreamTaps) + " taps");
          }
          const int64_t shift = (b.first + r * b.between - lowest[1]) * g.line.extent[0] + a.first +
                                s * a.between - lowest[0];
          reach = std::max(reach, shift);
          g.shift[used] = int(std::min<int64_t>(shift, 1 << 20));
          g.tap[used++] = a.tap + s * a.tap_step + (b.tap + r * b.tap_step) * int(p.filter[2]);
        }
      }
    }
  }
  if (g.line.places > (int64_t(1) << 31) - 4096) return no("takes at most 2^31 places");
  const int blocks_k = (g.channels + 63) / 64;
  const int64_t columns = StreamSlotBytes(reach) / 128;
  if (columns > 1024 || blocks_k > kStreamSlots || StreamShared(reach, blocks_k, 3) > kHaloShared) {
    return no("has no room for this filter's reach in shared memory");
  }
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
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  const int64_t c = g.channels;
  const TmaTensor image = {
      x, 4, {c, from[2], from[1], p.n}, {1, c, c * from[2], c * from[2] * from[1]}};
  const int none[3] = {};
  const std::string refusal = RefuseWalk(4, image.extent, walk, none);
  if (!refusal.empty()) return Status::Unimplemented(what + ": " + refusal);
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, image, walk, int(columns), what + " x", &g.x));
  const TmaTensor filter = {w, 4, {p.k, 1, p.c, p.filter_size()}, {1, p.k, p.k, p.k * p.c}};
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, filter, {0, 1, dgrad ? kStreamMade : 64, 1}, what + " w", &g.w));
  return p.dtype == DType::kBF16
             ? LaunchHaloStreamBf16(ctx, g, dgrad, int(reach), multiprocessors, what)
             : LaunchHaloStreamF16(ctx, g, dgrad, int(reach), multiprocessors, what);
}

Status Check(const ConvProblem& p, bool strides, const std::string& what) {
  const auto no = [&](const std::string& why) {
    return Status::Unimplemented(what + ": tile \"128x128h\" " + why);
  };
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return no("needs bfloat16 or float16");
  if (p.groups != 1) return no("takes no groups");
  if (p.in[0] != 1 || p.out[0] != 1 || p.filter[0] != 1) return no("takes at most two axes");
  if (!strides && p.stride[1] * p.stride[2] != 1) return no("takes strides in dgrad only");
  if (p.stride[1] * p.stride[2] > kStreamPhases) return no("takes at most 8 phases");
  return Status::Ok();
}

// The inverse of a modulo n, both positive and coprime; 0 if n is 1.
int64_t Inverse(int64_t a, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    if (a % n * i % n == 1) return i;
  }
  return 0;
}

}  // namespace

Status StreamFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                   const void* w, const void* bias, void* y, void* z, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(Check(p, false, what));
  PhaseAxis axes[2][8];
  for (int i = 0; i < 2; ++i) {
    const int d = 2 - i;
    if (p.pad[d] < 0) return Status::Unimplemented(what + ": tile \"128x128h\" takes no cropping");
    axes[i][0] = {-p.pad[d], p.dilation[d], int(p.filter[d]), int(p.out[d]), 0, 1, 0};
  }
  return Stream(ctx, p, false, axes, {1, 1}, e, x, w, bias, y, z, what);
}

Status StreamDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w,
                   void* dx, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(Check(p, true, what));
  PhaseAxis axes[2][8];
  int residues[2];
  for (int i = 0; i < 2; ++i) {
    const int d = 2 - i;
    DgradAxis a;
    a.extent = int(p.in[d]);
    a.taps = int(p.filter[d]);
    a.stride = int(p.stride[d]);
    a.pad = int(p.pad[d]);
    a.dilation = int(p.dilation[d]);
    a.gcd = int(std::gcd(p.stride[d], p.dilation[d]));
    a.inverse = int(Inverse(a.dilation / a.gcd, a.stride / a.gcd));
    a.residues = residues[i] = std::min(a.stride, a.extent);
    for (int residue = 0; residue < a.residues; ++residue) {
      const DgradPhase part = MakeDgradPhase(a, residue);
      const int last = std::max(part.taps - 1, 0), between = a.stride / a.gcd;
      const int step = a.dilation / a.gcd;
      axes[i][residue] = {part.origin - int64_t(last) * step, step,     part.taps, part.rows,
                          part.first + last * between,        -between, residue};
    }
  }
  const Epilogue none = {false, Activation::kNone, 0., false};
  return Stream(ctx, p, true, axes, residues, none, dy, w, nullptr, dx, nullptr, what);
}

}  // namespace jaxconv::cuda
