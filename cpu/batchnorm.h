// What convolutions take from the batch-norm on the host.
#pragma once

#include "common/problem.h"
#include "common/status.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

// The mean and the biased variance of each (batch, channel) of x.
Status ChannelMoments(const Context& ctx, const BatchNormProblem& p, const void* x, void* mean,
                      void* var);

}  // namespace jaxconv::cpu
