// Convolutions whose pixels stay in shared memory: bfloat16. See halo_stream.cuh.
#include "cuda/conv/sm90/halo_stream/halo_stream.cuh"

namespace jaxconv::cuda {

Status LaunchHaloStreamBf16(const Context& ctx, HaloStream& p, bool dgrad, int reach,
                            int multiprocessors, const std::string& what) {
  return dgrad ? LaunchHaloStream<__nv_bfloat16, true>(ctx, p, reach, multiprocessors, what)
               : LaunchHaloStream<__nv_bfloat16, false>(ctx, p, reach, multiprocessors, what);
}

}  // namespace jaxconv::cuda
