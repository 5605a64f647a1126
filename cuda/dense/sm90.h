// Dense on the sm_90a main loop; the formula is in dense.cu.
//
// Float32: with full_float32 as sums of three bfloat16 terms (gemm/sm90_operands.h), which has
// float32's accuracy, otherwise in TF32.
//
// Domain: compute capability 9.0; float32, bfloat16, float16; x, w, c, y, z and the workspace 16-byte
//   aligned; K >= 1, in TF32 a multiple of 8; an addend in 16 bit only;
//   x and w not both transposed; the fastest axis of x, w, y (K or M; N or K; N) a multiple of 8;
//   M, N, K, batch (in float32 thrice that) at most 2^31 - 4096. Outside, a Status.
//
// Plan: algorithm "wgmma"; tile "128x256", "256x128", "128x128", "256x64", "256x128s" or "128x320", with x
// not transposed also "64x128", whose splits are the parts that K is cut into, at most ceil(K / 64), and
// "128x64r" and "64x256r", where all of K of w's columns stays in shared memory (gemm/sm90_resident.cuh); in
// TF32 "128x256", "128x128" or "256x64"; where float32 is terms "128x128" or "128x64".
// Workspace, bytes: "64x128": splits * batch * M * N * 4. float32 with full_float32: 6 an element of w;
// without, 4 an element of x if trans_x and of w unless trans_w; each rounded up to 256. Otherwise 0.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda {

Status WgmmaDense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                  const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
                  Workspace workspace);

}  // namespace jaxconv::cuda
