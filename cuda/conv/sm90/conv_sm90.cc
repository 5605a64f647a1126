// The sm_90a convolutions on the host: a ConvProblem into descriptors, walks and phases.
#include "cuda/conv/sm90/conv_sm90.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>

#include "cuda/conv/common/gather.h"  // the phases of a dgrad
#include "cuda/conv/sm90/halo/halo.h"
#include "cuda/conv/sm90/halo_3d/halo_3d.h"
#include "cuda/conv/sm90/halo_stream/halo_stream.h"
#include "cuda/conv/sm90/statistics.h"
#include "cuda/conv/sm90/wgrad/wgrad.h"
#include "cuda/conv/sm90/wgrad/wgrad_tf32.h"
#include "cuda/core/divmod.h"
#include "cuda/core/tma.h"
#include "cuda/gemm/sm90_operands.h"
#include "cuda/gemm/sm90_product.h"

namespace jaxconv::cuda {
namespace {

constexpr int64_t kMaxPixels = (int64_t(1) << 31) - 1 - 4096;

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// What the three have in common.
Status Check(const ConvProblem& p, const Plan& plan, int64_t max_splits, bool gathers_k,
             const std::string& what) {
  const auto no = [&](const std::string& why) { return Status::Unimplemented(what + ": " + why); };
  if (!p.channels_last) return no("wgmma needs channels-last arrays, given channels-first");
  if (p.dtype == DType::kF64) {
    return no("wgmma needs float32, bfloat16 or float16, given float64");
  }
  if (p.group_c() % 8 != 0 || p.group_k() % 8 != 0) {
    return no("channels per group must be multiples of 8, given C/G=" +
              std::to_string(p.group_c()) + ", K/G=" + std::to_string(p.group_k()));
  }
  const int64_t gathered = gathers_k ? p.group_k() : p.group_c();
  if (p.groups > 1 && gathered % 64 != 0) {
    return no("with groups, the channels summed over must be a multiple of 64 per group, given " +
              std::to_string(gathered));
  }
  const double terms = p.dtype == DType::kF32 ? 3 : 1;  // a coordinate counts those of all terms
  const double images = terms * double(p.n);
  if (images * double(p.in_size()) > double(kMaxPixels) ||
      images * double(p.out_size()) > double(kMaxPixels) ||
      terms * double(p.c) * double(p.filter_size()) > double(kMaxPixels) ||
      terms * double(p.k) * double(p.filter_size()) > double(kMaxPixels)) {
    return no("N*D*H*W, N*O*P*Q, T*R*S*C and T*R*S*K (in float32 thrice that) must be at most " +
              std::to_string(kMaxPixels));
  }
  for (int i = 0; i < 3; ++i) {
    // Room for sums of coordinates in an int.
    if (double(p.filter[i]) * double(p.dilation[i]) + double(std::llabs(p.pad[i])) +
            double(p.out[i]) * double(p.stride[i]) + double(p.in[i]) >
        double(int64_t(1) << 30)) {
      return no("coordinates must stay below 2^30");
    }
  }
  if (plan.splits < 1 || plan.splits > max_splits) {
    return Status::Invalid(what + ": splits=" + std::to_string(plan.splits) + " must be in [1, " +
                           std::to_string(max_splits) + "]");
  }
  return Status::Ok();
}

std::string Describe(const char* op, const ConvProblem& p, const Plan& plan) {
  return std::string(op) + "[wgmma " + Name(p.dtype) + " " + std::string(plan.tile) +
         (plan.splits > 1 ? " splits=" + std::to_string(plan.splits) : "") + "]";
}

// Of the descriptors of images: 3 to 5, by the first spatial axis that does anything.
int Rank(const ConvProblem& p) {
  const auto trivial = [&](int i) {
    return p.in[i] == 1 && p.out[i] == 1 && p.filter[i] == 1 && p.pad[i] == 0;
  };
  return !trivial(0) ? 5 : !trivial(1) ? 4 : 3;
}

// A 1x1 convolution that is a matrix product.
bool Plain(const ConvProblem& p) {
  for (int i = 0; i < 3; ++i) {
    if (p.filter[i] != 1 || p.stride[i] != 1 || p.pad[i] != 0 || p.in[i] != p.out[i]) return false;
  }
  return true;
}

// (channels, W, [H, [D,]] N) of a channels-last tensor whose axes are `extent` (D H W).
TmaTensor ImageTensor(const void* base, int rank, int64_t channels, const int64_t (&extent)[3],
                      int64_t images) {
  TmaTensor t;
  t.base = base;
  t.rank = rank;
  t.extent[0] = channels;
  t.stride[0] = 1;
  int64_t stride = channels;
  for (int i = 0; i < rank - 2; ++i) {
    t.extent[i + 1] = extent[2 - i];
    t.stride[i + 1] = stride;
    stride *= extent[2 - i];
  }
  t.extent[rank - 1] = images;
  t.stride[rank - 1] = stride;
  return t;
}

// (columns of a group, group, rows) of a matrix of `rows` rows.
TmaTensor MatrixTensor(const void* base, int64_t columns, int64_t groups, int64_t rows) {
  return {base, 3, {columns, groups, rows}, {1, columns, columns * groups}};
}

// w (terms, T R S, C/G, K) as (K/G, group, C/G, terms*T*R*S).
TmaTensor FilterTensor(const ConvProblem& p, const void* w, int terms) {
  return {w,
          4,
          {p.group_k(), p.groups, p.group_c(), p.filter_size() * terms},
          {1, p.group_k(), p.k, p.k * p.group_c()}};
}

// The same of its transpose, w (T R S, K, C/G): (C/G, group, K/G, T*R*S).
TmaTensor TransposedFilterTensor(const ConvProblem& p, const void* w) {
  return {w,
          4,
          {p.group_c(), p.groups, p.group_k(), p.filter_size()},
          {1, p.group_k() * p.group_c(), p.group_c(), p.k * p.group_c()}};
}

int64_t CountX(const ConvProblem& p) { return p.n * p.in_size() * p.c; }
int64_t CountY(const ConvProblem& p) { return p.n * p.out_size() * p.k; }
int64_t CountW(const ConvProblem& p) { return p.filter_size() * p.group_c() * p.k; }

// Where float32 results go: a channels-last array of `channels` channels, whose axes are `extent`
// (D H W), seen in steps of `step` (W H D).
void SetFloatOutput(void* d, void* z, int64_t channels, int64_t group_channels,
                    const int64_t (&extent)[3], const int (&step)[3], Sm90FloatOutput* out) {
  out->d = static_cast<float*>(d);
  out->z = static_cast<float*>(z);
  out->instance = group_channels;
  int64_t stride = channels;
  for (int i = 0; i < 3; ++i) {
    out->stride[i] = stride * step[i];
    stride *= extent[2 - i];
  }
  out->stride_image = stride;
}

// The walk of fprop and wgrad over x.
TmaWalk InputWalk(const ConvProblem& p) {
  TmaWalk walk;
  for (int i = 0; i < 3; ++i) {
    walk.first[i] = int(-p.pad[2 - i]);
    walk.step[i] = int(p.stride[2 - i]);
    walk.count[i] = int(p.out[2 - i]);
  }
  return walk;
}

Status CheckWalk(const TmaTensor& t, const TmaWalk& walk, const int (&taps)[3],
                 const int (&tap_step)[3], const std::string& what) {
  int offset[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t largest = int64_t(std::max(taps[i] - 1, 0)) * tap_step[i];
    offset[i] = int(std::min<int64_t>(largest, 1 << 30));
  }
  const std::string refusal = RefuseWalk(t.rank, t.extent, walk, offset);
  return refusal.empty() ? Status::Ok() : Status::Unimplemented(what + ": " + refusal);
}

// The inverse of a modulo n, both positive and coprime; 0 if n is 1.
int64_t Inverse(int64_t a, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    if (a % n * i % n == 1) return i;
  }
  return 0;
}

Status Launch(const Context& ctx, const Sm90Arithmetic& in, bool k_major_b, Sm90Product& product,
              Sm90TileName tile, int multiprocessors, const std::string& what) {
  const DType dtype = in.element;
  if (in.tf32) return LaunchSm90KKTf32(ctx, product, tile, multiprocessors, what);
  if (in.terms > 1) {
    return k_major_b ? LaunchSm90KKFloat(ctx, product, tile, multiprocessors, what)
                     : LaunchSm90KNFloat(ctx, product, tile, multiprocessors, what);
  }
  if (dtype == DType::kBF16) {
    return k_major_b ? LaunchSm90KKBf16(ctx, product, tile, multiprocessors, what)
                     : LaunchSm90KNBf16(ctx, product, tile, multiprocessors, what);
  }
  return k_major_b ? LaunchSm90KKF16(ctx, product, tile, multiprocessors, what)
                   : LaunchSm90KNF16(ctx, product, tile, multiprocessors, what);
}

// ---------------------------------------------------------------------------------------------------
// Tile "halo" (sm90/halo/halo.cuh).

// One axis of a convolution of stride 1 that reads places first + q + t * dilation.
struct HaloAxis {
  int64_t read, made;  // extents
  int64_t taps, dilation;
  int64_t pad;  // -first
};

// The line of `images` images. Axes are W, H, D.
Status MakeLine(const HaloAxis (&axes)[3], int rank, int64_t images, const std::string& what,
                HaloLine* line, TmaWalk* read, TmaWalk* made) {
  line->rank = rank;
  line->places = images;
  for (int i = 0; i < 3; ++i) {
    const HaloAxis& a = axes[i];
    const int64_t high = a.made - 1 + (a.taps - 1) * a.dilation - a.pad - (a.read - 1);
    if (a.pad < 0) return Status::Unimplemented(what + ": tile \"halo\" takes no negative padding");
    const int64_t extent = std::max({a.read + std::max(a.pad, high), a.made, int64_t(1)});
    line->extent[i] = read->count[i] = made->count[i] = int(extent);
    line->first[i] = read->first[i] = int(-a.pad);
    made->first[i] = 0;
    read->step[i] = made->step[i] = 1;
    line->places *= extent;
  }
  if (line->places > kMaxPixels) {
    return Status::Unimplemented(what + ": tile \"halo\" takes at most " +
                                 std::to_string(kMaxPixels) + " places");
  }
  return Status::Ok();
}

Status CheckHalo(const ConvProblem& p, int64_t summed, int64_t made, int64_t shared,
                 const std::string& what) {
  const auto no = [&](const std::string& why) { return Status::Unimplemented(what + ": " + why); };
  if (p.dtype == DType::kF32 && p.full_float32) return no("tile \"halo\" rounds float32 to TF32");
  if (p.stride[0] * p.stride[1] * p.stride[2] != 1) return no("tile \"halo\" needs stride 1");
  if (summed > 64 || (p.groups > 1 && (summed != 64 || made % 64 != 0))) {
    return no(
        "tile \"halo\" needs at most 64 summed channels, and with groups 64 and a multiple of "
        "64 made, given " +
        std::to_string(summed) + " and " + std::to_string(made));
  }
  if (shared > kHaloShared) {
    return no("tile \"halo\" needs " + std::to_string(shared) +
              " bytes of shared memory for this "
              "filter's reach, there are " +
              std::to_string(kHaloShared));
  }
  return Status::Ok();
}

// d (of `made` channels) from x (of `summed`), fprop or dgrad of stride 1.
Status HaloForward(const Context& ctx, const ConvProblem& p, const HaloAxis (&axes)[3], bool dgrad,
                   const Epilogue& e, const void* x, const void* w, const void* bias, void* d,
                   void* z, Workspace workspace, const std::string& what) {
  const bool tf32 = p.dtype == DType::kF32;
  const int places = tf32 ? kHaloTf32Places : kHaloPlaces;
  HaloProduct g = {};
  g.channels = int(dgrad ? p.group_k() : p.group_c());
  g.n = int(dgrad ? p.group_c() : p.group_k());
  const int64_t taps = p.filter_size();
  TmaWalk read, made;
  JAXCONV_RETURN_IF_ERROR(MakeLine(axes, Rank(p), p.n, what, &g.line, &read, &made));
  if (taps > kHaloTaps) {
    return Status::Unimplemented(what + ": tile \"halo\" takes at most " +
                                 std::to_string(kHaloTaps) + " taps");
  }
  int64_t reach = 0;
  for (int tap = 0; tap < int(taps); ++tap) {
    int64_t rest = tap, pitch = 1, shift = 0;
    for (int i = 0; i < 3; ++i) {
      shift += rest % axes[i].taps * axes[i].dilation * pitch;
      rest /= axes[i].taps;
      pitch *= g.line.extent[i];
    }
    reach = shift;
    g.shift[tap] = int(std::min<int64_t>(shift, 1 << 20));
  }
  reach = std::min<int64_t>(reach, 1 << 20);
  JAXCONV_RETURN_IF_ERROR(CheckHalo(
      p, g.channels, g.n,
      tf32 ? HaloTf32Shared(taps, g.channels, reach) : HaloProductShared(taps, reach, 2), what));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  g.taps = int(taps);
  g.flip = dgrad;
  g.instances = int(p.groups);
  g.tiles = int((g.line.places + places - 1) / places);
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  if (e.bias) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kRow;
    g.epilogue.stride_bias = g.n;
  }
  const int64_t (&from)[3] = dgrad ? p.out : p.in;
  const int64_t (&to)[3] = dgrad ? p.in : p.out;
  const int rank = g.line.rank;
  const int none[3] = {};
  const TmaTensor source = ImageTensor(x, rank, g.channels * p.groups, from, p.n);
  g.d = d;
  g.z = e.save_preactivation ? z : nullptr;
  for (int i = 0; i < 3; ++i) g.made[i] = int(to[2 - i]);
  JAXCONV_RETURN_IF_ERROR(CheckWalk(source, read, none, none, what));
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(
      p.dtype, source, read, int(HaloBufferBytes(places, reach) / 128), what + " x", &g.x, tf32));
  if (tf32 && !dgrad) {
    JAXCONV_RETURN_IF_ERROR(TransposeFloats(ctx, taps, p.group_c(), p.k, what, &w, &workspace));
  }
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(p.dtype, tf32 && !dgrad ? TransposedFilterTensor(p, w) : FilterTensor(p, w, 1),
                  {0, 1, 64, 1}, what + " w", &g.w, tf32));
  if (tf32) return LaunchHaloProductTf32(ctx, g, multiprocessors, what);
  return p.dtype == DType::kBF16 ? LaunchHaloProductBf16(ctx, g, dgrad, multiprocessors, what)
                                 : LaunchHaloProductF16(ctx, g, dgrad, multiprocessors, what);
}

