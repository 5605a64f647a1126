// What a backend must define. This header is compiled twice, with JAXCONV_BACKEND = cpu and = cuda;
// cpu/ and cuda/ each hold one definition of every function. Pointers are to dense buffers of the
// layouts in problem.h; a pointer that the problem says is absent is null. Outputs are written
// completely; they are never read.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"

#ifndef JAXCONV_BACKEND
#error "define JAXCONV_BACKEND as cpu or cuda"
#endif

// 1 where JAXCONV_BACKEND is cuda: what a GPU alone has.
#define JAXCONV_ON_cpu 0
#define JAXCONV_ON_cuda 1
#define JAXCONV_ON_BACKEND(backend) JAXCONV_ON_##backend
#define JAXCONV_ON(backend) JAXCONV_ON_BACKEND(backend)
#define JAXCONV_ON_GPUS JAXCONV_ON(JAXCONV_BACKEND)

namespace jaxconv::JAXCONV_BACKEND {

struct Context;  // cpu: thread pool (cpu/context.h); cuda: stream and device (cuda/core/context.h)

// y = f(conv(x, w) + bias + residual), z before f. `bias` (K), `z` like y: null unless the epilogue has
// them. `residual`, like y, may be null.
Status ConvFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const void* x, const void* w, const void* bias, const void* residual, void* y,
                 void* z, Workspace workspace);

// y = conv(x, w), and of each of its channels, as rounded to dtype, the mean and the biased variance:
// (K), float64 for float64, else float32. n * out_size() must not be 0.
Status ConvStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                      const void* w, void* y, void* mean, void* var, Workspace workspace);

// dx = the transpose of conv in x, plus c: every element of dx, also those no tap reaches, is written.
// `c`, like dx, may be null; on a GPU it may be dx itself.
Status ConvDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                 const void* w, const void* c, void* dx, Workspace workspace);

#if JAXCONV_ON_GPUS
// dz = [y > 0] * (the transpose of conv in x, of dy, + c);  dbias = sum dz, dscale = sum dz * (x - mean) * rstd over pixels:
// what comes back to z of y = relu(z), z = (x - mean) * rstd * scale + bias + residual, which conv and others read, and the
// gradients of scale and bias. `c`, `x` like dz; `signs` as BatchNormSigns gives them; the others (C), float32. There are elements.
Status ConvDgradSums(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                     const void* w, const void* c, const void* signs, const void* x,
                     const void* mean, const void* rstd, void* dz, void* dscale, void* dbias,
                     Workspace workspace);
#endif

// dw = the transpose of conv in w.
Status ConvWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                 const void* dy, void* dw, Workspace workspace);

// y = conv(a, w), and dw = the transpose of conv in w, of a = f((x - mean) * scale / sqrt(var + epsilon) + bias), rounded to
// dtype, which is padded with zeros. `n` is the batch-norm of x, without a residual; (C) each: float64 for float64, else
// float32. No array is without elements.
Status ConvNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const void* x, const void* w, const void* scale,
                      const void* bias, const void* mean, const void* var, void* y,
                      Workspace workspace);
Status ConvNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const void* x, const void* dy, const void* scale,
                           const void* bias, const void* mean, const void* var, void* dw,
                           Workspace workspace);

// The backward pass of that convolution and of its batch-norm in training, n >= 1 elements a channel, without da, the gradient
// of a. With dz = da * f'(z) and xhat = (x - mean) * rstd:
//   dw = the transpose of conv in w;  dbias = sum dz;  dscale = sum dz * xhat
//   dx = scale * rstd * (dz - dbias / count - xhat * dscale / count), the sums being those of `count` elements a channel, of
//   which x may be a part
Status ConvNormalisedGradient(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                              const Plan& plan, const void* x, const void* dy, const void* w,
                              const void* scale, const void* bias, const void* mean,
                              const void* var, void* dw, void* dscale, void* dbias,
                              Workspace workspace);
Status ConvNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                        const Plan& plan, const void* x, const void* dy, const void* w,
                        const void* scale, const void* bias, const void* mean, const void* var,
                        const void* dscale, const void* dbias, int64_t count, void* dx);

// y = f(z), z = alpha op(x) op(w) + beta c + bias. `c` (M, N), `z` (M, N) and `bias` may be null.
Status Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
             const void* x, const void* w, const void* bias, const void* c, void* y, void* z,
             Workspace workspace);

#if JAXCONV_ON_GPUS
// dz = (dy op(w)) * f'(z), f of the epilogue, and the sums of dz's columns (N), as rounded, of dz's type. p is the product's
// problem, dy its x. `kept`, like dz: what f was given; of elu, tanh and sigmoid what it gave, of relu, relu6 and a leaky_relu
// of positive slope either. There are elements.
Status DenseGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                     const void* dy, const void* w, const void* kept, void* dz, void* sums,
                     Workspace workspace);
