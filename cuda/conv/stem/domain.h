// What the kernels between an image of at most 8 channels (narrow) and one of many (wide) can run: the first layer of a
// network, the last of a decoder. Host C++17 without CUDA headers (cuda/domain.h). geometry.h has the sizes in shared
// memory that these limits follow from.
//
//   stem/mma               every pass, by mma.sync
//   stem/sm90_narrow_in    sm_90: narrow to wide (fprop where C is small, dgrad where K is), and in 16 bit wgrad
//   stem/sm90_narrow_out   sm_90: wide to narrow (dgrad where C is small, fprop where K is)
//   stem/sm90_pooled       sm_90: fprop where C is small, and a max-pooling behind it (RefusePooled)
//   stem/planes            fprop and wgrad where C is small and the filter has several planes, by the first two
//   stem/patches           sm_90: dgrad of a filter that steps by its own extents, as a dense product
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/common/planes.h"
#include "cuda/conv/stem/geometry.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::stem {

inline bool ToWide(ConvOp op, const ConvProblem& p) {
  return op == (FewInputs(p) ? ConvOp::kFprop : ConvOp::kDgrad);
}

inline bool Empty(const ConvProblem& p) {
  return p.n == 0 || p.in_size() == 0 || p.out_size() == 0;
}

// What all kernels ask for.
inline std::string RefuseProblem(const ConvProblem& p, const Device& device) {
  if (device.shared_memory() < 163 * 1024)
    return "its largest tiles need the shared memory of compute capability 8.0 or 9.0";
  if (p.groups != 1 || std::min(p.c, p.k) > kFew || std::min(p.c, p.k) < 1) {
    return "it needs at most 8 input or output channels in one group, got " + std::to_string(p.c) +
           " and " + std::to_string(p.k);
  }
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  if (!p.channels_last) return "it needs channels-last arrays";
  if (p.dtype == DType::kF32 && p.full_float32) return "it takes float32 only as TF32";
  if (!PlanesAreImages(p))
    return "in 3-D it needs one tap, stride 1 and no padding on the first axis";
  if (p.n * p.in[0] >= kCoordLimit) return "it needs fewer than 2^30 planes";
  const int64_t most_stride = FewInputs(p) ? 16 : 1;
  for (int d = 1; d < 3; ++d) {
    if (!FewInputs(p) && p.stride[d] > most_stride)
      return "with few output channels it needs stride 1";
    if (p.stride[d] > most_stride || (p.filter[d] - 1) * p.dilation[d] > 32)
      return "it needs strides up to 16 and dilated filters up to 33";
  }
  return "";
}

inline std::string RefuseWideChannels(const ConvProblem& p) {
  const int64_t many = FewInputs(p) ? p.k : p.c;
  if (many % 8 == 0) return "";
  return "it needs a multiple of 8 channels on the other side, got " + std::to_string(many);
}

inline std::string RefuseUnits(const ConvProblem& p) {
  const int64_t units =
      p.filter_size() * CeilDivide(FewInputs(p) ? p.c : p.k, kUnitBytes / int64_t(SizeOf(p.dtype)));
  if (units <= 160) return "";
  return "it needs at most 160 taps in fours (float32: twos) of channels, got " +
         std::to_string(units);
}

// Wide to narrow, for stem/mma and stem/sm90_narrow_out alike.
inline std::string RefuseToNarrow(const ConvProblem& p, const StemGeometry& g, NarrowOffsets* o) {
  if (std::string why = RefuseWideChannels(p); !why.empty()) return why;
  const int columns = g.stride[0] * g.stride[1] * g.channels;
  if (columns > kMaxColumns) {
    return "it needs strides times channels of at most 64, got " + std::to_string(columns);
  }
  if (!SetOffsets(*o, g, p)) return "it needs filters of at most 16 taps an axis";
  if (g.stride[0] * g.narrow_h + g.stride[1] * g.narrow_w >= int64_t(1) << 31)
    return "it needs fewer than 2^31 elements of the few channels in a stride of rows";
  const int64_t operand = CeilDivide(g.wide_channels * int64_t(SizeOf(p.dtype)), 128) *
                          o->count[0] * o->count[1] * ToNarrowTile::KernelColumns(*o) * 128;
  if (operand <= kOperandBytes) return "";
  return "its filter would need " + std::to_string(operand) + " bytes of shared memory, it has " +
         std::to_string(kOperandBytes);
}

inline std::string RefuseMma(ConvOp op, const ConvProblem& p, const Device& device) {
  const std::string too_large = "its windows are too large for shared memory";
  const int item = int(SizeOf(p.dtype));
  StemGeometry g = MakeGeometry(p);
  if (ToWide(op, p)) {
    if (std::string why = RefuseUnits(p); !why.empty()) return why;
    PairUnits(g, device.sm90());
    const ToWideFilter filter(g, ToWideSteps(g), LongChunks(g) ? 14 : 4);
    return TileColumns(g, filter.Room(item, kMostShared)) > 0 ? "" : too_large;
  }
  if (op == ConvOp::kWgrad) {
    if (std::string why = RefuseWideChannels(p); !why.empty()) return why;
    if (item == 2) PairUnits(g, device.sm90());
    return TileColumns(g, WgradShares(g, item).Room(item)) > 0 ? "" : too_large;
  }
  NarrowOffsets o{};
  if (std::string why = RefuseToNarrow(p, g, &o); !why.empty()) return why;
  ToNarrowTile tile(g, o, ToNarrowTile::KernelColumns(o), item);
  const bool fits = tile.MostRows(kMostShared, 1, 1) >= 1 && tile.Set(1, 1, 1) <= kMostShared;
  return fits ? "" : too_large;
}

