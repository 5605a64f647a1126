// What the batch-norm kernels can run, and their workspaces. Host C++17 without CUDA headers (cuda/domain.h).
//
//   two_read        every problem; statistics alone, inference, and dx of given sums are a single pass, under this name; of
//                   two joined batch-norms large arrays, channels last, on sm_90
//   resident_block  a block keeps all elements of its channels in shared memory
//   resident_team   several CTAs share a group of channels, in accesses of 16 bytes
#pragma once

#include <algorithm>
#include <string>

#include "cuda/batchnorm/layout.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::batchnorm {

// Elements in an access: 16 bytes where the fastest axis divides into them.
inline int Vector(const BatchNormProblem& p) {
  const int vector = 16 / static_cast<int>(SizeOf(p.dtype));
  return (p.inner > 1 ? p.inner : p.channels) % vector != 0 ? 1 : vector;
}

// ---------------------------------------------------------------------------------------------------------------------
// resident_block

// Threads of a block at most, to whose steps the slots are rounded up; and its kernels' own shared memory, bytes, at most.
constexpr int kMaxThreads = 512;
constexpr int64_t kResidentStatic = 12 * 1024;

// Shared memory of the narrowest block, bytes. Backward keeps x and dy.
inline int64_t ResidentBytes(BatchNormOp op, const BatchNormProblem& p) {
  const int64_t vector = Vector(p), held = op == BatchNormOp::kBackward ? 2 : 1;
  const int64_t positions = p.reduced() / (p.inner > 1 ? vector : 1);
  const int64_t lanes = p.inner > 1 ? 1 : std::min<int64_t>(2, p.channels / vector);
  return held * (positions * lanes + kMaxThreads) * vector * int64_t(SizeOf(p.dtype)) +
         kResidentStatic;
}

// ---------------------------------------------------------------------------------------------------------------------
// resident_team

constexpr int kTeamThreads = 256;
constexpr int64_t kTeamStatic = 8 * 1024;     // the kernels' own shared memory, bytes, at most
constexpr int kTeamWidths[] = {32, 64, 128};  // bytes of neighbouring channels in a group

// Positions of a thread in a step: with four elements a position, train has registers for two.
constexpr int TeamStep(BatchNormOp op, size_t itemsize) {
  return op == BatchNormOp::kTrain && itemsize == 4 ? 2 : 1;
}

constexpr int kTeamBlocks = 2;  // CTAs of a multiprocessor

// Channels of a group, in lanes of 16 bytes (channels last).
inline int64_t TeamLanes(const BatchNormProblem& p, int width) {
  return p.inner > 1 ? 1 : Lanes(p.channels * int64_t(SizeOf(p.dtype)) / 16, 16, width);
}

inline int64_t TeamGroups(const BatchNormProblem& p, int width) {
  if (p.inner > 1) return p.batch * p.channels;
  return p.batch * CeilDivide(p.channels * int64_t(SizeOf(p.dtype)) / 16, TeamLanes(p, width));
}

// Bytes of the tile "64B", or 0.
inline int TeamWidth(std::string_view tile) {
  for (const int width : kTeamWidths) {
    if (tile == std::to_string(width) + "B") return width;
  }
  return 0;
}

// Bytes for each team: two rounds of a sum and a sum of squares, 8 bytes each, for every CTA and channel, and of their
// totals.
inline int64_t TeamBytes(const BatchNormProblem& p, int width, int64_t ctas) {
  const int64_t channels = p.inner > 1 ? 1 : TeamLanes(p, width) * Vector(p);
  return (ctas + 1) * channels * 2 * 2 * 8;
}

// Whether a CTA has room for four steps, the fewest that are in flight: of what stays (x; backward x and dy) and of the
// residual, which passes.
inline bool TeamFits(BatchNormOp op, const BatchNormProblem& p, const Device& device) {
  // The device keeps 1 KB of each block to itself.
  const int64_t room =
      std::min(device.shared_memory(), device.shared_memory_of_all() / kTeamBlocks - 1024);
  const int64_t slots =
      (room - kTeamStatic) / (int64_t{kTeamThreads} * TeamStep(op, SizeOf(p.dtype)) * 16);
  const bool backward = op == BatchNormOp::kBackward;
  const bool residual = p.residual && !(backward && p.activation == Activation::kNone);
  return (slots - (residual ? 4 : 0)) / (backward ? 2 : 1) >= 4;
}

// ---------------------------------------------------------------------------------------------------------------------
// Walks through a ring in shared memory (stream.cuh)

constexpr int kStreamThreads = 512;  // that compute; one warp more copies

// A tensor below this is read by the threads themselves: its walk ends before a ring is full twice.
constexpr int64_t kStreamBytes = 4 << 20;

// Vectors of a stage, whole rows of `row`; 0 where rows are too long, or leave too many threads idle.
constexpr int64_t StreamVectors(int64_t row) {
  if (row < 1 || row > kStreamThreads) return 0;
  const int64_t vectors = kStreamThreads / row * row;
  return vectors < kStreamThreads * 3 / 4 ? 0 : vectors;
}

inline int64_t Bytes(const BatchNormProblem& p) {
  return p.batch * p.channels * p.reduced() * static_cast<int64_t>(SizeOf(p.dtype));
}

// Whether walks over several tensors go through a ring, where the device has one.
inline bool Streamed(const BatchNormProblem& p) {
  return p.batch == 1 && p.inner == 1 && Bytes(p) >= kStreamBytes;
}

