// ConvFprop, ConvDgrad, ConvWgrad of common/launch.h on the CPU: dtype and plan.kernel choose
// the instance. Algorithms: "direct" and "im2col" take any problem, "depthwise" takes groups == c.
// float32 and float64. The workspace argument is unused (XLA plans none on the CPU): algorithms
// allocate what they need.
#include "cpu/conv.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "common/launch.h"
#include "cpu/batchnorm.h"
#include "cpu/scratch.h"

namespace jaxconv::cpu {
namespace {

constexpr Epilogue kBare = {false, Activation::kNone, 0.0, false};

// Whether the plan can be carried out.
Status Check(const ConvProblem& p, const Plan& plan, const char* what) {
  if (p.dtype != DType::kF32 && p.dtype != DType::kF64) {
    return Status::Unimplemented(std::string(what) +
                                 ": the CPU backend computes in float32 and float64, not " +
                                 Name(p.dtype) + ": convert first");
  }
  if (plan.kernel == "depthwise" && p.groups != p.c) {
    return Status::Invalid(std::string(what) + "[depthwise]: groups=" + std::to_string(p.groups) +
                           " must equal the number of input channels, " + std::to_string(p.c));
  }
  if (plan.kernel != "direct" && plan.kernel != "im2col" && plan.kernel != "depthwise") {
    return Status::Invalid(std::string(what) + ": the CPU backend has no kernel \"" +
                           std::string(plan.kernel) + "\"; it has direct, im2col and depthwise");
  }
  return Status::Ok();
}

template <typename T>
Status Fprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
             const void* x, const void* w, const void* bias, const void* residual, void* y,
             void* z) {
  const T* tx = static_cast<const T*>(x);
  const T* tw = static_cast<const T*>(w);
  const T* tbias = e.bias ? static_cast<const T*>(bias) : nullptr;
  const T* tr = static_cast<const T*>(residual);
  T* ty = static_cast<T*>(y);
  T* tz = e.save_preactivation ? static_cast<T*>(z) : nullptr;
  if (plan.kernel == "direct") return DirectFprop(ctx, p, e, tx, tw, tbias, tr, ty, tz);
  if (plan.kernel == "depthwise") return DepthwiseFprop(ctx, p, e, tx, tw, tbias, tr, ty, tz);
  if (IsPointwise(p)) return PointwiseFprop(ctx, p, e, tx, tw, tbias, tr, ty, tz);
  return Im2colFprop(ctx, p, e, tx, tw, tbias, tr, ty, tz);
}

// dx += c.
template <typename T>
void Add(const Context& ctx, int64_t count, const void* c, void* dx) {
  constexpr int64_t kRun = 1 << 16;
  ParallelFor(ctx, CeilDiv(count, kRun), [&](int64_t i) {
    AddBias(std::min(kRun, count - i * kRun), static_cast<const T*>(c) + i * kRun, false,
            static_cast<T*>(dx) + i * kRun);
  });
}

template <typename T>
Status Dgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
             const void* w, void* dx) {
  const T* tdy = static_cast<const T*>(dy);
  const T* tw = static_cast<const T*>(w);
  T* tdx = static_cast<T*>(dx);
  if (plan.kernel == "direct") return DirectDgrad(ctx, p, tdy, tw, tdx);
  if (plan.kernel == "depthwise") return DepthwiseDgrad(ctx, p, tdy, tw, tdx);
  if (IsPointwise(p)) return PointwiseDgrad(ctx, p, tdy, tw, tdx);
  return Im2colDgrad(ctx, p, tdy, tw, tdx);
}

template <typename T>
Status Wgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
             const void* dy, void* dw) {
  const T* tx = static_cast<const T*>(x);
  const T* tdy = static_cast<const T*>(dy);
  T* tdw = static_cast<T*>(dw);
  if (plan.kernel == "direct") return DirectWgrad(ctx, p, tx, tdy, tdw);
  if (plan.kernel == "depthwise") return DepthwiseWgrad(ctx, p, tx, tdy, tdw);
  if (IsPointwise(p)) return PointwiseWgrad(ctx, p, tx, tdy, tdw);
  return Im2colWgrad(ctx, p, tx, tdy, tdw);
}

}  // namespace

Status ConvFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                 const ConvFpropArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, "conv_fprop"));
  if (p.dtype == DType::kF32)
    return Fprop<float>(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z);
  return Fprop<double>(ctx, p, e, plan, a.x, a.w, a.b, a.residual, a.y, a.z);
}

Status ConvStatistics(const Context& ctx, const ConvProblem& p, const Plan& plan,
                      const ConvStatisticsArrays& a, Workspace workspace) {
  const Epilogue e = {a.b != nullptr, Activation::kNone, 0.0, false};
  JAXCONV_RETURN_IF_ERROR(ConvFprop(
      ctx, p, e, plan,
      ConvFpropArrays(in::X(a.x), in::W(a.w), in::B(a.b), in::Residual(a.residual), out::Y(a.y)),
      workspace));
  BatchNormProblem norm = {};
  norm.batch = 1;
  norm.outer = p.channels_last ? p.n * p.out_size() : p.n;
  norm.channels = p.k;
  norm.inner = p.channels_last ? 1 : p.out_size();
  norm.dtype = p.dtype;
  return ChannelMoments(ctx, norm, a.y, a.mean, a.var);
}

