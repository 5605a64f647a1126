// Convolution between an image of few channels (narrow: at most 8) and one of many (wide), on tensor cores: the first
// layer of a network, the last of a decoder. domain.h says what its kernels can run, jaxconv/_plan/stem.py which is
// taken and into how many parts a weight gradient's reduction is cut.
//
// Taps and channels are padded with zeros, and so are rows of pixels for wgrad: an infinity in the narrow image can make
// NaN where the sum would be infinite, and in sums that do not hold it. float32 is computed as TF32.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status StemFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, void* y, void* z,
                 Workspace workspace);
// y = the max-pooling `q` of f(fprop + bias); of the plans that PooledRefusal does not refuse.
Status StemPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e, const PoolProblem& q,
                  const PooledTypes& types, const Plan& plan, const void* x, const void* w,
                  const void* bias, void* y);
Status StemDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, void* dx, Workspace workspace);
Status StemWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
