// The launchers of the depthwise kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"

namespace jaxconv::cuda::conv {

ForwardLauncher DepthwiseFma, DepthwiseMma, DepthwiseConv1d, DepthwiseRows, DepthwiseRowsStrided,
    DepthwiseRowsMma, DepthwiseFew;
WgradLauncher DepthwiseFmaWgrad, DepthwiseMmaWgrad, DepthwiseConv1dWgrad, DepthwiseRowsWgrad,
    DepthwiseRowsStridedWgrad, DepthwiseRowsMmaWgrad;

}  // namespace jaxconv::cuda::conv
