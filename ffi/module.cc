// The Python modules _cpu and _cuda: nothing but the handlers, and facts about how they were built.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "common/activation.h"
#include "ffi/handlers.h"

#ifndef JAXCONV_CUDA
#include "cpu/batchnorm.h"
#include "cpu/blas.h"
#include "cpu/conv.h"
#include "cpu/gemm.h"
#include "ffi/domain.h"
#endif

namespace nb = nanobind;

NB_MODULE(JAXCONV_MODULE, m) {
  m.def("registrations", [] {
    nb::dict targets;
    for (const auto& row : jaxconv::JAXCONV_BACKEND::Rows())
      targets[row.target.c_str()] = nb::capsule(reinterpret_cast<void*>(row.handler));
    return targets;
  });
  // The table: target -> (operands, results), roles in the order of the wire, "x w b?".
  m.def("roles", [] {
    nb::dict targets;
    for (const auto& row : jaxconv::JAXCONV_BACKEND::Rows()) {
      if (row.operands) targets[row.target.c_str()] = nb::make_tuple(row.operands, row.results);
    }
    return targets;
  });
  m.def("ffi_api", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("activations", [] {
    std::vector<std::string> names;
    for (auto name : jaxconv::kActivationNames) names.emplace_back(name);
    return names;
  });
#ifdef JAXCONV_CUDA
  m.def("architectures", [] { return std::vector<std::string>{JAXCONV_ARCHITECTURES}; });
#else
  m.def("set_blas", [](uintptr_t sgemm, uintptr_t dgemm) {
    jaxconv::cpu::SetBlas(reinterpret_cast<void*>(sgemm), reinterpret_cast<void*>(dgemm));
  });
  jaxconv::BindDomain(m);
  // Sizes at which the work is cut: the tests' shapes stand on both sides of each.
  m.def("thresholds", [] {
    using Gemm = jaxconv::cpu::GemmShape;
    using Norm = jaxconv::cpu::BatchNormShape;
    using Conv = jaxconv::cpu::ConvShape;
    nb::dict d;
    d["gemm_tile_m"] = Gemm::kTileM;
    d["gemm_tile_n"] = Gemm::kTileN;
    d["gemm_tile_k"] = Gemm::kTileK;
    d["gemm_items"] = Gemm::kItems;
    d["gemm_min_split"] = Gemm::kMinSplit;
    d["gemm_blas_work"] = Gemm::kBlasWork;
    d["conv_direct_block"] = Conv::kDirectBlock;
    d["conv_depthwise_pixels"] = Conv::kDepthwisePixels;
    d["batchnorm_block_elements"] = Norm::kBlockElements;
    d["batchnorm_channel_step"] = Norm::kChannelStep;
    d["batchnorm_buffer"] = Norm::kBuffer;
    return d;
  });
  m.def("has_blas", [] { return jaxconv::cpu::HasBlas(); });
#endif
}
