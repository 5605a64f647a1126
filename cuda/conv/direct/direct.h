// Direct convolution: the sum of problem.h tile by tile in float32 FMAs, nothing materialised. The
// floor of the house: it supports every problem.
//
// Supports: float32, bfloat16, float16; both memory orders; 1-D to 3-D; any groups, stride,
// dilation and padding (negative too); any sizes whose coordinates stay below 2^30
// (CheckIndexable). float32 products are never rounded, so full_float32 is always honoured.
// `plan.tile` and `plan.chunk` are not read.
//
// Workspace: fprop, dgrad: 0. wgrad: plan.splits > 1 ? plan.splits * K * C/G * T*R*S * 4 bytes : 0.
//
// wgrad cuts the N*O*P*Q pixels into `plan.splits` >= 1 contiguous parts. It launches
// ceil(C/G*T*R*S / rows) * ceil(K/G / columns) * G blocks a part, rows * columns = 4096 with 8 to
// 64 columns; four blocks an SM in all keep a device busy.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status DirectFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, void* y, void* z,
                   Workspace workspace);
Status DirectDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace);
Status DirectWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace);

}  // namespace jaxconv::cuda
