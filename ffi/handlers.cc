// The handlers: buffers and attributes -> problem, confirmed -> launcher. Compiled for both
// platforms, with JAXCONV_BACKEND = cpu and = cuda. A handler allocates nothing on a device, never
// synchronises and never throws, so a captured CUDA graph may hold it.
//
// Python has validated what a user gave. Exported programs reach a handler without Python, so it
// confirms that buffers and attributes agree before a launcher trusts them.

#include "ffi/handlers.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/launch.h"
#include "ffi/wire.h"

#ifdef JAXCONV_CUDA
#include "cuda/core/context.h"
#else
#include "cpu/context.h"
#endif

namespace jaxconv::JAXCONV_BACKEND {
namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Dims = AnyBuffer::Dimensions;

#ifdef JAXCONV_CUDA
using PlatformContext = ffi::PlatformStream<cudaStream_t>;
Context MakeContext(cudaStream_t stream) { return Context{stream}; }
#define JAXCONV_TRAITS {ffi::Traits::kCmdBufferCompatible}
using ContextArg = cudaStream_t;
#else
using PlatformContext = ffi::ThreadPool;
Context MakeContext(ffi::ThreadPool pool) {
  return Context{std::max<int64_t>(1, pool.num_threads()),
                 [pool](std::function<void()> task) mutable { pool.Schedule(std::move(task)); }};
}
#define JAXCONV_TRAITS \
  {                    \
  }
using ContextArg = ffi::ThreadPool;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Operands and results in order, with the checks every op shares

// The custom call's operands and results. `name` opens every message.
class Call {
 public:
  Call(const char* name, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : name_(name), args_(args), rets_(rets) {}

  // The last result is always the workspace.
  Status Confirm(size_t args, size_t rets) const {
    if (args_.size() != args || rets_.size() != rets + 1) {
      return Status::Invalid(Text("got " + std::to_string(args_.size()) + " operands and " +
                                  std::to_string(rets_.size()) + " results, expected " +
                                  std::to_string(args) + " and " + std::to_string(rets + 1)));
    }
    for (size_t i = 0; i < args; ++i) {
      if (!args_.get<AnyBuffer>(i).has_value())
        return Status::Invalid(Text("an operand is no buffer"));
    }
    for (size_t i = 0; i <= rets; ++i) {
      if (!rets_.get<AnyBuffer>(i).has_value())
        return Status::Invalid(Text("a result is no buffer"));
    }
    return Status::Ok();
  }

  AnyBuffer Arg(size_t i) const { return *args_.get<AnyBuffer>(i); }
  AnyBuffer Ret(size_t i) const { return **rets_.get<AnyBuffer>(i); }
  Workspace Scratch() const {
    AnyBuffer last = Ret(rets_.size() - 1);
    return {last.untyped_data(), static_cast<int64_t>(last.size_bytes())};
  }

  Status ConfirmShape(const char* what, AnyBuffer buffer,
                      std::initializer_list<int64_t> shape) const {
    Dims dims = buffer.dimensions();
    if (std::equal(dims.begin(), dims.end(), shape.begin(), shape.end())) return Status::Ok();
    Dims expected(shape.begin(), shape.size());
    return Status::Invalid(Text(std::string(what) + " has shape " + wire::ShapeText(dims) +
                                ", expected " + wire::ShapeText(expected)));
  }
  Status ConfirmLike(const char* what, AnyBuffer buffer, AnyBuffer like) const {
    Dims dims = buffer.dimensions(), expected = like.dimensions();
    if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end()) &&
        buffer.element_type() == like.element_type()) {
      return Status::Ok();
    }
    return Status::Invalid(Text(std::string(what) + " has shape " + wire::ShapeText(dims) +
                                ", expected " + wire::ShapeText(expected) + " and the same type"));
  }
  Status ConfirmType(const char* what, AnyBuffer buffer, DType dtype) const {
    if (wire::ToDType(buffer.element_type()) == dtype) return Status::Ok();
    return Status::Invalid(Text(std::string(what) + " must be of type " + Name(dtype)));
  }
  std::string Text(const std::string& message) const { return std::string(name_) + ": " + message; }

