// Facts about the current device, asked once for each.
#pragma once

#include <string>

#include "common/status.h"
#include "cuda/domain.h"

namespace jaxconv::cuda {

// Of the calling thread's current device.
Status CurrentDevice(const std::string& what, Device* device);

// Lets a kernel have as much dynamic shared memory as the device gives a block. Always the same value, so that threads
// that launch one kernel with different sizes do not take it from each other.
Status AllowSharedMemory(const void* kernel, const std::string& what);

}  // namespace jaxconv::cuda