// Whether a descriptor cannot say how far the chunks of one of a window's first `steps` steps are apart.
inline bool ChunksTooFar(const StemGeometry& g, const NarrowWindows& windows, int steps) {
  for (int step = 0; step < steps; ++step) {
    if (windows.StepDistance(g, step) >= kMostDistance) return true;
  }
  return false;
}

inline std::string RefuseNarrowIn(ConvOp op, const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  const bool to_wide = ToWide(op, p);
  if (!to_wide && op != ConvOp::kWgrad) return "it needs few channels in the array that it reads";
  if (std::string why = to_wide ? RefuseUnits(p) : RefuseWideChannels(p); !why.empty()) return why;
  const int item = int(SizeOf(p.dtype));
  const StemGeometry g = MakeGeometry(p);
  if (!WholeVectors(p, g.wide_channels))
    return "it needs whole 16 bytes of channels on the other side";
  if (g.channels * item > 16) return "it needs at most 16 bytes of the few channels";
  if (int64_t(g.narrow[0]) * g.narrow[1] >= kCoordLimit ||
      int64_t(g.images) * g.wide[0] >= kCoordLimit) {
    return "it needs fewer than 2^30 pixels of an image, and rows of all images";
  }
  const NarrowWindows windows(g, item);
  const int filter_rows = g.taps / g.taps_w, chunks = filter_rows * windows.row_chunks;
  if (to_wide) {
    const int steps = int(CeilDiv(chunks, 2));
    if (steps > kMostSteps) return "it needs at most 64 chunks of 16 bytes of a window";
    if (ChunksTooFar(g, windows, steps)) return "the chunks of a window are too far apart";
    const int columns = windows.cols <= 64 ? 64 : 112;
    const bool fits = 2 * windows.SlotBytes(g, 1) <= NarrowInRoom(g, steps, columns, 1);
    return fits ? "" : "its filter and windows are too large for shared memory";
  }
  if (item != 2) return "it takes wgrad in 16 bit only";
  if (windows.row_chunks > kWgradParts || filter_rows > kWgradRows) {
    return "it needs at most 7 filter rows, of at most 4 chunks of 16 bytes";
  }
  if (g.step[0] * windows.row_bytes >= kMostDistance) return "its filter rows are too far apart";
  const bool fits = 2 * windows.SlotBytes(g, 1) <=
                    WgradRoom(g, windows, WgradKernelRows(g), kLeastWgradStages, 1);
  return fits ? "" : "its windows are too large for shared memory";
}

// A convolution and the max-pooling `q` of its result. The activation follows the maximum, so it must keep the order of numbers.
inline std::string RefusePooled(const ConvProblem& p, Activation activation, const PoolProblem& q,
                                Number x, Number y, const Device& device) {
  if (std::string why = RefuseProblem(p, device); !why.empty()) return why;
  if (!FewInputs(p)) return "it needs few channels in the array that it reads";
  if (Empty(p) || q.out_size() == 0) return "there is nothing to compute";
  if (std::string why = RefuseNarrowIn(ConvOp::kFprop, p, device); !why.empty()) return why;
  if (activation != Activation::kNone && activation != Activation::kRelu &&
      activation != Activation::kRelu6) {
    return "behind its maxima it applies relu or relu6";
  }
  bool agrees = q.n == p.n && q.c == p.k && q.dtype == p.dtype;
  for (int d = 0; d < 3; ++d) agrees = agrees && q.in[d] == p.out[d];
  if (!agrees) return "its pooling is not one of the convolution's result";
  if (q.window[0] != 1 || q.stride[0] != 1 || q.pad[0] != 0)
    return "its pooling needs one tap, stride 1 and no padding on the first of three axes";
  for (int d = 1; d < 3; ++d) {
    if (q.window[d] < 2 || q.window[d] > 3 || q.stride[d] != 2 || q.dilation[d] != 1 ||
        q.pad[d] > q.window[d] - 2) {
      return "its pooling needs windows of 2 or 3 rows and columns that step by 2, with padding in "
             "front of those of 3 of at most 1";
    }
    if ((q.out[d] - 1) * 2 - q.pad[d] >= q.in[d]) return "a window lies in the padding";
  }
  const StemGeometry g = MakeGeometry(p);
  const Number own = NumberOf(p.dtype);
  if (x != own && (x != Number::kF32 || SizeOf(own) != 2 || !g.dense)) {
    return "beside 16 bits it reads float32 of three channels, in rows of a multiple of 4 pixels";
  }
  if (y != own && (!IsInteger8(y) || p.k % 16 != 0))
    return "it makes int8 and uint8 of multiples of 16 channels";
  const PooledTile pool(g, q, int(SizeOf(p.dtype)));
  const NarrowWindows windows(g, int(SizeOf(p.dtype)), pool.cols);
  const int steps = int(CeilDiv(g.taps / g.taps_w * windows.row_chunks, 2));
  if (ChunksTooFar(g, windows, steps)) return "the chunks of a window are too far apart";
  const bool fits = 2 * windows.SlotBytes(g, pool.WideRows(1)) <= pool.Room(g, steps);
  return fits ? "" : "its filter and windows are too large for shared memory";
}