 private:
  const char* name_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

jaxconv::Plan ToPlan(const wire::Plan& plan) {
  return {plan.kernel, plan.tile, plan.splits, plan.chunk};
}

Status ToEpilogue(const Call& call, const wire::Epilogue& in, Epilogue* out) {
  auto activation = wire::ToActivation(in.activation);
  if (!activation) {
    return Status::Invalid(call.Text("unknown activation '" + std::string(in.activation) + "'"));
  }
  *out = {in.bias != 0, *activation, in.slope, in.save_preactivation != 0};
  return Status::Ok();
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolution

// Reads the problem off the three arrays, whichever of them are results.
Status ToConvProblem(const Call& call, AnyBuffer x, AnyBuffer w, AnyBuffer y,
                     const wire::Window& window, ConvProblem* p) {
  Dims xd = x.dimensions(), wd = w.dimensions(), yd = y.dimensions();
  const size_t nd = window.stride.size();
  if (nd < 1 || nd > 3 || xd.size() != nd + 2 || wd.size() != nd + 2 || yd.size() != nd + 2 ||
      window.pad_low.size() != nd || window.pad_high.size() != nd || window.dilation.size() != nd) {
    return Status::Invalid(call.Text("ranks disagree: x=" + wire::ShapeText(xd) +
                                     ", w=" + wire::ShapeText(wd) + ", y=" + wire::ShapeText(yd) +
                                     ", " + std::to_string(nd) + " spatial dimensions"));
  }
  auto dtype = wire::ToDType(x.element_type());
  if (!dtype || w.element_type() != x.element_type() || y.element_type() != x.element_type()) {
    return Status::Invalid(call.Text("x, w and y must have one floating-point type"));
  }
  const bool last = window.dims_channels_last != 0;
  const size_t spatial = last ? 1 : 2;       // first spatial axis of x and y
  const size_t filter = last ? 0 : 2;        // first spatial axis of w
  const size_t channel = last ? nd + 1 : 1;  // of x and y
  const int64_t group_c = wd[last ? nd : 1];
  p->n = xd[0];
  p->c = xd[channel];
  p->k = wd[last ? nd + 1 : 0];
  p->groups = window.groups;
  p->channels_last = window.memory_channels_last != 0;
  p->dtype = *dtype;
  p->full_float32 = window.full_float32 != 0;
  bool agree = p->groups >= 1 && p->k % p->groups == 0 && group_c * p->groups == p->c &&
               yd[0] == p->n && yd[channel] == p->k;
  for (int i = 0; i < 3; ++i) {
    p->in[i] = p->filter[i] = p->out[i] = p->stride[i] = p->dilation[i] = 1;
    p->pad[i] = 0;
  }
  for (size_t i = 0; i < nd; ++i) {
    const size_t d = 3 - nd + i;
    p->in[d] = xd[spatial + i];
    p->filter[d] = wd[filter + i];
    p->out[d] = yd[spatial + i];
    p->stride[d] = window.stride[i];
    p->pad[d] = window.pad_low[i];
    p->dilation[d] = window.dilation[i];
    if (p->stride[d] < 1 || p->dilation[d] < 1 || p->filter[d] < 1) {
      agree = false;
      continue;
    }
    const int64_t reach = p->in[d] + window.pad_low[i] + window.pad_high[i] -
                          ((p->filter[d] - 1) * p->dilation[d] + 1);
    agree = agree && reach >= 0 && reach / p->stride[d] + 1 == p->out[d];
  }
  if (!agree) {
    return Status::Invalid(call.Text("extents disagree: x=" + wire::ShapeText(xd) +
                                     ", w=" + wire::ShapeText(wd) + ", y=" + wire::ShapeText(yd) +
                                     ", groups=" + std::to_string(window.groups)));
  }
  return Status::Ok();
}

Status Fprop(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Epilogue& epilogue, const wire::Plan& plan) {
  Call call("conv_fprop", args, rets);
  Epilogue e;
  JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, epilogue, &e));
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2 + e.bias, 1 + e.save_preactivation));
  AnyBuffer x = call.Arg(0), w = call.Arg(1), y = call.Ret(0);
  ConvProblem p;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, x, w, y, window, &p));
  if (e.bias) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("b", call.Arg(2), {p.k}));
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("b", call.Arg(2), p.dtype));
  }
  if (e.save_preactivation) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("z", call.Ret(1), y));
  return ConvFprop(MakeContext(context), p, e, ToPlan(plan), x.untyped_data(), w.untyped_data(),
                   e.bias ? call.Arg(2).untyped_data() : nullptr, y.untyped_data(),
                   e.save_preactivation ? call.Ret(1).untyped_data() : nullptr, call.Scratch());
}