Status HaloFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                 const void* w, const void* bias, void* y, void* z, Workspace workspace,
                 const std::string& what) {
  HaloAxis axes[3];
  for (int i = 0; i < 3; ++i) {
    const int d = 2 - i;
    axes[i] = {p.in[d], p.out[d], p.filter[d], p.dilation[d], p.pad[d]};
  }
  return HaloForward(ctx, p, axes, false, e, x, w, bias, y, z, workspace, what);
}

// dx[h] sums dy[h + pad - t * dilation]: taps backwards, from h + pad - (taps - 1) * dilation on.
Status HaloDgrad(const Context& ctx, const ConvProblem& p, const void* dy, const void* w, void* dx,
                 const std::string& what) {
  HaloAxis axes[3];
  for (int i = 0; i < 3; ++i) {
    const int d = 2 - i;
    axes[i] = {p.out[d], p.in[d], p.filter[d], p.dilation[d],
               (p.filter[d] - 1) * p.dilation[d] - p.pad[d]};
  }
  const Epilogue none = {false, Activation::kNone, 0., false};
  return HaloForward(ctx, p, axes, true, none, dy, w, nullptr, dx, nullptr, {}, what);
}

Status HaloWgradOf(const Context& ctx, const ConvProblem& p, int64_t parts, const void* x,
                   const void* dy, void* dw, Workspace workspace, const std::string& what) {
  HaloWgrad g = {};
  HaloAxis axes[3];
  for (int i = 0; i < 3; ++i) {
    const int d = 2 - i;
    axes[i] = {p.in[d], p.out[d], p.filter[d], p.dilation[d], p.pad[d]};
  }
  if (p.filter[0] != 1 || p.filter[1] != 3 || p.filter[2] != 3) {
    return Status::Unimplemented(what + ": tile \"halo\" needs a 3 x 3 filter");
  }
  TmaWalk read, made;
  JAXCONV_RETURN_IF_ERROR(MakeLine(axes, Rank(p), p.n, what, &g.line, &read, &made));
  const int64_t row_shift = p.dilation[1] * g.line.extent[0];
  const int64_t reach = std::min<int64_t>(2 * (row_shift + p.dilation[2]), 1 << 20);
  JAXCONV_RETURN_IF_ERROR(CheckHalo(p, p.group_c(), p.group_k(), HaloWgradShared(reach, 2), what));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  g.row_shift = int(row_shift);
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
  const int none[3] = {};
  const TmaTensor source = ImageTensor(x, rank, p.c, p.in, p.n);
  const TmaTensor out = ImageTensor(dy, rank, p.k, p.out, p.n);
  JAXCONV_RETURN_IF_ERROR(CheckWalk(source, read, none, none, what));
  JAXCONV_RETURN_IF_ERROR(CheckWalk(out, made, none, none, what));
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(
      p.dtype, source, read, int(HaloBufferBytes(kHaloStep, reach) / 128), what + " x", &g.x));
  JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, out, made, kHaloStep, what + " dy", &g.dy));
  return p.dtype == DType::kBF16
             ? LaunchHaloWgradBf16(ctx, g, multiprocessors, workspace.bytes, what)
             : LaunchHaloWgradF16(ctx, g, multiprocessors, workspace.bytes, what);
}

