// Attributes and arrays -> problems, confirmed. A reader is made of an op's attributes and has
//
//   kRules           what an array of each role must be (call.h)
//   Begin(call)      what is decoded before there are arrays
//   Read(call)       the problem, off the arrays of the rules kX, kW, ...
//   Expect(call, r)  what an array of rule r must be, by the problem, and Where(call, r), for errors: by which arrays
//   End(call)        what is left to be confirmed
//   Problems()       what the launcher gets
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <tuple>
#include <utility>

#include "common/problem.h"
#include "ffi/call.h"

namespace jaxconv::handler {

// Of the arrays that a call may lack, those that it has by an attribute.
template <typename Attribute>
uint32_t Given(const Attribute&) {
  return 0;
}
inline uint32_t Given(const wire::Epilogue& e) {
  return (e.bias ? kHasB : 0) | (e.save_preactivation ? kHasZ : 0);
}
inline uint32_t Given(const wire::Scaled& s) {
  return (s.scale ? kHasScale : 0) | (s.residual ? kHasResidual : 0) |
         (s.residual_scale ? kHasResidualScale : 0) | (s.out_scale ? kHasOutScale : 0) |
         (s.shortcut_stride.size() != 0 ? kHasShortcut : 0);
}
inline uint32_t Given(const wire::Product& product) { return product.addend ? kHasC : 0; }
inline uint32_t Given(const wire::Norm& norm) { return norm.residual ? kHasResidual : 0; }
inline uint32_t Given(const wire::Pool& pool) { return pool.save ? kHasPosition : 0; }
inline uint32_t Given(wire::WantDx want) { return want.value ? kHasDx : 0; }
inline uint32_t Given(wire::WantDresidual want) { return want.value ? kHasDresidual : 0; }
inline uint32_t Given(wire::Residual residual) { return residual.value ? kHasResidual : 0; }

// All attributes but the plan, which every op has.
template <typename... Attributes>
struct Reader {
  explicit Reader(const Attributes&... attributes)
      : all(attributes...), given((Given(attributes) | ...)) {}
  template <typename Binding>
  static auto Bind(Binding&& binding) {
    return wire::Bind<Attributes..., wire::Plan>(std::move(binding));
  }

  Status Begin(const Call&) { return Status::Ok(); }
  Expected Expect(const Call&, Rule) const { return {}; }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX}); }
  Status End(const Call&) const { return Status::Ok(); }

  std::tuple<const Attributes&...> all;
  uint32_t given;
};