Status Statistics(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  const wire::Window& window, const wire::Plan& plan) {
  Call call("conv_statistics", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2, 3));
  AnyBuffer x = call.Arg(0), w = call.Arg(1), y = call.Ret(0);
  ConvProblem p;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, x, w, y, window, &p));
  if (p.n * p.out_size() == 0) {
    return Status::Invalid(call.Text("y has no elements: there are no statistics of nothing"));
  }
  for (size_t i = 1; i <= 2; ++i) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("a statistic", call.Ret(i), {p.k}));
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("a statistic", call.Ret(i),
                                             p.dtype == DType::kF64 ? DType::kF64 : DType::kF32));
  }
  return ConvStatistics(MakeContext(context), p, ToPlan(plan), x.untyped_data(), w.untyped_data(),
                        y.untyped_data(), call.Ret(1).untyped_data(), call.Ret(2).untyped_data(),
                        call.Scratch());
}

Status Dgrad(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Plan& plan, bool addend) {
  Call call(addend ? "conv_dgrad_add" : "conv_dgrad", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2 + addend, 1));
  AnyBuffer dy = call.Arg(0), w = call.Arg(1), dx = call.Ret(0);
  ConvProblem p;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, dx, w, dy, window, &p));
  if (addend) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("c", call.Arg(2), dx));
  return ConvDgrad(MakeContext(context), p, ToPlan(plan), dy.untyped_data(), w.untyped_data(),
                   addend ? call.Arg(2).untyped_data() : nullptr, dx.untyped_data(),
                   call.Scratch());
}

Status Wgrad(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Plan& plan) {
  Call call("conv_wgrad", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2, 1));
  AnyBuffer x = call.Arg(0), dy = call.Arg(1), dw = call.Ret(0);
  ConvProblem p;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, x, dw, dy, window, &p));
  return ConvWgrad(MakeContext(context), p, ToPlan(plan), x.untyped_data(), dy.untyped_data(),
                   dw.untyped_data(), call.Scratch());
}

// ---------------------------------------------------------------------------------------------------------------------
// Dense

Status DenseOp(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
               const wire::Product& product, const wire::Epilogue& epilogue,
               const wire::Plan& plan) {
  Call call("dense", args, rets);
  Epilogue e;
  JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, epilogue, &e));
  auto bias = wire::ToBiasKind(product.bias);
  if (!bias || (*bias != BiasKind::kNone) != e.bias) {
    return Status::Invalid(call.Text("unknown bias kind '" + std::string(product.bias) + "'"));
  }
  const bool addend = product.addend != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2 + e.bias + addend, 1 + e.save_preactivation));
  AnyBuffer x = call.Arg(0), w = call.Arg(1), y = call.Ret(0);
  auto dtype = wire::ToDType(x.element_type());
  Dims yd = y.dimensions(), xd = x.dimensions();
  const size_t instance = product.batched ? 1 : 0;
  if (!dtype || yd.size() != 2 + instance || xd.size() != 2u + (product.x_batched ? 1 : 0)) {
    return Status::Invalid(call.Text("x=" + wire::ShapeText(xd) + " and y=" + wire::ShapeText(yd) +
                                     " are no matrices of one floating-point type"));
  }
  DenseProblem p;
  p.batch = instance ? yd[0] : 1;
  p.m = yd[instance];
  p.n = yd[instance + 1];
  p.trans_x = product.trans_x != 0;
  p.trans_w = product.trans_w != 0;
  p.k = xd[xd.size() - (p.trans_x ? 2 : 1)];
  p.x_batched = product.x_batched != 0;
  p.w_batched = product.w_batched != 0;
  p.c_batched = product.c_batched != 0;
  p.bias_batched = product.bias_batched != 0;
  p.bias = *bias;
  p.addend = addend;
  p.alpha = product.alpha;
  p.beta = product.beta;
  p.dtype = *dtype;
  p.full_float32 = product.full_float32 != 0;

  auto confirm = [&](const char* what, AnyBuffer buffer, bool batched, int64_t rows,
                     int64_t columns) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType(what, buffer, p.dtype));
    return batched ? call.ConfirmShape(what, buffer, {p.batch, rows, columns})
                   : call.ConfirmShape(what, buffer, {rows, columns});
  };
  JAXCONV_RETURN_IF_ERROR(
      confirm("x", x, p.x_batched, p.trans_x ? p.k : p.m, p.trans_x ? p.m : p.k));
  JAXCONV_RETURN_IF_ERROR(
      confirm("w", w, p.w_batched, p.trans_w ? p.n : p.k, p.trans_w ? p.k : p.n));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("y", y, p.dtype));
  const void *b = nullptr, *c = nullptr;
  size_t next = 2;
  if (e.bias) {
    AnyBuffer buffer = call.Arg(next++);
    const int64_t size = p.bias == BiasKind::kScalar ? 1 : p.bias == BiasKind::kRow ? p.m : p.n;
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("b", buffer, p.dtype));
    JAXCONV_RETURN_IF_ERROR(p.bias_batched ? call.ConfirmShape("b", buffer, {p.batch, size})
                                           : call.ConfirmShape("b", buffer, {size}));
    b = buffer.untyped_data();
  }
  if (addend) {
    JAXCONV_RETURN_IF_ERROR(confirm("c", call.Arg(next), p.c_batched, p.m, p.n));
    c = call.Arg(next).untyped_data();
  }
  if (e.save_preactivation) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("z", call.Ret(1), y));
  return Dense(MakeContext(context), p, e, ToPlan(plan), x.untyped_data(), w.untyped_data(), b, c,
               y.untyped_data(), e.save_preactivation ? call.Ret(1).untyped_data() : nullptr,
               call.Scratch());
}

