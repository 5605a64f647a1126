// How a problem is laid on teams of CTAs, and their launch (resident_team).
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/batchnorm/batchnorm.h"
#include "cuda/batchnorm/launch.h"
#include "cuda/batchnorm/layout.h"
#include "cuda/batchnorm/team.cuh"
#include "cuda/core/context.h"
#include "cuda/core/device.h"

namespace jaxconv::cuda::batchnorm {

// Sums of a team, CTAs times columns, beyond which they are added up in parts: for every CTA to read all of them would
// take longer than another exchange.
constexpr int64_t kMeetingWords = 66 * 128;

struct TeamFit {
  Layout layout;
  Team team;
  size_t bytes;  // of slots
};

// `held` tensors stay in the ring and `passing` ones have one of their own of in_flight slots; a thread takes `step`
// positions a step.
inline Status MakeTeamFit(const BatchNormProblem& p, bool channels_last, int vec, int step,
                          int held, int passing, size_t kernel_static, const TeamShape& shape,
                          Workspace workspace, const std::string& what, TeamFit& fit) {
  int device = 0, per_sm = 0, limit = 0, sms = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), what));
  const std::pair<cudaDeviceAttr, int*> asked[] = {
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &per_sm},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &limit},
      {cudaDevAttrMultiProcessorCount, &sms}};
  for (const auto& [attribute, value] : asked) {
    JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetAttribute(value, attribute, device), what));
  }
  fit.layout = MakeLayout(p, channels_last, vec, shape.width);
  const Layout& a = fit.layout;
  Team& q = fit.team;
  const int most = sms * kTeamBlocks;
  // The plan may be another device's. A team of any size is right.
  q.ctas = std::min(shape.ctas, most);
  q.groups = a.tiles * a.batch;
  const int64_t columns = 2 * a.lanes * (channels_last ? vec : 1);
  if (q.ctas < 1) {
    return Status::Invalid(what + ": a team of " + std::to_string(q.ctas) + " CTAs");
  }
  q.meet = q.ctas == 1                        ? Meet::kAlone
           : q.ctas * columns > kMeetingWords ? Meet::kParts
                                              : Meet::kAll;
  // No more teams than the workspace, which was planned for the device at hand, has room for.
  const int64_t needed = 2 * (q.ctas + 1) * columns * static_cast<int64_t>(sizeof(*q.partials));
  if (workspace.bytes < needed || workspace.data == nullptr) {
    return Status::Invalid(what + ": workspace has " + std::to_string(workspace.bytes) +
                           " bytes, needs " + std::to_string(needed) + " a team");
  }
  q.partials = static_cast<uint64_t*>(workspace.data);
  q.teams =
      static_cast<int>(std::min({int64_t{most / q.ctas}, q.groups, workspace.bytes / needed}));
  const int64_t per_step = int64_t{q.ctas} * kTeamThreads / a.lanes * step;
  const int64_t steps = std::max<int64_t>((int64_t{a.positions} + per_step - 1) / per_step, 1);
  const int64_t slot = int64_t{kTeamThreads} * step * 16;
  // The device keeps 1 KB of each block to itself.
  const int64_t room =
      std::min(limit, per_sm / kTeamBlocks - 1024) - static_cast<int64_t>(kernel_static);
  for (const int in_flight : {16, 8, 4}) {
    // 16 pay in a long walk. They are a good part of a short one, whose first data then come late.
    if (in_flight == 16 && steps > 8 && steps <= 64) continue;
    const int64_t slots =
        std::min((room / slot - passing * in_flight) / held, std::max<int64_t>(steps, in_flight));
    if (slots < in_flight) continue;
    q.steps = static_cast<uint32_t>(steps);
    q.in_flight = in_flight;
    q.slots = static_cast<uint32_t>(slots);
    fit.bytes = static_cast<size_t>(slot * (held * slots + passing * in_flight));
    return Status::Ok();
  }
  return Status::Invalid(what + ": no slots in " + std::to_string(room) +
                         " bytes of shared memory");
}

// Every CTA waits for others of its team: the driver is asked to start all of them together, or none.
template <typename Kernel, typename Args>
Status LaunchTeam(const Context& ctx, Kernel kernel, const Args& args, const TeamFit& fit,
                  const std::string& what) {
  JAXCONV_RETURN_IF_ERROR(PreferSharedMemory(reinterpret_cast<const void*>(kernel), what));
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = fit.team.ctas > 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(fit.team.teams * fit.team.ctas));
  config.blockDim = dim3(kTeamThreads);
  config.dynamicSmemBytes = fit.bytes;
  config.stream = ctx.stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, args, fit.team), what);
}

// f(FormConstant<...>{}): ReLU, which most networks train with, has kernels of its own.
template <typename I, typename F>
Status WithTeamForm(Activation activation, F&& f) {
  if (activation == Activation::kRelu) return f(FormConstant<Form::kRelu>{});
  if constexpr (I::kLast) return WithForm<I>(activation, f);
  return f(FormConstant<Form::kAny>{});
}

inline Status NeedsVectors(const std::string& what) {
  return Status::Unimplemented(
      what +
      ": expected arrays aligned to 16 bytes and, channels-last, channels in vectors of 16 bytes");
}

}  // namespace jaxconv::cuda::batchnorm
