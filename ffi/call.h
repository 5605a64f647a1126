// A custom call's arrays by role, and the checks that all ops share. Python has validated what a user gave. Exported
// programs reach a handler without Python, so every array is confirmed, and every number bounded (common/problem.h says by
// what), before a launcher trusts them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "common/checked.h"
#include "common/plan.h"
#include "common/status.h"
#include "ffi/wire.h"

namespace jaxconv::handler {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Dims = AnyBuffer::Dimensions;

// clang-format off
// What an array must be. Of the first line the problem is read off one each; a second one must be like it.
enum Rule : uint8_t {
  kX, kW, kY, kPosition, kX2, kW2, kResidual, kTypedBias,
  kLikeX, kLikeY,  // of the shape and the type
  kSignsOfX,       // a bit of each element, channels last: a byte of eight channels
  kBias, kAddend, kStatistic, kPerChannel, kPerGroup, kPerHidden, kChannels, kHidden, kNumber,  // as the problem says
};
// clang-format on
inline constexpr size_t kReadRules = kTypedBias + 1;

// Of `words`, which spaces part, which one is `word`; -1: none.
constexpr int IndexOf(std::string_view word, std::string_view words) {
  for (int i = 0; !words.empty(); ++i) {
    const size_t end = std::min(words.find(' '), words.size());
    if (words.substr(0, end) == word) return i;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return -1;
}

// Arrays that a call may lack, "residual?", and which of them there are: bits.
constexpr uint32_t Bit(std::string_view name) {
  return 1u << IndexOf(name,
                       "b c residual z dx dresidual position scale residual_scale out_scale x2 w2");
}
inline constexpr uint32_t kHasB = Bit("b"), kHasC = Bit("c"), kHasResidual = Bit("residual"),
                          kHasZ = Bit("z"), kHasDx = Bit("dx"), kHasDresidual = Bit("dresidual"),
                          kHasPosition = Bit("position"), kHasScale = Bit("scale"),
                          kHasResidualScale = Bit("residual_scale"),
                          kHasOutScale = Bit("out_scale"), kHasShortcut = Bit("x2") | Bit("w2");

// The rule of roles; of all others, where there are none.
struct RuleOf {
  std::string_view roles;
  Rule rule;
};

struct Array {
  std::string_view name;
  Rule rule = kX;
  bool result = false;
  uint32_t needs = 0;  // the bit that says that it is there; 0: it always is
};

// The operands, then the results, in the order of the wire.
struct Signature {
  static constexpr size_t kMost = 16;
  Array arrays[kMost] = {};
  size_t size = 0;

  // `words`: "x w b?".
  template <size_t n>
  constexpr void Append(std::string_view words, bool result, const RuleOf (&rules)[n]) {
    while (!words.empty()) {
      const size_t end = std::min(words.find(' '), words.size());
      const bool optional = words[end - 1] == '?';
      const std::string_view name = words.substr(0, end - optional);
      size_t i = 0;
      while (!rules[i].roles.empty() && IndexOf(name, rules[i].roles) < 0) ++i;
      arrays[size++] = {name, rules[i].rule, result, optional ? Bit(name) : 0};
      words.remove_prefix(std::min(end + 1, words.size()));
    }
  }
  // `size` where there is no such array.
  constexpr size_t Find(std::string_view name, bool result) const {
    size_t i = 0;
    while (i < size && (arrays[i].name != name || arrays[i].result != result)) ++i;
    return i;
  }
};

// A type, which the array `whose` asks for, and extents, behind those of instances where these are not negative.
struct Expected {
  Expected() = default;  // anything
  Expected(DType of, Dims shape) : dtype(of), other(shape) {}
  Expected(DType of, std::initializer_list<int64_t> shape, int64_t instances = -1, Rule by = kX)
      : dtype(of), whose(by) {
    if (instances >= 0) extents[rank++] = instances;
    for (int64_t extent : shape) extents[rank++] = extent;
  }
  Dims shape() const { return rank > 0 ? Dims(extents, rank) : other; }

  std::optional<DType> dtype;
  Rule whose = kX;
  int64_t extents[3];
  size_t rank = 0;
  Dims other;
};

class Call {
 public:
  // `name` opens every message.
  Call(const char* name, const Signature& signature, ffi::RemainingArgs args,
       ffi::RemainingRets rets)
      : name_(name), signature_(signature), args_(args), rets_(rets) {}

  // Takes the buffers; `given` has the bits of those that the call has and might lack. The last result is the workspace.
  Status Open(uint32_t given) {
    size_t args = 0, rets = 0, arg = 0, ret = 0;
    const auto lacks = [&](const Array& array) { return (array.needs & ~given) != 0; };
    for (size_t i = 0; i < signature_.size; ++i) {
      if (!lacks(signature_.arrays[i])) ++(signature_.arrays[i].result ? rets : args);
    }
    if (args_.size() != args || rets_.size() != rets + 1) {
      return Invalid("got " + std::to_string(args_.size()) + " operands and " +
                     std::to_string(rets_.size()) + " results, expected " + std::to_string(args) +
                     " and " + std::to_string(rets + 1));
    }
    for (size_t i = 0; i < signature_.size; ++i) {
      const Array& array = signature_.arrays[i];
      if (lacks(array)) continue;
      JAXCONV_RETURN_IF_ERROR(Take(array.result, array.result ? ret++ : arg++, &buffers_[i]));
      if (array.rule < kReadRules && !read_[array.rule]) read_[array.rule] = &array;
    }
    std::optional<AnyBuffer> last;
    JAXCONV_RETURN_IF_ERROR(Take(true, ret, &last));
    scratch_ = {last->untyped_data(), static_cast<int64_t>(last->size_bytes())};
    return Status::Ok();
  }

  // The array that the problem is read off by this rule.
  bool Has(Rule rule) const { return read_[rule] != nullptr; }
  AnyBuffer operator[](Rule rule) const { return *buffers_[read_[rule] - signature_.arrays]; }
  std::string Name(Rule rule) const { return std::string(read_[rule]->name); }
  // Null of an array that is absent, also of signature.size.
  void* Data(size_t i) const {
    return i < signature_.size && buffers_[i] ? buffers_[i]->untyped_data() : nullptr;
  }
  Workspace Scratch() const { return scratch_; }

  // "x=(2, 3), y=(2, 4)"
  std::string Shapes(std::initializer_list<Rule> rules) const {
    std::string text;
    for (Rule rule : rules) {
      text += (text.empty() ? "" : ", ") + Name(rule) + "=" +
              wire::ShapeText((*this)[rule].dimensions());
    }
    return text;
  }
  Status Invalid(const std::string& message) const {
    return Status::Invalid(std::string(name_) + ": " + message);
  }

  // All arrays by their rules, those first that the problem is read off: they are what the others are confirmed by. `reader`
  // knows what they must be that are not like others, and, for errors, by what.
  template <typename Reader>
  Status Confirm(const Reader& reader) const {
    for (const bool read : {true, false}) {
      for (size_t i = 0; i < signature_.size; ++i) {
        const Array& array = signature_.arrays[i];
        if (!buffers_[i] || IsRead(array) != read) continue;
        if (array.rule == kSignsOfX) {
          JAXCONV_RETURN_IF_ERROR(ConfirmSigns(*buffers_[i]));
        } else if (!read && array.rule <= kLikeY) {
          JAXCONV_RETURN_IF_ERROR(ConfirmLike(i));
        } else {
          JAXCONV_RETURN_IF_ERROR(ConfirmExpected(i, reader));
        }
      }
    }
    return Status::Ok();
  }

 private:
  bool IsRead(const Array& array) const {
    return array.rule < kReadRules && read_[array.rule] == &array;
  }
  static bool Same(Dims a, Dims b) {
    bool same = a.size() == b.size();
    for (size_t i = 0; same && i < a.size(); ++i) same = a[i] == b[i];
    return same;
  }

  Status Take(bool result, size_t i, std::optional<AnyBuffer>* buffer) const {
    if (result) {
      auto ret = rets_.get<AnyBuffer>(i);
      if (!ret.has_value()) return Invalid("a result is no buffer");
      *buffer = **ret;
    } else {
      auto arg = args_.get<AnyBuffer>(i);
      if (!arg.has_value()) return Invalid("an operand is no buffer");
      *buffer = *arg;
    }
    // An array without elements may have any extents: no product of them may overflow either.
    Checked size = 1;
    const Dims dims = (*buffer)->dimensions();
    for (int64_t extent : dims) size = size * std::max<int64_t>(extent, 1);
    if (size.Within(1, kMaxElements)) return Status::Ok();
    return Invalid("an array has the shape " + wire::ShapeText(dims) +
                   ": the product of the extents that are not 0 must be at most 2^60");
  }

  template <typename Reader>
  Status ConfirmExpected(size_t i, const Reader& reader) const {
    const Array& array = signature_.arrays[i];
    const Expected expected = reader.Expect(*this, array.rule);
    if (!expected.dtype) return Status::Ok();
    const std::string_view name = array.name;
    if (wire::ToDType(buffers_[i]->element_type()) != expected.dtype) {
      return Invalid(std::string(name) + " must be of type " + jaxconv::Name(*expected.dtype) +
                     ", which " + Name(expected.whose) + " asks for");
    }
    const Dims dims = buffers_[i]->dimensions();
    if (Same(dims, expected.shape())) return Status::Ok();
    return Invalid(std::string(name) + " has shape " + wire::ShapeText(dims) + ", expected " +
                   wire::ShapeText(expected.shape()) + " by " + reader.Where(*this, array.rule));
  }
  Status ConfirmLike(size_t i) const {
    const Rule rule = signature_.arrays[i].rule;
    const Rule whose = rule == kLikeX ? kX : rule == kLikeY ? kY : rule;
    const AnyBuffer buffer = *buffers_[i], like = (*this)[whose];
    if (Same(buffer.dimensions(), like.dimensions()) &&
        buffer.element_type() == like.element_type()) {
      return Status::Ok();
    }
    return Invalid(std::string(signature_.arrays[i].name) + " has shape " +
                   wire::ShapeText(buffer.dimensions()) + ", expected the shape and the type of " +
                   Name(whose) + ", " + wire::ShapeText(like.dimensions()));
  }
  Status ConfirmSigns(AnyBuffer signs) const {
    const Dims dims = (*this)[kX].dimensions(), found = signs.dimensions();
    if (dims.size() == 0 || dims.back() % 8 != 0 || signs.element_type() != ffi::DataType::U8)
      return Invalid("signs are bytes of eight channels of " + Name(kX));
    if (found.size() == dims.size() && std::equal(dims.begin(), dims.end() - 1, found.begin()) &&
        found.back() == dims.back() / 8) {
      return Status::Ok();
    }
    return Invalid("signs=" + wire::ShapeText(found) + " are not those of " + Shapes({kX}));
  }

  const char* name_;
  const Signature& signature_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::optional<AnyBuffer> buffers_[Signature::kMost];
  const Array* read_[kReadRules] = {};
  Workspace scratch_ = {};
};

}  // namespace jaxconv::handler
