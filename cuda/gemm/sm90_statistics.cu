// The launches of products that take statistics of what they write. See sm90_moments.cuh.
#include <type_traits>

#include "cuda/gemm/sm90_moments.cuh"

namespace jaxconv::cuda {

template <typename T>
Status LaunchByTile(const Context& ctx, Sm90Product& p, TileSize tile, int multiprocessors,
                    StatisticsParts* to, const std::string& what) {
  return WithTile<kStatisticsTiles>(tile, what, [&](auto rows, auto columns) {
    using Tile = Sm90TileOf<T, true, false, decltype(rows)::value, decltype(columns)::value>;
    const auto launch = [&](auto affine) {
      return LaunchSm90Columns<Tile, Sm90Moments<Tile, decltype(affine)::value>>(
          ctx, p, *to, multiprocessors, what, &to->parts);
    };
    const bool bare = p.added == Sm90Added::kNothing && p.epilogue.bias_kind == BiasKind::kNone;
    return bare ? launch(std::false_type()) : launch(std::true_type());
  });
}

Status LaunchSm90Statistics(const Context& ctx, DType dtype, Sm90Product& p, TileSize tile,
                            int multiprocessors, StatisticsParts* to, const std::string& what) {
  return dtype == DType::kBF16
             ? LaunchByTile<__nv_bfloat16>(ctx, p, tile, multiprocessors, to, what)
             : LaunchByTile<__half>(ctx, p, tile, multiprocessors, to, what);
}

}  // namespace jaxconv::cuda
