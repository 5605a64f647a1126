// The handlers: buffers and attributes -> problem, confirmed -> launcher. Compiled for both
// platforms, with JAXCONV_BACKEND = cpu and = cuda. A handler allocates nothing on a device, never
// synchronises and never throws, so a captured CUDA graph may hold it.
//
// Python has validated what a user gave. Exported programs reach a handler without Python, so it
// confirms that buffers and attributes agree, and bounds every number (common/problem.h says by what),
// before a launcher trusts them.

#include "ffi/handlers.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <string>
#ifdef __SANITIZE_THREAD__
#include <functional>
#include <thread>
#endif

#include "common/checked.h"
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
// An error that somebody else's call left on this thread is not the next launch's.
Context MakeContext(cudaStream_t stream) {
  (void)cudaGetLastError();
  return Context{stream};
}
#define JAXCONV_TRAITS {ffi::Traits::kCmdBufferCompatible}
using ContextArg = cudaStream_t;
#else
using PlatformContext = ffi::ThreadPool;
Context MakeContext(ffi::ThreadPool pool) {
#ifdef __SANITIZE_THREAD__
  // XLA's pool is not instrumented: ThreadSanitizer would not see that a task starts after it was
  // handed over. Threads of our own, several also where the machine has one core.
  return Context{4, [](std::function<void()> task) { std::thread(std::move(task)).detach(); }};
#endif
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
      JAXCONV_RETURN_IF_ERROR(ConfirmSize(Arg(i)));
    }
    for (size_t i = 0; i <= rets; ++i) {
      if (!rets_.get<AnyBuffer>(i).has_value())
        return Status::Invalid(Text("a result is no buffer"));
      JAXCONV_RETURN_IF_ERROR(ConfirmSize(Ret(i)));
    }
    return Status::Ok();
  }

  AnyBuffer Arg(size_t i) const { return *args_.get<AnyBuffer>(i); }
  AnyBuffer Ret(size_t i) const { return **rets_.get<AnyBuffer>(i); }
  Workspace Scratch() const {
    AnyBuffer last = Ret(rets_.size() - 1);
    return {last.untyped_data(), static_cast<int64_t>(last.size_bytes())};
  }

  // where() -> the arrays that ask for the shape, "x=(2, 3), y=(2, 4)"; called only to say what is wrong.
  template <typename Where>
  Status ConfirmShape(const char* what, AnyBuffer buffer, std::initializer_list<int64_t> shape,
                      const Where& where) const {
    return ConfirmShape(what, buffer, Dims(shape.begin(), shape.size()), where);
  }
  template <typename Where>
  Status ConfirmShape(const char* what, AnyBuffer buffer, Dims expected, const Where& where) const {
    Dims dims = buffer.dimensions();
    if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end())) return Status::Ok();
    return Status::Invalid(Text(std::string(what) + " has shape " + wire::ShapeText(dims) +
                                ", expected " + wire::ShapeText(expected) + " by " + where()));
  }
  Status ConfirmLike(const char* what, AnyBuffer buffer, const char* whose, AnyBuffer like) const {
    Dims dims = buffer.dimensions(), expected = like.dimensions();
    if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end()) &&
        buffer.element_type() == like.element_type()) {
      return Status::Ok();
    }
    return Status::Invalid(Text(std::string(what) + " has shape " + wire::ShapeText(dims) +
                                ", expected the shape and the type of " + whose + ", " +
                                wire::ShapeText(expected)));
  }
  Status ConfirmType(const char* what, AnyBuffer buffer, DType dtype, const char* whose) const {
    if (wire::ToDType(buffer.element_type()) == dtype) return Status::Ok();
    return Status::Invalid(Text(std::string(what) + " must be of type " + Name(dtype) + ", which " +
                                whose + " asks for"));
  }
  std::string Text(const std::string& message) const { return std::string(name_) + ": " + message; }

 private:
  // An array without elements may have any extents: no product of them may overflow either.
  Status ConfirmSize(AnyBuffer buffer) const {
    Checked size = 1;
    for (int64_t extent : buffer.dimensions()) size = size * std::max<int64_t>(extent, 1);
    if (size.Within(1, kMaxElements)) return Status::Ok();
    return Status::Invalid(
        Text("an array has the shape " + wire::ShapeText(buffer.dimensions()) +
             ": the product of the extents that are not 0 must be at most 2^60"));
  }

  const char* name_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

