// The attributes of the custom calls (each with its name), as jaxconv/_core/primitives.py and its neighbours write them,
// and the small conversions between XLA's types and ours. Member names are the wire format: a change needs
// a new version in the target's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/plan.h"
#include "common/problem.h"
#include "common/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxconv::wire {

namespace ffi = xla::ffi;
using Ints = ffi::Span<const int64_t>;

struct Window {
  static constexpr char kName[] = "window";
  Ints stride;  // one per spatial dimension, also in the next three
  Ints pad_low;
  Ints pad_high;
  Ints dilation;
  int64_t groups;
  int64_t dims_channels_last;    // order of the logical dimensions
  int64_t memory_channels_last;  // order of the elements in memory
  int64_t full_float32;
};

// Of an integer convolution: lax's parameters.
struct IntegerWindow {
  static constexpr char kName[] = "window";
  Ints stride;  // one per spatial dimension, also in the next four
  Ints pad_low;
  Ints pad_high;
  Ints lhs_dilation;
  Ints rhs_dilation;
  Ints lhs_spec;  // lax's dimension numbers: the axes of N, C and the spatial dimensions
  Ints rhs_spec;  // of K, C/G and the spatial dimensions
  Ints out_spec;  // of N, K and the spatial dimensions
  int64_t groups;
  int64_t batch_groups;
};

struct Epilogue {
  static constexpr char kName[] = "epilogue";
  int64_t bias;
  std::string_view activation;
  double slope;
  int64_t save_preactivation;
};

// Of a convolution of 8-bit numbers, which of its operands are given.
struct Scaled {
  static constexpr char kName[] = "scaled";
  int64_t scale, residual, residual_scale, out_scale;
  Ints shortcut_stride;  // one per spatial dimension, or none: there is no shortcut
};

// Of a second convolution, of one tap and without padding, whose sums are added.
struct Shortcut {
  static constexpr char kName[] = "shortcut";
  Ints stride;  // one per spatial dimension
};

// A result of 8 bits: what it was is multiplied by `scale`, rounded and saturated; 0 where a result is none.
struct Narrow {
  static constexpr char kName[] = "narrow";
  double scale;
};

struct Product {
  static constexpr char kName[] = "product";
  int64_t trans_x, trans_w;
  int64_t batched;  // the result has an instance axis
  int64_t x_batched, w_batched, bias_batched, c_batched;
  std::string_view bias;  // "none", "scalar", "row", "column"
  int64_t addend;
  double alpha, beta;
  int64_t full_float32;
};

struct Norm {
  static constexpr char kName[] = "norm";
  int64_t channel_axis;  // counts the instance axis
  int64_t batched;       // the leading axis of every array is the instance axis
  double momentum, epsilon;
  std::string_view activation;
  double slope;
  int64_t residual;
};

struct Pool {
  static constexpr char kName[] = "pool";
  Ints window;  // one per spatial dimension, also in the next four
  Ints stride;
  Ints pad_low;
  Ints pad_high;
  Ints dilation;
  int64_t dims_channels_last;  // order of the logical dimensions; in memory channels are last
  int64_t save;                // the positions, as a second result
};

struct GroupNorm {
  static constexpr char kName[] = "norm";
  int64_t groups;
  int64_t batched;  // as in Norm
  double epsilon;
  std::string_view activation;
  double slope;
};

struct SqueezeExcite {
  static constexpr char kName[] = "squeeze";
  std::string_view activation;
  double slope;
  std::string_view gate;
};

struct Plan {
  static constexpr char kName[] = "plan";
  std::string_view kernel, tile;
  int64_t splits, chunk;
};

// A number by itself.
template <const char* name>
struct Number {
  static constexpr const char* kName = name;
  int64_t value;
};
inline constexpr char kWantDx[] = "want_dx", kWantDresidual[] = "want_dresidual",
                      kCount[] = "count", kResidual[] = "residual",
                      kCountIncludePad[] = "count_include_pad", kFirst[] = "first";
using WantDx = Number<kWantDx>;
using WantDresidual = Number<kWantDresidual>;
using Count = Number<kCount>;
using Residual = Number<kResidual>;
using CountIncludePad = Number<kCountIncludePad>;
using First = Number<kFirst>;

// `binding` with these attributes, by their names.
template <typename First, typename... Rest, typename Binding>
auto Bind(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return std::move(binding).template Attr<First>(First::kName);
  } else {
    return Bind<Rest...>(std::move(binding).template Attr<First>(First::kName));
  }
}

inline std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    default:
      return std::nullopt;
  }
}

inline std::optional<Integer> ToInteger(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S8:
      return Integer::kS8;
    case ffi::DataType::U8:
      return Integer::kU8;
    case ffi::DataType::S16:
      return Integer::kS16;
    case ffi::DataType::U16:
      return Integer::kU16;
    case ffi::DataType::S32:
      return Integer::kS32;
    case ffi::DataType::U32:
      return Integer::kU32;
    case ffi::DataType::S64:
      return Integer::kS64;
    case ffi::DataType::U64:
      return Integer::kU64;
    default:
      return std::nullopt;
  }
}

inline std::optional<jaxconv::Number> ToNumber(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S8:
      return jaxconv::Number::kS8;
    case ffi::DataType::U8:
      return jaxconv::Number::kU8;
    case ffi::DataType::F8E4M3FN:
      return jaxconv::Number::kE4M3;
    case ffi::DataType::F8E5M2:
      return jaxconv::Number::kE5M2;
    case ffi::DataType::BF16:
      return jaxconv::Number::kBF16;
    case ffi::DataType::F16:
      return jaxconv::Number::kF16;
    case ffi::DataType::F32:
      return jaxconv::Number::kF32;
    case ffi::DataType::S32:
      return jaxconv::Number::kS32;
    default:
      return std::nullopt;
  }
}

