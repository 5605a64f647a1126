// The table of ops, and the one handler that all of them have: buffers and attributes -> problem, confirmed -> launcher.
// Compiled for both platforms, with JAXCONV_BACKEND = cpu and = cuda. A handler allocates nothing on a device, never
// synchronises and never throws, so a captured CUDA graph may hold it.

#include "ffi/handlers.h"

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>
#ifdef __SANITIZE_THREAD__
#include <functional>
#include <thread>
#endif

#include "common/launch.h"
#include "ffi/problems.h"

#ifdef JAXCONV_CUDA
#include "cuda/core/context.h"
#else
#include "cpu/context.h"
#endif

namespace jaxconv::JAXCONV_BACKEND {
namespace {

namespace ffi = xla::ffi;
using handler::Call;
using handler::Signature;

#ifdef JAXCONV_CUDA
using PlatformContext = ffi::PlatformStream<cudaStream_t>;
using ContextArg = cudaStream_t;
// An error that somebody else's call left on this thread is not the next launch's.
Context MakeContext(cudaStream_t stream) {
  (void)cudaGetLastError();
  return Context{stream};
}
#define JAXCONV_TRAITS {ffi::Traits::kCmdBufferCompatible}
#else
using PlatformContext = ffi::ThreadPool;
using ContextArg = ffi::ThreadPool;
Context MakeContext(ffi::ThreadPool pool) {
#ifdef __SANITIZE_THREAD__
  // XLA's pool is not instrumented: ThreadSanitizer would not see that a task starts after it was
  // handed over. Threads of our own, several also where the machine has one core.
  return Context{4, [](std::function<void()> task) { std::thread(std::move(task)).detach(); }};
#endif
  return Context{std::max<int64_t>(1, pool.num_threads()),
                 [pool](std::function<void()> task) mutable { pool.Schedule(std::move(task)); }};
}
#define JAXCONV_TRAITS \
  {                    \
  }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The handler of a row. `Op` has Reader (problems.h), Name(), Operands(), Results() and Launcher().

template <typename Which>
struct ReadBy {
  using Reader = Which;
};

// Of a launcher, the arrays that it takes.
template <typename... Args>
std::tuple_element_t<sizeof...(Args) - 2, std::tuple<std::decay_t<Args>...>> TakenBy(
    Status (*)(Args...));
template <typename Op>
using ArraysOf = decltype(TakenBy(Op::Launcher()));

template <typename Op>
constexpr Signature MakeSignature() {
  Signature signature;
  signature.Append(Op::Operands(), false, Op::Reader::kRules);
  signature.Append(Op::Results(), true, Op::Reader::kRules);
  return signature;
}
template <typename Op>
constexpr Signature kSignature = MakeSignature<Op>();

// Whether the launcher takes every operand and every result.
template <typename... Roles>
constexpr bool Takes(const Signature& signature, Arrays<Roles...>*) {
  size_t found = 0;
  ((found += signature.Find(Roles::kName, Roles::kResult) < signature.size ? 1 : 0), ...);
  return found == signature.size;
}

template <typename Op, typename Role>
constexpr size_t kIndex = kSignature<Op>.Find(Role::kName, Role::kResult);

// Those that the row does not have, or the call not, are null.
template <typename Op, typename... Roles>
Arrays<Roles...> Gather(const Call& call, Arrays<Roles...>*) {
  return Arrays<Roles...>(Roles(call.Data(kIndex<Op, Roles>))...);
}

template <typename Op, typename Attributes, size_t... i>
Status Run(ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
           const Attributes& attributes, std::index_sequence<i...>) {
  Call call(Op::Name(), kSignature<Op>, args, rets);
  typename Op::Reader reader(std::get<i>(attributes)...);
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(reader.Begin(call));
  JAXCONV_RETURN_IF_ERROR(call.Open(reader.given));
  JAXCONV_RETURN_IF_ERROR(reader.Read(call));
  JAXCONV_RETURN_IF_ERROR(handler::ToPlan(call, std::get<sizeof...(i)>(attributes), &plan));
  JAXCONV_RETURN_IF_ERROR(call.Confirm(reader));
  JAXCONV_RETURN_IF_ERROR(reader.End(call));
  const auto arrays = Gather<Op>(call, static_cast<ArraysOf<Op>*>(nullptr));
  return std::apply(
      [&](const auto&... problems) {
        return Op::Launcher()(MakeContext(context), problems..., plan, arrays, call.Scratch());
      },
      reader.Problems());
}

// A Status becomes an ffi::Error here and nowhere else, and the host's allocator, which alone throws, is caught.
template <typename Op>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      Op::Reader::Bind(ffi::Ffi::Bind().Ctx<PlatformContext>().RemainingArgs().RemainingRets())
          .To(
              [](ContextArg context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 const auto&... attributes) {
                try {
                  return wire::ToFfi(
                      Run<Op>(context, args, rets, std::tie(attributes...),
                              std::make_index_sequence<sizeof...(attributes) - 1>()));
                } catch (const std::bad_alloc&) {
                  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of host memory");
                }
              },
              JAXCONV_TRAITS)
          .release();
  return handler->Call(frame);
}

// Version 1 named a plan's algorithm where version 2 names its kernel. Version 2 of conv_scaled had no shortcut.
XLA_FFI_DEFINE_HANDLER(
    kOlderRefused,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
      return ffi::Error(
          ffi::ErrorCode::kUnimplemented,
          "this program was exported with an older jaxconv, whose calls this version no "
          "longer has: export it again (jax.export) with the installed jaxconv");
    },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

template <typename Op>
Row MakeRow(const std::string& op) {
  static_assert(Takes(kSignature<Op>, static_cast<ArraysOf<Op>*>(nullptr)),
                "a role of the row is none of its launcher's");
  return {"jaxconv_" + op + "_v2", Handle<Op>, Op::Operands(), Op::Results()};
}

[[maybe_unused]] Row Third(Row row) {
  row.target.back() = '3';
  return row;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The table: what the target is called after, the name in errors, the reader, the launcher, operands, results.

#define JAXCONV_NAMED(op, name, reader, launcher, operands, results) \
  [] {                                                               \
    struct Op : ReadBy<handler::reader> {                            \
      static constexpr const char* Name() { return name; }           \
      static constexpr const char* Operands() { return operands; }   \
      static constexpr const char* Results() { return results; }     \
      static constexpr auto Launcher() { return &launcher; }         \
    };                                                               \
    return MakeRow<Op>(op);                                          \
  }()
#define JAXCONV_OP(op, ...) JAXCONV_NAMED(op, op, __VA_ARGS__)

// clang-format off
const std::vector<Row>& Rows() {
  static const std::vector<Row>* const rows = new std::vector<Row>{
      // The bare fprop and the fused conv are one, as matmul and dense are: the epilogue says what follows.
      JAXCONV_NAMED("conv", "conv_fprop", Fprop, ConvFprop, "x w b?", "y z?"),
      JAXCONV_OP("conv_fprop", Fprop, ConvFprop, "x w b?", "y z?"),
      JAXCONV_OP("conv_integer", IntegerConv, ConvInteger, "x w", "y"),
      JAXCONV_OP("conv_add", Fprop, ConvFprop, "x w b? residual", "y z?"),
      JAXCONV_OP("conv_statistics", Statistics, ConvStatistics, "x w", "y mean var"),
      JAXCONV_OP("conv_add_statistics", AddStatistics, ConvStatistics, "x w b? residual?", "y mean var"),
      JAXCONV_OP("conv_dgrad", Conv, ConvDgrad, "dy w", "dx"),
      JAXCONV_OP("conv_dgrad_add", Conv, ConvDgrad, "dy w c", "dx"),
      JAXCONV_OP("conv_wgrad", Conv, ConvWgrad, "x dy", "dw"),
      JAXCONV_OP("conv_normalised", Normalised, ConvNormalised, "x w scale bias mean var", "y"),
      JAXCONV_OP("conv_normalised_wgrad", Normalised, ConvNormalisedWgrad, "x dy scale bias mean var", "dw"),
      JAXCONV_OP("conv_normalised_gradient", Normalised, ConvNormalisedGradient,
                 "x dy w scale bias mean var", "dw dscale dbias"),
      JAXCONV_OP("conv_normalised_dx", NormalisedDx, ConvNormalisedDx,
                 "x dy w scale bias mean var dscale dbias", "dx"),
      JAXCONV_OP("dense", Dense, Dense, "x w b? c?", "y z?"),
      JAXCONV_NAMED("matmul", "dense", Dense, Dense, "x w b? c?", "y z?"),
      JAXCONV_OP("batchnorm_train", Norm, BatchNormTrain,
                 "x scale bias running_mean running_var residual?", "y new_mean new_var mean rstd"),
      JAXCONV_OP("batchnorm_infer", Norm, BatchNormInfer, "x scale bias mean var residual?", "y"),
      JAXCONV_OP("batchnorm_moments", Norm, BatchNormMoments, "x", "k shift var"),
      JAXCONV_OP("batchnorm_backward", NormBackward, BatchNormBackward,
                 "x dy scale bias mean rstd residual?", "dscale dbias dx? dresidual?"),
      JAXCONV_OP("batchnorm_dx", NormDx, BatchNormDx,
                 "x dy scale bias mean rstd dscale dbias residual?", "dx"),
      JAXCONV_OP("max_pool", Pool, MaxPool, "x", "y position?"),
      JAXCONV_OP("max_pool_backward", Pool, MaxPoolBackward, "position dy", "dx"),
      JAXCONV_OP("avg_pool", AvgPool, AvgPool, "x", "y"),
      JAXCONV_OP("avg_pool_backward", AvgPool, AvgPoolBackward, "dy", "dx"),
      JAXCONV_OP("groupnorm", Group, GroupNorm, "x scale bias", "y mean rstd"),
      JAXCONV_OP("groupnorm_backward", GroupBackward, GroupNormBackward,
                 "x dy scale bias mean rstd", "dscale dbias dx?"),
      JAXCONV_OP("squeeze_excite", Squeeze, SqueezeExcite, "x w1 b1 w2 b2", "y mean z1 gate"),
      JAXCONV_OP("squeeze_excite_backward", SqueezeBackward, SqueezeExciteBackward,
                 "x dy w1 w2 z1 gate", "dz2 dz1 dx?"),
#if JAXCONV_ON_GPUS
      Third(JAXCONV_OP("conv_scaled", ScaledConv, ConvScaled,
                       "x w scale? b? residual? residual_scale? out_scale? x2? w2?", "y")),
      JAXCONV_OP("conv_normalised_statistics", NormalisedStatistics, ConvNormalisedStatistics,
                 "x w scale bias mean var", "y new_mean new_var"),
      JAXCONV_OP("conv_pooled", PooledConv, ConvPooled, "x w b?", "y"),
      JAXCONV_OP("conv_shortcut", ShortcutConv, ConvShortcut, "x w b? x2 w2", "y"),
      JAXCONV_OP("conv_dgrad_sums", DgradSums, ConvDgradSums, "dy w c signs x mean rstd", "dz dscale dbias"),
      JAXCONV_OP("conv_gradient", ConvGradient, ConvGradient, "dy w kept", "dz dbias"),
      JAXCONV_OP("conv_gradient_add", ConvGradient, ConvGradient, "dy w kept c", "dz dbias"),
      JAXCONV_OP("conv_norm_gradient", ConvNormGradient, ConvNormGradient,
                 "dy w x scale bias mean rstd", "dz dscale dbias"),
      JAXCONV_OP("dense_gradient", DenseGradient, DenseGradient, "dy w kept", "dz db"),
      JAXCONV_OP("dense_gated", DenseGated, DenseGated, "x w b?", "y z?"),
      JAXCONV_OP("dense_gated_gradient", DenseGatedGradient, DenseGatedGradient, "dy w kept", "dz db"),
      JAXCONV_OP("batchnorm_signs", Norm, BatchNormSigns, "x scale bias mean var residual?", "y signs"),
      JAXCONV_OP("batchnorm_backward_add", Norm, BatchNormBackwardAdd,
                 "x dy scale bias mean rstd c", "dscale dbias dx"),
      JAXCONV_OP("batchnorm_shortcut_backward", Norm, BatchNormShortcutBackward,
                 "x dy scale bias mean rstd r scale_r bias_r mean_r rstd_r", "dscale dbias dscale_r dx dr"),
      {"jaxconv_conv_scaled_v2", kOlderRefused},
#endif
      {"jaxconv_conv_v1", kOlderRefused},
      {"jaxconv_conv_fprop_v1", kOlderRefused},
      {"jaxconv_conv_statistics_v1", kOlderRefused},
      {"jaxconv_conv_dgrad_v1", kOlderRefused},
      {"jaxconv_conv_dgrad_add_v1", kOlderRefused},
      {"jaxconv_conv_wgrad_v1", kOlderRefused},
      {"jaxconv_dense_v1", kOlderRefused},
      {"jaxconv_matmul_v1", kOlderRefused},
      {"jaxconv_batchnorm_train_v1", kOlderRefused},
      {"jaxconv_batchnorm_infer_v1", kOlderRefused},
      {"jaxconv_batchnorm_backward_v1", kOlderRefused},
  };
  return *rows;
}
// clang-format on

}  // namespace jaxconv::JAXCONV_BACKEND
