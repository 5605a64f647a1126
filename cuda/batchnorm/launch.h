// What the launchers of this room share: the choice of a template instance, grids, the workspace's
// size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "common/plan.h"
#include "cuda/batchnorm/access.cuh"
#include "cuda/batchnorm/domain.h"
#include "cuda/batchnorm/layout.h"
#include "cuda/core/context.h"

namespace jaxconv::cuda::batchnorm {

constexpr int kThreads = 256;  // of a two-read or inference block
constexpr int kTileBytes =
    256;                       // of neighbouring channels in such a block, channels-last, as a rule
constexpr int kMaxTile = 256;  // channels of a block at most: 8 bf16 * 32 lanes
constexpr int64_t kInlineParts =
    16;  // partial sums that the blocks of the second walk add up themselves

// One template instance: element type, elements per access, channels-last or -first.
template <typename Element, int kVec, bool kChannelsLast>
struct Instance {
  using T = Element;
  static constexpr int V = kVec;
  static constexpr bool kLast = kChannelsLast;
};

inline bool Aligned16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

template <typename T, bool kPieces, typename F>
Status WithVector(const BatchNormProblem& p, bool aligned, F&& f) {
  constexpr int V = 16 / sizeof(T);
  if (p.inner == 1) {
    if (aligned && p.channels % V == 0) return f(Instance<T, V, true>{});
    return f(Instance<T, 1, true>{});
  }
  const bool fits = p.inner % V == 0 || (kPieces && p.inner > V);
  if (aligned && fits && p.inner < kMaxImage) return f(Instance<T, V, false>{});
  return f(Instance<T, 1, false>{});
}

// f(Instance<...>{}): 16-byte vectors where the extents and the pointers allow them. kPieces: channels-first vectors may
// hold elements of two images.
template <bool kPieces = false, typename F>
Status WithInstance(const BatchNormProblem& p, std::initializer_list<const void*> pointers, F&& f) {
  const bool aligned = Aligned16(pointers);
  if (p.dtype == DType::kF32) return WithVector<float, kPieces>(p, aligned, f);
  if (p.dtype == DType::kBF16) return WithVector<__nv_bfloat16, kPieces>(p, aligned, f);
  return WithVector<__half, kPieces>(p, aligned, f);
}

template <Form kForm>
using FormConstant = std::integral_constant<Form, kForm>;

// f(FormConstant<...>{}). Kernels that read element by element are compiled for all activations only; those of which
// kMany says no, channels-first ones for one, for two forms.
template <typename I, bool kMany = I::kLast, typename F>
Status WithForm(Activation activation, F&& f) {
  if constexpr (I::V > 1) {
    const Form form = FormOf(activation);
    if (form == Form::kPiecewise) return f(FormConstant<Form::kPiecewise>{});
    if constexpr (kMany) {
      if (form == Form::kSilu) return f(FormConstant<Form::kSilu>{});
      if (form == Form::kGelu) return f(FormConstant<Form::kGelu>{});
      if (form == Form::kHardSwish) return f(FormConstant<Form::kHardSwish>{});
    }
  }
  return f(FormConstant<Form::kAny>{});
}

// Of a two-read or inference block.
inline Layout BlockLayout(const BatchNormProblem& p, bool channels_last, int vec) {
  Layout a = MakeLayout(p, channels_last, vec, kTileBytes);
  if (channels_last) {
    a.lanes = BusyLanes(a.row, a.lanes, kThreads);
    a.tiles = (a.row + a.lanes - 1) / a.lanes;
  }
  return a;
}

// blocks in [1, 2^31), or a sentence.
inline Status CheckGrid(int64_t tiles, int64_t parts, int64_t batch, const std::string& what) {
  const int64_t limit = std::numeric_limits<int32_t>::max();
  if (parts <= limit && tiles <= limit / parts && batch <= limit / (parts * tiles))
    return Status::Ok();
  return Status::Unimplemented(what + ": " + std::to_string(batch) + " instances of " +
                               std::to_string(tiles) + " channel tiles in " +
                               std::to_string(parts) +
                               " parts are more than the 2^31 - 1 blocks of a grid");
}

// ceil(work / each) of them.
inline Status Blocks(int64_t work, int64_t each, const std::string& what, unsigned& blocks) {
  const int64_t needed = (work + each - 1) / each;
  JAXCONV_RETURN_IF_ERROR(CheckGrid(needed, 1, 1, what));
  blocks = static_cast<unsigned>(needed);
  return Status::Ok();
}

// Parts per channel tile of a walk that keeps no sums: enough blocks for any device, 128 KB of x
// each in a large tensor (what a block reads before its first element is then small) and no less
// than 16 KB in a small one.
inline int64_t Pieces(const Layout& a, int64_t bytes) {
  const int64_t blocks = std::max(bytes / (128 << 10), std::min<int64_t>(512, bytes / (16 << 10)));
  const int64_t pieces = blocks / (a.tiles * a.batch);
  return std::clamp<int64_t>(pieces, 1, std::max<int64_t>(a.positions, 1));
}

}  // namespace jaxconv::cuda::batchnorm