// ---------------------------------------------------------------------------------------------------------------------
// Batch-norm

Status ToBatchNormProblem(const Call& call, AnyBuffer x, const wire::Norm& norm,
                          BatchNormProblem* p) {
  auto dtype = wire::ToDType(x.element_type());
  auto activation = wire::ToActivation(norm.activation);
  Dims dims = x.dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size()), first = norm.batched ? 1 : 0;
  if (!dtype || !activation || norm.channel_axis < first || norm.channel_axis >= rank) {
    return Status::Invalid(call.Text("x=" + wire::ShapeText(dims) + " with channel axis " +
                                     std::to_string(norm.channel_axis) + " and activation '" +
                                     std::string(norm.activation) + "' cannot be read"));
  }
  *p = {};
  p->batch = norm.batched ? dims[0] : 1;
  p->outer = p->inner = 1;
  for (int64_t i = first; i < norm.channel_axis; ++i) p->outer *= dims[i];
  p->channels = dims[norm.channel_axis];
  for (int64_t i = norm.channel_axis + 1; i < rank; ++i) p->inner *= dims[i];
  p->momentum = norm.momentum;
  p->epsilon = norm.epsilon;
  p->activation = *activation;
  p->slope = norm.slope;
  p->residual = norm.residual != 0;
  p->dtype = *dtype;
  return Status::Ok();
}

// Operands and results [first, last) must be per-channel arrays.
template <typename Get>
Status ConfirmParams(const Call& call, const wire::Norm& norm, const BatchNormProblem& p, Get get,
                     size_t first, size_t last) {
  const DType dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (size_t i = first; i < last; ++i) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("a per-channel array", get(i), dtype));
    JAXCONV_RETURN_IF_ERROR(
        norm.batched ? call.ConfirmShape("a per-channel array", get(i), {p.batch, p.channels})
                     : call.ConfirmShape("a per-channel array", get(i), {p.channels}));
  }
  return Status::Ok();
}

Status NormTrain(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 const wire::Norm& norm, const wire::Plan& plan) {
  Call call("batchnorm_train", args, rets);
  const bool residual = norm.residual != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(5 + residual, 5));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  BatchNormProblem p;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg, 1, 5));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, ret, 1, 5));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", ret(0), arg(0)));
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(5), arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return BatchNormTrain(MakeContext(context), p, ToPlan(plan), in(0), in(1), in(2), in(3), in(4),
                        residual ? in(5) : nullptr, out(0), out(1), out(2), out(3), out(4),
                        call.Scratch());
}