// ---------------------------------------------------------------------------------------------------
// wgrad in TF32, or of float32 that becomes terms on its way (sm90/wgrad/wgrad_tf32.cu).

// The line with gaps (sm90/halo/halo.cuh).
Status MakeTf32Halo(const ConvProblem& p, const std::string& what, Tf32Wgrad* g, TmaWalk* read,
                    TmaWalk* made) {
  if (p.filter[0] > 3 || p.filter[1] != 3 || p.filter[2] != 3 || p.dilation[2] != 1 ||
      p.stride[0] * p.stride[1] * p.stride[2] != 1) {
    return Status::Unimplemented(
        what +
        ": tile \"halo\" takes up to 3 planes of 3 x 3 taps, stride 1, no dilation along rows");
  }
  HaloAxis axes[3];
  for (int i = 0; i < 3; ++i) {
    const int d = 2 - i;
    axes[i] = {p.in[d], p.out[d], p.filter[d], p.dilation[d], p.pad[d]};
  }
  HaloLine line;
  JAXCONV_RETURN_IF_ERROR(MakeLine(axes, Rank(p), p.n, what, &line, read, made));
  const int64_t row = p.dilation[1] * line.extent[0];
  const int64_t plane = p.dilation[0] * line.extent[0] * line.extent[1];
  if (line.places + (p.filter[0] - 1) * plane > kMaxPixels) {
    return Status::Unimplemented(what + ": tile \"halo\" takes at most " +
                                 std::to_string(kMaxPixels) + " places");
  }
  g->halo = true;
  for (int i = 0; i < 3; ++i) {
    g->extent[i] = line.extent[i];
    g->first[i] = line.first[i];
    g->step[i] = 1;
  }
  g->row_shift = int(std::min<int64_t>(row, 1 << 20));
  g->plane_shift = p.filter[0] > 1 ? int(plane) : 0;
  g->steps = int((line.places + kTf32Step - 1) / kTf32Step);
  return Status::Ok();
}

