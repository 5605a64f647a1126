// Convolutions whose pixels stay in shared memory: float16. See halo_stream.cuh.
#include "cuda/conv/sm90/halo_stream/halo_stream.cuh"

namespace jaxconv::cuda {

Status LaunchHaloStreamF16(const Context& ctx, HaloStream& p, bool dgrad, int reach,
                           int multiprocessors, const std::string& what) {
  return dgrad ? LaunchHaloStream<__half, true>(ctx, p, reach, multiprocessors, what)
               : LaunchHaloStream<__half, false>(ctx, p, reach, multiprocessors, what);
}

}  // namespace jaxconv::cuda