inline std::string RefuseSigns(const BatchNormProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (p.activation != Activation::kRelu) return "it needs relu as activation";
  if (p.inner > 1 || p.batch != 1) return "it needs channels last, and one instance";
  const int vector = Vector(p);
  if (p.channels % 8 != 0 || vector == 1 || StreamVectors(p.channels / vector) == 0)
    return "it cannot cut rows of " + std::to_string(p.channels) +
           " channels into 16-byte vectors and whole bytes of signs";
  if (Bytes(p) < kStreamBytes)
    return "it needs arrays of at least 4 MB, got " + std::to_string(Bytes(p)) + " bytes";
  return "";
}

// An array is added to dx in the second walk through the ring.
inline std::string RefuseAdd(const BatchNormProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (p.residual) return "it cannot read a residual and add too";
  if (p.inner > 1 || p.batch != 1) return "it needs channels last, and one instance";
  if (Vector(p) == 1 || StreamVectors(p.channels / Vector(p)) == 0)
    return "it cannot cut rows of " + std::to_string(p.channels) + " channels into 16-byte vectors";
  if (Bytes(p) < kStreamBytes)
    return "it needs arrays of at least 4 MB, got " + std::to_string(Bytes(p)) + " bytes";
  return "";
}

inline std::string RefuseShortcut(const BatchNormProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs a GPU of compute capability 9.0";
  if (p.activation != Activation::kRelu && p.activation != Activation::kSilu &&
      p.activation != Activation::kGelu)
    return "it takes relu, silu and gelu only";
  if (p.inner > 1 || p.batch != 1) return "it needs channels last, and one instance";
  if (Vector(p) == 1 || StreamVectors(p.channels / Vector(p)) == 0)
    return "it cannot cut rows of " + std::to_string(p.channels) + " channels into 16-byte vectors";
  if (Bytes(p) < kStreamBytes)
    return "it needs arrays of at least 4 MB, got " + std::to_string(Bytes(p)) + " bytes";
  return "";
}

// ---------------------------------------------------------------------------------------------------------------------

inline std::string Refusal(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                           const Device& device) {
  if (plan.splits < 1 || plan.splits > 65535)
    return "it needs splits of 1 to 65535, got " + std::to_string(plan.splits);
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  if (p.reduced() >= kMaxPositions)
    return "it needs fewer than 2^31 elements per channel, got " + std::to_string(p.reduced());
  if (p.channels > 0 && p.batch > ((int64_t{1} << 31) - 1) / p.channels)
    return "it needs fewer than 2^31 channels, of all instances";
  if (op == BatchNormOp::kShortcutBackward)
    return plan.kernel == "two_read" ? RefuseShortcut(p, device) : "there is no such kernel";
  if (op == BatchNormOp::kBackwardAdd)
    return plan.kernel == "two_read" ? RefuseAdd(p, device) : "there is no such kernel";
  if (op == BatchNormOp::kSigns)
    return plan.kernel == "two_read" ? RefuseSigns(p, device) : "there is no such kernel";
  if (plan.kernel == "two_read") return "";
  const bool block = plan.kernel == "resident_block";
  if (!block && plan.kernel != "resident_team") return "there is no such kernel";
  if (op == BatchNormOp::kInfer) return "inference is a single pass";
  if (op == BatchNormOp::kDx) return "dx of given sums is a single pass";
  if (op == BatchNormOp::kMoments) return "statistics alone are a single pass";
  if (block) {
    const int64_t needed = ResidentBytes(op, p), there = device.shared_memory();
    if (needed <= there) return "";
    return "a block would need " + std::to_string(needed) +
           " bytes of shared memory, the device has " + std::to_string(there);
  }
  const int vector = 16 / static_cast<int>(SizeOf(p.dtype));
  if (p.inner > 1 && p.inner < vector)
    return "it reads 16 bytes at a time: images have " + std::to_string(p.inner) +
           " elements, fewer than " + std::to_string(vector);
  if (p.inner >= kMaxImage)
    return "it needs images of fewer than 2^30 elements, got " + std::to_string(p.inner);
  if (p.inner == 1 && Vector(p) == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(vector);
  if (!plan.tile.empty() && TeamWidth(plan.tile) == 0)
    return "it has tiles 32B, 64B and 128B, got " + std::string(plan.tile);
  return TeamFits(op, p, device) ? "" : "a team's CTAs do not fit in the device's shared memory";
}

// Bytes.
inline int64_t WorkspaceOf(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                           const Device& device) {
  const bool sums =
      op != BatchNormOp::kInfer && op != BatchNormOp::kSigns && op != BatchNormOp::kDx;
  if (op == BatchNormOp::kShortcutBackward) return (4 * plan.splits + 3) * p.channels * 4;
  if (plan.kernel == "two_read" && sums) return (plan.splits + 1) * 2 * p.batch * p.channels * 4;
  if (plan.kernel != "resident_team") return 0;
  const int width = TeamWidth(plan.tile);
  const int64_t most = int64_t{device.multiprocessors} * kTeamBlocks;
  const int64_t ctas = std::min(plan.splits, most);
  return std::min(most / ctas, TeamGroups(p, width)) * TeamBytes(p, width, ctas);
}

}  // namespace jaxconv::cuda::batchnorm
