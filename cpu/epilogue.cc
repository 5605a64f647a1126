// y = f(z), z = sum + bias + residual, on runs of elements that an algorithm has just written.
#include "cpu/conv.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

// The activation is a template argument so that the cheap ones vectorise.
template <Activation kActivation, typename T>
JAXCONV_INLINE void Apply(int64_t count, T slope, T* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = Activate<T>(kActivation, y[i], slope);
}

}  // namespace

template <typename T>
JAXCONV_MULTIVERSION void FinishInPlace(const Epilogue& e, int64_t count, T* y, T* z,
                                        const T* residual) {
  if (residual != nullptr) AddBias(count, residual, /*shared=*/false, y);
  if (z != nullptr) std::copy(y, y + count, z);
  const T slope = static_cast<T>(e.slope);
  switch (e.activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return Apply<Activation::kRelu>(count, slope, y);
    case Activation::kRelu6:
      return Apply<Activation::kRelu6>(count, slope, y);
    case Activation::kLeakyRelu:
      return Apply<Activation::kLeakyRelu>(count, slope, y);
    case Activation::kHardSwish:
      return Apply<Activation::kHardSwish>(count, slope, y);
    default:
      for (int64_t i = 0; i < count; ++i) y[i] = Activate(e.activation, y[i], slope);
  }
}

template <typename T>
JAXCONV_MULTIVERSION void AddBias(int64_t count, const T* bias, bool shared, T* y) {
  if (bias == nullptr) return;
  if (shared) {
    const T value = *bias;
    for (int64_t i = 0; i < count; ++i) y[i] += value;
  } else {
    for (int64_t i = 0; i < count; ++i) y[i] += bias[i];
  }
}

template void FinishInPlace<float>(const Epilogue&, int64_t, float*, float*, const float*);
template void FinishInPlace<double>(const Epilogue&, int64_t, double*, double*, const double*);
template void AddBias<float>(int64_t, const float*, bool, float*);
template void AddBias<double>(int64_t, const double*, bool, double*);

}  // namespace jaxconv::cpu