Status ToPlan(const Call& call, const wire::Plan& in, jaxconv::Plan* out) {
  for (int64_t count : {in.splits, in.chunk}) {
    if (count < 0 || count > kMaxStep) {
      return Status::Invalid(call.Text("splits=" + std::to_string(in.splits) + " and chunk=" +
                                       std::to_string(in.chunk) + " must be in [0, 2^31)"));
    }
  }
  *out = {in.kernel, in.tile, in.splits, in.chunk};
  return Status::Ok();
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

// The three arrays and what the op calls them.
struct ConvArrays {
  AnyBuffer x, w, y;
  const char *x_name, *w_name, *y_name;

  std::string Text() const {
    return std::string(x_name) + "=" + wire::ShapeText(x.dimensions()) + ", " + w_name + "=" +
           wire::ShapeText(w.dimensions()) + ", " + y_name + "=" + wire::ShapeText(y.dimensions());
  }
};

// Whether y's extent on axis d is what the window makes of x's, within the bounds of common/problem.h.
bool AxisIsSound(const ConvProblem& p, int d, int64_t pad_high) {
  if (p.stride[d] < 1 || p.stride[d] > kMaxStep || p.dilation[d] < 1 || p.dilation[d] > kMaxStep ||
      p.pad[d] < -kMaxStep || p.pad[d] > kMaxStep || pad_high < -kMaxStep || pad_high > kMaxStep) {
    return false;
  }
  const Checked window = Checked(p.filter[d] - 1) * p.dilation[d] + 1;
  const Checked slack = Checked(p.in[d]) + p.pad[d] + pad_high - window;
  if (!slack.Within(0, kMaxElements) || slack.value() / p.stride[d] + 1 != p.out[d]) return false;
  const Checked span =
      Checked(p.in[d]) + p.out[d] + std::abs(p.pad[d]) + std::abs(pad_high) + p.stride[d] + window;
  Checked x = span * std::max<int64_t>(p.n, 1) * p.c, y = span * std::max<int64_t>(p.n, 1) * p.k;
  for (int other = 0; other < 3; ++other) {
    if (other == d) continue;
    x = x * std::max<int64_t>(p.in[other], 1);
    y = y * std::max<int64_t>(p.out[other], 1);
  }
  return x.Within(1, kMaxSpanned) && y.Within(1, kMaxSpanned);
}

// Reads the problem off the three arrays, whichever of them are results.
Status ToConvProblem(const Call& call, const ConvArrays& a, const wire::Window& window,
                     ConvProblem* p) {
  Dims xd = a.x.dimensions(), wd = a.w.dimensions(), yd = a.y.dimensions();
  const size_t nd = window.stride.size();
  if (nd < 1 || nd > 3 || xd.size() != nd + 2 || wd.size() != nd + 2 || yd.size() != nd + 2 ||
      window.pad_low.size() != nd || window.pad_high.size() != nd || window.dilation.size() != nd) {
    return Status::Invalid(call.Text("ranks disagree: " + a.Text() + ", " + std::to_string(nd) +
                                     " spatial dimensions"));
  }
  auto dtype = wire::ToDType(a.x.element_type());
  if (!dtype || a.w.element_type() != a.x.element_type() ||
      a.y.element_type() != a.x.element_type()) {
    return Status::Invalid(call.Text(std::string(a.x_name) + ", " + a.w_name + " and " + a.y_name +
                                     " must have one floating-point type"));
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
  const auto disagree = [&](const std::string& how) {
    return Status::Invalid(call.Text("extents disagree: " + a.Text() +
                                     ", groups=" + std::to_string(window.groups) + ": " + how));
  };
  // An empty filter may have any number of taps, which nothing in memory bounds.
  if (a.w.element_count() == 0) return disagree(std::string(a.w_name) + " is empty");
  if (p->groups < 1 || p->groups > p->k || p->k % p->groups != 0 || p->c % p->groups != 0 ||
      p->c / p->groups != group_c) {
    return disagree("the channels and the groups");
  }
  if (yd[0] != p->n) return disagree("the batches");
  if (yd[channel] != p->k) return disagree("the output channels");
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
  }
  Checked products = Checked(std::max<int64_t>(p->n, 1)) * p->k * group_c;
  for (int d = 0; d < 3; ++d) products = products * p->filter[d] * p->out[d];
  for (size_t i = 0; i < nd; ++i) {
    if (AxisIsSound(*p, static_cast<int>(3 - nd + i), window.pad_high[i])) continue;
    return disagree("spatial axis " + std::to_string(i) + " with stride " +
                    std::to_string(window.stride[i]) + ", padding (" +
                    std::to_string(window.pad_low[i]) + ", " + std::to_string(window.pad_high[i]) +
                    ") and dilation " + std::to_string(window.dilation[i]));
  }
  if (!products.Within(0, kMaxProducts)) return disagree("more than 2^62 products");
  return Status::Ok();
}

Status Fprop(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Epilogue& epilogue, const wire::Plan& plan,
             bool residual) {
  Call call(residual ? "conv_add" : "conv_fprop", args, rets);
  Epilogue e;
  JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, epilogue, &e));
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2 + e.bias + residual, 1 + e.save_preactivation));
  AnyBuffer x = call.Arg(0), w = call.Arg(1), y = call.Ret(0);
  ConvProblem p;
  jaxconv::Plan how;
  const ConvArrays arrays = {x, w, y, "x", "w", "y"};
  const auto where = [&] { return arrays.Text(); };
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, arrays, window, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  if (e.bias) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("b", call.Arg(2), {p.k}, where));
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("b", call.Arg(2), p.dtype, "y"));
  }
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", call.Arg(2 + e.bias), "y", y));
  if (e.save_preactivation) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("z", call.Ret(1), "y", y));
  return ConvFprop(MakeContext(context), p, e, how, x.untyped_data(), w.untyped_data(),
                   e.bias ? call.Arg(2).untyped_data() : nullptr,
                   residual ? call.Arg(2 + e.bias).untyped_data() : nullptr, y.untyped_data(),
                   e.save_preactivation ? call.Ret(1).untyped_data() : nullptr, call.Scratch());
}

Status Statistics(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  const wire::Window& window, const wire::Plan& plan) {
  Call call("conv_statistics", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2, 3));
  AnyBuffer x = call.Arg(0), w = call.Arg(1), y = call.Ret(0);
  ConvProblem p;
  jaxconv::Plan how;
  const ConvArrays arrays = {x, w, y, "x", "w", "y"};
  const auto where = [&] { return arrays.Text(); };
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, arrays, window, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  if (p.n * p.out_size() == 0) {
    return Status::Invalid(call.Text("y has no elements: there are no statistics of nothing"));
  }
  for (size_t i = 1; i <= 2; ++i) {
    const char* what = i == 1 ? "mean" : "var";
    JAXCONV_RETURN_IF_ERROR(call.ConfirmShape(what, call.Ret(i), {p.k}, where));
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType(
        what, call.Ret(i), p.dtype == DType::kF64 ? DType::kF64 : DType::kF32, "y"));
  }
  return ConvStatistics(MakeContext(context), p, how, x.untyped_data(), w.untyped_data(),
                        y.untyped_data(), call.Ret(1).untyped_data(), call.Ret(2).untyped_data(),
                        call.Scratch());
}

Status Dgrad(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Plan& plan, bool addend) {
  Call call(addend ? "conv_dgrad_add" : "conv_dgrad", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2 + addend, 1));
  AnyBuffer dy = call.Arg(0), w = call.Arg(1), dx = call.Ret(0);
  ConvProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, {dx, w, dy, "dx", "w", "dy"}, window, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  if (addend) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("c", call.Arg(2), "dx", dx));
  return ConvDgrad(MakeContext(context), p, how, dy.untyped_data(), w.untyped_data(),
                   addend ? call.Arg(2).untyped_data() : nullptr, dx.untyped_data(),
                   call.Scratch());
}

#if JAXCONV_ON_GPUS
// Signs of `like`, channels last: a byte of eight channels.
Status ConfirmSigns(const Call& call, AnyBuffer signs, const char* name, AnyBuffer like) {
  const Dims dims = like.dimensions();
  std::vector<int64_t> expected(dims.begin(), dims.end());
  if (expected.empty() || expected.back() % 8 != 0 || signs.element_type() != ffi::DataType::U8) {
    return Status::Invalid(call.Text("signs are bytes of eight channels of " + std::string(name)));
  }
  expected.back() /= 8;
  const Dims found = signs.dimensions();
  if (expected == std::vector<int64_t>(found.begin(), found.end())) return Status::Ok();
  return Status::Invalid(call.Text("signs=" + wire::ShapeText(found) + " are not those of " +
                                   std::string(name) + "=" + wire::ShapeText(dims)));
}

