// What kernels that sum up the columns of their result leave for a second kernel (conv/common/statistics.h).
#pragma once

#include <cuda_runtime.h>

namespace jaxconv::cuda {

struct StatisticsParts {
  // In a workspace: (parts, columns of all instances) pairs (mean, sum of squares about it), and
  // (parts) numbers of rows, which may be 0, but not the first.
  float2* moments;
  float* counts;
  int parts;  // the launch says
};

}  // namespace jaxconv::cuda
