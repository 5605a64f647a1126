// From a ConvLaunch to a kernel instance: tile and vector widths. Included by the units that hold
// the instances.
#pragma once

#include "cuda/conv/implicit_gemm/instances.h"
#include "cuda/gemm/launch.cuh"

namespace jaxconv::cuda {

template <typename Math, typename View, typename Params>
Status LaunchView(const Context& ctx, const ConvLaunch<Params>& c, const std::string& what) {
  return LaunchMatrix<Math, View>(ctx, {c.grid, c.view, c.epilogue, c.a, c.b}, what);
}

// A by elements and B by vectors is the stem: three input channels, many output channels. Where B is
// read by elements too there is one tile: the copies limit it, whatever the tile.
template <template <typename, int, int, bool, bool> class Math, typename T, int kTileM, int kTileN>
struct ConvTile {
  static constexpr int kVec = kVecWidth<T>;
  using F = Math<T, kTileM, kTileN, true, false>;
  using D = Math<T, kTileM, kTileN, true, true>;
  using W = Math<T, kTileM, kTileN, false, false>;

  static Status Launch(const Context& ctx, const ConvLaunch<FpropParams>& c,
                       const std::string& what) {
    return c.vector_a ? LaunchView<F, FpropView<F, kVec, kVec>>(ctx, c, what)
                      : LaunchView<F, FpropView<F, 1, kVec>>(ctx, c, what);
  }
  static Status Launch(const Context& ctx, const ConvLaunch<DgradParams>& c,
                       const std::string& what) {
    return LaunchView<D, DgradView<D, kVec>>(ctx, c, what);
  }
  static Status Launch(const Context& ctx, const ConvLaunch<WgradParams>& c,
                       const std::string& what) {
    return c.vector_a ? LaunchView<W, WgradView<W, kVec, kVec>>(ctx, c, what)
                      : LaunchView<W, WgradView<W, 1, kVec>>(ctx, c, what);
  }
  static Status ByElements(const Context& ctx, const ConvLaunch<FpropParams>& c,
                           const std::string& what) {
    return LaunchView<F, FpropView<F, 1, 1>>(ctx, c, what);
  }
  static Status ByElements(const Context& ctx, const ConvLaunch<DgradParams>& c,
                           const std::string& what) {
    return LaunchView<D, DgradView<D, 1>>(ctx, c, what);
  }
  static Status ByElements(const Context& ctx, const ConvLaunch<WgradParams>& c,
                           const std::string& what) {
    return LaunchView<W, WgradView<W, 1, 1>>(ctx, c, what);
  }
};

template <template <typename, int, int, bool, bool> class Math, typename T, typename Params>
Status LaunchConv(const Context& ctx, const ConvLaunch<Params>& c, const std::string& what) {
  if (!c.vector_b) return ConvTile<Math, T, 64, 64>::ByElements(ctx, c, what);
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