Status DgradSums(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 const wire::Window& window, const wire::Plan& plan) {
  Call call("conv_dgrad_sums", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(7, 3));
  AnyBuffer dy = call.Arg(0), w = call.Arg(1), dz = call.Ret(0);
  ConvProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, {dz, w, dy, "dz", "w", "dy"}, window, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  if (p.n * p.c * p.in_size() == 0 || p.k * p.out_size() == 0) {
    return Status::Invalid(call.Text("it has no elements: there are no sums of nothing"));
  }
  const auto where = [&] { return "dz=" + wire::ShapeText(dz.dimensions()); };
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("c", call.Arg(2), "dz", dz));
  JAXCONV_RETURN_IF_ERROR(ConfirmSigns(call, call.Arg(3), "dz", dz));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("x", call.Arg(4), "dz", dz));
  const auto channels = [&](const char* what, AnyBuffer buffer) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmShape(what, buffer, {p.c}, where));
    return call.ConfirmType(what, buffer, DType::kF32, "dz");
  };
  JAXCONV_RETURN_IF_ERROR(channels("mean", call.Arg(5)));
  JAXCONV_RETURN_IF_ERROR(channels("rstd", call.Arg(6)));
  JAXCONV_RETURN_IF_ERROR(channels("dscale", call.Ret(1)));
  JAXCONV_RETURN_IF_ERROR(channels("dbias", call.Ret(2)));
  return ConvDgradSums(MakeContext(context), p, how, dy.untyped_data(), w.untyped_data(),
                       call.Arg(2).untyped_data(), call.Arg(3).untyped_data(),
                       call.Arg(4).untyped_data(), call.Arg(5).untyped_data(),
                       call.Arg(6).untyped_data(), dz.untyped_data(), call.Ret(1).untyped_data(),
                       call.Ret(2).untyped_data(), call.Scratch());
}
#endif

Status Wgrad(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const wire::Window& window, const wire::Plan& plan) {
  Call call("conv_wgrad", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2, 1));
  AnyBuffer x = call.Arg(0), dy = call.Arg(1), dw = call.Ret(0);
  ConvProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, {x, dw, dy, "x", "dw", "dy"}, window, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  return ConvWgrad(MakeContext(context), p, how, x.untyped_data(), dy.untyped_data(),
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
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
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

  const auto where = [&] { return "x=" + wire::ShapeText(xd) + ", y=" + wire::ShapeText(yd); };
  auto confirm = [&](const char* what, AnyBuffer buffer, bool batched, int64_t rows,
                     int64_t columns) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType(what, buffer, p.dtype, "x"));
    return batched ? call.ConfirmShape(what, buffer, {p.batch, rows, columns}, where)
                   : call.ConfirmShape(what, buffer, {rows, columns}, where);
  };
  JAXCONV_RETURN_IF_ERROR(
      confirm("x", x, p.x_batched, p.trans_x ? p.k : p.m, p.trans_x ? p.m : p.k));
  JAXCONV_RETURN_IF_ERROR(
      confirm("w", w, p.w_batched, p.trans_w ? p.n : p.k, p.trans_w ? p.k : p.n));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("y", y, p.dtype, "x"));
  const void *b = nullptr, *c = nullptr;
  size_t next = 2;
  if (e.bias) {
    AnyBuffer buffer = call.Arg(next++);
    const int64_t size = p.bias == BiasKind::kScalar ? 1 : p.bias == BiasKind::kRow ? p.m : p.n;
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType("b", buffer, p.dtype, "x"));
    JAXCONV_RETURN_IF_ERROR(p.bias_batched ? call.ConfirmShape("b", buffer, {p.batch, size}, where)
                                           : call.ConfirmShape("b", buffer, {size}, where));
    b = buffer.untyped_data();
  }
  if (addend) {
    JAXCONV_RETURN_IF_ERROR(confirm("c", call.Arg(next), p.c_batched, p.m, p.n));
    c = call.Arg(next).untyped_data();
  }
  if (e.save_preactivation) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("z", call.Ret(1), "y", y));
  return Dense(MakeContext(context), p, e, how, x.untyped_data(), w.untyped_data(), b, c,
               y.untyped_data(), e.save_preactivation ? call.Ret(1).untyped_data() : nullptr,
               call.Scratch());
}

#if JAXCONV_ON_GPUS
// The product's struct says how w is stored, and alpha; what it has for instances, bias and addend must be absent.
Status DenseGradientOp(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       const wire::Product& product, const wire::Epilogue& epilogue,
                       const wire::Plan& plan) {
  Call call("dense_gradient", args, rets);
  Epilogue e;
  JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, epilogue, &e));
  auto bias = wire::ToBiasKind(product.bias);
  if (!bias || *bias != BiasKind::kNone || e.bias || e.save_preactivation || product.batched ||
      product.addend || product.trans_x) {
    return Status::Invalid(
        call.Text("it takes one instance, x stored (M, K), no bias, addend or z"));
  }
  JAXCONV_RETURN_IF_ERROR(call.Confirm(3, 2));
  AnyBuffer dy = call.Arg(0), w = call.Arg(1), kept = call.Arg(2), dz = call.Ret(0);
  auto dtype = wire::ToDType(dy.element_type());
  Dims dyd = dy.dimensions(), dzd = dz.dimensions();
  const auto where = [&] { return "dy=" + wire::ShapeText(dyd) + ", dz=" + wire::ShapeText(dzd); };
  if (!dtype || dyd.size() != 2 || dzd.size() != 2) {
    return Status::Invalid(call.Text(where() + " are no matrices of one floating-point type"));
  }
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  DenseProblem p = {};
  p.batch = 1;
  p.m = dzd[0];
  p.n = dzd[1];
  p.k = dyd[1];
  p.trans_w = product.trans_w != 0;
  p.alpha = product.alpha;
  p.beta = 1.0;
  p.dtype = *dtype;
  p.full_float32 = product.full_float32 != 0;
  JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("dy", dy, {p.m, p.k}, where));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("w", w, p.dtype, "dy"));
  JAXCONV_RETURN_IF_ERROR(
      call.ConfirmShape("w", w, {p.trans_w ? p.n : p.k, p.trans_w ? p.k : p.n}, where));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("dz", dz, p.dtype, "dy"));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("kept", kept, "dz", dz));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("db", call.Ret(1), p.dtype, "dy"));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("db", call.Ret(1), {p.n}, where));
  return DenseGradient(MakeContext(context), p, e, how, dy.untyped_data(), w.untyped_data(),
                       kept.untyped_data(), dz.untyped_data(), call.Ret(1).untyped_data(),
                       call.Scratch());
}
#endif

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

