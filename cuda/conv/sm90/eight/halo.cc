// sm90/eight_halo on the host: a ScaledConvProblem into an EightHalo.
#include "cuda/conv/sm90/eight/halo.h"

#include "cuda/conv/sm90/eight/eight.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/tma.h"

namespace jaxconv::cuda {
namespace {

// w (K, R S, C) as (C, R S, 8, 2, K / 16): a filter n = 16g + 2i + e at (i, e, g).
TmaTensor PairsOfFilters(const void* w, int64_t channels, int64_t filters) {
  const int64_t depth = kEightHaloTaps * channels;
  return {w,
          5,
          {channels, kEightHaloTaps, 8, 2, filters / 16},
          {1, channels, 2 * depth, depth, 16 * depth}};
}

}  // namespace

Status EightHaloFprop(const Context& ctx, const ScaledConvProblem& s, const ConvScaledArrays& a,
                      int multiprocessors, const std::string& what) {
  const ConvProblem& p = s.conv;
  const HaloWalk walk(p, false);
  const bool integers = IsInteger8(s.x_type);
  const int64_t row = EightHaloRow(p.c), places = EightHaloPlaces(integers);
  EightHalo g = {};
  g.epilogue = EightEpilogue(s, a);
  g.line = walk.line;
  for (int i = 0; i < 3; ++i) g.made[i] = int(p.out[2 - i]);
  g.row_shift = int(walk.shift[1]);
  g.column_shift = int(walk.shift[0]);
  g.n = int(p.k);
  g.tiles = int(CeilDiv(walk.line.places, places));
  if (g.tiles == 0) return Status::Ok();
  JAXCONV_RETURN_IF_ERROR(EncodeBytesIm2col(
      ImageTensor(a.x, walk.line.rank, p.c, p.in, p.n), walk.read,
      int(EightHaloPixels(integers, row, walk.reach)), what + " x", &g.x, int(row)));
  JAXCONV_RETURN_IF_ERROR(
      EncodeBytes(PairsOfFilters(a.w, p.c, p.k), {int(row), 1, 8, 2, 4}, what + " w", &g.w));
#define JAXCONV_EIGHT_HALO_LAUNCH(x, w)                     \
  if (s.x_type == Number::k##x && s.w_type == Number::k##w) \
    return LaunchEightHalo##x##w(ctx, g, row, multiprocessors, what);
  JAXCONV_EIGHT_PAIRS(JAXCONV_EIGHT_HALO_LAUNCH)
#undef JAXCONV_EIGHT_HALO_LAUNCH
  return Status::Internal(what + ": no launcher");
}

}  // namespace jaxconv::cuda
