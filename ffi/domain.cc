// cuda/domain.h as functions of numbers: extents are (D, H, W), dtypes and ops are names.
#include "ffi/domain.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "cuda/domain.h"
#include "ffi/wire.h"

namespace nb = nanobind;

namespace jaxconv {
namespace {

using Three = std::array<int64_t, 3>;

DType ToDType(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    if (name == Name(dtype)) return dtype;
  }
  throw std::invalid_argument("unknown dtype " + name);
}

cuda::ConvOp ToConvOp(const std::string& name) {
  if (name == "conv" || name == "conv_fprop") return cuda::ConvOp::kFprop;
  if (name == "conv_add") return cuda::ConvOp::kFpropAdd;
  if (name == "conv_statistics") return cuda::ConvOp::kStatistics;
  if (name == "conv_dgrad") return cuda::ConvOp::kDgrad;
  if (name == "conv_dgrad_add") return cuda::ConvOp::kDgradAdd;
  if (name == "conv_dgrad_sums") return cuda::ConvOp::kDgradSums;
  if (name == "conv_wgrad") return cuda::ConvOp::kWgrad;
  if (name == "conv_normalised") return cuda::ConvOp::kFprop;
  if (name == "conv_normalised_wgrad") return cuda::ConvOp::kWgrad;
  if (name == "conv_normalised_gradient") return cuda::ConvOp::kSums;
  if (name == "conv_normalised_dx") return cuda::ConvOp::kDgrad;
  throw std::invalid_argument("unknown convolution " + name);
}

void Copy(const Three& from, int64_t (&to)[3]) { std::copy(from.begin(), from.end(), to); }

ConvProblem MakeConv(int64_t n, int64_t c, int64_t k, int64_t groups, const Three& in,
                     const Three& filter, const Three& out, const Three& stride, const Three& pad,
                     const Three& dilation, bool channels_last, const std::string& dtype,
                     bool full_float32) {
  ConvProblem p = {};
  p.n = n;
  p.c = c;
  p.k = k;
  p.groups = groups;
  Copy(in, p.in);
  Copy(filter, p.filter);
  Copy(out, p.out);
  Copy(stride, p.stride);
  Copy(pad, p.pad);
  Copy(dilation, p.dilation);
  p.channels_last = channels_last;
  p.dtype = ToDType(dtype);
  p.full_float32 = full_float32;
  return p;
}

BiasKind ToBias(const std::string& name) {
  if (name.empty()) return BiasKind::kNone;
  if (name == "scalar") return BiasKind::kScalar;
  if (name == "row") return BiasKind::kRow;
  if (name == "column") return BiasKind::kColumn;
  throw std::invalid_argument("unknown bias " + name);
}

DenseProblem MakeDense(int64_t batch, int64_t m, int64_t k, int64_t n, bool trans_x, bool trans_w,
                       bool x_batched, bool w_batched, const std::string& bias, bool addend,
                       const std::string& dtype, bool full_float32) {
  DenseProblem p = {};
  p.batch = batch;
  p.m = m;
  p.k = k;
  p.n = n;
  p.trans_x = trans_x;
  p.trans_w = trans_w;
  p.x_batched = x_batched;
  p.w_batched = w_batched;
  p.bias = ToBias(bias);
  p.addend = addend;
  p.dtype = ToDType(dtype);
  p.full_float32 = full_float32;
  return p;
}

cuda::BatchNormOp ToBatchNormOp(const std::string& name) {
  if (name == "batchnorm_train") return cuda::BatchNormOp::kTrain;
  if (name == "batchnorm_infer") return cuda::BatchNormOp::kInfer;
  if (name == "batchnorm_signs") return cuda::BatchNormOp::kSigns;
  if (name == "batchnorm_backward") return cuda::BatchNormOp::kBackward;
  if (name == "batchnorm_dx") return cuda::BatchNormOp::kDx;
  if (name == "batchnorm_moments") return cuda::BatchNormOp::kMoments;
  if (name == "batchnorm_shortcut_backward") return cuda::BatchNormOp::kShortcutBackward;
  throw std::invalid_argument("unknown batch-norm " + name);
}

Activation ToKnown(const std::string& name) {
  const auto known = wire::ToActivation(name);
  if (!known) throw std::invalid_argument("unknown activation " + name);
  return *known;
}

BatchNormProblem MakeBatchNorm(int64_t batch, int64_t outer, int64_t channels, int64_t inner,
                               const std::string& activation, bool residual,
                               const std::string& dtype) {
  BatchNormProblem p = {};
  p.batch = batch;
  p.outer = outer;
  p.channels = channels;
  p.inner = inner;
  p.activation = ToKnown(activation);
  p.residual = residual;
  p.dtype = ToDType(dtype);
  return p;
}

PoolProblem MakePool(int64_t n, int64_t c, const Three& in, const Three& window, const Three& out,
                     const Three& stride, const Three& pad, const Three& dilation,
                     const std::string& dtype) {
  PoolProblem p = {};
  p.n = n;
  p.c = c;
  Copy(in, p.in);
  Copy(window, p.window);
  Copy(out, p.out);
  Copy(stride, p.stride);
  Copy(pad, p.pad);
  Copy(dilation, p.dilation);
  p.dtype = ToDType(dtype);
  return p;
}

GroupNormProblem MakeGroupNorm(int64_t batch, int64_t images, int64_t pixels, int64_t channels,
                               int64_t groups, const std::string& activation,
                               const std::string& dtype) {
  GroupNormProblem p = {};
  p.batch = batch;
  p.images = images;
  p.pixels = pixels;
  p.channels = channels;
  p.groups = groups;
  p.activation = ToKnown(activation);
  p.dtype = ToDType(dtype);
  return p;
}

cuda::GroupNormOp ToGroupNormOp(const std::string& name) {
  if (name == "groupnorm") return cuda::GroupNormOp::kForward;
  if (name == "groupnorm_backward") return cuda::GroupNormOp::kBackward;
  throw std::invalid_argument("unknown group-norm " + name);
}

SqueezeExciteProblem MakeSqueezeExcite(int64_t images, int64_t pixels, int64_t channels,
                                       int64_t hidden, const std::string& dtype) {
  SqueezeExciteProblem p = {};
  p.images = images;
  p.pixels = pixels;
  p.channels = channels;
  p.hidden = hidden;
  p.dtype = ToDType(dtype);
  return p;
}

}  // namespace