Status NormInfer(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 const wire::Norm& norm, const wire::Plan& plan) {
  Call call("batchnorm_infer", args, rets);
  const bool residual = norm.residual != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(5 + residual, 1));
  auto arg = [&](size_t i) { return call.Arg(i); };
  BatchNormProblem p;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg, 1, 5));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", call.Ret(0), arg(0)));
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(5), arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  return BatchNormInfer(MakeContext(context), p, ToPlan(plan), in(0), in(1), in(2), in(3), in(4),
                        residual ? in(5) : nullptr, call.Ret(0).untyped_data());
}

Status NormBackward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    const wire::Norm& norm, int64_t want_dx, int64_t want_dresidual,
                    const wire::Plan& plan) {
  Call call("batchnorm_backward", args, rets);
  const bool residual = norm.residual != 0, dx = want_dx != 0, dresidual = want_dresidual != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(6 + residual, 2 + dx + dresidual));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  BatchNormProblem p;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg, 2, 6));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, ret, 0, 2));
  for (size_t i = 2; i < 2u + dx + dresidual; ++i) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("a gradient", ret(i), arg(0)));
  }
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(6), arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return BatchNormBackward(MakeContext(context), p, ToPlan(plan), in(0), in(1), in(2), in(3), in(4),
                           in(5), residual ? in(6) : nullptr, dx ? out(2) : nullptr, out(0), out(1),
                           dresidual ? out(2 + dx) : nullptr, call.Scratch());
}

// ---------------------------------------------------------------------------------------------------------------------
// Bindings. A Status becomes an ffi::Error here and nowhere else.

#define JAXCONV_BASE ffi::Ffi::Bind().Ctx<PlatformContext>().RemainingArgs().RemainingRets()

XLA_FFI_DEFINE_HANDLER(
    kFprop,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Epilogue epilogue,
       wire::Plan plan) { return wire::ToFfi(Fprop(context, args, rets, window, epilogue, plan)); },
    JAXCONV_BASE.Attr<wire::Window>("window")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kStatistics,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) { return wire::ToFfi(Statistics(context, args, rets, window, plan)); },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDgrad,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) { return wire::ToFfi(Dgrad(context, args, rets, window, plan, false)); },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDgradAdd,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) { return wire::ToFfi(Dgrad(context, args, rets, window, plan, true)); },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kWgrad,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) { return wire::ToFfi(Wgrad(context, args, rets, window, plan)); },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDense,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Product product,
       wire::Epilogue epilogue, wire::Plan plan) {
      return wire::ToFfi(DenseOp(context, args, rets, product, epilogue, plan));
    },
    JAXCONV_BASE.Attr<wire::Product>("product")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormTrain,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) { return wire::ToFfi(NormTrain(context, args, rets, norm, plan)); },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormInfer,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) { return wire::ToFfi(NormInfer(context, args, rets, norm, plan)); },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       int64_t want_dx, int64_t want_dresidual, wire::Plan plan) {
      return wire::ToFfi(NormBackward(context, args, rets, norm, want_dx, want_dresidual, plan));
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm")
        .Attr<int64_t>("want_dx")
        .Attr<int64_t>("want_dresidual")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

}  // namespace

// The bare fprop and the fused conv share a handler, as matmul and dense do: the epilogue says what
// follows.
std::vector<std::pair<const char*, XLA_FFI_Handler*>> Handlers() {
  return {
      {"jaxconv_conv_v1", kFprop},
      {"jaxconv_conv_fprop_v1", kFprop},
      {"jaxconv_conv_statistics_v1", kStatistics},
      {"jaxconv_conv_dgrad_v1", kDgrad},
      {"jaxconv_conv_dgrad_add_v1", kDgradAdd},
      {"jaxconv_conv_wgrad_v1", kWgrad},
      {"jaxconv_dense_v1", kDense},
      {"jaxconv_matmul_v1", kDense},
      {"jaxconv_batchnorm_train_v1", kNormTrain},
      {"jaxconv_batchnorm_infer_v1", kNormInfer},
      {"jaxconv_batchnorm_backward_v1", kNormBackward},
  };
}

}  // namespace jaxconv::JAXCONV_BACKEND