// Operands or results first, first + 1, ... must be the per-channel arrays of these names.
template <typename Get>
Status ConfirmParams(const Call& call, const wire::Norm& norm, const BatchNormProblem& p,
                     AnyBuffer x, Get get, size_t first, std::initializer_list<const char*> names) {
  const DType dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto where = [&] { return "x=" + wire::ShapeText(x.dimensions()); };
  for (const char* name : names) {
    AnyBuffer array = get(first++);
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType(name, array, dtype, "x"));
    JAXCONV_RETURN_IF_ERROR(norm.batched
                                ? call.ConfirmShape(name, array, {p.batch, p.channels}, where)
                                : call.ConfirmShape(name, array, {p.channels}, where));
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
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg(0), arg, 1,
                                        {"scale", "bias", "running_mean", "running_var"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), ret, 1, {"new_mean", "new_var", "mean", "rstd"}));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", ret(0), "x", arg(0)));
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(5), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return BatchNormTrain(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4),
                        residual ? in(5) : nullptr, out(0), out(1), out(2), out(3), out(4),
                        call.Scratch());
}

Status NormMoments(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   const wire::Norm& norm, const wire::Plan& plan) {
  Call call("batchnorm_moments", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(1, 3));
  BatchNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, call.Arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  auto ret = [&](size_t i) { return call.Ret(i); };
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, call.Arg(0), ret, 0, {"k", "shift", "var"}));
  return BatchNormMoments(MakeContext(context), p, how, call.Arg(0).untyped_data(),
                          ret(0).untyped_data(), ret(1).untyped_data(), ret(2).untyped_data(),
                          call.Scratch());
}

// `signs`: BatchNormSigns, which only GPUs have.
Status NormInfer(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 const wire::Norm& norm, const wire::Plan& plan, bool signs) {
  Call call(signs ? "batchnorm_signs" : "batchnorm_infer", args, rets);
  const bool residual = norm.residual != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(5 + residual, 1 + signs));
  auto arg = [&](size_t i) { return call.Arg(i); };
  BatchNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), arg, 1, {"scale", "bias", "mean", "var"}));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", call.Ret(0), "x", arg(0)));
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(5), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
#if JAXCONV_ON_GPUS
  if (signs) {
    JAXCONV_RETURN_IF_ERROR(ConfirmSigns(call, call.Ret(1), "x", arg(0)));
    return BatchNormSigns(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4),
                          residual ? in(5) : nullptr, call.Ret(0).untyped_data(),
                          call.Ret(1).untyped_data());
  }
#endif
  return BatchNormInfer(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4),
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
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), arg, 2, {"scale", "bias", "mean", "rstd"}));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg(0), ret, 0, {"dscale", "dbias"}));
  if (dx) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", ret(2), "x", arg(0)));
  if (dresidual) {
    JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dresidual", ret(2 + dx), "x", arg(0)));
  }
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(6), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return BatchNormBackward(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4), in(5),
                           residual ? in(6) : nullptr, dx ? out(2) : nullptr, out(0), out(1),
                           dresidual ? out(2 + dx) : nullptr, call.Scratch());
}

// Of the elements a channel that given sums are of.
Status ConfirmCount(const Call& call, int64_t count, const BatchNormProblem& p) {
  if (count >= 1 && count >= p.reduced()) return Status::Ok();
  return Status::Invalid(call.Text("count=" + std::to_string(count) +
                                   ", expected at least 1 and the " + std::to_string(p.reduced()) +
                                   " elements of a channel of x"));
}

Status NormDx(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
              const wire::Norm& norm, int64_t count, const wire::Plan& plan) {
  Call call("batchnorm_dx", args, rets);
  const bool residual = norm.residual != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(8 + residual, 1));
  auto arg = [&](size_t i) { return call.Arg(i); };
  BatchNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, p, arg(0), arg, 2,
                                        {"scale", "bias", "mean", "rstd", "dscale", "dbias"}));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", call.Ret(0), "x", arg(0)));
  if (residual) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("residual", arg(8), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmCount(call, count, p));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  return BatchNormDx(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4), in(5), in(6),
                     in(7), residual ? in(8) : nullptr, count, call.Ret(0).untyped_data());
}

#if JAXCONV_ON_GPUS
Status NormShortcutBackward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            const wire::Norm& norm, const wire::Plan& plan) {
  Call call("batchnorm_shortcut_backward", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(11, 5));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  BatchNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("r", arg(6), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), arg, 2, {"scale", "bias", "mean", "rstd"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), arg, 7, {"scale_r", "bias_r", "mean_r", "rstd_r"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmParams(call, norm, p, arg(0), ret, 0, {"dscale", "dbias", "dscale_r"}));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", ret(3), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dr", ret(4), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return BatchNormShortcutBackward(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4),
                                   in(5), in(6), in(7), in(8), in(9), in(10), out(0), out(1),
                                   out(2), out(3), out(4), call.Scratch());
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Max-pooling