inline std::string RefuseNarrowOut(ConvOp op, const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (op == ConvOp::kWgrad || ToWide(op, p))
    return "it needs few channels in the array that it writes";
  const StemGeometry g = MakeGeometry(p);
  NarrowOffsets o{};
  if (std::string why = RefuseToNarrow(p, g, &o); !why.empty()) return why;
  const NarrowOutSizes sizes(g, o, NarrowOutSizes::KernelColumns(g), int(SizeOf(p.dtype)));
  if (!sizes.BlocksReach(o)) {
    return "its filter's rows reach further than the " + std::to_string(sizes.blocks) +
           " rows that a product holds";
  }
  return sizes.Stages(1) >= 2 ? "" : "its filter is too large for shared memory";
}

// The dense product that stands for dgrad: dy's pixels (M, K) times w (R*S*C, K), transposed; its rows are windows.
inline DenseProblem PatchProduct(const ConvProblem& p) {
  DenseProblem q = {};
  q.batch = 1;
  q.m = p.n * p.out_size();
  q.k = p.k;
  q.n = p.filter_size() * p.c;
  q.trans_w = true;
  q.alpha = 1;
  q.dtype = p.dtype;
  return q;
}

// The dense product of a patches plan: its tile tells its kernel.
inline Plan PatchPlan(std::string_view tile) {
  const bool resident = tile == "128x64" || tile == "64x256";
  const char* kernel = resident ? "sm90/resident" : tile == "64x128" ? "sm90/rows" : "sm90/product";
  return {kernel, tile, 1, 0};
}

inline std::string RefusePatches(ConvOp op, const ConvProblem& p, const Plan& plan,
                                 const Device& device) {
  const int64_t columns = p.filter_size() * p.c;
  const bool steps = p.steps_by_filter(1) && p.steps_by_filter(2);
  if (op != ConvOp::kDgrad || !FewInputs(p) || !steps || !Half(p.dtype) || columns <= 64) {
    return "it needs dgrad in 16 bit of few input channels, a filter that steps by its own extents "
           "over all of x, and more than 64 elements under it";
  }
  const std::string why = DenseRefusal(PatchProduct(p), PatchPlan(plan.tile), device);
  return why.empty() ? "" : "of its product: " + why;
}

inline std::string RefusePlanes(ConvOp op, const ConvProblem& p, const Device& device) {
  if (std::string why = RefuseFolding(op, p, 1, kFew); !why.empty()) return why;
  const ConvProblem q = PlanesAsChannels(p);
  if (std::string why = RefuseProblem(q, device); !why.empty()) return why;
  if (Empty(p) || RefuseNarrowIn(op, q, device).empty()) return "";
  return RefuseMma(op, q, device);
}

inline std::string Refusal(std::string_view kernel, ConvOp op, const ConvProblem& p,
                           const Plan& plan, const Device& device) {
  if (kernel == "planes")
    return plan.tile.empty() ? RefusePlanes(op, p, device) : "it has one tile";
  if (std::string why = RefuseProblem(p, device); !why.empty()) return why;
  if (kernel == "patches") return RefusePatches(op, p, plan, device);
  if (!plan.tile.empty()) return "it has one tile";
  if (Empty(p)) return "";
  if (kernel == "mma") return RefuseMma(op, p, device);
  if (kernel == "sm90_narrow_in") return RefuseNarrowIn(op, p, device);
  if (kernel == "sm90_narrow_out") return RefuseNarrowOut(op, p, device);
  return "there is no such kernel";
}

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  if (MemberOf(plan.kernel) == "patches") {
    const DenseProblem q = PatchProduct(p);
    return Align256(q.m * q.n * int64_t(SizeOf(p.dtype))) + DenseWorkspace(q, PatchPlan(plan.tile));
  }
  if (MemberOf(plan.kernel) == "planes") {
    const ConvProblem q = PlanesAsChannels(p);
    const int64_t partials = op == ConvOp::kWgrad ? plan.splits * FilterCount(q) * 4 : 0;
    return FoldedBytes(q) + FoldedFilterBytes(q) + partials;
  }
  // The kernels always write parts, also a single one.
  return op == ConvOp::kWgrad ? plan.splits * FilterCount(p) * 4 : 0;
}

}  // namespace jaxconv::cuda::conv::stem