// Of parameters and statistics, beside an array of `dtype`.
inline DType Wide(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

inline Status ToPlan(const Call& call, const wire::Plan& in, Plan* out) {
  for (int64_t count : {in.splits, in.chunk}) {
    if (count < 0 || count > kMaxStep) {
      return call.Invalid("splits=" + std::to_string(in.splits) +
                          " and chunk=" + std::to_string(in.chunk) + " must be in [0, 2^31)");
    }
  }
  *out = {in.kernel, in.tile, in.splits, in.chunk};
  return Status::Ok();
}

inline Status ToEpilogue(const Call& call, const wire::Epilogue& in, Epilogue* out) {
  const auto activation = wire::ToActivation(in.activation);
  if (!activation) return call.Invalid("unknown activation '" + std::string(in.activation) + "'");
  *out = {in.bias != 0, *activation, in.slope, in.save_preactivation != 0};
  return Status::Ok();
}

// ---------------------------------------------------------------------------------------------------------------------
// Windows, a convolution's and a pooling's

// Whether all have one number of spatial dimensions, 1 to 3.
template <typename Window>
bool RanksAgree(const Window& window, Dims x, Dims y) {
  const size_t nd = window.stride.size();
  return nd >= 1 && nd <= 3 && x.size() == nd + 2 && y.size() == nd + 2 &&
         window.pad_low.size() == nd && window.pad_high.size() == nd &&
         window.dilation.size() == nd;
}

// Extents and steps along the spatial axes; `given`: the extents of the filter, or of the window.
template <typename Window, typename Problem>
void SetAxes(const Window& window, Dims x, Dims y, const int64_t* given, Problem* p,
             int64_t (&filter)[3]) {
  const size_t nd = window.stride.size(), first = window.dims_channels_last != 0 ? 1 : 2;
  for (int d = 0; d < 3; ++d) p->in[d] = filter[d] = p->out[d] = p->stride[d] = p->dilation[d] = 1;
  for (size_t i = 0; i < nd; ++i) {
    const size_t d = 3 - nd + i;
    p->in[d] = x[first + i];
    filter[d] = given[i];
    p->out[d] = y[first + i];
    p->stride[d] = window.stride[i];
    p->pad[d] = window.pad_low[i];
    p->dilation[d] = window.dilation[i];
  }
}

// Whether y's extent on axis d is what the window makes of x's, within the bounds of common/problem.h. y has `k` channels.
template <typename Problem>
bool AxisIsSound(const Problem& p, int64_t filter, int64_t k, size_t d, int64_t pad_high) {
  if (p.stride[d] < 1 || p.stride[d] > kMaxStep || p.dilation[d] < 1 || p.dilation[d] > kMaxStep ||
      p.pad[d] < -kMaxStep || p.pad[d] > kMaxStep || pad_high < -kMaxStep || pad_high > kMaxStep) {
    return false;
  }
  const Checked window = Checked(filter - 1) * p.dilation[d] + 1;
  const Checked slack = Checked(p.in[d]) + p.pad[d] + pad_high - window;
  if (!slack.Within(0, kMaxElements) || slack.value() / p.stride[d] + 1 != p.out[d]) return false;
  const Checked span =
      Checked(p.in[d]) + p.out[d] + std::abs(p.pad[d]) + std::abs(pad_high) + p.stride[d] + window;
  Checked x = span * std::max<int64_t>(p.n, 1) * p.c, y = span * std::max<int64_t>(p.n, 1) * k;
  for (size_t other = 0; other < 3; ++other) {
    if (other == d) continue;
    x = x * std::max<int64_t>(p.in[other], 1);
    y = y * std::max<int64_t>(p.out[other], 1);
  }
  return x.Within(1, kMaxSpanned) && y.Within(1, kMaxSpanned);
}

// A pooling of x to y, but for the type; whether its windows make y of x.
inline bool ReadWindows(const wire::Pool& pool, Dims x, Dims y, PoolProblem* p) {
  const size_t nd = pool.window.size(), channel = pool.dims_channels_last != 0 ? nd + 1 : 1;
  p->n = x[0];
  p->c = x[channel];
  SetAxes(pool, x, y, pool.window.begin(), p, p->window);
  bool sound = y[0] == x[0] && y[channel] == x[channel];
  for (size_t i = 0; i < nd; ++i) {
    sound = sound && pool.window[i] >= 1 && pool.pad_low[i] >= 0 && pool.pad_high[i] >= 0 &&
            AxisIsSound(*p, pool.window[i], p->c, 3 - nd + i, pool.pad_high[i]);
  }
  return sound;
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolution

template <typename... More>
struct ConvWith : Reader<wire::Window, More...> {
  static constexpr RuleOf kRules[] = {{"x dx", kX},    {"w dw", kW},  {"y dy", kY},
                                      {"b", kBias},    {"c", kLikeX}, {"residual z", kLikeY},
                                      {"", kStatistic}};
  using Reader<wire::Window, More...>::Reader;
  const wire::Window& window = std::get<0>(this->all);
  ConvProblem p = {};
  auto Problems() const { return std::tie(p); }

  // Off three arrays, whichever of them are results.
  Status Read(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ReadExtents(call, call[kY].dimensions()));
    return ReadType(call);
  }
  Status ReadType(const Call& call) {
    const AnyBuffer x = call[kX], w = call[kW], y = call[kY];
    const auto dtype = wire::ToDType(x.element_type());
    if (!dtype || w.element_type() != x.element_type() || y.element_type() != x.element_type()) {
      return call.Invalid(call.Name(kX) + ", " + call.Name(kW) + " and " + call.Name(kY) +
                          " must have one floating-point type");
    }
    p.dtype = *dtype;
    return Status::Ok();
  }
  // All but their type. `yd`: the extents of the convolution's result.
  Status ReadExtents(const Call& call, Dims yd) {
    const AnyBuffer x = call[kX], w = call[kW];
    const Dims xd = x.dimensions(), wd = w.dimensions();
    const size_t nd = window.stride.size();
    if (!RanksAgree(window, xd, yd) || wd.size() != nd + 2) {
      return call.Invalid("ranks disagree: " + call.Shapes({kX, kW, kY}) + ", " +
                          std::to_string(nd) + " spatial dimensions");
    }
    const bool last = window.dims_channels_last != 0;
    const size_t channel = last ? nd + 1 : 1;  // of x and y
    const int64_t group_c = wd[last ? nd : 1];
    p.n = xd[0];
    p.c = xd[channel];
    p.k = wd[last ? nd + 1 : 0];
    p.groups = window.groups;
    p.channels_last = window.memory_channels_last != 0;
    p.full_float32 = window.full_float32 != 0;
    const auto disagree = [&](const std::string& how) {
      return call.Invalid("extents disagree: " + call.Shapes({kX, kW, kY}) +
                          ", groups=" + std::to_string(window.groups) + ": " + how);
    };
    // An empty filter may have any number of taps, which nothing in memory bounds.
    if (w.element_count() == 0) return disagree(call.Name(kW) + " is empty");
    if (p.groups < 1 || p.groups > p.k || p.k % p.groups != 0 || p.c % p.groups != 0 ||
        p.c / p.groups != group_c) {
      return disagree("the channels and the groups");
    }
    if (yd[0] != p.n) return disagree("the batches");
    if (yd[channel] != p.k) return disagree("the output channels");
    SetAxes(window, xd, yd, wd.begin() + (last ? 0 : 2), &p, p.filter);
    for (size_t i = 0; i < nd; ++i) {
      const size_t d = 3 - nd + i;
      if (AxisIsSound(p, p.filter[d], p.k, d, window.pad_high[i])) continue;
      return disagree("spatial axis " + std::to_string(i) + " with stride " +
                      std::to_string(window.stride[i]) + ", padding (" +
                      std::to_string(window.pad_low[i]) + ", " +
                      std::to_string(window.pad_high[i]) + ") and dilation " +
                      std::to_string(window.dilation[i]));
    }
    Checked products = Checked(std::max<int64_t>(p.n, 1)) * p.k * group_c;
    for (int d = 0; d < 3; ++d) products = products * p.filter[d] * p.out[d];
    if (!products.Within(0, kMaxProducts)) return disagree("more than 2^62 products");
    return Status::Ok();
  }
  Expected Expect(const Call&, Rule rule) const {
    if (rule == kBias) return {p.dtype, {p.k}, -1, kY};
    if (rule == kStatistic) return {Wide(p.dtype), {p.k}, -1, kY};
    return {};
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX, kW, kY}); }
};

using Conv = ConvWith<>;

struct Fprop : ConvWith<wire::Epilogue> {
  using ConvWith::ConvWith;
  Epilogue e = {};
  auto Problems() const { return std::tie(p, e); }
  Status Begin(const Call& call) { return ToEpilogue(call, std::get<1>(all), &e); }
};

// With the max-pooling of its result behind it, whose y alone is an array.
struct PooledConv : ConvWith<wire::Epilogue, wire::Pool, wire::Narrow> {
  using ConvWith::ConvWith;
  Epilogue e = {};
  PoolProblem q = {};
  PooledTypes types = {};
  auto Problems() const { return std::tie(p, e, q, types); }

