// The problems as native code sees them: canonical numbers, confirmed by ffi/ before a
// launcher gets them. Shape rules live in jaxconv/_problem; here they are only restated as the
// equations the handler confirms.
//
// Bounds, also confirmed by ffi/, so that 64-bit arithmetic behind it does not overflow and loops end: the extents of any
// array that are not 0 have a product of at most kMaxElements; stride, dilation and pads are at most kMaxStep in size; the
// filter has elements, so its taps are in memory; and x and y, with one axis as long as all that a window steps over
// there (in + out + pads + stride + dilated filter), would have at most kMaxSpanned elements; nor does a convolution sum up
// more than kMaxProducts products.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/gating.h"

namespace jaxconv {

inline constexpr int64_t kMaxElements = int64_t{1} << 60;
inline constexpr int64_t kMaxSpanned = int64_t{1} << 62;
inline constexpr int64_t kMaxProducts = int64_t{1} << 62;
inline constexpr int64_t kMaxStep = (int64_t{1} << 31) - 1;

// ---------------------------------------------------------------------------------------------------------------------
// Convolution (cross-correlation, as lax):
//
//   y[n, o, k] = sum over taps t and channels c of  x[n, o*stride - pad + t*dilation, g(k)*C/G + c]
//   * w[t, c, k]
//
// with o, t in up to three spatial dimensions. A 1-D or 2-D problem has leading extents of 1
// (stride 1, pad 0, dilation 1), so index [2] is always the fastest (W), [1] is H, [0] is D.
struct ConvProblem {
  int64_t n;            // batch
  int64_t c;            // input channels, all groups
  int64_t k;            // output channels, all groups
  int64_t groups;       // divides c and k
  int64_t in[3];        // D H W of x
  int64_t filter[3];    // T R S of w
  int64_t out[3];       // O P Q of y
  int64_t stride[3];    // >= 1
  int64_t pad[3];       // low side; may be negative (cropping). The high side is implied by `out`
  int64_t dilation[3];  // >= 1
  bool channels_last;   // in memory: x (N,D,H,W,C), w (T,R,S,C/G,K), y (N,O,P,Q,K)
                        // otherwise:  x (N,C,D,H,W), w (K,C/G,T,R,S), y (N,K,O,P,Q)
  DType dtype;          // of x, w, y, bias, z alike
  bool full_float32;    // float32 products must not be rounded to TF32 (precision HIGHEST)

  int64_t in_size() const { return in[0] * in[1] * in[2]; }                  // D*H*W
  int64_t filter_size() const { return filter[0] * filter[1] * filter[2]; }  // T*R*S
  int64_t out_size() const { return out[0] * out[1] * out[2]; }              // O*P*Q
  int64_t group_c() const { return c / groups; }
  int64_t group_k() const { return k / groups; }

  // Whether axis d is padded on both sides by 0 to below the reach of the filter, dilated: every window's span meets the
  // array, and the last one reaches its end but for what the stride leaves over.
  bool padded_below_filter(int d) const {
    const int64_t reach = (filter[d] - 1) * dilation[d] + 1;
    return pad[d] >= 0 && pad[d] < reach && (out[d] - 1) * stride[d] - pad[d] < in[d] &&
           in[d] + pad[d] < out[d] * stride[d] + reach;
  }
  // Whether axis d is cut into windows that touch and do not overlap (a single tap: whether it is left alone).
  bool steps_by_filter(int d) const {
    return filter[d] == stride[d] && pad[d] == 0 && (filter[d] == 1 || dilation[d] == 1) &&
           in[d] == out[d] * filter[d];
  }
};

// Integer convolution, as lax.conv_general_dilated has it, in any order of axes. With z the array x whose neighbours are
// x_dilation apart (0 between them), and group g(k) = k / (K / (groups * batch_groups)):
//
//   y[n, o, k] = sum over taps t and channels c of  z[g_n * N + n, o*stride - pad + t*w_dilation, g_c * C + c] * w[t, c, k]
//
// g_n is g where there are batch groups, g_c where there are groups, else 0. Sums wrap around in y's type, to which x and w
// are converted first: both are exact modulo 2^bits, so any wider sum cut off is the same. Axes are as in ConvProblem; steps
// are in elements.
struct IntegerConvProblem {
  int64_t n;                       // of y; x has batch_groups times as many images
  int64_t c;                       // channels of a group: of w
  int64_t k;                       // output channels, all groups
  int64_t groups;                  // of channels; 1 where there are batch groups
  int64_t batch_groups;            // of images
  int64_t in[3];                   // D H W of x
  int64_t filter[3];               // T R S of w
  int64_t out[3];                  // O P Q of y
  int64_t stride[3];               // >= 1
  int64_t pad[3];                  // low side; may be negative
  int64_t x_dilation[3];           // >= 1
  int64_t w_dilation[3];           // >= 1
  int64_t x_n, x_c, x_at[3];       // x's steps along N, C and D H W
  int64_t w_k, w_c, w_at[3];       // w's along K, C and T R S
  int64_t y_n, y_k, y_at[3];       // y's along N, K and O P Q
  Integer x_type, w_type, y_type;  // those of x and w are one, or both of 8 bits

