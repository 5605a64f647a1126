// Errors as values: every launcher and every check returns a Status. Nothing throws, nothing exits.
#pragma once

#include <string>
#include <utility>

namespace jaxconv {

enum class Code { kOk, kInvalidArgument, kUnimplemented, kInternal };

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }
  static Status Invalid(std::string message) {
    return {Code::kInvalidArgument, std::move(message)};
  }
  static Status Unimplemented(std::string message) {
    return {Code::kUnimplemented, std::move(message)};
  }
  static Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace jaxconv

#define JAXCONV_RETURN_IF_ERROR(expr)                                      \
  do {                                                                     \
    if (::jaxconv::Status status_ = (expr); !status_.ok()) return status_; \
  } while (0)
