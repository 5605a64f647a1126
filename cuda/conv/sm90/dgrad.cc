// dgrad by the products of sm90:  dx = sum over taps and k of dy * w, for each residue of the strides a convolution of stride
// 1 over dy (common/dgrad_phases.h), all of them in one launch.
#include <algorithm>
#include <string>

#include "cuda/conv/sm90/conv_sm90.h"
#include "cuda/conv/sm90/tensors.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda {

static_assert(kMaxPhases == kSm90Phases);

Status Sm90ProductDgrad(const Context& ctx, const ConvProblem& p, Sm90Choice choice, const void* dy,
                        const void* w, const void* c, void* dx, Workspace workspace,
                        const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const int tile_m = choice.tile.rows;

  // Axes W, H, D from here on.
  DgradAxis axis[3];
  int phases = 1;
  bool strided = false;
  for (int i = 0; i < 3; ++i) {
    axis[i] = MakeDgradAxis(p, 2 - i);
    strided = strided || axis[i].residues > 1;
    phases *= axis[i].residues;
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
  } else if (c != nullptr && p.dtype != DType::kF32) {
    g.added = Sm90Added::kMatrix;
    JAXCONV_RETURN_IF_ERROR(EncodeTiled(p.dtype,
                                        MatrixTensor(c, p.group_c(), p.groups, p.n * p.in_size()),
                                        {64, 1, tile_m}, what + " c", &g.c));
  }
  SetFloatOutput(dx, nullptr, p.c, p.group_c(), p.in,
                 {axis[0].stride, axis[1].stride, axis[2].stride}, &g.out);
  g.out.c = static_cast<const float*>(c);  // where strides are more than 1 it is dx
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
      const DgradWalk part = MakeDgradWalk(a, residue);
      phase.extent[i] = walk.count[i] = every.count[i] = part.rows;
      phase.tap_step[i] = part.step;
      phase.first[i] = walk.first[i] = part.first;
      phase.step[i] = walk.step[i] = 1;
      phase.taps[i] = part.taps;
      phase.filter_first += part.tap * filter_step;
      phase.filter_step[i] = part.tap_step * filter_step;
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
                                      {0, 1, FilterBoxRows(choice.tile), 1}, what + " w", &g.b,
                                      in.tf32));
  return LaunchProduct(ctx, in, true, g, choice, device.multiprocessors, what);
}

}  // namespace jaxconv::cuda