Status Tf32WgradOf(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace, const std::string& what) {
  Tf32Wgrad g = {};
  g.terms = p.full_float32;
  const bool tf32 = !p.full_float32;
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  for (int i = 0; i < 3; ++i) {
    g.taps[i] = int(p.filter[2 - i]);
    g.tap_step[i] = int(p.dilation[2 - i]);
  }
  g.instances = int(p.groups);
  g.channels = int(p.group_c());
  g.channel_blocks = (g.channels + 63) / 64;
  g.n = int(p.group_k());
  g.pitch = p.k;
  g.parts = int(plan.splits);
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  const int64_t pixels = p.n * p.out_size();
  const int rank = Rank(p), none[3] = {};
  TmaWalk read = InputWalk(p), made;
  int taps[3] = {1, 1, 1};  // whose offsets a copy of x adds to its coordinates
  if (plan.tile == "halo") {
    JAXCONV_RETURN_IF_ERROR(MakeTf32Halo(p, what, &g, &read, &made));
    g.rank_dy = rank;
  } else {
    for (int i = 0; i < 3; ++i) {
      g.extent[i] = read.count[i];
      g.first[i] = read.first[i];
      g.step[i] = read.step[i];
      taps[i] = g.taps[i];
    }
    g.steps = int((pixels + kTf32Step - 1) / kTf32Step);
  }
  if (plan.tile == "256x64s") {
    if (!g.terms || !Plain(p)) {
      return Status::Unimplemented(what + ": this tile needs a 1x1 filter of stride 1");
    }
    g.swapped = true;
    std::swap(x, dy);
    g.channels = int(p.group_k());
    g.channel_blocks = (g.channels + 63) / 64;
    g.n = int(p.group_c());
  }
  JAXCONV_RETURN_IF_ERROR(PrepareTf32Wgrad(g, plan.tile, what));
  if (g.halo) {
    const TmaTensor out = ImageTensor(dy, rank, p.k, p.out, p.n);
    JAXCONV_RETURN_IF_ERROR(CheckWalk(out, made, none, none, what));
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, out, made, g.slot, what + " dy", &g.dy, tf32));
  } else {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(dy, g.n, p.groups, pixels),
                                        {0, 1, g.slot}, what + " dy", &g.dy, tf32));
  }
  if (Plain(p) && !g.halo) {
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, g.channels, p.groups, pixels),
                                        {0, 1, g.slot}, what + " x", &g.x, tf32));
  } else {
    g.rank_x = rank;
    const TmaTensor image = ImageTensor(x, rank, p.c, p.in, p.n);
    JAXCONV_RETURN_IF_ERROR(CheckWalk(image, read, taps, g.tap_step, what));
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, image, read, g.slot, what + " x", &g.x, tf32));
  }
  return LaunchTf32Wgrad(ctx, g, plan.tile, multiprocessors, workspace.bytes, what);
}