#endif

// scale, bias, running_mean, running_var, new_mean, new_var, mean, rstd: (batch, channels).
Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* running_mean,
                      const void* running_var, const void* residual, void* y, void* new_mean,
                      void* new_var, void* mean, void* rstd, Workspace workspace);

// BatchNormTrain's statistics alone, in three parts: a sample k of a channel or what else is near its mean, the mean - k, and
// the biased variance. (batch, channels) each.
Status BatchNormMoments(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                        const void* x, void* k, void* shift, void* var, Workspace workspace);

Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, const void* residual, void* y);

#if JAXCONV_ON_GPUS
// BatchNormInfer before relu, and of each element of y a bit, whether it is above 0: bit j of byte i of `signs` is that of
// element 8i + j.
Status BatchNormSigns(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, const void* residual, void* y, void* signs);
#endif

// With dz = dy * f'(z), z recomputed from x (and residual):
//   dbias = sum dz;  dscale = sum dz * xhat;  dx = scale * rstd * (dz - dbias / n - xhat * dscale /
//   n);  dresidual = dz
// `dx` and `dresidual` are null when nobody asked for them. `bias` and `residual` are read only
// where f needs z.
Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                         const void* x, const void* dy, const void* scale, const void* bias,
                         const void* mean, const void* rstd, const void* residual, void* dx,
                         void* dscale, void* dbias, void* dresidual, Workspace workspace);

// BatchNormBackward's dx alone, by sums that are given: those over `count` elements a channel, of which x may be a part.
// count >= p.reduced().
Status BatchNormDx(const Context& ctx, const BatchNormProblem& p, const Plan& plan, const void* x,
                   const void* dy, const void* scale, const void* bias, const void* mean,
                   const void* rstd, const void* dscale, const void* dbias, const void* residual,
                   int64_t count, void* dx);

#if JAXCONV_ON_GPUS
// The backward pass of y = f(z), z = (x - mean) * rstd * scale + bias + (r - mean_r) * rstd_r * scale_r + bias_r, by x's and r's
// own statistics, with dz = dy * f'(z):
//   dbias = sum dz, of both;  dscale = sum dz * xhat;  dscale_r = sum dz * rhat
//   dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), dr with r's
Status BatchNormShortcutBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                                 const void* x, const void* dy, const void* scale, const void* bias,
                                 const void* mean, const void* rstd, const void* r,
                                 const void* scale_r, const void* bias_r, const void* mean_r,
                                 const void* rstd_r, void* dscale, void* dbias, void* dscale_r,
                                 void* dx, void* dr, Workspace workspace);
#endif

// `position` is null when nobody asked for it.
Status MaxPool(const Context& ctx, const PoolProblem& p, const Plan& plan, const void* x, void* y,
               uint8_t* position);

// dx[i] = the sum of dy over the windows whose position is i's tap, in float32 (float64 for float64).
Status MaxPoolBackward(const Context& ctx, const PoolProblem& p, const Plan& plan,
                       const uint8_t* position, const void* dy, void* dx);

// scale, bias: (batch, channels). mean, rstd: (batch, images, groups). There are pixels and groups.
Status GroupNorm(const Context& ctx, const GroupNormProblem& p, const Plan& plan, const void* x,
                 const void* scale, const void* bias, void* y, void* mean, void* rstd,
                 Workspace workspace);

// With dz = dy * f'(z), z recomputed from x, and n the elements of a group of an image:
//   dbias = sum dz, dscale = sum dz * xhat, over images and pixels
//   dx = rstd * (scale * dz - (sum scale * dz) / n - xhat * (sum scale * dz * xhat) / n), sums over the group
// `dx` is null when nobody asked for it.
Status GroupNormBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                         const void* x, const void* dy, const void* scale, const void* bias,
                         const void* mean, const void* rstd, void* dx, void* dscale, void* dbias,
                         Workspace workspace);

// w1: (channels, hidden), w2: (hidden, channels). mean, gate: (images, channels), z1: (images, hidden), for the backward
// pass. There are pixels, channels and hidden numbers.
Status SqueezeExcite(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                     const void* x, const void* w1, const void* b1, const void* w2, const void* b2,
                     void* y, void* mean, void* z1, void* gate);

//   dz2 = (sum dy * x over the pixels) * g'(z2);  dz1 = (dz2 @ w2^T) * f'(z1);  dx = dy * gate + (dz1 @ w1^T) / pixels
// `dx` is null when nobody asked for it.
Status SqueezeExciteBackward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                             const void* x, const void* dy, const void* w1, const void* w2,
                             const void* z1, const void* gate, void* dz2, void* dz1, void* dx);

}  // namespace jaxconv::JAXCONV_BACKEND
