// Convolution on the sm_90a main loop: TMA walks x and dy in place (im2col mode), the tensor cores
// read both operands as they lie. Formulas as in implicit_gemm/implicit_gemm.h; domain.h says what
// each kernel can run, and its workspace. The plans come confirmed (conv.cu), the problems folded.
//
// Float32: with full_float32 as sums of three bfloat16 terms (gemm/sm90_operands.h), which has
// float32's accuracy; without it in TF32.
//
// Padding is read as zeros: an infinity in w or dy makes NaN where a tap reads it. In halo's wgrad dy
// is zero between rows and images, where an infinity in x makes NaN. As terms, a product beyond
// float32's range may be NaN instead of infinite.
//
// splits are 1, except wgrad's: the number of CTAs (wgrad_pair: of pairs) over which the reduction of
// all tiles together is spread evenly (a multiple of the number of tiles keeps them at the same pixels
// at the same time, which matters where x and dy are larger than L2), or 1 for whole tiles; in 16-bit
// halo and halo_3d the CTAs that share the sums of 64 of K/G, or of 32 of C and 32 of K.
#pragma once

#include <string>

#include "common/launch.h"
#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/gemm/sm90_tiles.h"

namespace jaxconv::cuda {

Status Sm90Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, const void* residual, void* y,
                 void* z, Workspace workspace);
// ConvShortcut.
Status Sm90Shortcut(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                    const ConvProblem& q, const Plan& plan, const ConvShortcutArrays& a,
                    Workspace workspace);
// fprop, plus bias and residual, which may be null, and the mean and biased variance of each of y's channels, (K), float32.
// n * out_size() must not be 0.
Status Sm90Statistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, const void* bias, const void* residual, void* y, void* mean,
                      void* var, Workspace workspace);
// c is null, or like dx and added to it; where a stride is above 1, c must be dx itself.
Status Sm90Dgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace);
// ConvDgradSums of a 1x1 (dgrad_sums.cc).
Status Sm90DgradSums(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                     const void* w, const void* c, const void* signs, const void* x,
                     const void* mean, const void* rstd, void* dz, void* dscale, void* dbias,
                     Workspace workspace);
// ConvGradient.
Status Sm90Gradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const void* dy, const void* w, const void* kept, void* dz, void* dbias,
                    Workspace workspace);
// ConvNormGradient (gradient.cc). There are elements.
Status Sm90NormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                        const Plan& plan, const ConvNormGradientArrays& a, Workspace workspace);
Status Sm90Wgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace);

// fprop and wgrad of a batch-norm of x and its activation, `n`, which are in no memory: "normalised". y's statistics as
// Sm90Statistics has them, null where they are not wanted. (C), float32.
Status Sm90Normalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const void* x, const void* w, const void* scale,
                      const void* bias, const void* mean, const void* var, void* y, void* y_mean,
                      void* y_var, Workspace workspace);
Status Sm90NormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const void* x, const void* dy, const void* scale,
                           const void* bias, const void* mean, const void* var, void* dw,
                           Workspace workspace);

// gradient.cc: product's ConvGradient, strides of 1. `p` is not folded; there are elements of dy and dz.
// dz = dgrad * f', from `kept`, which lies like dz (gemm/sm90_gradient.h); dbias (C), of dz's type: dz's sums over images and
// pixels.
Status Sm90ProductGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                           Sm90Choice choice, const void* dy, const void* w, const void* kept,
                           void* dz, void* dbias, Workspace workspace, const std::string& what);

// dgrad.cc: product, product_swapped and resident.
Status Sm90ProductDgrad(const Context& ctx, const ConvProblem& p, Sm90Choice choice, const void* dy,
                        const void* w, const void* c, void* dx, Workspace workspace,
                        const std::string& what);

}  // namespace jaxconv::cuda