// Reads the problem off x and y, or `gradient` and its dx and dy, confirmed as a convolution's window is. `position` is
// read where positions are saved.
Status ToPoolProblem(const Call& call, AnyBuffer x, AnyBuffer y, AnyBuffer position, bool gradient,
                     const wire::Pool& pool, PoolProblem* p) {
  Dims xd = x.dimensions(), yd = y.dimensions();
  const std::string x_name = gradient ? "dx" : "x", y_name = gradient ? "dy" : "y";
  const auto arrays = [&] {
    const std::string text =
        x_name + "=" + wire::ShapeText(xd) + ", " + y_name + "=" + wire::ShapeText(yd);
    return pool.save ? text + ", position=" + wire::ShapeText(position.dimensions()) : text;
  };
  const size_t nd = pool.window.size();
  if (nd < 1 || nd > 3 || xd.size() != nd + 2 || yd.size() != nd + 2 || pool.stride.size() != nd ||
      pool.pad_low.size() != nd || pool.pad_high.size() != nd || pool.dilation.size() != nd) {
    return Status::Invalid(call.Text("ranks disagree: " + arrays() + ", " + std::to_string(nd) +
                                     " spatial dimensions"));
  }
  auto dtype = wire::ToDType(x.element_type());
  if (!dtype || y.element_type() != x.element_type()) {
    return Status::Invalid(
        call.Text(x_name + " and " + y_name + " must have one floating-point type"));
  }
  Dims pd = position.dimensions();
  if (pool.save && (position.element_type() != ffi::DataType::U8 ||
                    !std::equal(pd.begin(), pd.end(), yd.begin(), yd.end()))) {
    return Status::Invalid(
        call.Text("position must be uint8, of " + y_name + "'s shape: " + arrays()));
  }
  const bool last = pool.dims_channels_last != 0;
  const size_t spatial = last ? 1 : 2, channel = last ? nd + 1 : 1;
  ConvProblem window = {};  // depthwise, of which only the extents are read
  window.n = xd[0];
  window.c = window.k = xd[channel];
  for (int i = 0; i < 3; ++i) {
    window.in[i] = window.filter[i] = window.out[i] = window.stride[i] = window.dilation[i] = 1;
  }
  bool sound = yd[0] == xd[0] && yd[channel] == xd[channel];
  Checked taps = 1;
  for (size_t i = 0; i < nd; ++i) {
    const size_t d = 3 - nd + i;
    window.in[d] = xd[spatial + i];
    window.out[d] = yd[spatial + i];
    window.filter[d] = pool.window[i];
    window.stride[d] = pool.stride[i];
    window.pad[d] = pool.pad_low[i];
    window.dilation[d] = pool.dilation[i];
    taps = taps * pool.window[i];
    sound = sound && pool.window[i] >= 1 && pool.pad_low[i] >= 0 && pool.pad_high[i] >= 0;
  }
  for (size_t i = 0; sound && i < nd; ++i)
    sound = AxisIsSound(window, static_cast<int>(3 - nd + i), pool.pad_high[i]);
  if (!sound) return Status::Invalid(call.Text("extents disagree with the window: " + arrays()));
  if (!taps.Within(1, kMaxPoolTaps))
    return Status::Invalid(call.Text("windows have at most 255 taps"));
  *p = {};
  p->n = window.n;
  p->c = window.c;
  for (int i = 0; i < 3; ++i) {
    p->in[i] = window.in[i];
    p->window[i] = window.filter[i];
    p->out[i] = window.out[i];
    p->stride[i] = window.stride[i];
    p->pad[i] = window.pad[i];
    p->dilation[i] = window.dilation[i];
  }
  p->dtype = *dtype;
  return Status::Ok();
}

Status Pool(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
            const wire::Pool& pool, const wire::Plan& plan) {
  Call call("max_pool", args, rets);
  const bool save = pool.save != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(1, 1 + save));
  AnyBuffer x = call.Arg(0), y = call.Ret(0), position = call.Ret(save);
  PoolProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToPoolProblem(call, x, y, position, false, pool, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  return MaxPool(MakeContext(context), p, how, x.untyped_data(), y.untyped_data(),
                 save ? static_cast<uint8_t*>(position.untyped_data()) : nullptr);
}

Status PoolBackward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    const wire::Pool& pool, const wire::Plan& plan) {
  Call call("max_pool_backward", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(2, 1));
  if (pool.save == 0) return Status::Invalid(call.Text("it needs the positions"));
  AnyBuffer position = call.Arg(0), dy = call.Arg(1), dx = call.Ret(0);
  PoolProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToPoolProblem(call, dx, dy, position, true, pool, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  return MaxPoolBackward(MakeContext(context), p, how,
                         static_cast<const uint8_t*>(position.untyped_data()), dy.untyped_data(),
                         dx.untyped_data());
}

// ---------------------------------------------------------------------------------------------------------------------
// Group-norm. Groups of 0 are layer-norm: every pixel is an image of one pixel and one group.

Status ToGroupNormProblem(const Call& call, AnyBuffer x, const wire::GroupNorm& norm,
                          GroupNormProblem* p) {
  auto dtype = wire::ToDType(x.element_type());
  auto activation = wire::ToActivation(norm.activation);
  Dims dims = x.dimensions();
  const size_t first = norm.batched ? 1 : 0;
  if (!dtype || !activation || dims.size() < first + 2) {
    return Status::Invalid(call.Text("x=" + wire::ShapeText(dims) + " with activation '" +
                                     std::string(norm.activation) + "' cannot be read"));
  }
  *p = {};
  p->batch = first ? dims[0] : 1;
  p->images = dims[first];
  p->pixels = 1;
  for (size_t i = first + 1; i + 1 < dims.size(); ++i) p->pixels *= dims[i];
  if (norm.groups == 0) {
    p->images *= p->pixels;
    p->pixels = 1;
  }
  p->channels = dims[dims.size() - 1];
  p->groups = norm.groups == 0 ? 1 : norm.groups;
  p->epsilon = norm.epsilon;
  p->activation = *activation;
  p->slope = norm.slope;
  p->dtype = *dtype;
  if (p->pixels > 0 && p->groups > 0 && p->groups <= p->channels && p->channels % p->groups == 0) {
    return Status::Ok();
  }
  return Status::Invalid(
      call.Text("x=" + wire::ShapeText(dims) + " and groups=" + std::to_string(norm.groups) +
                ": there must be pixels, and the groups must divide the channels"));
}

// Operands or results first, first + 1, ... must be the arrays of these names: per channel, or per image and group (of
// layer-norm per pixel).
template <typename Get>
Status ConfirmGroupParams(const Call& call, const wire::GroupNorm& norm, const GroupNormProblem& p,
                          AnyBuffer x, Get get, size_t first, bool per_group,
                          std::initializer_list<const char*> names) {
  const DType dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto where = [&] { return "x=" + wire::ShapeText(x.dimensions()); };
  const auto confirm = [&](const char* name, AnyBuffer array) {
    if (per_group && norm.groups == 0) {
      Dims dims = x.dimensions();
      return call.ConfirmShape(name, array, Dims(dims.begin(), dims.size() - 1), where);
    }
    if (per_group) {
      return norm.batched ? call.ConfirmShape(name, array, {p.batch, p.images, p.groups}, where)
                          : call.ConfirmShape(name, array, {p.images, p.groups}, where);
    }
    return norm.batched ? call.ConfirmShape(name, array, {p.batch, p.channels}, where)
                        : call.ConfirmShape(name, array, {p.channels}, where);
  };
  for (const char* name : names) {
    AnyBuffer array = get(first++);
    JAXCONV_RETURN_IF_ERROR(call.ConfirmType(name, array, dtype, "x"));
    JAXCONV_RETURN_IF_ERROR(confirm(name, array));
  }
  return Status::Ok();
}

Status GroupForward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    const wire::GroupNorm& norm, const wire::Plan& plan) {
  Call call("groupnorm", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(3, 3));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  GroupNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToGroupNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmGroupParams(call, norm, p, arg(0), arg, 1, false, {"scale", "bias"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmGroupParams(call, norm, p, arg(0), ret, 1, true, {"mean", "rstd"}));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", ret(0), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return GroupNorm(MakeContext(context), p, how, in(0), in(1), in(2), out(0), out(1), out(2),
                   call.Scratch());
}