// `statistics`: null unless they are wanted, which 16-bit results without an epilogue have.
Status Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
             const void* x, const void* w, const void* bias, void* y, void* z, Workspace workspace,
             Sm90Parts* statistics, const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 1, false, what));
  if (!Aligned(x) || !Aligned(w) || !Aligned(y) || !Aligned(z) || !Aligned(workspace.data)) {
    return Status::Invalid(what + ": x, w, y, z and the workspace must be 16-byte aligned");
  }
  if (plan.tile == "halo" && statistics == nullptr) {
    return HaloFprop(ctx, p, e, x, w, bias, y, z, workspace, what);
  }
  if (plan.tile == "128x128h" && statistics == nullptr) {
    return StreamFprop(ctx, p, e, x, w, bias, y, z, what);
  }
  if (plan.tile == "planes" && statistics == nullptr) {
    return PlanesFprop(ctx, p, e, x, w, bias, y, z, what);
  }
  Sm90TileName tile;
  JAXCONV_RETURN_IF_ERROR(FindSm90Tile(plan.tile, what, &tile));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));

  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  if (in.terms > 1) {
    JAXCONV_RETURN_IF_ERROR(SplitIntoTerms(ctx, 0, CountW(p), what, &x, &w, &workspace));
  } else if (in.tf32) {
    JAXCONV_RETURN_IF_ERROR(
        TransposeFloats(ctx, p.filter_size(), p.group_c(), p.k, what, &w, &workspace));
  }

  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  const int64_t pixels = p.n * p.out_size();
  g.term_taps = int(p.filter_size());
  SetFloatOutput(y, z, p.k, p.group_k(), p.out, {1, 1, 1}, &g.out);
  const TmaWalk walk = InputWalk(p);
  phase.m = int(pixels);
  int filter_step = 1;
  for (int i = 0; i < 3; ++i) {
    phase.extent[i] = walk.count[i];
    phase.first[i] = walk.first[i];
    phase.step[i] = walk.step[i];
    phase.taps[i] = int(p.filter[2 - i]);
    phase.tap_step[i] = int(p.dilation[2 - i]);
    phase.filter_step[i] = filter_step;
    filter_step *= phase.taps[i];
  }
  g.phases = 1;
  g.instances = int(p.groups);
  g.n = int(p.group_k());
  g.channels = int(p.group_c());
  g.k_blocks = int(CeilDiv(g.channels, in.depth));
  g.splits = 1;
  g.epilogue.activation = e.activation;
  g.epilogue.slope = float(e.slope);
  g.epilogue.save_z = e.save_preactivation;
  if (e.bias) {
    g.epilogue.bias = bias;
    g.epilogue.bias_kind = BiasKind::kColumn;
    g.epilogue.stride_bias = p.group_k();
  }
  const int tile_m = TileRows(tile);
  if (Plain(p)) {
    // A 1x1 convolution is a matrix product.
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, p.group_c(), p.groups, pixels),
                                        {0, 1, tile_m}, what + " x", &g.a[0], in.tf32));
  } else {
    g.rank_a = Rank(p);
    const TmaTensor image = ImageTensor(x, g.rank_a, p.c, p.in, p.n);
    JAXCONV_RETURN_IF_ERROR(CheckWalk(image, walk, phase.taps, phase.tap_step, what));
    JAXCONV_RETURN_IF_ERROR(
        EncodeIm2col(p.dtype, image, walk, tile_m, what + " x", &g.a[0], in.tf32));
  }
  JAXCONV_RETURN_IF_ERROR(
      EncodeTiled(in.element, in.tf32 ? TransposedFilterTensor(p, w) : FilterTensor(p, w, in.terms),
                  {0, 1, in.tf32 ? TileColumns(tile) : 64, 1}, what + " w", &g.b, in.tf32));
  if (p.dtype == DType::kF32) return Launch(ctx, in, in.tf32, g, tile, multiprocessors, what);
  const TmaTensor out = MatrixTensor(y, p.group_k(), p.groups, pixels);
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, out, {64, 1, 64}, what + " y", &g.d[0]));
  if (e.save_preactivation) {
    TmaTensor saved = out;
    saved.base = z;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, saved, {64, 1, 64}, what + " z", &g.z));
  }
  if (statistics == nullptr) return Launch(ctx, in, false, g, tile, multiprocessors, what);
  return p.dtype == DType::kBF16
             ? LaunchSm90StatisticsBf16(ctx, g, tile, multiprocessors, statistics, what)
             : LaunchSm90StatisticsF16(ctx, g, tile, multiprocessors, statistics, what);
}

}  // namespace

