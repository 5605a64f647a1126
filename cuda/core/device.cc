#include "cuda/core/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "cuda/core/context.h"

namespace jaxconv::cuda {
namespace {

constexpr int kDevices = 64;

struct Facts {
  std::atomic<int> known{0};
  int major, minor, multiprocessors, shared_memory;
};

// Threads that ask at once write the same numbers.
Status Ask(const std::string& what, Facts* facts) {
  static std::array<Facts, kDevices> all;
  int ordinal = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&ordinal), what));
  Facts* of = ordinal < kDevices ? &all[size_t(ordinal)] : nullptr;
  if (of != nullptr && of->known.load(std::memory_order_acquire) == 1) {
    facts->major = of->major;
    facts->minor = of->minor;
    facts->multiprocessors = of->multiprocessors;
    facts->shared_memory = of->shared_memory;
    return Status::Ok();
  }
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    return CudaStatus(cudaDeviceGetAttribute(value, attribute, ordinal), what);
  };
  JAXCONV_RETURN_IF_ERROR(get(&facts->major, cudaDevAttrComputeCapabilityMajor));
  JAXCONV_RETURN_IF_ERROR(get(&facts->minor, cudaDevAttrComputeCapabilityMinor));
#ifdef JAXCONV_WITHOUT_HOPPER
  // Of kernels for Hopper this module has empty ones. What the driver makes of PTX for 8.0 runs as there.
  if (facts->major == 9) facts->major = 8, facts->minor = 0;
#endif
  JAXCONV_RETURN_IF_ERROR(get(&facts->multiprocessors, cudaDevAttrMultiProcessorCount));
  JAXCONV_RETURN_IF_ERROR(get(&facts->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  int unknown = 0;
  if (of != nullptr && of->known.compare_exchange_strong(unknown, -1)) {
    of->major = facts->major;
    of->minor = facts->minor;
    of->multiprocessors = facts->multiprocessors;
    of->shared_memory = facts->shared_memory;
    of->known.store(1, std::memory_order_release);
  }
  return Status::Ok();
}

enum Told : unsigned { kNothing = 0, kLimit = 1, kCarveout = 2 };

struct Kernel {
  size_t static_bytes = 0;
  unsigned told = kNothing;  // what the driver was told
};

// Asks the driver about a kernel, and tells it what `tell` has and was not told yet. That takes microseconds, which a
// launch outside of a graph would spend each time.
Status AskKernel(const void* kernel, const std::string& what, unsigned tell, Kernel* facts) {
  // Never destroyed: a thread may still launch while the process ends.
  static auto& mutex = *new std::shared_mutex;
  static auto& all = *new std::map<std::pair<const void*, int>, Kernel>;
  int ordinal = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&ordinal), what));
  const std::pair<const void*, int> key(kernel, ordinal);
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    if (const auto found = all.find(key); found != all.end()) {
      *facts = found->second;
      if ((tell & ~facts->told) == 0) return Status::Ok();
    }
  }
  cudaFuncAttributes attributes;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaFuncGetAttributes(&attributes, kernel), what));
  facts->static_bytes = attributes.sharedSizeBytes;
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    return CudaStatus(cudaFuncSetAttribute(kernel, attribute, value), what);
  };
  if ((tell & kLimit) != 0) {
    Facts device;
    JAXCONV_RETURN_IF_ERROR(Ask(what, &device));
    JAXCONV_RETURN_IF_ERROR(set(cudaFuncAttributeMaxDynamicSharedMemorySize,
                                device.shared_memory - int(attributes.sharedSizeBytes)));
  }
  if ((tell & kCarveout) != 0) {
    JAXCONV_RETURN_IF_ERROR(
        set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  std::unique_lock<std::shared_mutex> lock(mutex);
  Kernel& kept = all[key];
  kept.static_bytes = facts->static_bytes;
  kept.told |= tell;
  *facts = kept;
  return Status::Ok();
}

}  // namespace

Status CurrentDevice(const std::string& what, Device* device) {
  Facts facts;
  JAXCONV_RETURN_IF_ERROR(Ask(what, &facts));
  *device = {facts.major, facts.minor, facts.multiprocessors};
  return Status::Ok();
}

Status StaticSharedMemory(const void* kernel, const std::string& what, size_t* bytes) {
  Kernel facts;
  JAXCONV_RETURN_IF_ERROR(AskKernel(kernel, what, kNothing, &facts));
  *bytes = facts.static_bytes;
  return Status::Ok();
}

Status AllowSharedMemory(const void* kernel, const std::string& what) {
  Kernel facts;
  return AskKernel(kernel, what, kLimit, &facts);
}

Status PreferSharedMemory(const void* kernel, const std::string& what) {
  Kernel facts;
  return AskKernel(kernel, what, kLimit | kCarveout, &facts);
}

}  // namespace jaxconv::cuda
