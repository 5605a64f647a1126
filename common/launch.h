// What a backend must define. This header is compiled twice, with JAXCONV_BACKEND = cpu and = cuda;
// cpu/ and cuda/ each hold one definition of every function. Arrays are dense buffers of the layouts in
// problem.h; what the problem says is absent is null. Results are written completely; they are never read.
//
// A launcher takes a context, its problem or problems, a plan, its arrays by role, and a workspace: ffi/ calls them all alike.
#pragma once

#include "common/arrays.h"
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
using ConvFpropArrays = Arrays<in::X, in::W, in::B, in::Residual, out::Y, out::Z>;
Status ConvFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const ConvFpropArrays& a, Workspace workspace);

// y = conv(x, w) of integers, wrapping around. No array is empty. It needs no workspace.
using ConvIntegerArrays = Arrays<in::X, in::W, out::Y>;
Status ConvInteger(const Context& ctx, const IntegerConvProblem& p, const Plan& plan,
                   const ConvIntegerArrays& a, Workspace workspace);

// y = conv(x, w) + b + residual, both of which may be null, and of each of its channels, as rounded to dtype, the mean and
// the biased variance: (K), float64 for float64, else float32. n * out_size() must not be 0.
using ConvStatisticsArrays = Arrays<in::X, in::W, in::B, in::Residual, out::Y, out::Mean, out::Var>;
Status ConvStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan,
                      const ConvStatisticsArrays& a, Workspace workspace);

// dx = the transpose of conv in x, plus c: every element of dx, also those no tap reaches, is written.
// `c`, like dx, may be null; on a GPU it may be dx itself.
using ConvDgradArrays = Arrays<in::Dy, in::W, in::C, out::Dx>;
Status ConvDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvDgradArrays& a, Workspace workspace);

#if JAXCONV_ON_GPUS
// y of ScaledConvProblem. `scale` (K), the numbers `residual_scale` and `out_scale`: float32; `b` (K) of bias_type. What it lacks
// is null. There are elements.
using ConvScaledArrays = Arrays<in::X, in::W, in::Scale, in::B, in::Residual, in::ResidualScale,
                                in::OutScale, in::X2, in::W2, out::Y>;
Status ConvScaled(const Context& ctx, const ScaledConvProblem& p, const Plan& plan,
                  const ConvScaledArrays& a, Workspace workspace);

// dz = [y > 0] * (the transpose of conv in x, of dy, + c);  dbias = sum dz, dscale = sum dz * (x - mean) * rstd over pixels:
// what comes back to z of y = relu(z), z = (x - mean) * rstd * scale + bias + residual, which conv and others read, and the
// gradients of scale and bias. `c`, `x` like dz; `signs` as BatchNormSigns gives them; the others (C), float32. There are elements.
using ConvDgradSumsArrays = Arrays<in::Dy, in::W, in::C, in::Signs, in::X, in::Mean, in::Rstd,
                                   out::Dz, out::Dscale, out::Dbias>;
Status ConvDgradSums(const Context& ctx, const ConvProblem& p, const Plan& plan,
                     const ConvDgradSumsArrays& a, Workspace workspace);

// y = f(conv(x, w) + conv of `q` of x2 and w2 + b), f of the epilogue, which makes no z. `q` has one tap, no padding, and makes y's
// pixels and channels. `b` (K) may be null. There are elements.
using ConvShortcutArrays = Arrays<in::X, in::W, in::B, in::X2, in::W2, out::Y>;
Status ConvShortcut(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                    const ConvProblem& q, const Plan& plan, const ConvShortcutArrays& a,
                    Workspace workspace);

// y = the max-pooling `q` of f(conv(x, w) + b), f of the epilogue, which makes no z; x and y of `types`. `b` (K) may be null.
// There are elements.
using ConvPooledArrays = Arrays<in::X, in::W, in::B, out::Y>;
Status ConvPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e, const PoolProblem& q,
                  const PooledTypes& types, const Plan& plan, const ConvPooledArrays& a,
                  Workspace workspace);