inline std::optional<Gating> ToGating(std::string_view name) {
  for (int i = 0; i < kGatingCount; ++i) {
    if (kGatingNames[i] == name) return static_cast<Gating>(i);
  }
  return std::nullopt;
}

inline std::optional<Activation> ToActivation(std::string_view name) {
  for (int i = 0; i < kActivationCount; ++i) {
    if (kActivationNames[i] == name) return static_cast<Activation>(i);
  }
  return std::nullopt;
}

inline std::optional<BiasKind> ToBiasKind(std::string_view name) {
  if (name == "none") return BiasKind::kNone;
  if (name == "scalar") return BiasKind::kScalar;
  if (name == "row") return BiasKind::kRow;
  if (name == "column") return BiasKind::kColumn;
  return std::nullopt;
}

inline ffi::Error ToFfi(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message());
    case Code::kUnimplemented:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message());
    default:
      return ffi::Error::Internal(status.message());
  }
}

inline std::string ShapeText(ffi::AnyBuffer::Dimensions dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

}  // namespace jaxconv::wire

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jaxconv::wire::Window, StructMember<::jaxconv::wire::Ints>("stride"),
    StructMember<::jaxconv::wire::Ints>("pad_low"), StructMember<::jaxconv::wire::Ints>("pad_high"),
    StructMember<::jaxconv::wire::Ints>("dilation"), StructMember<int64_t>("groups"),
    StructMember<int64_t>("dims_channels_last"), StructMember<int64_t>("memory_channels_last"),
    StructMember<int64_t>("full_float32"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::IntegerWindow,
                                      StructMember<::jaxconv::wire::Ints>("stride"),
                                      StructMember<::jaxconv::wire::Ints>("pad_low"),
                                      StructMember<::jaxconv::wire::Ints>("pad_high"),
                                      StructMember<::jaxconv::wire::Ints>("lhs_dilation"),
                                      StructMember<::jaxconv::wire::Ints>("rhs_dilation"),
                                      StructMember<::jaxconv::wire::Ints>("lhs_spec"),
                                      StructMember<::jaxconv::wire::Ints>("rhs_spec"),
                                      StructMember<::jaxconv::wire::Ints>("out_spec"),
                                      StructMember<int64_t>("groups"),
                                      StructMember<int64_t>("batch_groups"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Epilogue, StructMember<int64_t>("bias"),
                                      StructMember<std::string_view>("activation"),
                                      StructMember<double>("slope"),
                                      StructMember<int64_t>("save_preactivation"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Scaled, StructMember<int64_t>("scale"),
                                      StructMember<int64_t>("residual"),
                                      StructMember<int64_t>("residual_scale"),
                                      StructMember<int64_t>("out_scale"),
                                      StructMember<::jaxconv::wire::Ints>("shortcut_stride"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Shortcut,
                                      StructMember<::jaxconv::wire::Ints>("stride"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Narrow, StructMember<double>("scale"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jaxconv::wire::Product, StructMember<int64_t>("trans_x"), StructMember<int64_t>("trans_w"),
    StructMember<int64_t>("batched"), StructMember<int64_t>("x_batched"),
    StructMember<int64_t>("w_batched"), StructMember<int64_t>("bias_batched"),
    StructMember<int64_t>("c_batched"), StructMember<std::string_view>("bias"),
    StructMember<int64_t>("addend"), StructMember<double>("alpha"), StructMember<double>("beta"),
    StructMember<int64_t>("full_float32"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Norm, StructMember<int64_t>("channel_axis"),
                                      StructMember<int64_t>("batched"),
                                      StructMember<double>("momentum"),
                                      StructMember<double>("epsilon"),
                                      StructMember<std::string_view>("activation"),
                                      StructMember<double>("slope"),
                                      StructMember<int64_t>("residual"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Pool,
                                      StructMember<::jaxconv::wire::Ints>("window"),
                                      StructMember<::jaxconv::wire::Ints>("stride"),
                                      StructMember<::jaxconv::wire::Ints>("pad_low"),
                                      StructMember<::jaxconv::wire::Ints>("pad_high"),
                                      StructMember<::jaxconv::wire::Ints>("dilation"),
                                      StructMember<int64_t>("dims_channels_last"),
                                      StructMember<int64_t>("save"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::GroupNorm, StructMember<int64_t>("groups"),
                                      StructMember<int64_t>("batched"),
                                      StructMember<double>("epsilon"),
                                      StructMember<std::string_view>("activation"),
                                      StructMember<double>("slope"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::SqueezeExcite,
                                      StructMember<std::string_view>("activation"),
                                      StructMember<double>("slope"),
                                      StructMember<std::string_view>("gate"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxconv::wire::Plan,
                                      StructMember<std::string_view>("kernel"),
                                      StructMember<std::string_view>("tile"),
                                      StructMember<int64_t>("splits"),
                                      StructMember<int64_t>("chunk"));

template <const char* name>
struct xla::ffi::AttrDecoding<jaxconv::wire::Number<name>> {
  using Type = jaxconv::wire::Number<name>;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attr, DiagnosticEngine& engine) {
    const auto value = AttrDecoding<int64_t>::Decode(type, attr, engine);
    return value ? std::optional<Type>({*value}) : std::nullopt;
  }
};
