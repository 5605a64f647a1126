// Facts about the current device and its kernels, asked once for each.
#pragma once

#include <cstddef>
#include <string>

#include "common/status.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {

// Of the calling thread's current device.
Status CurrentDevice(const std::string& what, Device* device);

// Static shared memory of a kernel as compiled, in bytes.
Status StaticSharedMemory(const void* kernel, const std::string& what, size_t* bytes);

// Lets a kernel have as much dynamic shared memory as the device gives a block. Always the same value, so that threads
// that launch one kernel with different sizes do not take it from each other. The driver is told once for each device.
Status AllowSharedMemory(const void* kernel, const std::string& what);

// AllowSharedMemory for a kernel that wants a multiprocessor's whole shared memory, and little of its L1 cache.
Status PreferSharedMemory(const void* kernel, const std::string& what);

}  // namespace jaxconv::cuda