// dz = (the transpose of conv in x, of dy) * f'(z) + c, f of the epilogue;  dbias = sum dz over images and pixels, of dz as
// rounded, of dz's type (C). `kept`, like dz: as DenseGradient's. `c`, like dz, may be null. There are elements.
using ConvGradientArrays = Arrays<in::Dy, in::W, in::Kept, in::C, out::Dz, out::Dbias>;
Status ConvGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                    const ConvGradientArrays& a, Workspace workspace);

// dz = (the transpose of conv in x, of dy) * f'(z);  dbias = sum dz, dscale = sum dz * (x - mean) * rstd over images and pixels,
// of dz as rounded: what comes back to z = (x - mean) * rstd * scale + bias of y = f(z), which only conv reads, f of the
// epilogue, and the gradients of scale and bias. `x` like dz; the others (C), float32. There are elements.
using ConvNormGradientArrays = Arrays<in::Dy, in::W, in::X, in::Scale, in::Bias, in::Mean, in::Rstd,
                                      out::Dz, out::Dscale, out::Dbias>;
Status ConvNormGradient(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                        const Plan& plan, const ConvNormGradientArrays& a, Workspace workspace);
#endif

// dw = the transpose of conv in w.
using ConvWgradArrays = Arrays<in::X, in::Dy, out::Dw>;
Status ConvWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvWgradArrays& a, Workspace workspace);

// y = conv(a, w), and dw = the transpose of conv in w, of a = f((x - mean) * scale / sqrt(var + epsilon) + bias), rounded to
// dtype, which is padded with zeros. `n` is the batch-norm of x, without a residual; (C) each: float64 for float64, else
// float32. No array is without elements.
using ConvNormalisedArrays = Arrays<in::X, in::W, in::Scale, in::Bias, in::Mean, in::Var, out::Y>;
Status ConvNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const ConvNormalisedArrays& a, Workspace workspace);
#if JAXCONV_ON_GPUS
// The same y, and the mean and biased variance of its channels, (K), float32.
using ConvNormalisedStatisticsArrays =
    Arrays<in::X, in::W, in::Scale, in::Bias, in::Mean, in::Var, out::Y, out::NewMean, out::NewVar>;
Status ConvNormalisedStatistics(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                                const Plan& plan, const ConvNormalisedStatisticsArrays& a,
                                Workspace workspace);
#endif
using ConvNormalisedWgradArrays =
    Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Var, out::Dw>;
Status ConvNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const ConvNormalisedWgradArrays& a,
                           Workspace workspace);

// The backward pass of that convolution and of its batch-norm in training, n >= 1 elements a channel, without da, the gradient
// of a. With dz = da * f'(z) and xhat = (x - mean) * rstd:
//   dw = the transpose of conv in w;  dbias = sum dz;  dscale = sum dz * xhat
//   dx = scale * rstd * (dz - dbias / count - xhat * dscale / count), the sums being those of `count` elements a channel, of
//   which x may be a part
using ConvNormalisedGradientArrays = Arrays<in::X, in::Dy, in::W, in::Scale, in::Bias, in::Mean,
                                            in::Var, out::Dw, out::Dscale, out::Dbias>;
Status ConvNormalisedGradient(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                              const Plan& plan, const ConvNormalisedGradientArrays& a,
                              Workspace workspace);
using ConvNormalisedDxArrays = Arrays<in::X, in::Dy, in::W, in::Scale, in::Bias, in::Mean, in::Var,
                                      in::Dscale, in::Dbias, out::Dx>;
Status ConvNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                        int64_t count, const Plan& plan, const ConvNormalisedDxArrays& a,
                        Workspace workspace);

// y = f(z), z = alpha op(x) op(w) + beta c + bias. `c` (M, N), `z` (M, N) and `bias` may be null.
using DenseArrays = Arrays<in::X, in::W, in::B, in::C, out::Y, out::Z>;
Status Dense(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
             const DenseArrays& a, Workspace workspace);

#if JAXCONV_ON_GPUS
// dz = (dy op(w)) * f'(z), f of the epilogue, and the sums of dz's columns (N), as rounded, of dz's type. p is the product's
// problem, dy its x. `kept`, like dz: what f was given; of elu, tanh and sigmoid what it gave, of relu, relu6 and a leaky_relu
// of positive slope either. There are elements.
using DenseGradientArrays = Arrays<in::Dy, in::W, in::Kept, out::Dz, out::Db>;
Status DenseGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e, const Plan& plan,
                     const DenseGradientArrays& a, Workspace workspace);