Status Sm90Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace) {
  return Fprop(ctx, p, e, plan, x, w, bias, y, z, workspace, nullptr,
               Describe("conv_fprop", p, plan));
}

Status Sm90Statistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, void* y, void* mean, void* var, Workspace workspace) {
  const std::string what = Describe("conv_statistics", p, plan);
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
    return Status::Unimplemented(what + ": statistics are those of bfloat16 and float16 results");
  }
  const int64_t rows = p.n * p.out_size(), most = MostStatisticsParts(rows);
  const int64_t needed = most * (p.k * 8 + 4);
  if (workspace.bytes < needed || !Aligned(workspace.data)) {
    return Status::Invalid(what + ": needs a workspace of " + std::to_string(needed) +
                           " bytes, given " + std::to_string(workspace.bytes));
  }
  Sm90Parts parts = {};
  parts.moments = static_cast<float2*>(workspace.data);
  parts.counts = reinterpret_cast<float*>(parts.moments + most * p.k);
  const Epilogue bare = {false, Activation::kNone, 0.0, false};
  JAXCONV_RETURN_IF_ERROR(
      Fprop(ctx, p, bare, plan, x, w, nullptr, y, nullptr, Workspace{}, &parts, what));
  return CombineStatistics(ctx, parts, rows, p.k, mean, var, what);
}

