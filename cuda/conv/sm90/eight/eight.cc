#include "cuda/conv/sm90/eight/eight.h"

#include "cuda/conv/sm90/geometry.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/tma.h"
#include "cuda/domain.h"
#include "cuda/gemm/sm90_eight.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {
namespace {

// w (K, T R S, C/G) as (T R S C/G, 2, 4, 2, K / 16): a filter n = 16g + 4t + 2h + e at (e, t, h, g).
TmaTensor SixteensOfFilters(const void* w, int64_t depth, int64_t filters) {
  return {w, 5, {depth, 2, 4, 2, filters / 16}, {1, depth, 4 * depth, 2 * depth, 16 * depth}};
}

Status Launch(const Context& ctx, const ScaledConvProblem& s, Sm90Product& p,
              const Sm90EightEpilogue& e, TileSize tile, int multiprocessors,
              const std::string& what) {
#define JAXCONV_EIGHT_LAUNCH(x, w)                          \
  if (s.x_type == Number::k##x && s.w_type == Number::k##w) \
    return LaunchSm90Eight##x##w(ctx, p, e, tile, multiprocessors, what);
  JAXCONV_EIGHT_PAIRS(JAXCONV_EIGHT_LAUNCH)
#undef JAXCONV_EIGHT_LAUNCH
  return Status::Internal(what + ": no launcher");
}

}  // namespace

Sm90EightEpilogue EightEpilogue(const ScaledConvProblem& s, const ConvScaledArrays& a) {
  Sm90EightEpilogue e = {};
  e.scale = a.scale.as<float>();
  e.bias = a.b;
  e.bias_of_sums = IsInteger8(s.x_type) && (!s.bias || s.bias_type == Number::kS32);
  e.residual = a.residual;
  e.residual_scale = a.residual_scale.as<float>();
  e.out_scale = a.out_scale.as<float>();
  e.d = a.y;
  e.row = s.conv.k;
  e.activation = s.activation;
  e.slope = float(s.slope);
  e.residual_type = s.residual_type;
  e.type = s.y_type;
  return e;
}

Status Sm90EightFprop(const Context& ctx, const ScaledConvProblem& s, const Plan& plan,
                      const ConvScaledArrays& a, int multiprocessors, const std::string& what) {
  if (MemberOf(plan.kernel) == "eight_halo")
    return EightHaloFprop(ctx, s, a, multiprocessors, what);
  const ConvProblem& p = s.conv;
  const TileSize tile = ReadTile(plan.tile);
  const int64_t pixels = p.n * p.out_size();
  Sm90Product g = {};
  Sm90Phase& phase = g.phase[0];
  const TmaWalk walk = InputWalk(p);
  phase.m = int(pixels);
  for (int i = 0; i < 3; ++i) {
    phase.extent[i] = walk.count[i];
    phase.first[i] = walk.first[i];
    phase.step[i] = walk.step[i];
    phase.taps[i] = int(p.filter[2 - i]);
    phase.tap_step[i] = int(p.dilation[2 - i]);
  }
  g.phases = 1;
  g.instances = int(p.groups);
  g.n = int(p.group_k());
  g.channels = int(p.group_c());
  g.k_blocks = int(CeilDiv(g.channels, 128));
  Sm90EightEpilogue e = EightEpilogue(s, a);
  const bool halves = EightHalves(tile, s.w_type, g.channels);
  const int depth_of_box = halves ? 64 : 128;
  const ConvProblem& q = s.shortcut;
  if (s.has_shortcut) {
    g.shortcut_steps = halves ? 0 : int(CeilDiv(q.c, 128));
    const TmaWalk over = InputWalk(q);
    for (int i = 0; i < 3; ++i) g.phase[1].step[i] = over.step[i];
    if (Plain(q)) {
      JAXCONV_RETURN_IF_ERROR(EncodeBytes(MatrixTensor(a.x2, q.c, 1, pixels),
                                          {depth_of_box, 1, tile.rows}, what + " x2", &g.a[1]));
    } else {
      g.shortcut_rank = Rank(q);
      JAXCONV_RETURN_IF_ERROR(EncodeBytesIm2col(ImageTensor(a.x2, Rank(q), q.c, q.in, q.n), over,
                                                tile.rows, what + " x2", &g.a[1], depth_of_box));
    }
    JAXCONV_RETURN_IF_ERROR(EncodeBytes(SixteensOfFilters(a.w2, q.c, q.k),
                                        {depth_of_box, 2, 4, 2, tile.columns / 16}, what + " w2",
                                        &g.z));
  }
  if (halves) {  // a tap to count, of all stages
    const int64_t blocks =
        p.filter_size() * CeilDiv(g.channels, 64) + (s.has_shortcut ? CeilDiv(q.c, 64) : 0);
    g.k_blocks = int(CeilDiv(blocks, 2));
    e.half = blocks % 2 != 0;
    for (int i = 0; i < 3; ++i) {
      e.taps[i] = phase.taps[i];
      phase.taps[i] = 1;
    }
  }
  g.splits = 1;
  if (Plain(p)) {
    JAXCONV_RETURN_IF_ERROR(EncodeBytes(MatrixTensor(a.x, p.group_c(), p.groups, pixels),
                                        {depth_of_box, 1, tile.rows}, what + " x", &g.a[0]));
  } else {
    g.rank_a = Rank(p);
    JAXCONV_RETURN_IF_ERROR(EncodeBytesIm2col(ImageTensor(a.x, g.rank_a, p.c, p.in, p.n), walk,
                                              tile.rows, what + " x", &g.a[0], depth_of_box));
  }
  const int64_t depth = p.filter_size() * p.group_c();
  JAXCONV_RETURN_IF_ERROR(EncodeBytes(SixteensOfFilters(a.w, depth, p.k),
                                      {depth_of_box, 2, 4, 2, tile.columns / 16}, what + " w",
                                      &g.b));
  const int columns = tile.columns < 128 ? tile.columns : 128;
  if (SizeOf(s.y_type) == 1) {
    JAXCONV_RETURN_IF_ERROR(EncodeBytes(MatrixTensor(a.y, p.group_k(), p.groups, pixels),
                                        {columns, 1, 16}, what + " y", &g.d[0]));
  }
  if (s.residual && SizeOf(s.residual_type) == 1) {
    g.added = Sm90Added::kMatrix;
    JAXCONV_RETURN_IF_ERROR(EncodeBytes(MatrixTensor(a.residual, p.group_k(), p.groups, pixels),
                                        {columns, 1, tile.rows}, what + " residual", &g.c));
  }
  return Launch(ctx, s, g, e, tile, multiprocessors, what);
}

}  // namespace jaxconv::cuda
