// narrow/rows of float: wgrad.
#include "cuda/conv/narrow/rows_wgrad.cuh"

namespace jaxconv::cuda::conv {

Status NarrowRowsWgradF32(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                          const void* dy, void* dw, float* partials, const std::string& what) {
  return NarrowWgrad<float>(ctx, p, splits, x, dy, dw, partials, what);
}

}  // namespace jaxconv::cuda::conv
