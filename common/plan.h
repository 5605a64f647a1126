// A plan is chosen in jaxconv/_plan.py and travels as one attribute. Native code carries it out or
// says why it cannot.
#pragma once

#include <cstdint>
#include <string_view>

namespace jaxconv {

struct Plan {
  std::string_view
      algorithm;  // "direct", "im2col", "implicit_gemm", "depthwise", "gemm", "two_read", ...
  std::string_view
      tile;        // matrix tile "128x128" (M x N of a CTA), or "" where the algorithm has none
  int64_t splits;  // parts the reduction is cut into (wgrad, split-K); >= 1
  int64_t chunk;   // im2col: images whose columns are held at a time; otherwise 0
};

// Scratch memory that XLA planned (an extra result of the custom call); its contents are undefined
// on entry.
struct Workspace {
  void* data;
  int64_t bytes;
};

}  // namespace jaxconv
