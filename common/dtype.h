// Element types as the native code names them. No CUDA types, no XLA types.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxconv {

enum class DType : int32_t { kF32, kF64, kBF16, kF16 };

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
      return 4;
    default:
      return 2;
  }
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "float64";
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    default:
      return "float16";
  }
}

// Of integer convolutions; signs and sizes alternate.
enum class Integer : int32_t { kS8, kU8, kS16, kU16, kS32, kU32, kS64, kU64 };

constexpr size_t SizeOf(Integer type) { return size_t{1} << (static_cast<int32_t>(type) / 2); }
constexpr bool IsSigned(Integer type) { return static_cast<int32_t>(type) % 2 == 0; }

constexpr const char* Name(Integer type) {
  constexpr const char* kNames[] = {"int8",  "uint8",  "int16", "uint16",
                                    "int32", "uint32", "int64", "uint64"};
  return kNames[static_cast<int32_t>(type)];
}

// Of convolutions of 8-bit numbers: operands are of the first four types, residuals and results of any.
enum class Number : int32_t { kS8, kU8, kE4M3, kE5M2, kBF16, kF16, kF32, kS32 };

constexpr size_t SizeOf(Number type) {
  return type <= Number::kE5M2 ? 1 : type <= Number::kF16 ? 2 : 4;
}
// A dtype as one of them; float64 is none, and becomes int32, which is no dtype.
constexpr Number NumberOf(DType dtype) {
  return dtype == DType::kBF16  ? Number::kBF16
         : dtype == DType::kF16 ? Number::kF16
         : dtype == DType::kF32 ? Number::kF32
                                : Number::kS32;
}
constexpr bool IsInteger8(Number type) { return type == Number::kS8 || type == Number::kU8; }
constexpr bool IsFloat8(Number type) { return type == Number::kE4M3 || type == Number::kE5M2; }

constexpr const char* Name(Number type) {
  constexpr const char* kNames[] = {"int8",     "uint8",   "float8_e4m3fn", "float8_e5m2",
                                    "bfloat16", "float16", "float32",       "int32"};
  return kNames[static_cast<int32_t>(type)];
}

}  // namespace jaxconv
