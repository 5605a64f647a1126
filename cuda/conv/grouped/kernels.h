// The launchers of the grouped kernels. domain.h says what each can run; cuda/conv/conv.cu has asked before they are
// called. Arrays are 16-byte aligned.
#pragma once

#include "cuda/conv/common/launchers.h"

namespace jaxconv::cuda::conv {

ForwardLauncher GroupedMma, GroupedRows, GroupedRowsFloat32;
WgradLauncher GroupedMmaWgrad, GroupedRowsWgrad, GroupedRowsFloat32Wgrad;

}  // namespace jaxconv::cuda::conv
