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

}  // namespace jaxconv