  JAXCONV_HD int64_t all_groups() const { return groups * batch_groups; }
  JAXCONV_HD int64_t group_k() const { return k / all_groups(); }
  int64_t out_size() const { return out[0] * out[1] * out[2]; }              // O*P*Q
  int64_t filter_size() const { return filter[0] * filter[1] * filter[2]; }  // T*R*S
  int64_t x_size(int d) const { return (in[d] - 1) * x_dilation[d] + 1; }    // of x, dilated
  int64_t w_size(int d) const { return (filter[d] - 1) * w_dilation[d] + 1; }
};

// A convolution of 8-bit numbers, and what follows its sums, int32 of integers (which wrap around) and float32 of float8:
//
//   v = float32(sum) * scale[k] + bias[k] + float32(residual) * residual_scale;  y = narrow(f(v) * out_scale)
//
// in float32, from the left to the right, each operation rounded by itself. A bias of int32 is added to the sum of integers
// instead: v = float32(sum + bias[k]) * scale[k] + ... narrow is y's type: of 8 bits rounded to nearest even and saturated, NaN
// 0 in integers. y of int32 is the sum. In memory x, y and the residual are channels last, w is (K, T, R, S, C/G).
//
// With a shortcut the sum is conv(x, w) + shortcut(x2, w2): a convolution of one tap and one group, without padding, which makes
// y's pixels and channels too. x2 has x's type, w2 has w's.
struct ScaledConvProblem {
  ConvProblem conv;  // channels_last; its dtype means nothing
  Number x_type, w_type, y_type;
  bool scale, bias, residual, residual_scale, out_scale;  // which are given
  Number bias_type, residual_type;                        // of those that are given
  bool has_shortcut;
  ConvProblem shortcut;
  Activation activation;
  double slope;
};

// What follows the sum in fprop: z = sum + bias[k]; y = f(z).
struct Epilogue {
  bool bias;
  Activation activation;
  double slope;             // leaky_relu
  bool save_preactivation;  // also write z, in dtype
};

// ---------------------------------------------------------------------------------------------------------------------
// Dense: for each of `batch` instances  z = alpha * op(x) @ op(w) + beta * c + bias;  y = f(z).
enum class BiasKind : int32_t { kNone, kScalar, kRow, kColumn };

struct DenseProblem {
  int64_t batch;    // instances (vmap); 1 otherwise
  int64_t m, k, n;  // op(x) is (M, K), op(w) is (K, N), y is (M, N); all row-major
  bool trans_x;     // x is stored (K, M)
  bool trans_w;     // w is stored (N, K)
  bool x_batched, w_batched, c_batched,
      bias_batched;  // false: the operand has no instance axis and is shared
  BiasKind bias;     // kScalar: 1 element; kRow: M; kColumn: N
  bool addend;       // c is given
  double alpha, beta;
  DType dtype;
  bool full_float32;  // as in ConvProblem
};

// ---------------------------------------------------------------------------------------------------------------------
// Batch-norm over a contiguous array seen as (batch, outer, channels, inner): statistics per
// (batch, channel) over outer and inner. channels-last has inner == 1, channels-first has outer ==
// N.
//
//   mean, var = over outer*inner elements (biased, two-pass or shifted: never E[x^2] - E[x]^2);
//   rstd = 1/sqrt(var + eps) z = (x - mean) * rstd * scale + bias (+ residual);  y = f(z)
//   new_running = momentum * running + (1 - momentum) * statistic
struct BatchNormProblem {
  int64_t batch;
  int64_t outer, channels, inner;
  double momentum, epsilon;
  Activation activation;
  double slope;
  bool residual;
  DType dtype;  // of x, y, dy, dx, residual. Parameters and statistics are float64 for float64,
                // else float32

