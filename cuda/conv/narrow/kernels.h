// The launchers of the narrow kernels, one for each element type. domain.h says what each can run; cuda/conv/conv.cu has
// asked before they are called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"

namespace jaxconv::cuda::conv {

ForwardLauncher NarrowRowsF32, NarrowRowsBf16, NarrowRowsF16;
WgradLauncher NarrowRowsWgradF32, NarrowRowsWgradBf16, NarrowRowsWgradF16;

}  // namespace jaxconv::cuda::conv
