// narrow/rows of __half: fprop and dgrad, also through an activation.
#include "cuda/conv/narrow/rows.cuh"

namespace jaxconv::cuda::conv {

Status NarrowRowsF16(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                     const void* src, const void* w, const void* bias, const void* addend,
                     void* dst, void* z, const std::string& what) {
  return NarrowRows<__half>(ctx, p, dgrad, e, src, w, bias, addend, dst, z, what);
}

Status NarrowRowsBackF16(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                         const void* dy, const void* w, const void* kept, const void* addend,
                         void* dz, float* sums, int64_t* parts, const std::string& what) {
  return NarrowRowsBack<__half>(ctx, p, e, dy, w, kept, addend, dz, sums, parts, what);
}

}  // namespace jaxconv::cuda::conv
