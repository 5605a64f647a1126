// Places of the line of halo.cuh, as TMA fetches them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/conv/sm90/halo/domain.h"
#include "cuda/core/divmod.h"
#include "cuda/core/tma.cuh"

namespace jaxconv::cuda {

__device__ __forceinline__ void LoadPlaces(const HaloLine& line, uint32_t to,
                                           const CUtensorMap& map, uint32_t full, int channel,
                                           int place, bool from_first) {
  const Digits4 at = SplitDigits(place, line.extent[2], line.extent[1], line.extent[0]);
  int from[3];
  for (int i = 0; i < 3; ++i) from[i] = at.digit[3 - i] + (from_first ? line.first[i] : 0);
  const int none[3] = {};
  LoadColumn(line.rank, to, map, full, channel, from, at.digit[0], none);
}

}  // namespace jaxconv::cuda
