// fprop and wgrad over several planes (conv/common/planes.h) by stem's kernels.
#include "cuda/conv/common/fold.h"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {

Status StemPlanesFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* x,
                       const void* w, const void* bias, void* y, void* z, Workspace workspace,
                       const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const ConvProblem q = PlanesAsChannels(p);
  char* folded = static_cast<char*>(workspace.data);
  char* filter = folded + FoldedBytes(q);
  JAXCONV_RETURN_IF_ERROR(FoldPlanes(ctx, p, q, x, folded, what));
  JAXCONV_RETURN_IF_ERROR(FoldFilter(ctx, p, q, w, filter, what));
  const bool narrow_in = stem::RefuseNarrowIn(ConvOp::kFprop, q, device).empty();
  return (narrow_in ? StemNarrowIn : StemMma)(ctx, ConvOp::kFprop, q, e, folded, filter, bias, y, z,
                                              what);
}

Status StemPlanesWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                       const void* dy, void* dw, Workspace workspace, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const ConvProblem q = PlanesAsChannels(p);
  char* folded = static_cast<char*>(workspace.data);
  char* sums = folded + FoldedBytes(q);
  float* partials = reinterpret_cast<float*>(sums + FoldedFilterBytes(q));
  JAXCONV_RETURN_IF_ERROR(FoldPlanes(ctx, p, q, x, folded, what));
  const bool narrow_in = stem::RefuseNarrowIn(ConvOp::kWgrad, q, device).empty();
  JAXCONV_RETURN_IF_ERROR((narrow_in ? StemNarrowInWgrad : StemMmaWgrad)(ctx, q, splits, folded, dy,
                                                                         sums, partials, what));
  return UnfoldFilter(ctx, p, q, sums, dw, what);
}

}  // namespace jaxconv::cuda::conv
