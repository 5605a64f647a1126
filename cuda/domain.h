// What each CUDA kernel can run, and the memory that it needs: host C++17 without CUDA headers, compiled into _cpu too, so that every machine has it.
// The plan asks before it chooses a kernel, a launcher before it launches; nothing else states these limits. What a kernel
// should be given (tile, splits) is the plan's to say, in jaxconv/_plan.
//
// A kernel's name is "family/kernel" ("depthwise/rows"), or the family's where it has one kernel. cuda/conv/<family>/domain.h
// has the family's part, cuda/dense/domain.h that of dense products, cuda/batchnorm/domain.h that of batch-norms,
// cuda/groupnorm/domain.h that of group-norms, cuda/pool/domain.h that of max-pooling, cuda/squeeze_excite/domain.h that of
// squeeze-and-excitation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/plan.h"
#include "common/problem.h"

namespace jaxconv::cuda {

// Facts about a device that decide what runs on it.
struct Device {
  int major = 8,
      minor = 6;  // compute capability; what is not known is taken for 8.6, which runs the least
  int multiprocessors = 132;

  bool sm90() const { return major == 9 && minor == 0; }

  // Bytes that a block can have (CUDA C++ Programming Guide, "Technical Specifications per Compute
  // Capability").
  int64_t shared_memory() const {
    const int kib = major == 9 || major == 10                  ? 227
                    : major == 8 && (minor == 0 || minor == 7) ? 163
                                                               : 99;
    return int64_t(kib) * 1024;
  }
  // Bytes that the blocks of a multiprocessor share: 1 KB more.
  int64_t shared_memory_of_all() const { return shared_memory() + 1024; }
};

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t Align256(int64_t bytes) { return CeilDivide(bytes, 256) * 256; }

inline std::string_view FamilyOf(std::string_view kernel) {
  return kernel.substr(0, kernel.find('/'));
}

// The name behind the slash, or nothing.
inline std::string_view MemberOf(std::string_view kernel) {
  const size_t slash = kernel.find('/');
  return slash == std::string_view::npos ? std::string_view() : kernel.substr(slash + 1);
}

// kAddStatistics: kStatistics of a sum, with a bias or a residual.
// kSums: a weight gradient, and the sums of the batch-norm in front; NormalisedRefusal's alone.
// kDgradSums: a dgrad with an addend and the sums of the batch-norm whose result the convolution reads.
// kGradient: a dgrad through the activation whose result the convolution reads, and the sums of that; kGradientAdd: with an
// addend behind the derivative; kNormGradient: through the batch-norm in front of the activation too, whose result nobody else
// reads, and the sums that are its gradients. GradientRefusal's.
enum class ConvOp {
  kFprop,
  kFpropAdd,
  kStatistics,
  kAddStatistics,
  kDgrad,
  kDgradAdd,
  kDgradSums,
  kGradient,
  kGradientAdd,
  kNormGradient,
  kWgrad,
  kSums
};

// Nothing where plan.kernel can run `op` of `p` on the device with the plan's tile, splits and chunk, else a sentence. An
// empty tile asks for some tile. `p` is the problem as it lies in memory.
std::string ConvRefusal(ConvOp op, const ConvProblem& p, const Plan& plan, const Device& device);

// The same of a convolution whose kernel normalises x where it reads it and puts it through `activation`: kFprop, kStatistics,
// kWgrad, and of the backward pass of both kSums and, for dx, kDgrad. The workspace is that of op.
std::string NormalisedRefusal(ConvOp op, const ConvProblem& p, Activation activation,
                              const Plan& plan, const Device& device);

// ConvRefusal of kGradient, kGradientAdd or kNormGradient, by the activation too.
std::string GradientRefusal(ConvOp op, const ConvProblem& p, Activation activation,
                            const Plan& plan, const Device& device);

// ConvRefusal of fprop with the max-pooling `q` of its result behind it, by the activation in between and the types of x and y
// (PooledTypes) too. It needs no workspace.
std::string PooledRefusal(const ConvProblem& p, Activation activation, const PoolProblem& q,
                          Number x, Number y, const Plan& plan, const Device& device);

// ConvRefusal of fprop with a shortcut: the sums of `q`, of one tap, are added. It needs no workspace.
std::string ShortcutRefusal(const ConvProblem& p, const ConvProblem& q, const Plan& plan,
                            const Device& device);

// `p`, channels last, as sm90 and implicit_gemm run it (FoldPatches).
ConvProblem ConvFolded(const ConvProblem& p, bool dgrad);

// Bytes, for a problem and a plan that are not refused.
int64_t ConvWorkspace(ConvOp op, const ConvProblem& p, const Plan& plan);

// The same of a convolution of 8-bit numbers, which needs no workspace. The kernels are "sm90/eight" and "sm90/eight_halo".
std::string ScaledRefusal(const ScaledConvProblem& p, const Plan& plan, const Device& device);

// The same of a dense product: the kernels are "gemm" and sm90's.
std::string DenseRefusal(const DenseProblem& p, const Plan& plan, const Device& device);
int64_t DenseWorkspace(const DenseProblem& p, const Plan& plan);

// The same of an integer convolution, which needs no workspace.
std::string IntegerRefusal(const IntegerConvProblem& p, const Plan& plan);

enum class BatchNormOp {
  kTrain,
  kInfer,
  kSigns,
  kBackward,
  kBackwardAdd,
  kDx,
  kMoments,
  kShortcutBackward
};

// The same of a batch-norm. The workspace of a team is for as many teams as the device runs at once.
std::string BatchNormRefusal(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                             const Device& device);
int64_t BatchNormWorkspace(BatchNormOp op, const BatchNormProblem& p, const Plan& plan,
                           const Device& device);
// Elements in an access of its kernels.
int64_t BatchNormVector(const BatchNormProblem& p);

// Whether two_read's backward may walk through a ring, by its layout and size.
bool BatchNormStreamed(const BatchNormProblem& p);

// The same of a max-pooling and its gradient, which need no workspace.
std::string PoolRefusal(const PoolProblem& p, const Plan& plan);
// The same of an average-pooling and its gradient.
std::string AvgPoolRefusal(const PoolProblem& p, const Plan& plan);
// Elements in an access of the kernels of both.
int64_t PoolVector(const PoolProblem& p);

// resident_team with tiles of `width` bytes, of a problem that it takes: CTAs that the device runs at once, and groups of
// channels for them.
struct TeamCount {
  int64_t ctas, groups;
};
TeamCount BatchNormTeams(BatchNormOp op, const BatchNormProblem& p, int width,
                         const Device& device);

enum class GroupNormOp { kForward, kBackward };

// The same of a group-norm.
std::string GroupNormRefusal(GroupNormOp op, const GroupNormProblem& p, const Plan& plan,
                             const Device& device);
int64_t GroupNormWorkspace(GroupNormOp op, const GroupNormProblem& p, const Plan& plan);
// Bytes of the narrowest tile of its "resident", 0 where there is none.
int64_t GroupNormUnit(const GroupNormProblem& p);
// Elements in an access of its kernels, and pixels that a block takes in a step.
int64_t GroupNormVector(const GroupNormProblem& p);
int64_t GroupNormRows(const GroupNormProblem& p);

// The same of a squeeze-and-excitation and its gradient, which need no workspace.
std::string SqueezeExciteRefusal(const SqueezeExciteProblem& p, const Plan& plan,
                                 const Device& device);
// Elements in an access of its kernel.
int64_t SqueezeExciteVector(const SqueezeExciteProblem& p);
// Of a plan that is not refused: images of a cluster, steps of a CTA, those of them that stay in shared memory, bytes of it.
struct SqueezeExciteSize {
  int64_t images, steps, held, bytes;
};
SqueezeExciteSize SqueezeExciteCta(const SqueezeExciteProblem& p, const Plan& plan,
                                   const Device& device);

}  // namespace jaxconv::cuda
