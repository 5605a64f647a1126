// Tile names and the device check of the sm_90a products.
#include "cuda/gemm/sm90_product.h"

#include <cuda_runtime_api.h>

namespace jaxconv::cuda {

Status FindSm90Tile(std::string_view name, const std::string& what, Sm90TileName* tile) {
  int at = 0;
  std::string known;
  for (std::string_view candidate : kSm90TileNames) {
    if (name == candidate) {
      *tile = Sm90TileName(at);
      return Status::Ok();
    }
    known += (at++ ? ", \"" : "\"") + std::string(candidate) + "\"";
  }
  return Status::Invalid(what + ": tile \"" + std::string(name) + "\" is unknown; the tiles are " +
                         known);
}

Status RequireSm90(const std::string& what, int* multiprocessors) {
  int device = 0, major = 0, minor = 0;
  JAXCONV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), what));
  const auto get = [&](cudaDeviceAttr attribute, int* value) {
    return CudaStatus(cudaDeviceGetAttribute(value, attribute, device), what);
  };
  JAXCONV_RETURN_IF_ERROR(get(cudaDevAttrComputeCapabilityMajor, &major));
  JAXCONV_RETURN_IF_ERROR(get(cudaDevAttrComputeCapabilityMinor, &minor));
  JAXCONV_RETURN_IF_ERROR(get(cudaDevAttrMultiProcessorCount, multiprocessors));
  if (major == 9 && minor == 0) return Status::Ok();
  return Status::Unimplemented(what + ": wgmma needs compute capability 9.0, the device has " +
                               std::to_string(major) + "." + std::to_string(minor));
}

}  // namespace jaxconv::cuda