void BindDomain(nb::module_& m) {
  nb::class_<ConvProblem>(m, "ConvProblem")
      .def("__init__",
           [](ConvProblem* self, int64_t n, int64_t c, int64_t k, int64_t groups, Three in,
              Three filter, Three out, Three stride, Three pad, Three dilation, bool channels_last,
              std::string dtype, bool full_float32) {
             new (self) ConvProblem(MakeConv(n, c, k, groups, in, filter, out, stride, pad,
                                             dilation, channels_last, dtype, full_float32));
           });
  m.def("conv_refusal",
        [](std::string op, const ConvProblem& p, std::string kernel, std::string tile,
           int64_t splits, int64_t chunk, int major, int minor, int multiprocessors) {
          return cuda::ConvRefusal(ToConvOp(op), p, {kernel, tile, splits, chunk},
                                   {major, minor, multiprocessors});
        });
  m.def("conv_normalised_refusal", [](std::string op, const ConvProblem& p, std::string activation,
                                      std::string kernel, std::string tile, int64_t splits,
                                      int64_t chunk, int major, int minor, int multiprocessors) {
    return cuda::NormalisedRefusal(ToConvOp(op), p, ToKnown(activation),
                                   {kernel, tile, splits, chunk}, {major, minor, multiprocessors});
  });
  m.def("conv_folded", [](const ConvProblem& p, bool dgrad) {
    const ConvProblem q = cuda::ConvFolded(p, dgrad);
    const auto three = [](const int64_t (&from)[3]) { return Three{from[0], from[1], from[2]}; };
    return std::tuple(q.n, q.c, three(q.in), three(q.filter), three(q.out), three(q.stride));
  });
  m.def("conv_workspace", [](std::string op, const ConvProblem& p, std::string kernel,
                             std::string tile, int64_t splits, int64_t chunk) {
    return cuda::ConvWorkspace(ToConvOp(op), p, {kernel, tile, splits, chunk});
  });
  nb::class_<DenseProblem>(m, "DenseProblem")
      .def("__init__", [](DenseProblem* self, int64_t batch, int64_t rows, int64_t k, int64_t n,
                          bool trans_x, bool trans_w, bool x_batched, bool w_batched,
                          std::string bias, bool addend, std::string dtype, bool full_float32) {
        new (self) DenseProblem(MakeDense(batch, rows, k, n, trans_x, trans_w, x_batched, w_batched,
                                          bias, addend, dtype, full_float32));
      });
  m.def("dense_refusal", [](const DenseProblem& p, std::string kernel, std::string tile,
                            int64_t splits, int64_t chunk, int major, int minor,
                            int multiprocessors) {
    return cuda::DenseRefusal(p, {kernel, tile, splits, chunk}, {major, minor, multiprocessors});
  });
  m.def("dense_workspace",
        [](const DenseProblem& p, std::string kernel, std::string tile, int64_t splits,
           int64_t chunk) { return cuda::DenseWorkspace(p, {kernel, tile, splits, chunk}); });
  nb::class_<BatchNormProblem>(m, "BatchNormProblem")
      .def("__init__", [](BatchNormProblem* self, int64_t batch, int64_t outer, int64_t channels,
                          int64_t inner, std::string activation, bool residual, std::string dtype) {
        new (self) BatchNormProblem(
            MakeBatchNorm(batch, outer, channels, inner, activation, residual, dtype));
      });
  m.def("batchnorm_refusal",
        [](std::string op, const BatchNormProblem& p, std::string kernel, std::string tile,
           int64_t splits, int64_t chunk, int major, int minor, int multiprocessors) {
          return cuda::BatchNormRefusal(ToBatchNormOp(op), p, {kernel, tile, splits, chunk},
                                        {major, minor, multiprocessors});
        });
  m.def("batchnorm_workspace",
        [](std::string op, const BatchNormProblem& p, std::string kernel, std::string tile,
           int64_t splits, int64_t chunk, int major, int minor, int multiprocessors) {
          return cuda::BatchNormWorkspace(ToBatchNormOp(op), p, {kernel, tile, splits, chunk},
                                          {major, minor, multiprocessors});
        });
  m.def("batchnorm_vector", [](const BatchNormProblem& p) { return cuda::BatchNormVector(p); });
  m.def("batchnorm_streamed", [](const BatchNormProblem& p) { return cuda::BatchNormStreamed(p); });
  m.def("batchnorm_teams", [](std::string op, const BatchNormProblem& p, int width, int major,
                              int minor, int multiprocessors) {
    const cuda::TeamCount count =
        cuda::BatchNormTeams(ToBatchNormOp(op), p, width, {major, minor, multiprocessors});
    return std::pair(count.ctas, count.groups);
  });
  nb::class_<PoolProblem>(m, "PoolProblem")
      .def("__init__", [](PoolProblem* self, int64_t n, int64_t c, Three in, Three window,
                          Three out, Three stride, Three pad, Three dilation, std::string dtype) {
        new (self) PoolProblem(MakePool(n, c, in, window, out, stride, pad, dilation, dtype));
      });
  m.def("pool_refusal", [](const PoolProblem& p, std::string kernel) {
    return cuda::PoolRefusal(p, {kernel, "", 1, 0});
  });
  m.def("pool_vector", [](const PoolProblem& p) { return cuda::PoolVector(p); });
  nb::class_<GroupNormProblem>(m, "GroupNormProblem")
      .def("__init__",
           [](GroupNormProblem* self, int64_t batch, int64_t images, int64_t pixels,
              int64_t channels, int64_t groups, std::string activation, std::string dtype) {
             new (self) GroupNormProblem(
                 MakeGroupNorm(batch, images, pixels, channels, groups, activation, dtype));
           });
  m.def("groupnorm_refusal",
        [](std::string op, const GroupNormProblem& p, std::string kernel, std::string tile,
           int64_t splits, int64_t chunk, int major, int minor, int multiprocessors) {
          return cuda::GroupNormRefusal(ToGroupNormOp(op), p, {kernel, tile, splits, chunk},
                                        {major, minor, multiprocessors});
        });
  m.def("groupnorm_workspace", [](std::string op, const GroupNormProblem& p, std::string kernel,
                                  std::string tile, int64_t splits, int64_t chunk) {
    return cuda::GroupNormWorkspace(ToGroupNormOp(op), p, {kernel, tile, splits, chunk});
  });
  m.def("groupnorm_unit", [](const GroupNormProblem& p) { return cuda::GroupNormUnit(p); });
  m.def("groupnorm_vector", [](const GroupNormProblem& p) { return cuda::GroupNormVector(p); });
  m.def("groupnorm_rows", [](const GroupNormProblem& p) { return cuda::GroupNormRows(p); });
  nb::class_<SqueezeExciteProblem>(m, "SqueezeExciteProblem")
      .def("__init__", [](SqueezeExciteProblem* self, int64_t images, int64_t pixels,
                          int64_t channels, int64_t hidden, std::string dtype) {
        new (self) SqueezeExciteProblem(MakeSqueezeExcite(images, pixels, channels, hidden, dtype));
      });
  m.def("squeeze_excite_refusal",
        [](const SqueezeExciteProblem& p, std::string kernel, std::string tile, int64_t splits,
           int64_t chunk, int major, int minor, int multiprocessors) {
          return cuda::SqueezeExciteRefusal(p, {kernel, tile, splits, chunk},
                                            {major, minor, multiprocessors});
        });
  m.def("squeeze_excite_vector",
        [](const SqueezeExciteProblem& p) { return cuda::SqueezeExciteVector(p); });
  m.def("squeeze_excite_cta", [](const SqueezeExciteProblem& p, std::string kernel,
                                 std::string tile, int64_t splits, int64_t chunk, int major,
                                 int minor, int multiprocessors) {
    const cuda::SqueezeExciteSize size =
        cuda::SqueezeExciteCta(p, {kernel, tile, splits, chunk}, {major, minor, multiprocessors});
    return std::make_tuple(size.images, size.steps, size.held, size.bytes);
  });
  m.def("shared_memory",
        [](int major, int minor) { return cuda::Device{major, minor}.shared_memory(); });
}

}  // namespace jaxconv
