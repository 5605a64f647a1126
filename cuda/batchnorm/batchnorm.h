// Batch-norm on the GPU: the algorithms behind BatchNormTrain and BatchNormBackward. What each runs, and its scratch: domain.h.
// Meaning and layouts: common/problem.h, common/launch.h. Inference is a single pass and knows no algorithm.
//
// two_read: any problem. Three small steps, no grid-wide wait: sums per (channel, split) into the workspace; a pass that
//   adds the splits up; then the second walk over the tensor. Channels-last, 16 splits or fewer are added up by the blocks
//   of the second walk instead. Channels-first it walks in the order of memory, in vectors that may be of two images.
//   Traffic: train 2 reads + 1 write, backward 4 reads + 1 write, less what the L2 cache still holds: the second walk is the
//   first one backwards.
//   Any splits >= 1 is right, also more than there are elements; up to 16 save a launch. Without dx the first walk is all:
//   it writes dresidual too, where that is wanted. BatchNormDx is the second walk alone, by sums that are given.
//
// resident_block: one launch; 1 read + 1 write (train), 2 reads + 1 write (backward): a block keeps all of its channels'
//   elements in shared memory. Made for small tensors and for channels-first with small images. It fills the device where
//   batch * channels (inner > 1) or batch * channels / (2 * vec) is no less than the number of multiprocessors.
//
// resident_team: one launch, cooperative unless a team is one CTA. Several CTAs share a group of channels (a tile: `width`
//   bytes of neighbouring channels, channels-last; one channel, channels-first), keep what of it fits in their shared
//   memory, and add its sums up together; the teams take groups in turn. Traffic: train 1 read + 1 write, backward 2 reads
//   + 1 write where a group fits on chip; what does not is read a second time, from the L2 cache if it is still there.
//   Plan: tile "32B", "64B" or "128B", the width; splits, the CTAs of a team, of which no more take part than the device
//   runs at once. A smaller workspace than planned means fewer teams.
//
// All: float32, bfloat16, float16 with float32 parameters; fewer than 2^31 positions a channel; deterministic.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::batchnorm {

// (batch, channels): scale, bias, running and batch statistics. x, residual, y: the tensor, in
// dtype.
struct ForwardTensors {
  const void* x;
  const void* residual;  // null without
  void* y;
  const float* scale;
  const float* bias;
  const float* old_mean;  // the running statistics; in inference those to apply
  const float* old_var;
  float* new_mean;  // null in inference, like the three below
  float* new_var;
  float* mean;
  float* rstd;
  // A bit an element, bit j of byte i of y's element 8i + j: whether it is above 0. Null without; 16 bits, walks through a ring.
  uint8_t* signs;
};

struct BackwardTensors {
  const void* x;
  const void* dy;
  const void* residual;  // null where z is not needed
  const void* addend;    // to dx; null without; walks through a ring, without a residual
  void* dx;              // null when unwanted
  void* dresidual;       // null when unwanted
  const float* scale;
  const float* bias;
  const float* mean;
  const float* rstd;
  float* dscale;  // DxOfSums reads these two
  float* dbias;
};

// `p` is canonical (layout.h) and not empty in batch or channels. `what` opens the message of a
// failure.
Status TwoReadTrain(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                    const ForwardTensors& t, Workspace workspace, const std::string& what);
Status TwoReadBackward(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                       const BackwardTensors& t, Workspace workspace, const std::string& what);
// (batch, channels) each: a sample of the channel, its mean less that, its biased variance.
struct MomentTensors {
  const void* x;
  float* k;
  float* shift;
  float* var;
};
// The statistics alone.
Status TwoReadMoments(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                      const MomentTensors& t, Workspace workspace, const std::string& what);
// dx alone: t.dscale and t.dbias are read, and are sums over `count` elements a channel.
Status DxOfSums(const Context& ctx, const BatchNormProblem& p, int64_t count,
                const BackwardTensors& t, const std::string& what);
Status ResidentTrain(const Context& ctx, const BatchNormProblem& p, const ForwardTensors& t,
                     const std::string& what);
Status ResidentBackward(const Context& ctx, const BatchNormProblem& p, const BackwardTensors& t,
                        const std::string& what);

// How resident_team lays a problem on the device.
struct TeamShape {
  int width;  // bytes of neighbouring channels in a group, channels-last: 32, 64 or 128
  int ctas;   // that share a group
};
Status TeamTrain(const Context& ctx, const BatchNormProblem& p, const TeamShape& shape,
                 const ForwardTensors& t, Workspace workspace, const std::string& what);
Status TeamBackward(const Context& ctx, const BatchNormProblem& p, const TeamShape& shape,
                    const BackwardTensors& t, Workspace workspace, const std::string& what);
Status Infer(const Context& ctx, const BatchNormProblem& p, const ForwardTensors& t,
             const std::string& what);

// Two batch-norms that an addition joins (shortcut.cu): of x, and of r, which is like x. (channels) each.
struct SavedNorm {
  const float* scale;
  const float* bias;
  const float* mean;
  const float* rstd;
};
struct ShortcutTensors {
  const void* x;
  const void* dy;
  const void* r;
  SavedNorm of_x, of_r;
  float* dscale;
  float* dbias;  // of both
  float* dscale_r;
  void* dx;
  void* dr;
};
// At most `splits` parts of a sum.
Status ShortcutBackward(const Context& ctx, const BatchNormProblem& p, int64_t splits,
                        const ShortcutTensors& t, Workspace workspace, const std::string& what);

// sums: (rows, parts) -> totals: (rows).
Status AddParts(const Context& ctx, int64_t rows, int64_t parts, const float* sums, float* totals,
                const std::string& what);

}  // namespace jaxconv::cuda::batchnorm