// y (M, N / 2) = a * f(g), f of the epilogue, where a and g are the halves of the columns of z = x op(w) + bias (M, N), which is
// written too where the epilogue saves it. `first`: a is the second half and g the first. There are elements.
using DenseGatedArrays = Arrays<in::X, in::W, in::B, out::Y, out::Z>;
Status DenseGated(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                  const Plan& plan, const DenseGatedArrays& a, Workspace workspace);

// The way back through such a gate: dy (M, N) = dz2 op(w), of which p is the problem, dz2 its x; da = dy * f(g) and
// dg = dy * a * f'(g) where a and g lie in `kept` (M, 2 N), z, are dz, and the sums of its columns (2 N), as rounded. There are
// elements.
using DenseGatedGradientArrays = Arrays<in::Dy, in::W, in::Kept, out::Dz, out::Db>;
Status DenseGatedGradient(const Context& ctx, const DenseProblem& p, const Epilogue& e, bool first,
                          const Plan& plan, const DenseGatedGradientArrays& a, Workspace workspace);
#endif

// scale, bias, running_mean, running_var, new_mean, new_var, mean, rstd: (batch, channels).
using BatchNormTrainArrays =
    Arrays<in::X, in::Scale, in::Bias, in::RunningMean, in::RunningVar, in::Residual, out::Y,
           out::NewMean, out::NewVar, out::Mean, out::Rstd>;
Status BatchNormTrain(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormTrainArrays& a, Workspace workspace);

// BatchNormTrain's statistics alone, in three parts: a sample k of a channel or what else is near its mean, the mean - k, and
// the biased variance. (batch, channels) each.
using BatchNormMomentsArrays = Arrays<in::X, out::K, out::Shift, out::Var>;
Status BatchNormMoments(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                        const BatchNormMomentsArrays& a, Workspace workspace);

using BatchNormInferArrays =
    Arrays<in::X, in::Scale, in::Bias, in::Mean, in::Var, in::Residual, out::Y>;
Status BatchNormInfer(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormInferArrays& a, Workspace workspace);

#if JAXCONV_ON_GPUS
// BatchNormInfer before relu, and of each element of y a bit, whether it is above 0: bit j of byte i of `signs` is that of
// element 8i + j.
using BatchNormSignsArrays =
    Arrays<in::X, in::Scale, in::Bias, in::Mean, in::Var, in::Residual, out::Y, out::Signs>;
Status BatchNormSigns(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                      const BatchNormSignsArrays& a, Workspace workspace);
#endif

// With dz = dy * f'(z), z recomputed from x (and residual):
//   dbias = sum dz;  dscale = sum dz * xhat;  dx = scale * rstd * (dz - dbias / n - xhat * dscale /
//   n);  dresidual = dz
// `dx` and `dresidual` are null when nobody asked for them. `bias` and `residual` are read only
// where f needs z.
using BatchNormBackwardArrays =
    Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Rstd, in::Residual, out::Dscale,
           out::Dbias, out::Dx, out::Dresidual>;
Status BatchNormBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                         const BatchNormBackwardArrays& a, Workspace workspace);

// BatchNormBackward's dx alone, by sums that are given: those over `count` elements a channel, of which x may be a part.
// count >= p.reduced().
using BatchNormDxArrays = Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Rstd, in::Dscale,
                                 in::Dbias, in::Residual, out::Dx>;
Status BatchNormDx(const Context& ctx, const BatchNormProblem& p, int64_t count, const Plan& plan,
                   const BatchNormDxArrays& a, Workspace workspace);

#if JAXCONV_ON_GPUS
// BatchNormBackward without a residual, with c, an array like x, added to dx.
using BatchNormBackwardAddArrays = Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Rstd,
                                          in::C, out::Dscale, out::Dbias, out::Dx>;
Status BatchNormBackwardAdd(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                            const BatchNormBackwardAddArrays& a, Workspace workspace);

