// The CUDA backend's context and the few facts about the device that a launcher asks for.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/status.h"

namespace jaxconv::cuda {

struct Context {
  cudaStream_t stream;
};

// `what` names the kernel and its plan: "conv_fprop[implicit_gemm bfloat16 128x64 splits=1]".
inline Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return Status::Ok();
  // The runtime keeps the error of a call, too, for this thread's next cudaGetLastError, which would blame a
  // healthy launch.
  (void)cudaGetLastError();
  return Status::Internal(what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Right after a launch. What others left on this thread is cleared where a handler starts (ffi/handlers.cc).
inline Status LaunchStatus(const std::string& what) { return CudaStatus(cudaGetLastError(), what); }

}  // namespace jaxconv::cuda