  Status Begin(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(all), &e));
    if (!e.save_preactivation && !std::get<2>(all).save) return Status::Ok();
    return call.Invalid("it makes neither z nor positions");
  }
  Status Read(const Call& call) {
    const wire::Pool& pool = std::get<2>(all);
    const Dims xd = call[kX].dimensions(), wd = call[kW].dimensions(), yd = call[kY].dimensions();
    const size_t nd = window.stride.size();
    const bool last = window.dims_channels_last != 0;
    if (!RanksAgree(window, xd, yd) || !RanksAgree(pool, xd, yd) || wd.size() != nd + 2 ||
        pool.window.size() != nd || last != (pool.dims_channels_last != 0)) {
      return call.Invalid("ranks disagree: " + call.Shapes({kX, kW, kY}) + ", " +
                          std::to_string(nd) + " spatial dimensions of either window");
    }
    int64_t of_conv[5];  // what is pooled
    std::copy(yd.begin(), yd.end(), of_conv);
    for (size_t i = 0; i < nd; ++i) {
      const int64_t stride = window.stride[i];
      const Checked span = Checked(wd[(last ? 0 : 2) + i] - 1) * window.dilation[i] + 1;
      const Checked slack =
          Checked(xd[(last ? 1 : 2) + i]) + window.pad_low[i] + window.pad_high[i] - span;
      if (stride < 1 || !slack.Within(0, kMaxElements)) {
        return call.Invalid("extents disagree: " + call.Shapes({kX, kW, kY}) + ": spatial axis " +
                            std::to_string(i));
      }
      of_conv[(last ? 1 : 2) + i] = slack.value() / stride + 1;
    }
    const Dims between(of_conv, nd + 2);
    JAXCONV_RETURN_IF_ERROR(ReadExtents(call, between));
    JAXCONV_RETURN_IF_ERROR(ReadTypes(call));
    q.dtype = p.dtype;
    if (!ReadWindows(pool, between, yd, &q))
      return call.Invalid("extents disagree with the pooling's window: " +
                          call.Shapes({kX, kW, kY}));
    if (p.n * p.c * p.in_size() != 0 && p.k * q.out_size() != 0) return Status::Ok();
    return call.Invalid("an array is empty: " + call.Shapes({kX, kW, kY}));
  }
  Status ReadTypes(const Call& call) {
    const auto dtype = wire::ToDType(call[kW].element_type());
    const auto x = wire::ToNumber(call[kX].element_type()),
               y = wire::ToNumber(call[kY].element_type());
    const Number own = dtype ? NumberOf(*dtype) : Number::kS32;
    const bool narrow = y && IsInteger8(*y), wide = x == Number::kF32 && SizeOf(own) == 2;
    if (own == Number::kS32 || (x != own && !wide) || (y != own && !narrow)) {
      return call.Invalid(
          "x, w and y must have one floating-point type, but x may be float32 beside 16 bits, and "
          "y int8 or uint8");
    }
    types = {*x, *y, float(std::get<3>(all).scale)};
    if (narrow ? !(types.scale > 0 && types.scale < INFINITY) : types.scale != 0)
      return call.Invalid("y of 8 bits needs a positive finite scale, and no other has one");
    p.dtype = *dtype;
    return Status::Ok();
  }
};

// Reads a second convolution from x2, w2 and the stride. It has one tap and no padding, and its result has y's shape, as p's.
inline Status ReadShortcut(const Call& call, const wire::Window& window, const wire::Ints& stride,
                           const ConvProblem& p, ConvProblem* shortcut) {
  const AnyBuffer x2 = call[kX2], w2 = call[kW2];
  const Dims xd = x2.dimensions(), wd = w2.dimensions(), yd = call[kY].dimensions();
  const size_t nd = window.stride.size();
  const auto disagree = [&](const std::string& how) {
    return call.Invalid("extents disagree: " + call.Shapes({kX2, kW2, kY}) + ": " + how);
  };
  if (x2.element_type() != call[kX].element_type() || w2.element_type() != call[kW].element_type())
    return call.Invalid("x2 must have x's type, and w2 w's");
  if (stride.size() != nd || xd.size() != nd + 2 || wd.size() != nd + 2)
    return disagree("the ranks");
  if (p.groups != 1) return call.Invalid("a shortcut has one group");
  const bool last = window.dims_channels_last != 0;
  const size_t channel = last ? nd + 1 : 1;
  ConvProblem& q = *shortcut;
  q = p;
  q.c = xd[channel];
  if (xd[0] != p.n || wd[last ? nd : 1] != q.c || wd[last ? nd + 1 : 0] != p.k || q.c == 0)
    return disagree("the batches or the channels");
  for (size_t i = 0; i < nd; ++i) {
    const size_t d = 3 - nd + i, spatial = (last ? 1 : 2) + i;
    q.in[d] = xd[spatial];
    q.stride[d] = stride[i];
    if (stride[i] < 1 || stride[i] > kMaxStep || q.in[d] < 1 ||
        (q.in[d] - 1) / q.stride[d] + 1 != yd[spatial] || wd[(last ? 0 : 2) + i] != 1)
      return disagree("spatial axis " + std::to_string(i) + " with stride " +
                      std::to_string(stride[i]));
  }
  for (int d = 0; d < 3; ++d) {
    q.filter[d] = q.dilation[d] = 1;
    q.pad[d] = 0;
  }
  if (!(Checked(p.n) * p.k * q.c * p.out_size()).Within(0, kMaxProducts))
    return disagree("more than 2^62 products");
  return Status::Ok();
}

// With a shortcut.
struct ShortcutConv : ConvWith<wire::Epilogue, wire::Shortcut> {
  static constexpr RuleOf kRules[] = {{"x", kX},   {"w", kW},   {"y", kY},
                                      {"x2", kX2}, {"w2", kW2}, {"", kBias}};
  using ConvWith::ConvWith;
  Epilogue e = {};
  ConvProblem q = {};
  auto Problems() const { return std::tie(p, e, q); }

  Status Begin(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(all), &e));
    return e.save_preactivation ? call.Invalid("it keeps nothing for a gradient") : Status::Ok();
  }
  Status Read(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ConvWith::Read(call));
    if (p.n * p.c * p.in_size() == 0 || p.k * p.out_size() == 0)
      return call.Invalid("an array is empty: " + call.Shapes({kX, kW, kY}));
    return ReadShortcut(call, window, std::get<2>(all).stride, p, &q);
  }
};

// Of 8-bit numbers.
struct ScaledConv : ConvWith<wire::Epilogue, wire::Scaled> {
  static constexpr RuleOf kRules[] = {{"x", kX},
                                      {"w", kW},
                                      {"y", kY},
                                      {"residual", kResidual},
                                      {"scale", kPerChannel},
                                      {"b", kTypedBias},
                                      {"x2", kX2},
                                      {"w2", kW2},
                                      {"", kNumber}};
  using ConvWith::ConvWith;
  ScaledConvProblem scaled = {};
  auto Problems() const { return std::tie(scaled); }

