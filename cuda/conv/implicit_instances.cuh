// From a ConvLaunch to a kernel instance: tile and vector widths. Included by the units that hold
// the instances.
#pragma once

#include "cuda/conv/implicit_instances.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {

template <typename Math, typename View, typename Params>
Status LaunchView(const Context& ctx, const ConvLaunch<Params>& c, const std::string& what) {
  return LaunchMatrix<Math, View>(ctx, {c.grid, c.view, c.epilogue, c.a, c.b}, what);
}

// A by elements and B by vectors is the stem: three input channels, many output channels.
template <typename Math, template <typename, int, int> class View, typename Params>
Status LaunchWidths(const Context& ctx, const ConvLaunch<Params>& c, const std::string& what) {
  constexpr int kVec = kVecWidth<typename Math::T>;
  if (c.vector_a && c.vector_b) return LaunchView<Math, View<Math, kVec, kVec>>(ctx, c, what);
  if (c.vector_b) return LaunchView<Math, View<Math, 1, kVec>>(ctx, c, what);
  return LaunchView<Math, View<Math, 1, 1>>(ctx, c, what);
}

template <template <typename, int, int, bool, bool> class Math, typename T, int kTileM, int kTileN>
struct ConvTile {
  static Status Launch(const Context& ctx, const ConvLaunch<FpropParams>& c,
                       const std::string& what) {
    return LaunchWidths<Math<T, kTileM, kTileN, true, false>, FpropView>(ctx, c, what);
  }
  static Status Launch(const Context& ctx, const ConvLaunch<DgradParams>& c,
                       const std::string& what) {
    using M = Math<T, kTileM, kTileN, true, true>;
    return c.vector_a && c.vector_b ? LaunchView<M, DgradView<M, kVecWidth<T>>>(ctx, c, what)
                                    : LaunchView<M, DgradView<M, 1>>(ctx, c, what);
  }
  static Status Launch(const Context& ctx, const ConvLaunch<WgradParams>& c,
                       const std::string& what) {
    return LaunchWidths<Math<T, kTileM, kTileN, false, false>, WgradView>(ctx, c, what);
  }
};

template <template <typename, int, int, bool, bool> class Math, typename T, typename Params>
Status LaunchConv(const Context& ctx, const ConvLaunch<Params>& c, const std::string& what) {
  switch (c.tile) {
    case Tile::k128x128:
      return ConvTile<Math, T, 128, 128>::Launch(ctx, c, what);
    case Tile::k128x64:
      return ConvTile<Math, T, 128, 64>::Launch(ctx, c, what);
    case Tile::k64x64:
      return ConvTile<Math, T, 64, 64>::Launch(ctx, c, what);
  }
  return Status::Internal(what + ": no such tile");
}

}  // namespace jaxconv::cuda
