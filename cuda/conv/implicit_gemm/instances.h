// The implicit-GEMM kernels by arithmetic, one translation unit each; implicit_gemm.cu checks the
// problem and picks one.
#pragma once

#include <string>

#include "cuda/conv/implicit_gemm/views.cuh"
#include "cuda/core/context.h"
#include "cuda/gemm/tiles.h"

namespace jaxconv::cuda {

template <typename Params>
struct ConvLaunch {
  Grid grid;  // without the tile counts
  Params view;
  EpilogueParams epilogue;
  const void* a;
  const void* b;
  bool vector_a, vector_b;  // the operand can be read 16 bytes at a time
  Tile tile;
};

#define JAXCONV_DECLARE_IMPLICIT(Name)                                                          \
  Status LaunchFprop##Name(const Context&, const ConvLaunch<FpropParams>&, const std::string&); \
  Status LaunchDgrad##Name(const Context&, const ConvLaunch<DgradParams>&, const std::string&); \
  Status LaunchWgrad##Name(const Context&, const ConvLaunch<WgradParams>&, const std::string&);
JAXCONV_DECLARE_IMPLICIT(Bf16)
JAXCONV_DECLARE_IMPLICIT(F16)
JAXCONV_DECLARE_IMPLICIT(Tf32)
JAXCONV_DECLARE_IMPLICIT(Float32)
#undef JAXCONV_DECLARE_IMPLICIT

}  // namespace jaxconv::cuda