// The backward pass of y = f(z), z = (x - mean) * rstd * scale + bias + (r - mean_r) * rstd_r * scale_r + bias_r, by x's and r's
// own statistics, with dz = dy * f'(z):
//   dbias = sum dz, of both;  dscale = sum dz * xhat;  dscale_r = sum dz * rhat
//   dx = scale * rstd * (dz - dbias / n - xhat * dscale / n), dr with r's
using BatchNormShortcutBackwardArrays =
    Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Rstd, in::R, in::ScaleR, in::BiasR,
           in::MeanR, in::RstdR, out::Dscale, out::Dbias, out::DscaleR, out::Dx, out::Dr>;
Status BatchNormShortcutBackward(const Context& ctx, const BatchNormProblem& p, const Plan& plan,
                                 const BatchNormShortcutBackwardArrays& a, Workspace workspace);
#endif

// `position` is null when nobody asked for it.
using MaxPoolArrays = Arrays<in::X, out::Y, out::Position>;
Status MaxPool(const Context& ctx, const PoolProblem& p, const Plan& plan, const MaxPoolArrays& a,
               Workspace workspace);

// dx[i] = the sum of dy over the windows whose position is i's tap, in float32 (float64 for float64).
using MaxPoolBackwardArrays = Arrays<in::Position, in::Dy, out::Dx>;
Status MaxPoolBackward(const Context& ctx, const PoolProblem& p, const Plan& plan,
                       const MaxPoolBackwardArrays& a, Workspace workspace);

// Sums are of float32 (float64 for float64), rounded once.
using AvgPoolArrays = Arrays<in::X, out::Y>;
Status AvgPool(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
               const AvgPoolArrays& a, Workspace workspace);

// dx[i] = the sum of dy / count over the windows that have a tap at i.
using AvgPoolBackwardArrays = Arrays<in::Dy, out::Dx>;
Status AvgPoolBackward(const Context& ctx, const AvgPoolProblem& p, const Plan& plan,
                       const AvgPoolBackwardArrays& a, Workspace workspace);

// scale, bias: (batch, channels). mean, rstd: (batch, images, groups). There are pixels and groups.
using GroupNormArrays = Arrays<in::X, in::Scale, in::Bias, out::Y, out::Mean, out::Rstd>;
Status GroupNorm(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                 const GroupNormArrays& a, Workspace workspace);

// With dz = dy * f'(z), z recomputed from x, and n the elements of a group of an image:
//   dbias = sum dz, dscale = sum dz * xhat, over images and pixels
//   dx = rstd * (scale * dz - (sum scale * dz) / n - xhat * (sum scale * dz * xhat) / n), sums over the group
// `dx` is null when nobody asked for it.
using GroupNormBackwardArrays = Arrays<in::X, in::Dy, in::Scale, in::Bias, in::Mean, in::Rstd,
                                       out::Dscale, out::Dbias, out::Dx>;
Status GroupNormBackward(const Context& ctx, const GroupNormProblem& p, const Plan& plan,
                         const GroupNormBackwardArrays& a, Workspace workspace);

// w1: (channels, hidden), w2: (hidden, channels). mean, gate: (images, channels), z1: (images, hidden), for the backward
// pass. There are pixels, channels and hidden numbers.
using SqueezeExciteArrays =
    Arrays<in::X, in::W1, in::B1, in::W2, in::B2, out::Y, out::Mean, out::Z1, out::Gate>;
Status SqueezeExcite(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                     const SqueezeExciteArrays& a, Workspace workspace);

//   dz2 = (sum dy * x over the pixels) * g'(z2);  dz1 = (dz2 @ w2^T) * f'(z1);  dx = dy * gate + (dz1 @ w1^T) / pixels
// `dx` is null when nobody asked for it.
using SqueezeExciteBackwardArrays =
    Arrays<in::X, in::Dy, in::W1, in::W2, in::Z1, in::Gate, out::Dz2, out::Dz1, out::Dx>;
Status SqueezeExciteBackward(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                             const SqueezeExciteBackwardArrays& a, Workspace workspace);

}  // namespace jaxconv::JAXCONV_BACKEND
