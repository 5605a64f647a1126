// What the group-norm kernels can run, how a block's threads lie on a pixel, and the workspaces. Host C++17 without CUDA
// headers (cuda/domain.h).
//
//   two_read     the sums in one launch, then what is written
//   interleaved  both in one launch: blocks that write follow blocks that sum up at a distance of `chunk` items, so that
//                what they read again is still in the L2 cache; 16-byte vectors only
//   resident     a tile of channels, whole groups, of an image stays in the shared memory of a CTA, or of the `splits` CTAs
//                of a cluster, which share its pixels; `chunk` is a tile's width, in bytes. 16-byte vectors only
//   rows         layer-norm: images of one pixel and one group, each in the registers of some lanes of a warp; no activation,
//                16-byte vectors only
//
// Of two_read and interleaved: an item is one of the `splits` runs of pixels of an image.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>

#include "cuda/domain.h"

namespace jaxconv::cuda::groupnorm {

constexpr int kThreads = 256;
// Bytes of shared memory that any block of any device has without asking.
constexpr int64_t kShared = 48 * 1024;
// Elements of an image, images, blocks of a launch.
constexpr int64_t kMostItems = (int64_t{1} << 30) - 1;

// Elements in an access: 16 bytes where they divide the channels.
inline int Vector(const GroupNormProblem& p) {
  const int vector = 16 / static_cast<int>(SizeOf(p.dtype));
  return p.channels % vector != 0 ? 1 : vector;
}

// A pixel is `row` vectors, cut into `tiles` of `lanes` vectors, a thread each; a block takes `rows` pixels in a step.
struct Lanes {
  int64_t row, tiles, lanes, rows;
};

inline Lanes LanesOf(int64_t channels, int64_t vector) {
  const int64_t row = channels / vector, tiles = CeilDivide(row, kThreads);
  const int64_t lanes = CeilDivide(row, tiles);
  return {row, tiles, lanes, kThreads / lanes};
}

// Shared memory of a block, bytes: the threads' two sums of each channel of a vector, the channels' two sums and a number
// for each group; or, of a block that writes, four numbers for each group.
inline int64_t SharedBytes(const GroupNormProblem& p, int64_t vector) {
  return 4 * std::max(2 * kThreads * vector + 2 * p.channels + p.groups, 4 * p.groups);
}

// ---------------------------------------------------------------------------------------------------------------------
// resident

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;           // of a CTA
constexpr int64_t kLargeSlab = 100 * 1024;  // bytes: from here on a multiprocessor has one CTA

// Steps of a thread whose copies are on their way, a power of two: 32 KB a CTA of 256 threads.
constexpr int InFlight(GroupNormOp op) { return op == GroupNormOp::kBackward ? 4 : 8; }
// Tensors that stay.
constexpr int Held(GroupNormOp op) { return op == GroupNormOp::kBackward ? 2 : 1; }

// Vectors of the narrowest tile: whole groups, whole vectors. More than a warp has where none divide a pixel.
inline int64_t UnitOf(const GroupNormProblem& p) {
  const int64_t vector = Vector(p);
  if (vector == 1) return kWarp + 1;
  return std::lcm(p.group_channels(), vector) / vector;
}

// A tile is `lanes` vectors of neighbouring channels. A warp takes kWarp / lanes pixels in a step, `rows` are a CTA's. The
// copies of `steps` steps pass through `slots` steps of shared memory: the first `held` stay, the others, if any, take the
// last in_flight slots in turn and are copied again for the second walk, from the last one backwards.
struct Resident {
  int64_t lanes, tiles, pixels;  // of a CTA
  int64_t threads, rows, steps, slots, held;
  int64_t
      cells;  // numbers of a lane that meet in a sum: a vector's channels, in forward those of one group together
  int64_t slab, bytes;  // shared memory: of the slots; of all
};

// Of a problem whose UnitOf divides `width`, bytes. slots < in_flight: the device has not enough shared memory.
inline Resident ResidentOf(GroupNormOp op, const GroupNormProblem& p, int64_t width, int64_t ctas,
                           const Device& device) {
  Resident r = {};
  const int64_t vector = Vector(p), held = Held(op), in_flight = InFlight(op);
  r.lanes = width / 16;
  r.tiles = CeilDivide(p.channels / vector, r.lanes);
  r.pixels = CeilDivide(p.pixels, ctas);
  const int64_t vectors = r.pixels * r.lanes;
  r.threads = 64;
  while (r.threads < 256 && r.threads * 4 <= vectors) r.threads *= 2;
  if (vectors * 16 * held > kLargeSlab) r.threads = kMostThreads;
  const int64_t warps = r.threads / kWarp;
  r.rows = warps * (kWarp / r.lanes);
  r.steps = CeilDivide(r.pixels, r.rows);
  const int64_t channels = r.lanes * vector, groups = channels / p.group_channels();
  const bool backward = op == GroupNormOp::kBackward;
  r.cells = backward ? vector : vector / std::gcd(p.group_channels(), vector);
  // Forward: warps' and CTAs' sums, four numbers for each group, scale and bias. Backward: warps' and CTAs' sums, the
  // channels' and two numbers for each group.
  const int64_t sums = 2 * warps * r.lanes * r.cells;
  const int64_t numbers = backward ? sums + 2 * (ctas + 1) * channels + 2 * groups
                                   : sums + (2 * ctas + 4) * groups + 2 * channels;
  const int64_t scratch = CeilDivide(4 * numbers, 16) * 16, slot = r.threads * 16 * held;
  r.slots = std::min(r.steps, (device.shared_memory() - scratch) / slot);
  r.held = r.slots == r.steps ? r.slots : r.slots - in_flight;
  r.slab = r.slots * slot;
  r.bytes = r.slab + scratch;
  return r;
}

inline std::string ResidentRefusal(GroupNormOp op, const GroupNormProblem& p, const Plan& plan,
                                   const Device& device) {
  if (Vector(p) == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(16 / SizeOf(p.dtype));
  const int64_t unit = 16 * UnitOf(p), most = 16 * kWarp;
  if (unit > most)
    return "it needs whole groups in 512 bytes of channels, which are here " +
           std::to_string(unit) + " at least";
  if (plan.chunk < unit || plan.chunk > most || plan.chunk % unit != 0)
    return "it needs a tile's width (chunk) in multiples of " + std::to_string(unit) +
           " bytes up to 512, got " + std::to_string(plan.chunk);
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8)
    return "it needs clusters (splits) of 1, 2, 4 or 8 CTAs, got " + std::to_string(plan.splits);
  if (plan.splits > 1 && !device.sm90())
    return "clusters need a GPU of compute capability 9.0 and code for it";
  const Resident r = ResidentOf(op, p, plan.chunk, plan.splits, device);
  if (p.batch * p.images > kMostItems / (r.tiles * plan.splits))
    return "it needs fewer than 2^30 CTAs";
  if (r.slots < std::min<int64_t>(r.steps, InFlight(op)))
    return "its tile does not fit in the device's shared memory";
  return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// rows

constexpr int64_t kMostRowChannels = 1024;  // 32 numbers a lane
constexpr int64_t kMostRowBlocks = 1024;    // each leaves a share of dbias and dscale

// Lanes that take a row, a power of two: as few as hold it with 24 numbers each, so that few are idle and exchanges short.
inline int64_t RowLanes(const GroupNormProblem& p) {
  const int64_t vectors = p.channels / Vector(p), most = 24 / Vector(p);
  int64_t lanes = 1;
  while (lanes < kWarp && lanes * most < vectors) lanes *= 2;
  return lanes;
}

// Blocks of an instance, if the device can run so many at once.
inline int64_t RowBlocks(const GroupNormProblem& p) {
  const int64_t blocks = CeilDivide(p.images, kThreads / RowLanes(p));
  return std::clamp<int64_t>(blocks, 1, kMostRowBlocks);
}

inline std::string RowsRefusal(const GroupNormProblem& p) {
  if (p.pixels != 1 || p.groups != 1)
    return "it takes images of one pixel and one group: layer-norms over the channels";
  if (p.activation != Activation::kNone) return "it takes no activation";
  if (Vector(p) == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(16 / SizeOf(p.dtype));
  if (p.channels > kMostRowChannels)
    return "it takes at most " + std::to_string(kMostRowChannels) + " channels";
  return p.batch > 65535 ? "it takes at most 65535 instances" : "";
}

// ---------------------------------------------------------------------------------------------------------------------

inline std::string Refusal(GroupNormOp op, const GroupNormProblem& p, const Plan& plan,
                           const Device& device) {
  const bool resident = plan.kernel == "resident", rows = plan.kernel == "rows";
  if (plan.kernel != "two_read" && plan.kernel != "interleaved" && !resident && !rows)
    return "there is no such kernel";
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  if (plan.splits < 1 || plan.splits > 65535)
    return "it needs splits of 1 to 65535, got " + std::to_string(plan.splits);
  if (p.channels > kMostItems || p.pixels > kMostItems ||
      p.pixels > kMostItems / std::max<int64_t>(p.channels, 1))
    return "it needs images of fewer than 2^30 elements";
  if (p.batch > kMostItems || p.images > kMostItems ||
      p.batch * p.images > kMostItems / plan.splits)
    return "it needs fewer than 2^30 images times splits";
  if (resident) return ResidentRefusal(op, p, plan, device);
  if (rows) return RowsRefusal(p);
  const int64_t shared = SharedBytes(p, Vector(p));
  if (shared > kShared)
    return "its channels and groups need " + std::to_string(shared) +
           " bytes of shared memory of " + std::to_string(kShared);
  if (plan.kernel == "two_read") return "";
  if (Vector(p) == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(16 / SizeOf(p.dtype));
  if (plan.chunk < plan.splits)
    return "it needs a distance (chunk) of no fewer items than an image has, " +
           std::to_string(plan.splits) + ", got " + std::to_string(plan.chunk);
  return "";
}

// Where in the workspace what lies, bytes from its start.
struct Scratch {
  int64_t
      parts;  // (batch * images, groups, splits) pairs of float32: an item's two sums for each group
  int64_t
      sums;  // (batch * images * splits, 2, channels) float32: an item's share of dbias and dscale; of
             // "resident" an image's, of "rows" a block's
  int64_t counters;  // (1 + batch * images) uint32: the items taken; of each image those summed up
  int64_t end;
};

inline Scratch ScratchOf(GroupNormOp op, const GroupNormProblem& p, const Plan& plan) {
  const int64_t images = p.batch * p.images;
  const bool resident = plan.kernel == "resident", backward = op == GroupNormOp::kBackward;
  const bool rows = plan.kernel == "rows";
  const int64_t items = rows ? p.batch * RowBlocks(p) : resident ? images : images * plan.splits;
  Scratch s = {};
  s.sums = resident || rows ? 0 : Align256(items * p.groups * 8);
  s.counters = s.sums + (backward ? Align256(items * 2 * p.channels * 4) : 0);
  s.end = s.counters + (plan.kernel == "interleaved" ? Align256((1 + images) * 4) : 0);
  return s;
}

}  // namespace jaxconv::cuda::groupnorm
