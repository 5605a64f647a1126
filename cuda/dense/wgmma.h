// Dense on the sm_90a main loop; the formula is in dense.cu.
//
// Domain: compute capability 9.0; bfloat16, float16; x, w, y, z 16-byte aligned; K >= 1; no addend;
//   x and w not both transposed; the fastest axis of x, w, y (K or M; N or K; N) a multiple of 8;
//   M, N, K, batch at most 2^31 - 4096. Outside, a Status.
//
// Plan: algorithm "wgmma"; tile "128x256", "256x128", "128x128" or "256x64"; splits 1.
// Workspace: 0 bytes.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status WgmmaDense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                  const void* x, const void* w, const void* bias, void* y, void* z);

}  // namespace jaxconv::cuda
