// What the kernels for convolutions of few channels on both sides can run. Host C++17 without CUDA headers (cuda/domain.h).
//
//   narrow/rows     sm_90: 3x3 of stride 1, every pass, by mma.sync; float32 as TF32
//   narrow/planes   fprop and wgrad of a volume's first layer, whose planes are more channels than stem takes, by rows
#pragma once

#include <string>
#include <string_view>

#include "cuda/conv/common/domain.h"
#include "cuda/conv/common/planes.h"
#include "cuda/domain.h"

namespace jaxconv::cuda::conv::narrow {

constexpr int64_t kMostSummed = 32;  // channels; of both sides of a weight gradient
constexpr int64_t kMostMade = 128;   // channels that fprop and dgrad make
// C times K: with more, mma.sync is slower than the loops of wgmma (32 to 64 channels: 0.7 of XLA's speed).
constexpr int64_t kMostProducts = 1024;
constexpr int64_t kMostParts = 256;  // of kGradient's sums, whatever the device

inline std::string RefuseRows(ConvOp op, const ConvProblem& p, const Device& device) {
  if (!device.sm90()) return "it needs compute capability 9.0";
  if (std::string why = RefuseCoordinates(p); !why.empty()) return why;
  if (!p.channels_last) return "it needs channels-last arrays";
  if (p.dtype == DType::kF32 && p.full_float32) return "it takes float32 only as TF32";
  if (!PlanesAreImages(p))
    return "in 3-D it needs one tap, stride 1 and no padding on the first axis";
  if (p.n * p.in[0] >= kCoordLimit) return "it needs fewer than 2^30 planes";
  for (int d = 1; d < 3; ++d) {
    if (p.filter[d] != 3 || p.stride[d] != 1 || p.dilation[d] != 1 || !p.padded_below_filter(d))
      return "it needs a 3x3 filter of stride 1, not dilated, with padding of 0 to 2";
  }
  const bool dgrad = op == ConvOp::kDgrad || op == ConvOp::kGradient;
  const int64_t summed = dgrad ? p.k : p.c;
  const int64_t made = dgrad ? p.c : p.k;
  const int64_t most = op == ConvOp::kWgrad ? kMostSummed : kMostMade;
  if (p.groups != 1 || summed > kMostSummed || made > most || !WholeVectors(p, summed) ||
      !WholeVectors(p, made)) {
    const std::string limits =
        op == ConvOp::kWgrad ? "32" : "32 summed ones and " + std::to_string(kMostMade) + " others";
    return "it needs one group of whole 16 bytes of channels on both sides, up to " + limits +
           ", got " + std::to_string(summed) + " and " + std::to_string(made);
  }
  if (summed * made > kMostProducts) {
    return "it takes up to 1024 products of channels, got " + std::to_string(summed) + " x " +
           std::to_string(made);
  }
  return "";
}

inline std::string Refusal(std::string_view kernel, ConvOp op, const ConvProblem& p,
                           const Device& device) {
  if (kernel == "rows") return RefuseRows(op, p, device);
  if (kernel != "planes") return "there is no such kernel";
  if (std::string why = RefuseFolding(op, p, 9, kMostFolded); !why.empty()) return why;
  const ConvProblem q = PlanesAsChannels(p);
  const std::string why = RefuseRows(op, q, device);
  return why.empty() ? "" : "of planes as " + std::to_string(q.c) + " channels: " + why;
}

inline int64_t Workspace(ConvOp op, const ConvProblem& p, const Plan& plan) {
  if (MemberOf(plan.kernel) == "planes") {
    const ConvProblem q = PlanesAsChannels(p);
    const int64_t partials = op == ConvOp::kWgrad ? PartialsBytes(q, plan.splits) : 0;
    return FoldedBytes(q) + FoldedFilterBytes(q) + partials;
  }
  if (op == ConvOp::kGradient) return kMostParts * p.c * 4;
  return op == ConvOp::kWgrad ? PartialsBytes(p, plan.splits) : 0;
}

}  // namespace jaxconv::cuda::conv::narrow