  Status Begin(const Call& call) {
    Epilogue e = {};
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(all), &e));
    if (e.save_preactivation) return call.Invalid("it keeps nothing for a gradient");
    const wire::Scaled& s = std::get<2>(all);
    scaled.activation = e.activation;
    scaled.slope = e.slope;
    scaled.bias = e.bias;
    scaled.scale = s.scale != 0;
    scaled.residual = s.residual != 0;
    scaled.residual_scale = s.residual_scale != 0;
    scaled.out_scale = s.out_scale != 0;
    if (scaled.residual_scale && !scaled.residual)
      return call.Invalid("a residual_scale without a residual");
    return Status::Ok();
  }
  Status Read(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ReadExtents(call, call[kY].dimensions()));
    const auto x = wire::ToNumber(call[kX].element_type()),
               w = wire::ToNumber(call[kW].element_type()),
               y = wire::ToNumber(call[kY].element_type());
    if (!x || !w || !y || SizeOf(*x) != 1 || SizeOf(*w) != 1 || IsInteger8(*x) != IsInteger8(*w)) {
      return call.Invalid(
          "x and w must both be of integers of 8 bits or both of float8, y of 8 bits, bfloat16, "
          "float16, "
          "float32 or int32");
    }
    const bool bare = !scaled.scale && !scaled.bias && !scaled.residual && !scaled.out_scale &&
                      scaled.activation == Activation::kNone;
    if (*y == Number::kS32 && !(bare && IsInteger8(*x)))
      return call.Invalid("y of int32 is a sum of integers, which nothing follows");
    if (call.Has(kTypedBias)) {
      const auto bias = wire::ToNumber(call[kTypedBias].element_type());
      const Dims found = call[kTypedBias].dimensions();
      if (bias != Number::kF32 && !(bias == Number::kS32 && IsInteger8(*x)))
        return call.Invalid("b must be of float32, or of int32 beside integers");
      if (found.size() != 1 || found[0] != p.k)
        return call.Invalid("extents disagree: " + call.Shapes({kTypedBias, kY}));
      scaled.bias_type = *bias;
    }
    if (call.Has(kResidual)) {
      const auto residual = wire::ToNumber(call[kResidual].element_type());
      if (!residual || *residual == Number::kS32)
        return call.Invalid("residual must be of 8 bits, bfloat16, float16 or float32");
      const Dims found = call[kResidual].dimensions(), yd = call[kY].dimensions();
      if (!std::equal(found.begin(), found.end(), yd.begin(), yd.end()))
        return call.Invalid("extents disagree: " + call.Shapes({kResidual, kY}));
      scaled.residual_type = *residual;
    }
    if (p.n * p.c * p.in_size() == 0 || p.k * p.out_size() == 0)
      return call.Invalid("an array is empty: " + call.Shapes({kX, kW, kY}));
    scaled.x_type = *x;
    scaled.w_type = *w;
    scaled.y_type = *y;
    scaled.conv = p;
    scaled.has_shortcut = call.Has(kX2);
    if (!scaled.has_shortcut) return Status::Ok();
    return ReadShortcut(call, window, std::get<2>(all).shortcut_stride, p, &scaled.shortcut);
  }
  Expected Expect(const Call&, Rule rule) const {
    if (rule == kPerChannel) return {DType::kF32, {p.k}, -1, kY};
    if (rule == kNumber) return {DType::kF32, std::initializer_list<int64_t>{}, -1, kY};
    return {};
  }
};

template <typename... More>
struct StatisticsWith : ConvWith<More...> {
  using ConvWith<More...>::ConvWith;
  Status End(const Call& call) const {
    if (this->p.n * this->p.out_size() != 0) return Status::Ok();
    return call.Invalid("y has no elements: there are no statistics of nothing");
  }
};

using Statistics = StatisticsWith<>;

// Of a convolution to which a bias and an array like y may be added.
struct AddStatistics : StatisticsWith<wire::Epilogue, wire::Residual> {
  using StatisticsWith::StatisticsWith;
  Status Begin(const Call& call) {
    Epilogue e = {};
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(all), &e));
    if (e.activation != Activation::kNone || e.save_preactivation)
      return call.Invalid("statistics are of the sum, which no activation follows");
    return Status::Ok();
  }
};

struct DgradSums : Conv {
  static constexpr RuleOf kRules[] = {
      {"dz", kX}, {"w", kW}, {"dy", kY}, {"c x", kLikeX}, {"signs", kSignsOfX}, {"", kPerChannel}};
  using ConvWith::ConvWith;
  Expected Expect(const Call&, Rule rule) const {
    return rule == kPerChannel ? Expected(DType::kF32, {p.c}) : Expected();
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX}); }
  Status End(const Call& call) const {
    if (p.n * p.c * p.in_size() != 0 && p.k * p.out_size() != 0) return Status::Ok();
    return call.Invalid("it has no elements: there are no sums of nothing");
  }
};

// A dgrad, and the way back through the epilogue's activation, whose result x is; c is added behind it.
struct ConvGradient : Fprop {
  static constexpr RuleOf kRules[] = {
      {"dz", kX}, {"w", kW}, {"dy", kY}, {"kept c", kLikeX}, {"", kPerChannel}};
  using Fprop::Fprop;
  Status Begin(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(Fprop::Begin(call));
    if (!e.bias && !e.save_preactivation) return Status::Ok();
    return call.Invalid("it takes no bias and makes no z");
  }
  Expected Expect(const Call&, Rule rule) const {
    return rule == kPerChannel ? Expected(p.dtype, {p.c}) : Expected();
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX}); }
  Status End(const Call& call) const {
    if (p.n * p.c * p.in_size() != 0 && p.k * p.out_size() != 0) return Status::Ok();
    return call.Invalid("it has no elements: there are no sums of nothing");
  }
};