Status Sm90Dgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace) {
  const std::string what = Describe("conv_dgrad", p, plan);
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 1, true, what));
  if (!Aligned(dy) || !Aligned(w) || !Aligned(c) || !Aligned(dx) || !Aligned(workspace.data)) {
    return Status::Invalid(what + ": dy, w, c, dx and the workspace must be 16-byte aligned");
  }
  if (c != nullptr && (p.dtype == DType::kF32 || plan.tile == "halo" || plan.tile == "planes" ||
                       plan.tile == "128x128h")) {
    return Status::Unimplemented(what + ": float32 and this tile take no addend");
  }
  if (plan.tile == "halo") return HaloDgrad(ctx, p, dy, w, dx, what);
  if (plan.tile == "planes") return PlanesDgrad(ctx, p, dy, w, dx, what);
  if (plan.tile == "128x128h") return StreamDgrad(ctx, p, dy, w, dx, what);
  Sm90TileName tile;
  JAXCONV_RETURN_IF_ERROR(FindSm90Tile(plan.tile, what, &tile));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));
  const int tile_m = TileRows(tile);

  // Axes W, H, D from here on.
  DgradAxis axis[3];
  int phases = 1;
  bool strided = false;
  for (int i = 0; i < 3; ++i) {
    DgradAxis& a = axis[i];
    const int d = 2 - i;
    a.extent = int(p.in[d]);
    a.taps = int(p.filter[d]);
    a.stride = int(p.stride[d]);
    a.pad = int(p.pad[d]);
    a.dilation = int(p.dilation[d]);
    a.gcd = int(std::gcd(p.stride[d], p.dilation[d]));
    a.inverse = int(Inverse(a.dilation / a.gcd, a.stride / a.gcd));
    a.residues = std::min(a.stride, a.extent);
    strided = strided || a.residues > 1;
    phases *= std::min(a.residues, kMaxPhases + 1);
  }
  if (phases > kMaxPhases) {
    return Status::Unimplemented(what + ": the product of the strides may be at most " +
                                 std::to_string(kMaxPhases));
  }
  if (strided && p.groups > 1 && p.group_c() % 64 != 0) {
    return Status::Unimplemented(what + ": strided, with groups, needs C/G to be a multiple of 64");
  }
  if (strided && c != nullptr && c != dx) {
    return Status::Unimplemented(what + ": strided, it adds to what dx holds: c must be dx");
  }
  const int rank = Rank(p);
  const Sm90Arithmetic in = ArithmeticOf(p.dtype, p.full_float32);
  if (in.terms > 1) {
    JAXCONV_RETURN_IF_ERROR(SplitIntoTerms(ctx, 0, CountW(p), what, &dy, &w, &workspace));
  }
  const TmaTensor image = ImageTensor(dy, rank, p.k, p.out, p.n);
  const TmaTensor whole = ImageTensor(dx, rank, p.c, p.in, p.n);

  Sm90Product g = {};
  g.rank_a = rank;
  g.rank_d = strided ? rank : 0;
  g.instances = int(p.groups);
  g.n = int(p.group_c());
  g.channels = int(p.group_k());
  g.k_blocks = int(CeilDiv(g.channels, in.depth));
  g.splits = 1;
  g.term_taps = int(p.filter_size());
  if (c != nullptr && strided) {
    g.added = Sm90Added::kInPlace;
  } else if (c != nullptr) {
    g.added = Sm90Added::kMatrix;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype,
                                        MatrixTensor(c, p.group_c(), p.groups, p.n * p.in_size()),
                                        {64, 1, tile_m}, what + " c", &g.c));
  }
  SetFloatOutput(dx, nullptr, p.c, p.group_c(), p.in,
                 {axis[0].stride, axis[1].stride, axis[2].stride}, &g.out);
  for (int number = 0; number < phases; ++number) {
    Sm90Phase phase = {};
    int64_t begin = 0;
    TmaWalk walk;
    TmaTensor to = whole;
    TmaWalk every;  // pixel of the phase
    int rest = number, filter_step = 1;
    phase.m = int(p.n);
    for (int i = 0; i < 3; ++i) {
      const DgradAxis& a = axis[i];
      const int residue = rest % a.residues;
      rest /= a.residues;
      const DgradPhase part = MakeDgradPhase(a, residue);
      // Taps in descending order: pixel h reads h + origin - (taps - 1 - j) * dilation/g, tap first
      // + (taps - 1 - j) * stride/g.
      const int last = std::max(part.taps - 1, 0), between = a.stride / a.gcd;
      phase.extent[i] = walk.count[i] = every.count[i] = part.rows;
      phase.tap_step[i] = a.dilation / a.gcd;
      phase.first[i] = walk.first[i] = part.origin - last * phase.tap_step[i];
      phase.step[i] = walk.step[i] = 1;
      phase.taps[i] = part.taps;
      phase.filter_first += (part.first + last * between) * filter_step;
      phase.filter_step[i] = -between * filter_step;
      filter_step *= a.taps;
      phase.m *= part.rows;
      every.first[i] = 0;
      every.step[i] = 1;
      begin += residue * (g.out.stride[i] / a.stride);
      if (i < rank - 2) {
        to.base = static_cast<const char*>(to.base) + residue * to.stride[i + 1] * 2;
        to.extent[i + 1] = part.rows;
        to.stride[i + 1] *= a.stride;
      }
    }
    // The longest first: the short ones then fill the last wave.
    const auto work = [](const Sm90Phase& f) { return f.taps[0] * f.taps[1] * f.taps[2]; };
    if (g.added == Sm90Added::kInPlace && work(phase) == 0) continue;  // it is there already
    int at = g.phases++;
    while (at > 0 && work(g.phase[at - 1]) < work(phase)) {
      g.phase[at] = g.phase[at - 1];
      g.a[at] = g.a[at - 1];
      g.d[at] = g.d[at - 1];
      g.out.begin[at] = g.out.begin[at - 1];
      --at;
    }
    g.phase[at] = phase;
    g.out.begin[at] = begin;
    if (Plain(p) && p.dtype != DType::kF32) {
      g.rank_a = 0;
      JAXCONV_RETURN_IF_ERROR(
          EncodeTiled(p.dtype, MatrixTensor(dy, p.group_k(), p.groups, p.n * p.out_size()),
                      {0, 1, tile_m}, what + " dy", &g.a[at]));
    } else if (work(phase) > 0) {
      JAXCONV_RETURN_IF_ERROR(CheckWalk(image, walk, phase.taps, phase.tap_step, what));
      JAXCONV_RETURN_IF_ERROR(
          EncodeIm2col(p.dtype, image, walk, tile_m, what + " dy", &g.a[at], in.tf32));
    }
    if (p.dtype == DType::kF32) continue;
    if (strided) {
      JAXCONV_RETURN_IF_ERROR(EncodeIm2col(p.dtype, to, every, 64, what + " dx", &g.d[at]));
    } else {
      JAXCONV_RETURN_IF_ERROR(
          EncodeTiled(p.dtype, MatrixTensor(dx, p.group_c(), p.groups, p.n * p.in_size()),
                      {64, 1, 64}, what + " dx", &g.d[at]));
    }
  }
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(in.element, FilterTensor(p, w, in.terms),
                                      {0, 1, FilterBoxRows(tile), 1}, what + " w", &g.b, in.tf32));
  return Launch(ctx, in, true, g, tile, multiprocessors, what);
}

