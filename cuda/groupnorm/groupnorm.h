// Group-norm on the GPU, channels last: the launches behind GroupNorm and GroupNormBackward. Meaning and layouts:
// common/problem.h, common/launch.h. What runs: domain.h.
//
// An image is `splits` items of `chunk` pixels; a block has an item, whole pixels of it at a time. Blocks that sum up
// leave an item's two sums for each group in the workspace, blocks that write add the image's up and read the item again.
// Traffic: forward 2 reads + 1 write, backward 4 reads + 1 write, less what the L2 cache still holds at the second reading:
// of "two_read" the end of the tensor (the second launch walks backwards), of "interleaved" all, where `lead` items of
// everything that is read and written fit in it.
#pragma once

#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::groupnorm {

// How blocks cover the problem, in numbers that every kernel has.
struct Walk {
  int64_t images;         // of all instances
  uint32_t per_instance;  // images that share a scale and a bias
  uint32_t pixels;
  uint32_t chunk, splits;  // pixels of an item; items of an image
  uint32_t lead;           // items by which sums are ahead of what is written ("interleaved")
  int channels, groups, group_channels;
  int row, tiles, lanes, rows;  // domain.h: Lanes
  Activation activation;
  float slope;
  double inv_n;  // 1 / elements of a group
  double epsilon;
};

struct ForwardArgs {
  Walk walk;
  const void* x;
  void* y;
  const float* scale;  // (batch, channels)
  const float* bias;
  float* mean;  // (batch * images, groups)
  float* rstd;
  float2* parts;       // domain.h: Scratch
  unsigned* counters;  // zeros
};

struct BackwardArgs {
  Walk walk;
  const void* x;
  const void* dy;
  void* dx;  // null when unwanted
  const float* scale;
  const float* bias;
  const float* mean;
  const float* rstd;
  float* dscale;  // (batch, channels)
  float* dbias;
  float2* parts;
  float* sums;
  unsigned* counters;
};

// `aligned`: x, y, dy, dx, scale and bias begin at multiples of 16 bytes. `what` opens the message of a failure.
Status Forward(const Context& ctx, const GroupNormProblem& p, bool interleaved, bool aligned,
               ForwardArgs args, const std::string& what);
Status Backward(const Context& ctx, const GroupNormProblem& p, bool interleaved, bool aligned,
                BackwardArgs args, const std::string& what);
Status ResidentForward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                       const Device& device, bool aligned, const ForwardArgs& args,
                       const std::string& what);
Status ResidentBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                        const Device& device, bool aligned, const BackwardArgs& args,
                        const std::string& what);
// "rows"; arrays begin at multiples of 16 bytes. The backward pass includes AddShares.
Status RowsForward(const Context& ctx, const GroupNormProblem& p, const Device& device,
                   const ForwardArgs& args, const std::string& what);
Status RowsBackward(const Context& ctx, const GroupNormProblem& p, const Device& device,
                    const BackwardArgs& args, const std::string& what);
// After a backward pass: dscale and dbias, of the `rows` shares of an instance. `early`: its blocks may come while that
// ends (compute capability 9.0).
Status AddShares(const Context& ctx, const GroupNormProblem& p, int64_t rows, bool early,
                 const BackwardArgs& args, const std::string& what);

}  // namespace jaxconv::cuda::groupnorm
