// The second step of a convolution's statistics: those of parts into those of all.
#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"
#include "cuda/core/context.h"
#include "cuda/gemm/statistics_parts.h"

namespace jaxconv::cuda {

// `from` holds parts of `channels` channels, `rows` rows in all. mean, var: (channels), float32; var
// is the biased one. Channels must be a multiple of 8.
Status CombineStatistics(const Context& ctx, const StatisticsParts& from, int64_t rows,
                         int64_t channels, void* mean, void* var, const std::string& what);

}  // namespace jaxconv::cuda