Status Sm90Wgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, 4096, false, what));
  if (!Aligned(x) || !Aligned(dy) || !Aligned(dw) || !Aligned(workspace.data)) {
    return Status::Invalid(what + ": x, dy, dw and the workspace must be 16-byte aligned");
  }
  if (p.dtype == DType::kF32 && (!p.full_float32 || plan.tile.substr(0, 4) == "256x")) {
    return Tf32WgradOf(ctx, p, plan, x, dy, dw, workspace, what);
  }
  if (plan.tile == "halo") return HaloWgradOf(ctx, p, plan.splits, x, dy, dw, workspace, what);
  if (plan.tile == "planes") return PlanesWgradOf(ctx, p, plan.splits, x, dy, dw, workspace, what);
  Sm90TileName tile;
  JAXCONV_RETURN_IF_ERROR(FindSm90Tile(plan.tile, what, &tile));
  int multiprocessors;
  JAXCONV_RETURN_IF_ERROR(RequireSm90(what, &multiprocessors));

  const int terms = p.dtype == DType::kF32 ? 3 : 1;
  if (terms > 1) {
    JAXCONV_RETURN_IF_ERROR(SplitIntoTerms(ctx, CountX(p), CountY(p), what, &x, &dy, &workspace));
  }
  const DType dtype = terms > 1 ? DType::kBF16 : p.dtype;

  WgradLaunch g = {};
  g.images = int(p.n);
  const int64_t pixels = p.n * p.out_size();
  const TmaWalk walk = InputWalk(p);
  for (int i = 0; i < 3; ++i) {
    g.extent[i] = walk.count[i];
    g.first[i] = walk.first[i];
    g.step[i] = walk.step[i];
    g.taps[i] = int(p.filter[2 - i]);
    g.tap_step[i] = int(p.dilation[2 - i]);
  }
  g.rank = Rank(p);
  g.instances = int(p.groups);
  g.channels = int(p.group_c());
  g.channel_blocks = (g.channels + 63) / 64;
  g.n = int(p.group_k());
  g.steps = int((pixels + 63) / 64);
  g.parts = int(plan.splits);
  g.pitch = p.k;
  g.dw = dw;
  g.partials = static_cast<float*>(workspace.data);
  if (Plain(p) && p.dtype != DType::kF32) {
    g.rank = 0;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype, MatrixTensor(x, p.group_c(), p.groups, pixels),
                                        {0, 1, 64}, what + " x", &g.x));
  } else {
    const TmaTensor image = ImageTensor(x, g.rank, p.c, p.in, p.n * terms);
    JAXCONV_RETURN_IF_ERROR(CheckWalk(image, walk, g.taps, g.tap_step, what));
    JAXCONV_RETURN_IF_ERROR(EncodeIm2col(dtype, image, walk, 64, what + " x", &g.x));
  }
  const TmaTensor out = {
      dy, 4, {p.group_k(), p.groups, pixels, terms}, {1, p.group_k(), p.k, p.k * pixels}};
  JAXCONV_RETURN_IF_ERROR(EncodeTiled(dtype, out, {0, 1, 64, 1}, what + " dy", &g.dy));
  if (terms > 1) {
    return LaunchSm90WgradFloat(ctx, g, tile, multiprocessors, workspace.bytes, what);
  }
  return p.dtype == DType::kBF16
             ? LaunchSm90WgradBf16(ctx, g, tile, multiprocessors, workspace.bytes, what)
             : LaunchSm90WgradF16(ctx, g, tile, multiprocessors, workspace.bytes, what);
}

}  // namespace jaxconv::cuda