Status GroupBackward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     const wire::GroupNorm& norm, int64_t want_dx, const wire::Plan& plan) {
  Call call("groupnorm_backward", args, rets);
  const bool dx = want_dx != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(6, 2 + dx));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  GroupNormProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToGroupNormProblem(call, arg(0), norm, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmGroupParams(call, norm, p, arg(0), arg, 2, false, {"scale", "bias"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmGroupParams(call, norm, p, arg(0), arg, 4, true, {"mean", "rstd"}));
  JAXCONV_RETURN_IF_ERROR(
      ConfirmGroupParams(call, norm, p, arg(0), ret, 0, false, {"dscale", "dbias"}));
  if (dx) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", ret(2), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return GroupNormBackward(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4), in(5),
                           dx ? out(2) : nullptr, out(0), out(1), call.Scratch());
}

// ---------------------------------------------------------------------------------------------------------------------
// Squeeze-and-excitation

// w1: (channels, hidden), w2: (hidden, channels).
Status ToSqueezeExciteProblem(const Call& call, AnyBuffer x, AnyBuffer w1, AnyBuffer w2,
                              const wire::SqueezeExcite& squeeze, SqueezeExciteProblem* p) {
  auto dtype = wire::ToDType(x.element_type());
  auto activation = wire::ToActivation(squeeze.activation);
  auto gating = wire::ToGating(squeeze.gate);
  Dims dims = x.dimensions(), rows = w1.dimensions();
  if (!dtype || !activation || !gating || dims.size() < 2 || rows.size() != 2) {
    return Status::Invalid(call.Text("x=" + wire::ShapeText(dims) +
                                     " and w1=" + wire::ShapeText(rows) + " with activation '" +
                                     std::string(squeeze.activation) + "' and gate '" +
                                     std::string(squeeze.gate) + "' cannot be read"));
  }
  *p = {};
  p->images = dims[0];
  p->pixels = 1;
  for (size_t i = 1; i + 1 < dims.size(); ++i) p->pixels *= dims[i];
  p->channels = dims[dims.size() - 1];
  p->hidden = rows[1];
  p->activation = *activation;
  p->slope = squeeze.slope;
  p->gating = *gating;
  p->dtype = *dtype;
  const auto where = [&] {
    return "x=" + wire::ShapeText(dims) + " and w1=" + wire::ShapeText(rows);
  };
  if (p->pixels < 1 || p->channels < 1 || p->hidden < 1)
    return Status::Invalid(call.Text(where() + ": there must be some of each"));
  const DType wide = p->dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("w1", w1, wide, "x"));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmType("w2", w2, wide, "x"));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmShape("w1", w1, {p->channels, p->hidden}, where));
  return call.ConfirmShape("w2", w2, {p->hidden, p->channels}, where);
}

// An array of numbers of each image, or (`shared`) of all.
Status ConfirmNumbers(const Call& call, const SqueezeExciteProblem& p, const char* name,
                      AnyBuffer array, int64_t numbers, bool shared) {
  const auto where = [&] {
    return std::to_string(p.channels) + " channels, " + std::to_string(p.hidden) +
           " hidden numbers";
  };
  JAXCONV_RETURN_IF_ERROR(
      call.ConfirmType(name, array, p.dtype == DType::kF64 ? DType::kF64 : DType::kF32, "x"));
  return shared ? call.ConfirmShape(name, array, {numbers}, where)
                : call.ConfirmShape(name, array, {p.images, numbers}, where);
}

Status SqueezeForward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      const wire::SqueezeExcite& squeeze, const wire::Plan& plan) {
  Call call("squeeze_excite", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(5, 4));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  SqueezeExciteProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToSqueezeExciteProblem(call, arg(0), arg(1), arg(3), squeeze, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "b1", arg(2), p.hidden, true));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "b2", arg(4), p.channels, true));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("y", ret(0), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "mean", ret(1), p.channels, false));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "z1", ret(2), p.hidden, false));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "gate", ret(3), p.channels, false));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return SqueezeExcite(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4), out(0),
                       out(1), out(2), out(3));
}

