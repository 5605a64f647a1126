// What the launchers of this room share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "cuda/core/context.h"
#include "cuda/pool/domain.h"

namespace jaxconv::cuda::pool {

// For problems that domain.h does not refuse and that have elements; `what` names the call in errors.
Status Forward(const Context& ctx, const PoolProblem& p, const void* x, void* y, uint8_t* position,
               const std::string& what);
Status Backward(const Context& ctx, const PoolProblem& p, const uint8_t* position, const void* dy,
                void* dx, const std::string& what);

Status Average(const Context& ctx, const AvgPoolProblem& p, const void* x, void* y,
               const std::string& what);
Status AverageBackward(const Context& ctx, const AvgPoolProblem& p, const void* dy, void* dx,
                       const std::string& what);

// An element type and elements in an access.
template <typename Element, int kVec>
struct Instance {
  using T = Element;
  static constexpr int V = kVec;
};

// Where the arrays are not aligned to the accesses there are more threads than domain.h counted.
inline Status TooMany(int64_t threads, const std::string& what) {
  return Status::Unimplemented(what + ": it needs fewer than 2^31 threads, got " +
                               std::to_string(threads));
}

// f(Instance<...>{}): 16-byte accesses where the channels and the pointers allow them.
template <typename F>
Status WithInstance(const PoolProblem& p, std::initializer_list<const void*> pointers, F&& f) {
  const bool wide = Vector(p) > 1 && std::all_of(pointers.begin(), pointers.end(), [](auto* at) {
                      return reinterpret_cast<uintptr_t>(at) % 16 == 0;
                    });
  const auto with = [&](auto element) {
    using T = decltype(element);
    return wide ? f(Instance<T, 16 / int(sizeof(T))>{}) : f(Instance<T, 1>{});
  };
  if (p.dtype == DType::kF32) return with(float{});
  if (p.dtype == DType::kBF16) return with(__nv_bfloat16{});
  return with(__half{});
}

}  // namespace jaxconv::cuda::pool
