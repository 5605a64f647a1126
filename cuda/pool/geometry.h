// A pooling's numbers as its kernels take them: 32 bits, with divisors made ready. domain.h refuses what they do not
// hold.
#pragma once

#include "cuda/core/divmod.h"
#include "cuda/pool/domain.h"

namespace jaxconv::cuda::pool {

struct Geometry {
  int in[3], window[3], out[3], stride[3], pad[3], dilation[3];
  int c;
  FastDiv per_stride[3], per_dilation[3];
  FastDiv lanes;      // accesses of a pixel's channels
  FastDiv extent[3];  // forward: of y; backward: of the blocks of dx
  int shift[3];       // backward: pixels of the first block in front of the image

  Geometry(const PoolProblem& p, int vector, bool backward) : c(int(p.c)), lanes(p.c / vector) {
    for (int i = 0; i < 3; ++i) {
      in[i] = int(p.in[i]);
      window[i] = int(p.window[i]);
      out[i] = int(p.out[i]);
      stride[i] = int(p.stride[i]);
      pad[i] = int(p.pad[i]);
      dilation[i] = int(p.dilation[i]);
      per_stride[i] = FastDiv(p.stride[i]);
      per_dilation[i] = FastDiv(p.dilation[i]);
      shift[i] = i > 0 ? int(BlockShift(p, i)) : 0;
      extent[i] = FastDiv(!backward ? p.out[i] : i > 0 ? Blocks(p, i) : p.in[i]);
    }
  }
};

// Windows that reach the padded coordinates c and c + more: [low, high).
struct Range {
  int low, high;
};
__device__ __forceinline__ Range Windows(const Geometry& g, int axis, int c, int more) {
  const int reach = (g.window[axis] - 1) * g.dilation[axis];
  const int last = c + more;
  Range r;
  r.low = c <= reach ? 0 : int(g.per_stride[axis].Div(unsigned(c - reach + g.stride[axis] - 1)));
  r.high = last < 0 ? 0 : min(g.out[axis], int(g.per_stride[axis].Div(unsigned(last))) + 1);
  return r;
}

}  // namespace jaxconv::cuda::pool