Status SqueezeBackward(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       const wire::SqueezeExcite& squeeze, int64_t want_dx,
                       const wire::Plan& plan) {
  Call call("squeeze_excite_backward", args, rets);
  const bool dx = want_dx != 0;
  JAXCONV_RETURN_IF_ERROR(call.Confirm(6, 2 + dx));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  SqueezeExciteProblem p;
  jaxconv::Plan how;
  JAXCONV_RETURN_IF_ERROR(ToSqueezeExciteProblem(call, arg(0), arg(2), arg(3), squeeze, &p));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dy", arg(1), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "z1", arg(4), p.hidden, false));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "gate", arg(5), p.channels, false));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "dz2", ret(0), p.channels, false));
  JAXCONV_RETURN_IF_ERROR(ConfirmNumbers(call, p, "dz1", ret(1), p.hidden, false));
  if (dx) JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", ret(2), "x", arg(0)));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return SqueezeExciteBackward(MakeContext(context), p, how, in(0), in(1), in(2), in(3), in(4),
                               in(5), out(0), out(1), dx ? out(2) : nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// A convolution of a batch-norm: of x by known statistics, as NormInfer

// The problems, confirmed, of arrays whose x is `x`; its channels' numbers are operands `first` and on, `names`.
Status ToNormalised(const Call& call, const ConvArrays& arrays, AnyBuffer x,
                    const wire::Window& window, const wire::Norm& norm, size_t first,
                    std::initializer_list<const char*> names, ConvProblem* p, BatchNormProblem* n) {
  JAXCONV_RETURN_IF_ERROR(ToConvProblem(call, arrays, window, p));
  JAXCONV_RETURN_IF_ERROR(ToBatchNormProblem(call, x, norm, n));
  const int64_t axis =
      window.dims_channels_last != 0 ? static_cast<int64_t>(x.dimensions().size()) - 1 : 1;
  if (norm.batched != 0 || norm.residual != 0 || norm.channel_axis != axis) {
    return Status::Invalid(call.Text("it takes one instance, x's own channels and no residual"));
  }
  if (p->n * p->in_size() == 0 || p->out_size() == 0) {
    return Status::Invalid(call.Text(arrays.Text() + ": there must be some of each"));
  }
  return ConfirmParams(call, norm, *n, x, [&](size_t i) { return call.Arg(i); }, first, names);
}

Status Normalised(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  const wire::Window& window, const wire::Norm& norm, const wire::Plan& plan,
                  bool wgrad) {
  Call call(wgrad ? "conv_normalised_wgrad" : "conv_normalised", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(6, 1));
  auto arg = [&](size_t i) { return call.Arg(i); };
  AnyBuffer result = call.Ret(0);
  ConvProblem p;
  BatchNormProblem n;
  jaxconv::Plan how;
  const ConvArrays arrays = wgrad ? ConvArrays{arg(0), result, arg(1), "x", "dw", "dy"}
                                  : ConvArrays{arg(0), arg(1), result, "x", "w", "y"};
  JAXCONV_RETURN_IF_ERROR(ToNormalised(call, arrays, arg(0), window, norm, 2,
                                       {"scale", "bias", "mean", "var"}, &p, &n));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  return (wgrad ? ConvNormalisedWgrad : ConvNormalised)(MakeContext(context), p, n, how, in(0),
                                                        in(1), in(2), in(3), in(4), in(5),
                                                        result.untyped_data(), call.Scratch());
}

Status NormalisedGradient(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          const wire::Window& window, const wire::Norm& norm,
                          const wire::Plan& plan) {
  Call call("conv_normalised_gradient", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(7, 3));
  auto arg = [&](size_t i) { return call.Arg(i); };
  auto ret = [&](size_t i) { return call.Ret(i); };
  ConvProblem p;
  BatchNormProblem n;
  jaxconv::Plan how;
  const ConvArrays arrays = {arg(0), arg(2), arg(1), "x", "w", "dy"};
  JAXCONV_RETURN_IF_ERROR(ToNormalised(call, arrays, arg(0), window, norm, 3,
                                       {"scale", "bias", "mean", "var"}, &p, &n));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dw", ret(0), "w", arg(2)));
  JAXCONV_RETURN_IF_ERROR(ConfirmParams(call, norm, n, arg(0), ret, 1, {"dscale", "dbias"}));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  auto out = [&](size_t i) { return ret(i).untyped_data(); };
  return ConvNormalisedGradient(MakeContext(context), p, n, how, in(0), in(1), in(2), in(3), in(4),
                                in(5), in(6), out(0), out(1), out(2), call.Scratch());
}

Status NormalisedDx(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    const wire::Window& window, const wire::Norm& norm, int64_t count,
                    const wire::Plan& plan) {
  Call call("conv_normalised_dx", args, rets);
  JAXCONV_RETURN_IF_ERROR(call.Confirm(9, 1));
  auto arg = [&](size_t i) { return call.Arg(i); };
  ConvProblem p;
  BatchNormProblem n;
  jaxconv::Plan how;
  const ConvArrays arrays = {arg(0), arg(2), arg(1), "x", "w", "dy"};
  JAXCONV_RETURN_IF_ERROR(ToNormalised(call, arrays, arg(0), window, norm, 3,
                                       {"scale", "bias", "mean", "var", "dscale", "dbias"}, &p,
                                       &n));
  JAXCONV_RETURN_IF_ERROR(ToPlan(call, plan, &how));
  JAXCONV_RETURN_IF_ERROR(call.ConfirmLike("dx", call.Ret(0), "x", arg(0)));
  JAXCONV_RETURN_IF_ERROR(ConfirmCount(call, count, n));
  auto in = [&](size_t i) { return arg(i).untyped_data(); };
  return ConvNormalisedDx(MakeContext(context), p, n, how, in(0), in(1), in(2), in(3), in(4), in(5),
                          in(6), in(7), in(8), count, call.Ret(0).untyped_data());
}

// ---------------------------------------------------------------------------------------------------------------------
// Bindings. A Status becomes an ffi::Error here and nowhere else, and the host's allocator, which alone throws, is caught.

template <typename Op>
ffi::Error Answer(const Op& op) {
  try {
    return wire::ToFfi(op());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of host memory");
  }
}

#define JAXCONV_BASE ffi::Ffi::Bind().Ctx<PlatformContext>().RemainingArgs().RemainingRets()

XLA_FFI_DEFINE_HANDLER(
    kFprop,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Epilogue epilogue, wire::Plan plan) {
      return Answer([&] { return Fprop(context, args, rets, window, epilogue, plan, false); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kFpropAdd,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Epilogue epilogue, wire::Plan plan) {
      return Answer([&] { return Fprop(context, args, rets, window, epilogue, plan, true); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kStatistics,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) {
      return Answer([&] { return Statistics(context, args, rets, window, plan); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDgrad,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) {
      return Answer([&] { return Dgrad(context, args, rets, window, plan, false); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDgradAdd,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) {
      return Answer([&] { return Dgrad(context, args, rets, window, plan, true); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

#if JAXCONV_ON_GPUS
XLA_FFI_DEFINE_HANDLER(
    kDgradSums,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) {
      return Answer([&] { return DgradSums(context, args, rets, window, plan); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);
#endif

XLA_FFI_DEFINE_HANDLER(
    kWgrad,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Plan plan) {
      return Answer([&] { return Wgrad(context, args, rets, window, plan); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormalised,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Norm norm, wire::Plan plan) {
      return Answer([&] { return Normalised(context, args, rets, window, norm, plan, false); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormalisedWgrad,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Norm norm, wire::Plan plan) {
      return Answer([&] { return Normalised(context, args, rets, window, norm, plan, true); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormalisedGradient,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Norm norm, wire::Plan plan) {
      return Answer([&] { return NormalisedGradient(context, args, rets, window, norm, plan); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window").Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormalisedDx,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Window window,
       wire::Norm norm, int64_t count, wire::Plan plan) {
      return Answer([&] { return NormalisedDx(context, args, rets, window, norm, count, plan); });
    },
    JAXCONV_BASE.Attr<wire::Window>("window")
        .Attr<wire::Norm>("norm")
        .Attr<int64_t>("count")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kDense,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Product product,
       wire::Epilogue epilogue, wire::Plan plan) {
      return Answer([&] { return DenseOp(context, args, rets, product, epilogue, plan); });
    },
    JAXCONV_BASE.Attr<wire::Product>("product")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

#if JAXCONV_ON_GPUS
XLA_FFI_DEFINE_HANDLER(
    kDenseGradient,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Product product,
       wire::Epilogue epilogue, wire::Plan plan) {
      return Answer([&] { return DenseGradientOp(context, args, rets, product, epilogue, plan); });
    },
    JAXCONV_BASE.Attr<wire::Product>("product")
        .Attr<wire::Epilogue>("epilogue")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);
#endif

XLA_FFI_DEFINE_HANDLER(
    kNormTrain,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) {
      return Answer([&] { return NormTrain(context, args, rets, norm, plan); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormInfer,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) {
      return Answer([&] { return NormInfer(context, args, rets, norm, plan, false); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

#if JAXCONV_ON_GPUS
XLA_FFI_DEFINE_HANDLER(
    kNormSigns,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) {
      return Answer([&] { return NormInfer(context, args, rets, norm, plan, true); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);
#endif

XLA_FFI_DEFINE_HANDLER(
    kNormBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       int64_t want_dx, int64_t want_dresidual, wire::Plan plan) {
      return Answer(
          [&] { return NormBackward(context, args, rets, norm, want_dx, want_dresidual, plan); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm")
        .Attr<int64_t>("want_dx")
        .Attr<int64_t>("want_dresidual")
        .Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

#if JAXCONV_ON_GPUS
XLA_FFI_DEFINE_HANDLER(
    kNormShortcutBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) {
      return Answer([&] { return NormShortcutBackward(context, args, rets, norm, plan); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);
#endif

XLA_FFI_DEFINE_HANDLER(
    kNormMoments,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       wire::Plan plan) {
      return Answer([&] { return NormMoments(context, args, rets, norm, plan); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kNormDx,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Norm norm,
       int64_t count, wire::Plan plan) {
      return Answer([&] { return NormDx(context, args, rets, norm, count, plan); });
    },
    JAXCONV_BASE.Attr<wire::Norm>("norm").Attr<int64_t>("count").Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kPool,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Pool pool,
       wire::Plan plan) { return Answer([&] { return Pool(context, args, rets, pool, plan); }); },
    JAXCONV_BASE.Attr<wire::Pool>("pool").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kPoolBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::Pool pool,
       wire::Plan plan) {
      return Answer([&] { return PoolBackward(context, args, rets, pool, plan); });
    },
    JAXCONV_BASE.Attr<wire::Pool>("pool").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kGroupNorm,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::GroupNorm norm,
       wire::Plan plan) {
      return Answer([&] { return GroupForward(context, args, rets, norm, plan); });
    },
    JAXCONV_BASE.Attr<wire::GroupNorm>("norm").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kGroupNormBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets, wire::GroupNorm norm,
       int64_t want_dx, wire::Plan plan) {
      return Answer([&] { return GroupBackward(context, args, rets, norm, want_dx, plan); });
    },
    JAXCONV_BASE.Attr<wire::GroupNorm>("norm").Attr<int64_t>("want_dx").Attr<wire::Plan>("plan"),
    JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kSqueezeExcite,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
       wire::SqueezeExcite squeeze, wire::Plan plan) {
      return Answer([&] { return SqueezeForward(context, args, rets, squeeze, plan); });
    },
    JAXCONV_BASE.Attr<wire::SqueezeExcite>("squeeze").Attr<wire::Plan>("plan"), JAXCONV_TRAITS);

XLA_FFI_DEFINE_HANDLER(
    kSqueezeExciteBackward,
    [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
       wire::SqueezeExcite squeeze, int64_t want_dx, wire::Plan plan) {
      return Answer([&] { return SqueezeBackward(context, args, rets, squeeze, want_dx, plan); });
    },
    JAXCONV_BASE.Attr<wire::SqueezeExcite>("squeeze").Attr<int64_t>("want_dx").Attr<wire::Plan>(
        "plan"),
    JAXCONV_TRAITS);

// Version 1 named a plan's algorithm where version 2 names its kernel.
XLA_FFI_DEFINE_HANDLER(
    kVersion1Refused,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
      return ffi::Error(
          ffi::ErrorCode::kUnimplemented,
          "this program was exported with an older jaxconv, whose calls this version no "
          "longer has: export it again (jax.export) with the installed jaxconv");
    },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

constexpr const char* kVersion1[] = {"jaxconv_conv_v1",
                                     "jaxconv_conv_fprop_v1",
                                     "jaxconv_conv_statistics_v1",
                                     "jaxconv_conv_dgrad_v1",
                                     "jaxconv_conv_dgrad_add_v1",
                                     "jaxconv_conv_wgrad_v1",
                                     "jaxconv_dense_v1",
                                     "jaxconv_matmul_v1",
                                     "jaxconv_batchnorm_train_v1",
                                     "jaxconv_batchnorm_infer_v1",
                                     "jaxconv_batchnorm_backward_v1"};

}  // namespace

// The bare fprop and the fused conv share a handler, as matmul and dense do: the epilogue says what
// follows.
std::vector<std::pair<const char*, XLA_FFI_Handler*>> Handlers() {
  std::vector<std::pair<const char*, XLA_FFI_Handler*>> handlers = {
      {"jaxconv_conv_v2", kFprop},
      {"jaxconv_conv_add_v2", kFpropAdd},
      {"jaxconv_conv_fprop_v2", kFprop},
      {"jaxconv_conv_statistics_v2", kStatistics},
      {"jaxconv_conv_dgrad_v2", kDgrad},
      {"jaxconv_conv_dgrad_add_v2", kDgradAdd},
#if JAXCONV_ON_GPUS
      {"jaxconv_conv_dgrad_sums_v2", kDgradSums},
#endif
      {"jaxconv_conv_wgrad_v2", kWgrad},
      {"jaxconv_conv_normalised_v2", kNormalised},
      {"jaxconv_conv_normalised_wgrad_v2", kNormalisedWgrad},
      {"jaxconv_conv_normalised_gradient_v2", kNormalisedGradient},
      {"jaxconv_conv_normalised_dx_v2", kNormalisedDx},
      {"jaxconv_dense_v2", kDense},
      {"jaxconv_matmul_v2", kDense},
#if JAXCONV_ON_GPUS
      {"jaxconv_dense_gradient_v2", kDenseGradient},
#endif
      {"jaxconv_batchnorm_train_v2", kNormTrain},
      {"jaxconv_batchnorm_infer_v2", kNormInfer},
#if JAXCONV_ON_GPUS
      {"jaxconv_batchnorm_signs_v2", kNormSigns},
#endif
      {"jaxconv_batchnorm_backward_v2", kNormBackward},
      {"jaxconv_batchnorm_dx_v2", kNormDx},
      {"jaxconv_batchnorm_moments_v2", kNormMoments},
#if JAXCONV_ON_GPUS
      {"jaxconv_batchnorm_shortcut_backward_v2", kNormShortcutBackward},
#endif
      {"jaxconv_max_pool_v2", kPool},
      {"jaxconv_max_pool_backward_v2", kPoolBackward},
      {"jaxconv_groupnorm_v2", kGroupNorm},
      {"jaxconv_groupnorm_backward_v2", kGroupNormBackward},
      {"jaxconv_squeeze_excite_v2", kSqueezeExcite},
      {"jaxconv_squeeze_excite_backward_v2", kSqueezeExciteBackward},
  };
  for (const char* name : kVersion1) handlers.emplace_back(name, kVersion1Refused);
  return handlers;
}

}  // namespace jaxconv::JAXCONV_BACKEND
