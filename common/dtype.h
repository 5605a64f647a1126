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

}  // namespace jaxconv