// The same, and the way back through the batch-norm in front of the activation, which was given x.
struct ConvNormGradient : ConvGradient {
  static constexpr RuleOf kRules[] = {
      {"dz", kX}, {"w", kW}, {"dy", kY}, {"x", kLikeX}, {"", kPerChannel}};
  using ConvGradient::ConvGradient;
  Expected Expect(const Call&, Rule rule) const {
    return rule == kPerChannel ? Expected(DType::kF32, {p.c}) : Expected();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Integer convolution

struct IntegerConv : Reader<wire::IntegerWindow> {
  static constexpr RuleOf kRules[] = {{"x", kX}, {"w", kW}, {"", kY}};
  using Reader::Reader;
  const wire::IntegerWindow& window = std::get<0>(all);
  IntegerConvProblem p = {};
  auto Problems() const { return std::tie(p); }

  Status Read(const Call& call) {
    const AnyBuffer x = call[kX], w = call[kW], y = call[kY];
    const Dims xd = x.dimensions(), wd = w.dimensions(), yd = y.dimensions();
    const size_t nd = window.stride.size();
    bool ranks = nd <= 3;
    for (const wire::Ints& values :
         {window.pad_low, window.pad_high, window.lhs_dilation, window.rhs_dilation}) {
      ranks = ranks && values.size() == nd;
    }
    for (const Dims& dims : {xd, wd, yd}) ranks = ranks && dims.size() == nd + 2;
    for (const wire::Ints& spec : {window.lhs_spec, window.rhs_spec, window.out_spec})
      ranks = ranks && IsOrder(spec, nd + 2);
    if (!ranks) {
      return call.Invalid("ranks disagree: " + Where(call, kY) + ", " + std::to_string(nd) +
                          " spatial dimensions and an axis for each");
    }
    const auto x_type = wire::ToInteger(x.element_type()),
               w_type = wire::ToInteger(w.element_type()),
               y_type = wire::ToInteger(y.element_type());
    if (!x_type || !w_type || !y_type ||
        (*x_type != *w_type && (SizeOf(*x_type) != 1 || SizeOf(*w_type) != 1))) {
      return call.Invalid(
          "x, w and y must be of integers of 8 to 64 bits, x and w of one type or both of 8 bits");
    }
    // Nothing bounds the extents of what has no elements.
    if (x.element_count() == 0 || w.element_count() == 0 || y.element_count() == 0)
      return call.Invalid("an array is empty: " + Where(call, kY));
    p.x_type = *x_type;
    p.w_type = *w_type;
    p.y_type = *y_type;
    p.n = yd[window.out_spec[0]];
    p.c = wd[window.rhs_spec[1]];
    p.k = wd[window.rhs_spec[0]];
    p.groups = window.groups;
    p.batch_groups = window.batch_groups;
    const auto disagree = [&](const std::string& how) {
      return call.Invalid("extents disagree: " + Where(call, kY) +
                          ", groups=" + std::to_string(p.groups) +
                          ", batch_groups=" + std::to_string(p.batch_groups) + ": " + how);
    };
    if (p.groups < 1 || p.batch_groups < 1 || (p.groups > 1 && p.batch_groups > 1) ||
        p.groups > p.k || p.batch_groups > p.k || p.k % p.all_groups() != 0) {
      return disagree("the output channels and the groups");
    }
    const int64_t channels = xd[window.lhs_spec[1]], images = xd[window.lhs_spec[0]];
    if (channels % p.groups != 0 || channels / p.groups != p.c)
      return disagree("the channels and the groups");
    if (images % p.batch_groups != 0 || images / p.batch_groups != p.n)
      return disagree("the batches");
    if (yd[window.out_spec[1]] != p.k) return disagree("the output channels");
    SetSteps(xd, window.lhs_spec, &p.x_n, &p.x_c, p.x_at, p.in);
    SetSteps(wd, window.rhs_spec, &p.w_k, &p.w_c, p.w_at, p.filter);
    SetSteps(yd, window.out_spec, &p.y_n, &p.y_k, p.y_at, p.out);
    for (int d = 0; d < 3; ++d) {
      p.stride[d] = p.x_dilation[d] = p.w_dilation[d] = 1;
      p.pad[d] = 0;
    }
    for (size_t i = 0; i < nd; ++i) {
      const size_t d = 3 - nd + i;
      p.stride[d] = window.stride[i];
      p.pad[d] = window.pad_low[i];
      p.x_dilation[d] = window.lhs_dilation[i];
      p.w_dilation[d] = window.rhs_dilation[i];
      if (AxisFits(d, window.pad_high[i])) continue;
      return disagree("spatial axis " + std::to_string(i) + " with stride " +
                      std::to_string(window.stride[i]) + ", padding (" +
                      std::to_string(window.pad_low[i]) + ", " +
                      std::to_string(window.pad_high[i]) + ") and dilations " +
                      std::to_string(window.lhs_dilation[i]) + " and " +
                      std::to_string(window.rhs_dilation[i]));
    }
    Checked products = Checked(p.n) * p.k * p.c;
    for (int d = 0; d < 3; ++d) products = products * p.filter[d] * p.out[d];
    if (!products.Within(1, kMaxProducts)) return disagree("more than 2^62 products");
    return Status::Ok();
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX, kW, kY}); }

 private:
  static bool IsOrder(const wire::Ints& spec, size_t rank) {
    if (spec.size() != rank) return false;
    uint32_t found = 0;
    for (int64_t axis : spec) {
      if (axis < 0 || axis >= static_cast<int64_t>(rank)) return false;
      found |= 1u << axis;
    }
    return found == (1u << rank) - 1;
  }
  // Elements between neighbours along each axis of a row-major array, and its spatial extents.
  static void SetSteps(Dims dims, const wire::Ints& spec, int64_t* first, int64_t* second,
                       int64_t (&at)[3], int64_t (&extents)[3]) {
    int64_t steps[5];
    int64_t step = 1;
    for (size_t axis = dims.size(); axis-- > 0; step *= dims[axis]) steps[axis] = step;
    *first = steps[spec[0]];
    *second = steps[spec[1]];
    const size_t nd = dims.size() - 2;
    for (int d = 0; d < 3; ++d) {
      at[d] = 0;
      extents[d] = 1;
    }
    for (size_t i = 0; i < nd; ++i) {
      at[3 - nd + i] = steps[spec[2 + i]];
      extents[3 - nd + i] = dims[spec[2 + i]];
    }
  }
  // Whether y's extent is what the window makes of x's, dilated. All that a window steps over is then within 2^62.
  bool AxisFits(size_t d, int64_t pad_high) const {
    for (int64_t step : {p.stride[d], p.x_dilation[d], p.w_dilation[d]}) {
      if (step < 1 || step > kMaxStep) return false;
    }
    if (std::max(p.pad[d], pad_high) > kMaxStep || std::min(p.pad[d], pad_high) < -kMaxStep)
      return false;
    const Checked z = Checked(p.in[d] - 1) * p.x_dilation[d] + 1;
    const Checked window_size = Checked(p.filter[d] - 1) * p.w_dilation[d] + 1;
    if (!z.Within(1, kMaxElements) || !window_size.Within(1, kMaxElements)) return false;
    const Checked slack = z + p.pad[d] + pad_high - window_size;
    return slack.Within(0, kMaxElements) && slack.value() / p.stride[d] + 1 == p.out[d];
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Dense

template <typename... More>
struct DenseWith : Reader<wire::Product, wire::Epilogue, More...> {
  static constexpr RuleOf kRules[] = {{"x dy", kX},    {"w", kW},      {"y dz", kY},
                                      {"b db", kBias}, {"c", kAddend}, {"z kept", kLikeY}};
  using Reader<wire::Product, wire::Epilogue, More...>::Reader;
  const wire::Product& product = std::get<0>(this->all);
  DenseProblem p = {};
  Epilogue e = {};
  auto Problems() const { return std::tie(p, e); }

  Status Begin(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(this->all), &e));
    const auto bias = wire::ToBiasKind(product.bias);
    if (!bias || (*bias != BiasKind::kNone) != e.bias)
      return call.Invalid("unknown bias kind '" + std::string(product.bias) + "'");
    p.bias = *bias;
    return Status::Ok();
  }
  Status Read(const Call& call) {
    p.x_batched = product.x_batched != 0;
    p.w_batched = product.w_batched != 0;
    p.c_batched = product.c_batched != 0;
    p.bias_batched = product.bias_batched != 0;
    p.addend = product.addend != 0;
    p.beta = product.beta;
    return ReadMatrices(call, " and ");
  }
  Expected Expect(const Call&, Rule rule) const {
    const auto matrix = [&](bool batched, bool transposed, int64_t rows, int64_t columns) {
      if (transposed) std::swap(rows, columns);
      return Expected(p.dtype, {rows, columns}, batched ? p.batch : -1);
    };
    if (rule == kX) return matrix(p.x_batched, p.trans_x, p.m, p.k);
    if (rule == kW) return matrix(p.w_batched, p.trans_w, p.k, p.n);
    if (rule == kY) return matrix(product.batched, false, p.m, p.n);
    if (rule == kAddend) return matrix(p.c_batched, false, p.m, p.n);
    const int64_t size = p.bias == BiasKind::kScalar ? 1 : p.bias == BiasKind::kRow ? p.m : p.n;
    return {p.dtype, {size}, p.bias_batched ? p.batch : -1};
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX, kY}); }

 protected:
  Status ReadMatrices(const Call& call, const char* and_) {
    const Dims xd = call[kX].dimensions(), yd = call[kY].dimensions();
    const auto dtype = wire::ToDType(call[kX].element_type());
    const size_t instance = product.batched ? 1 : 0;
    if (!dtype || yd.size() != 2 + instance || xd.size() != 2u + (p.x_batched ? 1 : 0)) {
      return call.Invalid(call.Shapes({kX}) + and_ + call.Shapes({kY}) +
                          " are no matrices of one floating-point type");
    }
    p.batch = instance ? yd[0] : 1;
    p.m = yd[instance];
    p.n = yd[instance + 1];
    p.trans_x = product.trans_x != 0;
    p.trans_w = product.trans_w != 0;
    p.k = xd[xd.size() - (p.trans_x ? 2 : 1)];
    p.alpha = product.alpha;
    p.dtype = *dtype;
    p.full_float32 = product.full_float32 != 0;
    return Status::Ok();
  }
};