namespace {

// The batch-norm of x as it lies in memory.
BatchNormProblem NormOfX(const ConvProblem& p, const BatchNormProblem& n) {
  BatchNormProblem norm = n;
  norm.batch = 1;
  norm.outer = p.channels_last ? p.n * p.in_size() : p.n;
  norm.channels = p.c;
  norm.inner = p.channels_last ? 1 : p.in_size();
  return norm;
}

// run(x): `given`.x normalised, in memory of its own.
template <typename Given, typename F>
Status OfNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                    const Plan& plan, const char* what, const Given& given, const F& run) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, what));
  Scratch<char> x(p.n * p.c * p.in_size() * SizeOf(p.dtype));
  JAXCONV_RETURN_IF_ERROR(x.status());
  const BatchNormInferArrays norm(in::X(given.x), in::Scale(given.scale), in::Bias(given.bias),
                                  in::Mean(given.mean), in::Var(given.var), out::Y(x.data()));
  JAXCONV_RETURN_IF_ERROR(BatchNormInfer(ctx, NormOfX(p, n), plan, norm, {}));
  return run(in::X(x.data()));
}

// run(dy, rstd): the gradient of what was convolved, and 1 / sqrt(var + epsilon), in memory of their own.
template <typename T, typename Given, typename F>
Status OfGradient(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                  const Plan& plan, const Given& given, const F& run) {
  Scratch<T> dx(p.n * p.c * p.in_size()), rstd(p.c);
  JAXCONV_RETURN_IF_ERROR(dx.status());
  JAXCONV_RETURN_IF_ERROR(rstd.status());
  const ConvDgradArrays dgrad(in::Dy(given.dy), in::W(given.w), out::Dx(dx.data()));
  JAXCONV_RETURN_IF_ERROR(ConvDgrad(ctx, p, plan, dgrad, {}));
  for (int64_t c = 0; c < p.c; ++c)
    rstd.data()[c] = T(1) / std::sqrt(given.var.template as<T>()[c] + T(n.epsilon));
  return run(in::Dy(dx.data()), in::Rstd(rstd.data()));
}

}  // namespace

Status ConvNormalised(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                      const Plan& plan, const ConvNormalisedArrays& a, Workspace workspace) {
  return OfNormalised(ctx, p, n, plan, "conv_normalised", a, [&](in::X x) {
    return ConvFprop(ctx, p, kBare, plan, ConvFpropArrays(x, in::W(a.w), out::Y(a.y)), workspace);
  });
}

Status ConvNormalisedWgrad(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                           const Plan& plan, const ConvNormalisedWgradArrays& a,
                           Workspace workspace) {
  return OfNormalised(ctx, p, n, plan, "conv_normalised_wgrad", a, [&](in::X x) {
    return ConvWgrad(ctx, p, plan, ConvWgradArrays(x, in::Dy(a.dy), out::Dw(a.dw)), workspace);
  });
}

Status ConvNormalisedGradient(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                              const Plan& plan, const ConvNormalisedGradientArrays& a,
                              Workspace workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, "conv_normalised_gradient"));
  const ConvNormalisedWgradArrays wgrad(in::X(a.x), in::Dy(a.dy), in::Scale(a.scale),
                                        in::Bias(a.bias), in::Mean(a.mean), in::Var(a.var),
                                        out::Dw(a.dw));
  JAXCONV_RETURN_IF_ERROR(ConvNormalisedWgrad(ctx, p, n, plan, wgrad, workspace));
  const auto sums = [&](in::Dy dy, in::Rstd rstd) {
    const BatchNormBackwardArrays norm(in::X(a.x), dy, in::Scale(a.scale), in::Bias(a.bias),
                                       in::Mean(a.mean), rstd, out::Dscale(a.dscale),
                                       out::Dbias(a.dbias));
    return BatchNormBackward(ctx, NormOfX(p, n), plan, norm, {});
  };
  return p.dtype == DType::kF32 ? OfGradient<float>(ctx, p, n, plan, a, sums)
                                : OfGradient<double>(ctx, p, n, plan, a, sums);
}

Status ConvNormalisedDx(const Context& ctx, const ConvProblem& p, const BatchNormProblem& n,
                        int64_t count, const Plan& plan, const ConvNormalisedDxArrays& a,
                        Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, "conv_normalised_dx"));
  const auto of_sums = [&](in::Dy dy, in::Rstd rstd) {
    const BatchNormDxArrays norm(in::X(a.x), dy, in::Scale(a.scale), in::Bias(a.bias),
                                 in::Mean(a.mean), rstd, in::Dscale(a.dscale), in::Dbias(a.dbias),
                                 out::Dx(a.dx));
    return BatchNormDx(ctx, NormOfX(p, n), count, plan, norm, {});
  };
  return p.dtype == DType::kF32 ? OfGradient<float>(ctx, p, n, plan, a, of_sums)
                                : OfGradient<double>(ctx, p, n, plan, a, of_sums);
}

Status ConvDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvDgradArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, "conv_dgrad"));
  if (a.c == a.dx && a.c != nullptr) {
    return Status::Unimplemented("conv_dgrad: on the CPU c must be an array of its own");
  }
  const bool single = p.dtype == DType::kF32;
  JAXCONV_RETURN_IF_ERROR(single ? Dgrad<float>(ctx, p, plan, a.dy, a.w, a.dx)
                                 : Dgrad<double>(ctx, p, plan, a.dy, a.w, a.dx));
  if (a.c != nullptr) (single ? Add<float> : Add<double>)(ctx, p.n * p.c * p.in_size(), a.c, a.dx);
  return Status::Ok();
}

Status ConvWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const ConvWgradArrays& a, Workspace) {
  JAXCONV_RETURN_IF_ERROR(Check(p, plan, "conv_wgrad"));
  if (p.dtype == DType::kF32) return Wgrad<float>(ctx, p, plan, a.x, a.dy, a.dw);
  return Wgrad<double>(ctx, p, plan, a.x, a.dy, a.dw);
}

}  // namespace jaxconv::cpu