  int64_t reduced() const { return outer * inner; }  // elements per channel
};

// ---------------------------------------------------------------------------------------------------------------------
// Max-pooling of x (N,D,H,W,C) to y (N,O,P,Q,C), channels last in memory; axes and bounds are a convolution's:
//
//   y[n, o, c] = max over taps t of  x[n, o*stride - pad + t*dilation, c],  -inf where that is padding
//   position[n, o, c] = the tap, counted row by row through the window, that the maximum is taken from
//
// A tap takes the place of those before it unless one of them is at least as large: of equal ones the first is the
// maximum, -0 and +0 are equal, and what follows a NaN takes its place. y is NaN where a tap is.
struct PoolProblem {
  int64_t n, c;
  int64_t in[3];        // D H W of x
  int64_t window[3];    // T R S
  int64_t out[3];       // O P Q of y
  int64_t stride[3];    // >= 1
  int64_t pad[3];       // low side, >= 0
  int64_t dilation[3];  // >= 1
  DType dtype;          // of x, y, dy, dx; positions are uint8

  int64_t in_size() const { return in[0] * in[1] * in[2]; }
  int64_t taps() const { return window[0] * window[1] * window[2]; }
  int64_t out_size() const { return out[0] * out[1] * out[2]; }
};

inline constexpr int64_t kMaxPoolTaps = 255;  // of a window: positions are bytes

// What a convolution with a max-pooling behind it reads and makes, beside a filter and what is pooled, of the problem's dtype.
struct PooledTypes {
  Number x;  // the dtype; beside one of 16 bits also float32, which is rounded to it
  // The dtype; or int8, uint8: float32(what is pooled) * scale, rounded to nearest even and saturated, NaN 0.
  Number y;
  float scale;  // positive
};

// Average-pooling, of the same axes:
//
//   y[n, o, c] = (sum over taps t of  x[n, o*stride - pad + t, c]) / count[o],  0 where that is padding
//
// The count is that of all taps, or of the taps that are no padding; y is NaN where there are none. No window is dilated.
struct AvgPoolProblem : PoolProblem {
  bool count_include_pad;
};

inline constexpr int64_t kMaxAvgPoolTaps = int64_t{1} << 24;  // float32 counts them exactly

// Group-norm over a contiguous array seen as (batch, images, pixels, channels): statistics per (batch, image, group), a
// group being channels / groups neighbouring channels, over the pixels and the group's channels. Layer-norm is that of
// images of one pixel and one group.
//
//   mean, var = over pixels * group_channels elements (biased, never E[x^2] - E[x]^2 of raw sums); rstd = 1/sqrt(var + eps)
//   z = (x - mean) * rstd * scale[channel] + bias[channel];  y = f(z)
struct GroupNormProblem {
  int64_t batch;  // instances (vmap), each with a scale and a bias; 1 otherwise
  int64_t images, pixels, channels;
  int64_t groups;  // divides channels
  double epsilon;
  Activation activation;
  double slope;
  DType dtype;  // of x, y, dy, dx. Parameters and statistics are float64 for float64, else float32

  int64_t group_channels() const { return channels / groups; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Squeeze-and-excitation over an array (images, pixels, channels):
//
//   mean[n, c] = of x[n, :, c];  z1 = mean @ w1 + b1 (images, hidden);  gate = g(f(z1) @ w2 + b2) (images, channels)
//   y = x * gate
struct SqueezeExciteProblem {
  int64_t images, pixels, channels;
  int64_t hidden;
  Activation activation;  // f
  double slope;
  Gating gating;  // g
  DType dtype;    // of x, y, dy, dx. Everything else is float64 for float64, else float32
};

}  // namespace jaxconv
