// The instances of the sm_90a product for one pair of memory orders.
#pragma once

#include "cuda/gemm/sm90_product.cuh"
#include "cuda/gemm/sm90_resident.cuh"
#include "cuda/gemm/sm90_rows.cuh"

namespace jaxconv::cuda {

template <typename T, bool kMajorA, bool kMajorB>
Status LaunchSm90ByTile(const Context& ctx, Sm90Product& p, Sm90TileName tile, int multiprocessors,
                        const std::string& what) {
#define JAXCONV_SM90_CASE(name, blocks, tile_n, ping_pong)                                  \
  case Sm90TileName::name: {                                                                \
    using Tile = Sm90Tile<T, kMajorA, kMajorB, blocks, tile_n, ping_pong, true>;            \
    return LaunchSm90Product<Tile>(ctx, Sm90ProductKernel<Tile>, p, multiprocessors, what); \
  }
  switch (tile) {
    JAXCONV_SM90_CASE(k128x256, 1, 256, false)
    JAXCONV_SM90_CASE(k256x128, 2, 128, false)
    JAXCONV_SM90_CASE(k128x128, 2, 128, true)
    JAXCONV_SM90_CASE(k256x64, 2, 64, false)
    JAXCONV_SM90_CASE(k128x320, 1, 320, false)
    case Sm90TileName::k256x128s: {
      using Tile = Sm90Tile<T, kMajorB, kMajorA, 1, 256, false, true, 1, false, true>;
      return LaunchSm90Product<Tile>(ctx, Sm90ProductKernel<Tile>, p, multiprocessors, what);
    }
    default:
      break;
  }
#undef JAXCONV_SM90_CASE
  if constexpr (kMajorA) {
    switch (tile) {
      case Sm90TileName::k64x128:
        return LaunchSm90Rows<Sm90Alternate<T, kMajorA, kMajorB, 128>>(ctx, p, multiprocessors,
                                                                       what);
      case Sm90TileName::k128x64Resident:
        return LaunchSm90Resident<Sm90Resident<T, kMajorB, 4, 2, 64>>(ctx, p, multiprocessors,
                                                                      what);
      case Sm90TileName::k64x256Resident:
        return LaunchSm90Resident<Sm90Resident<T, kMajorB, 2, 1, 256>>(ctx, p, multiprocessors,
                                                                       what);
      default:
        break;
    }
  }
  return Status::Unimplemented(what + ": no such tile");
}

}  // namespace jaxconv::cuda
