// narrow/rows of __nv_bfloat16: fprop and dgrad.
#include "cuda/conv/narrow/rows.cuh"

namespace jaxconv::cuda::conv {

Status NarrowRowsBf16(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                      const void* src, const void* w, const void* bias, void* dst, void* z,
                      const std::string& what) {
  return NarrowRows<__nv_bfloat16>(ctx, p, dgrad, e, src, w, bias, dst, z, what);
}

}  // namespace jaxconv::cuda::conv
