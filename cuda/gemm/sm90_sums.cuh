// What the two kernels of sm90_sums.h share: where the totals go.
#pragma once

namespace jaxconv::cuda {

// From the sums of d and of d * (x - mean).
struct Sm90NormTotals {
  __device__ __forceinline__ void operator()(int column, const float (&sum)[2]) const {
    dbias[column] = sum[0];
    dscale[column] = sum[1] * rstd[column];
  }
  const float* rstd;
  float *dscale, *dbias;
};

}  // namespace jaxconv::cuda
