// The sm_90a product in float32, all memory orders. See sm90_float32.cuh.
#include "cuda/gemm/sm90_float32.cuh"

namespace jaxconv::cuda {

Status LaunchSm90KNFloat(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                         const std::string& what) {
  return LaunchSm90TermsByTile<true, false>(ctx, p, choice, multiprocessors, what);
}

Status LaunchSm90KKFloat(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                         const std::string& what) {
  return LaunchSm90TermsByTile<true, true>(ctx, p, choice, multiprocessors, what);
}

Status LaunchSm90MNFloat(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                         const std::string& what) {
  return LaunchSm90TermsByTile<false, false>(ctx, p, choice, multiprocessors, what);
}

Status LaunchSm90KKTf32(const Context& ctx, Sm90Product& p, Sm90Choice choice, int multiprocessors,
                        const std::string& what) {
  return WithTile<kTf32Tiles>(choice.tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90Tf32Tile<decltype(rows)::value, decltype(columns)::value>;
    return LaunchSm90Streamed<Tile, Sm90Floats<Tile>>(ctx, p, multiprocessors, what);
  });
}

}  // namespace jaxconv::cuda