using Dense = DenseWith<>;

// The product's struct says how w is stored, and alpha; what it has for instances, bias and addend must be absent.
template <typename... More>
struct DenseGradientWith : DenseWith<More...> {
  using Base = DenseWith<More...>;
  using Base::Base;
  Status Begin(const Call& call) {
    const wire::Product& product = this->product;
    Epilogue& e = this->e;
    JAXCONV_RETURN_IF_ERROR(ToEpilogue(call, std::get<1>(this->all), &e));
    if (wire::ToBiasKind(product.bias) == BiasKind::kNone && !e.bias && !e.save_preactivation &&
        !product.batched && !product.addend && !product.trans_x) {
      return Status::Ok();
    }
    return call.Invalid("it takes one instance, x stored (M, K), no bias, addend or z");
  }
  Status Read(const Call& call) {
    this->p.beta = 1.0;
    return this->ReadMatrices(call, ", ");
  }
};
using DenseGradient = DenseGradientWith<>;

// dz has two halves, each of them as wide as the product.
struct DenseGatedGradient : DenseGradientWith<wire::First> {
  static constexpr RuleOf kRules[] = {
      {"dy", kX}, {"w", kW}, {"dz", kY}, {"db", kBias}, {"kept", kLikeY}};
  using DenseGradientWith::DenseGradientWith;
  bool first = std::get<2>(all).value != 0;
  auto Problems() const { return std::tie(p, e, first); }

  Status Read(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(DenseGradientWith::Read(call));
    columns = p.n;
    p.n /= 2;
    return columns % 2 == 0 ? Status::Ok() : call.Invalid(call.Shapes({kY}) + " has no halves");
  }
  Expected Expect(const Call& call, Rule rule) const {
    if (rule == kY) return {p.dtype, {p.m, columns}};
    return rule == kBias ? Expected(p.dtype, {columns}) : DenseGradientWith::Expect(call, rule);
  }

  int64_t columns = 0;
};

// Rows of x may have several axes, as images have. z has w's columns, y half of them.
struct DenseGated : DenseWith<wire::First> {
  static constexpr RuleOf kRules[] = {
      {"x", kX}, {"w", kW}, {"y", kY}, {"b", kBias}, {"z", kHidden}};
  using DenseWith::DenseWith;
  bool first = std::get<2>(all).value != 0;
  auto Problems() const { return std::tie(p, e, first); }

  Status Begin(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(DenseWith::Begin(call));
    if (!product.batched && !product.addend && !product.trans_x && !product.trans_w)
      return Status::Ok();
    return call.Invalid("it takes one instance, x stored (M, K), w stored (K, N), no addend");
  }
  Status Read(const Call& call) {
    const Dims xd = call[kX].dimensions(), wd = call[kW].dimensions();
    const auto dtype = wire::ToDType(call[kX].element_type());
    rank = xd.size();
    if (!dtype || rank < 2 || rank > kMostAxes || wd.size() != 2 || wd[1] % 2 != 0) {
      return call.Invalid(call.Shapes({kX, kW}) +
                          " are no rows of one floating-point type and no columns in halves");
    }
    p.batch = p.m = 1;
    for (size_t axis = 0; axis + 1 < rank; ++axis) {
      p.m *= xd[axis];
      y_shape[axis] = z_shape[axis] = xd[axis];
    }
    p.k = xd.back();
    p.n = z_shape[rank - 1] = wd[1];
    y_shape[rank - 1] = p.n / 2;
    p.alpha = product.alpha;
    p.beta = 1.0;
    p.dtype = *dtype;
    p.full_float32 = product.full_float32 != 0;
    return Status::Ok();
  }
  Expected Expect(const Call& call, Rule rule) const {
    if (rule == kX) return {p.dtype, call[kX].dimensions()};
    if (rule == kY) return {p.dtype, Dims(y_shape, rank)};
    if (rule == kHidden) return {p.dtype, Dims(z_shape, rank)};
    return DenseWith::Expect(call, rule);
  }
  std::string Where(const Call& call, Rule) const { return call.Shapes({kX, kW}); }

  static constexpr size_t kMostAxes = 5;
  size_t rank = 0;
  int64_t y_shape[kMostAxes] = {}, z_shape[kMostAxes] = {};
};

