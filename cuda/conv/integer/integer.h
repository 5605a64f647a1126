// The kernels of integer convolutions. domain.h says what they can run; no array is empty.
#pragma once

#include <string>

#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::conv::integer {

// A thread an output: for few output channels a group, and few products a sum.
Status OneOutput(const Context& ctx, const IntegerConvProblem& p, const void* x, const void* w,
                 void* y, const std::string& what);

// A block a tile of outputs, of operands in shared memory.
Status Tile(const Context& ctx, const IntegerConvProblem& p, const void* x, const void* w, void* y,
            const std::string& what);

}  // namespace jaxconv::cuda::conv::integer
