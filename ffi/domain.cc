// cuda/domain.h as functions of numbers: extents are (D, H, W), dtypes and ops are names. A function takes its arguments one
// after the other, a plan's and a device's among them.
#include "ffi/domain.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "cuda/domain.h"
#include "ffi/wire.h"

namespace nb = nanobind;

namespace jaxconv {
namespace {

using std::string_view;
using Three = std::array<int64_t, 3>;

template <typename Value, size_t n>
Value Named(const char* what, string_view name, const std::pair<string_view, Value> (&names)[n]) {
  for (const auto& [known, value] : names) {
    if (name == known) return value;
  }
  throw std::invalid_argument("unknown " + std::string(what) + " " + std::string(name));
}

constexpr std::pair<string_view, cuda::ConvOp> kConvOps[] = {
    {"conv", cuda::ConvOp::kFprop},
    {"conv_fprop", cuda::ConvOp::kFprop},
    {"conv_add", cuda::ConvOp::kFpropAdd},
    {"conv_statistics", cuda::ConvOp::kStatistics},
    {"conv_add_statistics", cuda::ConvOp::kAddStatistics},
    {"conv_dgrad", cuda::ConvOp::kDgrad},
    {"conv_dgrad_add", cuda::ConvOp::kDgradAdd},
    {"conv_dgrad_sums", cuda::ConvOp::kDgradSums},
    {"conv_gradient", cuda::ConvOp::kGradient},
    {"conv_gradient_add", cuda::ConvOp::kGradientAdd},
    {"conv_norm_gradient", cuda::ConvOp::kNormGradient},
    {"conv_wgrad", cuda::ConvOp::kWgrad},
    {"conv_normalised", cuda::ConvOp::kFprop},
    {"conv_normalised_statistics", cuda::ConvOp::kStatistics},
    {"conv_normalised_wgrad", cuda::ConvOp::kWgrad},
    {"conv_normalised_gradient", cuda::ConvOp::kSums},
    {"conv_normalised_dx", cuda::ConvOp::kDgrad}};
constexpr std::pair<string_view, cuda::BatchNormOp> kBatchNormOps[] = {
    {"batchnorm_train", cuda::BatchNormOp::kTrain},
    {"batchnorm_infer", cuda::BatchNormOp::kInfer},
    {"batchnorm_signs", cuda::BatchNormOp::kSigns},
    {"batchnorm_backward", cuda::BatchNormOp::kBackward},
    {"batchnorm_backward_add", cuda::BatchNormOp::kBackwardAdd},
    {"batchnorm_dx", cuda::BatchNormOp::kDx},
    {"batchnorm_moments", cuda::BatchNormOp::kMoments},
    {"batchnorm_shortcut_backward", cuda::BatchNormOp::kShortcutBackward}};
constexpr std::pair<string_view, cuda::GroupNormOp> kGroupNormOps[] = {
    {"groupnorm", cuda::GroupNormOp::kForward},
    {"groupnorm_backward", cuda::GroupNormOp::kBackward}};
constexpr std::pair<string_view, DType> kDTypes[] = {{Name(DType::kF32), DType::kF32},
                                                     {Name(DType::kF64), DType::kF64},
                                                     {Name(DType::kBF16), DType::kBF16},
                                                     {Name(DType::kF16), DType::kF16}};
constexpr std::pair<string_view, Number> kNumbers[] = {
    {Name(Number::kS8), Number::kS8},     {Name(Number::kU8), Number::kU8},
    {Name(Number::kE4M3), Number::kE4M3}, {Name(Number::kE5M2), Number::kE5M2},
    {Name(Number::kBF16), Number::kBF16}, {Name(Number::kF16), Number::kF16},
    {Name(Number::kF32), Number::kF32},   {Name(Number::kS32), Number::kS32}};
constexpr std::pair<string_view, BiasKind> kBiases[] = {{"", BiasKind::kNone},
                                                        {"scalar", BiasKind::kScalar},
                                                        {"row", BiasKind::kRow},
                                                        {"column", BiasKind::kColumn}};

// What a field or a parameter is in Python, and the way from there.
template <typename Value>
void Set(const Value& from, Value& to) {
  to = from;
}
void Set(const Three& from, int64_t (&to)[3]) { std::copy(from.begin(), from.end(), to); }
void Set(string_view name, DType& to) { to = Named("dtype", name, kDTypes); }
void Set(string_view name, Number& to) { to = Named("type", name, kNumbers); }
void Set(string_view name, BiasKind& to) { to = Named("bias", name, kBiases); }
void Set(string_view name, cuda::ConvOp& to) { to = Named("convolution", name, kConvOps); }
void Set(string_view name, cuda::BatchNormOp& to) { to = Named("batch-norm", name, kBatchNormOps); }
void Set(string_view name, cuda::GroupNormOp& to) { to = Named("group-norm", name, kGroupNormOps); }
void Set(string_view name, Activation& to) {
  const auto known = wire::ToActivation(name);
  if (!known) throw std::invalid_argument("unknown activation " + std::string(name));
  to = *known;
}
template <typename Value>
using InPython = std::conditional_t<std::is_array_v<Value>, Three,
                                    std::conditional_t<std::is_enum_v<Value>, string_view, Value>>;

// The class `name`, made of these fields; all others are 0.
template <typename Problem, typename... Values>
void Class(nb::module_& m, const char* name, Values Problem::*... fields) {
  nb::class_<Problem>(m, name).def("__init__", [=](Problem* self, InPython<Values>... values) {
    Problem p = {};
    (Set(values, p.*fields), ...);
    new (self) Problem(p);
  });
}

// A parameter, made of kCount arguments.
template <typename Value>
struct Argument {
  static constexpr size_t kCount = 1;
  static Value Take(const nb::args& args, size_t* at) {
    if constexpr (std::is_enum_v<Value>) {
      Value value;
      Set(nb::cast<string_view>(args[(*at)++]), value);
      return value;
    } else {
      return nb::cast<Value>(args[(*at)++]);
    }
  }
};
template <>
struct Argument<Plan> {
  static constexpr size_t kCount = 4;
  static Plan Take(const nb::args& args, size_t* at) {
    const size_t i = *at;
    *at += kCount;
    return {nb::cast<string_view>(args[i]), nb::cast<string_view>(args[i + 1]),
            nb::cast<int64_t>(args[i + 2]), nb::cast<int64_t>(args[i + 3])};
  }
};
template <>
struct Argument<cuda::Device> {
  static constexpr size_t kCount = 3;
  static cuda::Device Take(const nb::args& args, size_t* at) {
    const size_t i = *at;
    *at += kCount;
    return {nb::cast<int>(args[i]), nb::cast<int>(args[i + 1]), nb::cast<int>(args[i + 2])};
  }
};

template <typename Result, typename... Parameters>
void Function(nb::module_& m, const char* name, Result (*f)(Parameters...)) {
  m.def(name, [=](const nb::args& args) {
    if (args.size() != (Argument<std::decay_t<Parameters>>::kCount + ...))
      throw nb::type_error("not as many arguments as the function has");
    try {
      size_t at = 0;
      // Braces: from left to right.
      std::tuple<std::decay_t<Parameters>...> values{
          Argument<std::decay_t<Parameters>>::Take(args, &at)...};
      return std::apply(f, values);
    } catch (const std::bad_cast&) {
      throw nb::type_error("an argument of another type than the function has");
    }
  });
}

auto Folded(const ConvProblem& p, bool dgrad) {
  const ConvProblem q = cuda::ConvFolded(p, dgrad);
  const auto three = [](const int64_t (&from)[3]) { return Three{from[0], from[1], from[2]}; };
  return std::tuple(q.n, q.c, three(q.in), three(q.filter), three(q.out), three(q.stride));
}
auto Teams(cuda::BatchNormOp op, const BatchNormProblem& p, int width, const cuda::Device& device) {
  const cuda::TeamCount count = cuda::BatchNormTeams(op, p, width, device);
  return std::pair(count.ctas, count.groups);
}
auto Cta(const SqueezeExciteProblem& p, const Plan& plan, const cuda::Device& device) {
  const cuda::SqueezeExciteSize size = cuda::SqueezeExciteCta(p, plan, device);
  return std::tuple(size.images, size.steps, size.held, size.bytes);
}
// `conv`, and perhaps a shortcut, with types, of x, w and y.
std::string ScaledRefusal(const ConvProblem& conv, bool has_shortcut, const ConvProblem& shortcut,
                          Number x, Number w, Number y, const Plan& plan,
                          const cuda::Device& device) {
  ScaledConvProblem p = {};
  p.conv = conv;
  p.has_shortcut = has_shortcut;
  p.shortcut = shortcut;
  p.x_type = x;
  p.w_type = w;
  p.y_type = y;
  return cuda::ScaledRefusal(p, plan, device);
}
std::string PoolRefusal(const PoolProblem& p, string_view kernel) {
  return cuda::PoolRefusal(p, {kernel, "", 1, 0});
}
std::string AvgPoolRefusal(const PoolProblem& p, string_view kernel) {
  return cuda::AvgPoolRefusal(p, {kernel, "", 1, 0});
}
std::string IntegerRefusal(const IntegerConvProblem& p, string_view kernel) {
  return cuda::IntegerRefusal(p, {kernel, "", 1, 0});
}
int64_t SharedMemory(int major, int minor) { return cuda::Device{major, minor}.shared_memory(); }

}  // namespace

void BindDomain(nb::module_& m) {
  using C = ConvProblem;
  Class(m, "ConvProblem", &C::n, &C::c, &C::k, &C::groups, &C::in, &C::filter, &C::out, &C::stride,
        &C::pad, &C::dilation, &C::channels_last, &C::dtype, &C::full_float32);
  Function(m, "conv_refusal", cuda::ConvRefusal);
  Function(m, "conv_normalised_refusal", cuda::NormalisedRefusal);
  Function(m, "conv_gradient_refusal", cuda::GradientRefusal);
  Function(m, "conv_folded", Folded);
  Function(m, "conv_workspace", cuda::ConvWorkspace);
  Function(m, "conv_scaled_refusal", ScaledRefusal);
  using I = IntegerConvProblem;
  Class(m, "IntegerConvProblem", &I::n, &I::c, &I::k, &I::groups, &I::batch_groups, &I::in,
        &I::filter, &I::out, &I::stride, &I::pad, &I::x_dilation, &I::w_dilation);
  Function(m, "conv_integer_refusal", IntegerRefusal);
  using D = DenseProblem;
  Class(m, "DenseProblem", &D::batch, &D::m, &D::k, &D::n, &D::trans_x, &D::trans_w, &D::x_batched,
        &D::w_batched, &D::bias, &D::addend, &D::dtype, &D::full_float32);
  Function(m, "dense_refusal", cuda::DenseRefusal);
  Function(m, "dense_workspace", cuda::DenseWorkspace);
  using B = BatchNormProblem;
  Class(m, "BatchNormProblem", &B::batch, &B::outer, &B::channels, &B::inner, &B::activation,
        &B::residual, &B::dtype);
  Function(m, "batchnorm_refusal", cuda::BatchNormRefusal);
  Function(m, "batchnorm_workspace", cuda::BatchNormWorkspace);
  Function(m, "batchnorm_vector", cuda::BatchNormVector);
  Function(m, "batchnorm_streamed", cuda::BatchNormStreamed);
  Function(m, "batchnorm_teams", Teams);
  using P = PoolProblem;
  Class(m, "PoolProblem", &P::n, &P::c, &P::in, &P::window, &P::out, &P::stride, &P::pad,
        &P::dilation, &P::dtype);
  Function(m, "pool_refusal", PoolRefusal);
  Function(m, "conv_pooled_refusal", cuda::PooledRefusal);
  Function(m, "conv_shortcut_refusal", cuda::ShortcutRefusal);
  Function(m, "avg_pool_refusal", AvgPoolRefusal);
  Function(m, "pool_vector", cuda::PoolVector);
  using G = GroupNormProblem;
  Class(m, "GroupNormProblem", &G::batch, &G::images, &G::pixels, &G::channels, &G::groups,
        &G::activation, &G::dtype);
  Function(m, "groupnorm_refusal", cuda::GroupNormRefusal);
  Function(m, "groupnorm_workspace", cuda::GroupNormWorkspace);
  Function(m, "groupnorm_unit", cuda::GroupNormUnit);
  Function(m, "groupnorm_vector", cuda::GroupNormVector);
  Function(m, "groupnorm_rows", cuda::GroupNormRows);
  using S = SqueezeExciteProblem;
  Class(m, "SqueezeExciteProblem", &S::images, &S::pixels, &S::channels, &S::hidden, &S::dtype);
  Function(m, "squeeze_excite_refusal", cuda::SqueezeExciteRefusal);
  Function(m, "squeeze_excite_vector", cuda::SqueezeExciteVector);
  Function(m, "squeeze_excite_cta", Cta);
  Function(m, "shared_memory", SharedMemory);
}

}  // namespace jaxconv
