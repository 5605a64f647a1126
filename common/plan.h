// A plan is chosen in jaxconv/_plan and travels as one attribute. Native code carries it out or
// says why it cannot.
#pragma once

#include <cstdint>
#include <string_view>

namespace jaxconv {

struct Plan {
  std::string_view
      kernel;  // "family/kernel": "depthwise/rows", "sm90/halo"; or a family of one: "direct"
  std::string_view
      tile;  // "128x128", rows and columns of a CTA's outputs; "" where the kernel has one size
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
