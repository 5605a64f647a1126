// A batch-norm and its activation, of x where rows.cu, rows_strided.cu and rows_wgrad.cu read it:
//
//   a = f((x - mean) * scale / sqrt(var + epsilon) + bias), rounded to x's type
//
// The convolution is of a, which is in no memory. What TMA brings for pixels outside x is zero and stays zero: a is padded,
// not x.
#pragma once

#include <type_traits>

#include "common/activation.h"
#include "common/status.h"
#include "cuda/conv/depthwise/kernels.h"
#include "cuda/conv/depthwise/rows.cuh"

namespace jaxconv::cuda::conv {

// What a kernel takes of x. kClipped: f is relu or relu6.
enum class Input { kPlain, kClipped, kSilu };

struct NormalisedArgs {
  Normalisation of;
  float most;      // of kClipped: the most that f gives
  uint32_t limit;  // the same, twice in a word
};

template <typename T>
uint32_t TwiceInAWord(float v) {
  const T narrow(v);
  uint16_t bits;
  static_assert(sizeof(bits) == sizeof(narrow));
  __builtin_memcpy(&bits, &narrow, sizeof(bits));
  return uint32_t(bits) << 16 | bits;
}

template <typename T>
NormalisedArgs MakeNormalised(const Normalisation& n) {
  const float most = n.activation == Activation::kRelu6 ? 6.f : __builtin_huge_valf();
  return {n, most, TwiceInAWord<T>(most)};
}

// launch(tag) of a 16-bit type.
template <typename F>
Status ForHalf(DType dtype, const std::string& what, const F& launch) {
  if (dtype == DType::kBF16) return launch(TypeTag<__nv_bfloat16>{});
  if (dtype == DType::kF16) return launch(TypeTag<__half>{});
  return Status::Internal(what + ": no kernel normalises arrays that are not of 16 bits");
}

// launch(input), a constant, of what `n` asks for.
template <typename F>
Status ForInput(const Normalisation& n, const std::string& what, const F& launch) {
  using Clipped = std::integral_constant<Input, Input::kClipped>;
  switch (n.activation) {
    case Activation::kRelu:
    case Activation::kRelu6:
      return launch(Clipped());
    case Activation::kSilu:
      return launch(std::integral_constant<Input, Input::kSilu>());
    default:
      return Status::Internal(what + ": no kernel normalises with this activation");
  }
}

// max(v, 0), rounded, then the least of it and `limit`, which rounding leaves as it is. NaN stays.
template <typename T>
__device__ __forceinline__ uint32_t PackClipped(const float (&v)[2], uint32_t limit) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(v[1]), "f"(v[0]));
    asm("min.NaN.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(limit));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(v[1]), "f"(v[0]));
    asm("min.NaN.bf16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(limit));
  }
  return pair;
}

// Which columns of a row that a thread reads are x's; column 0 is x's column `first` > -S, of `width`. `row`: the row is x's.
template <int S>
struct InsideRow {
  int width, end;  // columns up to `end` are not past the row, from end - width on not before it

  __device__ __forceinline__ InsideRow(int first, int width, bool row = true)
      : width(width), end(row ? width - first : 0) {
    // Opaque: else the tests of all columns are done before the rows' loop, and kept in registers.
    asm volatile("" : "+r"(end));
  }
  __device__ __forceinline__ bool operator()(int c) const {
    return (c >= S - 1 || end <= width + c) && c < end;
  }
};

// Of a thread's two channels. z = x * scale + offset: of 16 bits, x has none that this could lose where the mean is large.
template <typename T, Input kInput>
struct Normaliser {
  static_assert(sizeof(T) == 2);
  float scale[2] = {}, offset[2] = {};

  __device__ __forceinline__ void Load(const Normalisation& n, int channel) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float rstd = 1.f / sqrtf(n.var[channel + i] + n.epsilon);
      scale[i] = n.scale[channel + i] * rstd;
      offset[i] = fmaf(-n.mean[channel + i], scale[i], n.bias[channel + i]);
    }
  }

  __device__ __forceinline__ void Apply(const NormalisedArgs& g, bool inside, float (&v)[2]) const {
    float z[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      z[i] = fmaf(v[i], scale[i], offset[i]);
      if constexpr (kInput == Input::kSilu) {
        z[i] = Activate<float, true>(Activation::kSilu, z[i], 0.f);
      }
    }
    uint32_t pair;
    if constexpr (kInput == Input::kClipped) {
      pair = PackClipped<T>(z, g.limit);
    } else {
      pair = PackPair(z[0], z[1], T());
    }
    UnpackPair<T>(inside ? pair : 0u, v);
  }
};

}  // namespace jaxconv::cuda::conv