// ---------------------------------------------------------------------------------------------------------------------
// Batch-norm

template <typename... More>
struct NormWith : Reader<wire::Norm, More...> {
  static constexpr RuleOf kRules[] = {{"x", kX},
                                      {"y dy r c residual dx dresidual dr", kLikeX},
                                      {"signs", kSignsOfX},
                                      {"", kPerChannel}};
  using Reader<wire::Norm, More...>::Reader;
  const wire::Norm& norm = std::get<0>(this->all);
  BatchNormProblem p = {};
  auto Problems() const { return std::tie(p); }

  Status Read(const Call& call) {
    const Dims dims = call[kX].dimensions();
    const auto dtype = wire::ToDType(call[kX].element_type());
    const auto activation = wire::ToActivation(norm.activation);
    const int64_t rank = static_cast<int64_t>(dims.size()), first = norm.batched ? 1 : 0;
    if (!dtype || !activation || norm.channel_axis < first || norm.channel_axis >= rank) {
      return call.Invalid(call.Shapes({kX}) + " with channel axis " +
                          std::to_string(norm.channel_axis) + " and activation '" +
                          std::string(norm.activation) + "' cannot be read");
    }
    p.batch = norm.batched ? dims[0] : 1;
    p.outer = p.inner = 1;
    for (int64_t i = first; i < norm.channel_axis; ++i) p.outer *= dims[i];
    p.channels = dims[norm.channel_axis];
    for (int64_t i = norm.channel_axis + 1; i < rank; ++i) p.inner *= dims[i];
    p.momentum = norm.momentum;
    p.epsilon = norm.epsilon;
    p.activation = *activation;
    p.slope = norm.slope;
    p.residual = norm.residual != 0;
    p.dtype = *dtype;
    return Status::Ok();
  }
  Expected Expect(const Call&, Rule rule) const {
    if (rule != kPerChannel) return {};
    return {Wide(p.dtype), {p.channels}, norm.batched ? p.batch : -1};
  }
};

using Norm = NormWith<>;
using NormBackward = NormWith<wire::WantDx, wire::WantDresidual>;

// By given sums, over `count` elements a channel.
struct NormDx : NormWith<wire::Count> {
  using NormWith::NormWith;
  const int64_t& count = std::get<1>(all).value;
  auto Problems() const { return std::tie(p, count); }
  Status End(const Call& call) const {
    if (count >= 1 && count >= p.reduced()) return Status::Ok();
    return call.Invalid("count=" + std::to_string(count) + ", expected at least 1 and the " +
                        std::to_string(p.reduced()) + " elements of a channel of x");
  }
};

// A convolution of a batch-norm: of x by known statistics, as in inference.
template <typename NormOfX, typename... More>
struct NormalisedBy : Reader<wire::Window, wire::Norm, More...> {
  static constexpr RuleOf kRules[] = {
      {"x", kX}, {"w dw", kW}, {"y dy", kY}, {"dx", kLikeX}, {"", kPerChannel}};
  NormalisedBy(const wire::Window& window, const wire::Norm& of_x, const More&... more)
      : Reader<wire::Window, wire::Norm, More...>(window, of_x, more...),
        conv(window),
        norm(of_x, more...) {}
  Conv conv;
  NormOfX norm;
  auto Problems() const { return std::tuple_cat(conv.Problems(), norm.Problems()); }

  Status Read(const Call& call) {
    JAXCONV_RETURN_IF_ERROR(conv.Read(call));
    JAXCONV_RETURN_IF_ERROR(norm.Read(call));
    const int64_t rank = static_cast<int64_t>(call[kX].dimensions().size());
    const int64_t axis = conv.window.dims_channels_last != 0 ? rank - 1 : 1;
    if (norm.norm.batched != 0 || norm.norm.residual != 0 || norm.norm.channel_axis != axis)
      return call.Invalid("it takes one instance, x's own channels and no residual");
    if (conv.p.n * conv.p.in_size() == 0 || conv.p.out_size() == 0)
      return call.Invalid(call.Shapes({kX, kW, kY}) + ": there must be some of each");
    return Status::Ok();
  }
  Expected Expect(const Call& call, Rule rule) const { return norm.Expect(call, rule); }
  Status End(const Call& call) const { return norm.End(call); }
};
using Normalised = NormalisedBy<Norm>;
// With the statistics of y.
struct NormalisedStatistics : Normalised {
  static constexpr RuleOf kRules[] = {
      {"x", kX}, {"w", kW}, {"y", kY}, {"new_mean new_var", kStatistic}, {"", kPerChannel}};
  using Normalised::Normalised;
  Expected Expect(const Call& call, Rule rule) const {
    return rule == kStatistic ? conv.Expect(call, rule) : Normalised::Expect(call, rule);
  }
};
using NormalisedDx = NormalisedBy<NormDx, wire::Count>;

// ---------------------------------------------------------------------------------------------------------------------
// Poolings and their gradients

template <typename Problem, int64_t kMaxTaps, typename... More>
struct PoolWith : Reader<wire::Pool, More...> {
  static constexpr RuleOf kRules[] = {{"x dx", kX}, {"y dy", kY}, {"position", kPosition}};
  using Reader<wire::Pool, More...>::Reader;
  const wire::Pool& pool = std::get<0>(this->all);
  Problem p = {};
  auto Problems() const { return std::tie(p); }

  Status Read(const Call& call) {
    if (call.Has(kPosition) && !pool.save) return call.Invalid("it needs the positions");
    const AnyBuffer x = call[kX], y = call[kY];
    const Dims xd = x.dimensions(), yd = y.dimensions();
    const auto arrays = [&] {
      return pool.save ? call.Shapes({kX, kY, kPosition}) : call.Shapes({kX, kY});
    };
    const size_t nd = pool.window.size();
    if (!RanksAgree(pool, xd, yd) || pool.stride.size() != nd) {
      return call.Invalid("ranks disagree: " + arrays() + ", " + std::to_string(nd) +
                          " spatial dimensions");
    }
    const auto dtype = wire::ToDType(x.element_type());
    if (!dtype || y.element_type() != x.element_type()) {
      return call.Invalid(call.Name(kX) + " and " + call.Name(kY) +
                          " must have one floating-point type");
    }
    if (pool.save) {
      const Dims pd = call[kPosition].dimensions();
      if (call[kPosition].element_type() != ffi::DataType::U8 ||
          !std::equal(pd.begin(), pd.end(), yd.begin(), yd.end())) {
        return call.Invalid("position must be uint8, of " + call.Name(kY) +
                            "'s shape: " + arrays());
      }
    }
    p.dtype = *dtype;
    if (!ReadWindows(pool, xd, yd, &p))
      return call.Invalid("extents disagree with the window: " + arrays());
    Checked taps = 1;
    for (size_t i = 0; i < nd; ++i) taps = taps * pool.window[i];
    if (!taps.Within(1, kMaxTaps))
      return call.Invalid("windows have at most " + std::to_string(kMaxTaps) + " taps");
    return Status::Ok();
  }
};
using Pool = PoolWith<PoolProblem, kMaxPoolTaps>;

