// What convolutions take from the batch-norm on the host, and how it cuts its work up.
#pragma once

#include "common/problem.h"
#include "common/status.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

// Tests take their shapes from it, on both sides of each threshold.
struct BatchNormShape {
  static constexpr int64_t kBlockElements = 32768;
  static constexpr int64_t kChannelStep =
      1024;                                // channels-last: partial sums that stay in the L1 cache
  static constexpr int64_t kBuffer = 256;  // elements of dz worked out at a time
};

// The mean and the biased variance of each (batch, channel) of x.
Status ChannelMoments(const Context& ctx, const BatchNormProblem& p, const void* x, void* mean,
                      void* var);

}  // namespace jaxconv::cpu