struct AvgPool : PoolWith<AvgPoolProblem, kMaxAvgPoolTaps, wire::CountIncludePad> {
  using PoolWith::PoolWith;

  Status Read(const Call& call) {
    if (pool.save) return call.Invalid("averages have no positions");
    JAXCONV_RETURN_IF_ERROR(PoolWith::Read(call));
    if (p.dilation[0] * p.dilation[1] * p.dilation[2] != 1)
      return call.Invalid("no window is dilated");
    p.count_include_pad = std::get<1>(all).value != 0;
    return Status::Ok();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Group-norm. Groups of 0 are layer-norm: every pixel is an image of one pixel and one group.

template <typename... More>
struct GroupWith : Reader<wire::GroupNorm, More...> {
  static constexpr RuleOf kRules[] = {
      {"x", kX}, {"y dy dx", kLikeX}, {"mean rstd", kPerGroup}, {"", kPerChannel}};
  using Reader<wire::GroupNorm, More...>::Reader;
  const wire::GroupNorm& norm = std::get<0>(this->all);
  GroupNormProblem p = {};
  auto Problems() const { return std::tie(p); }

  Status Read(const Call& call) {
    const Dims dims = call[kX].dimensions();
    const auto dtype = wire::ToDType(call[kX].element_type());
    const auto activation = wire::ToActivation(norm.activation);
    const size_t first = norm.batched ? 1 : 0;
    if (!dtype || !activation || dims.size() < first + 2) {
      return call.Invalid(call.Shapes({kX}) + " with activation '" + std::string(norm.activation) +
                          "' cannot be read");
    }
    p.batch = first ? dims[0] : 1;
    p.images = dims[first];
    p.pixels = 1;
    for (size_t i = first + 1; i + 1 < dims.size(); ++i) p.pixels *= dims[i];
    if (norm.groups == 0) {
      p.images *= p.pixels;
      p.pixels = 1;
    }
    p.channels = dims.back();
    p.groups = norm.groups == 0 ? 1 : norm.groups;
    p.epsilon = norm.epsilon;
    p.activation = *activation;
    p.slope = norm.slope;
    p.dtype = *dtype;
    if (p.pixels > 0 && p.groups > 0 && p.groups <= p.channels && p.channels % p.groups == 0)
      return Status::Ok();
    return call.Invalid(call.Shapes({kX}) + " and groups=" + std::to_string(norm.groups) +
                        ": there must be pixels, and the groups must divide the channels");
  }
  Expected Expect(const Call& call, Rule rule) const {
    const Dims dims = call[kX].dimensions();
    const int64_t instances = norm.batched ? p.batch : -1;
    if (rule == kPerChannel) return {Wide(p.dtype), {p.channels}, instances};
    if (rule != kPerGroup) return {};
    if (norm.groups == 0) return {Wide(p.dtype), Dims(dims.begin(), dims.size() - 1)};
    return {Wide(p.dtype), {p.images, p.groups}, instances};
  }
};
using Group = GroupWith<>;
using GroupBackward = GroupWith<wire::WantDx>;

// ---------------------------------------------------------------------------------------------------------------------
// Squeeze-and-excitation. w1: (channels, hidden), w2: (hidden, channels).

template <typename... More>
struct SqueezeWith : Reader<wire::SqueezeExcite, More...> {
  static constexpr RuleOf kRules[] = {{"x", kX},
                                      {"w1", kW},
                                      {"w2", kW2},
                                      {"y dy dx", kLikeX},
                                      {"b1", kHidden},
                                      {"b2", kChannels},
                                      {"z1 dz1", kPerHidden},
                                      {"", kPerChannel}};
  using Reader<wire::SqueezeExcite, More...>::Reader;
  const wire::SqueezeExcite& squeeze = std::get<0>(this->all);
  SqueezeExciteProblem p = {};
  auto Problems() const { return std::tie(p); }

  Status Read(const Call& call) {
    const Dims dims = call[kX].dimensions(), rows = call[kW].dimensions();
    const auto dtype = wire::ToDType(call[kX].element_type());
    const auto activation = wire::ToActivation(squeeze.activation);
    const auto gating = wire::ToGating(squeeze.gate);
    if (!dtype || !activation || !gating || dims.size() < 2 || rows.size() != 2) {
      return call.Invalid(Where(call, kW) + " with activation '" + std::string(squeeze.activation) +
                          "' and gate '" + std::string(squeeze.gate) + "' cannot be read");
    }
    p.images = dims[0];
    p.pixels = 1;
    for (size_t i = 1; i + 1 < dims.size(); ++i) p.pixels *= dims[i];
    p.channels = dims.back();
    p.hidden = rows[1];
    p.activation = *activation;
    p.slope = squeeze.slope;
    p.gating = *gating;
    p.dtype = *dtype;
    if (p.pixels >= 1 && p.channels >= 1 && p.hidden >= 1) return Status::Ok();
    return call.Invalid(Where(call, kW) + ": there must be some of each");
  }
  Expected Expect(const Call&, Rule rule) const {
    const DType dtype = Wide(p.dtype);
    if (rule == kW) return {dtype, {p.channels, p.hidden}};
    if (rule == kW2) return {dtype, {p.hidden, p.channels}};
    if (rule == kHidden) return {dtype, {p.hidden}};
    if (rule == kChannels) return {dtype, {p.channels}};
    if (rule == kPerHidden) return {dtype, {p.images, p.hidden}};
    if (rule == kPerChannel) return {dtype, {p.images, p.channels}};
    return {};
  }
  std::string Where(const Call& call, Rule rule) const {
    if (rule == kW || rule == kW2) return call.Shapes({kX}) + " and " + call.Shapes({kW});
    return std::to_string(p.channels) + " channels, " + std::to_string(p.hidden) +
           " hidden numbers";
  }
};

using Squeeze = SqueezeWith<>;
using SqueezeBackward = SqueezeWith<wire::WantDx>;

}  // namespace jaxconv::handler
