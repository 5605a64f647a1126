// Convolution as the formula says it, for any problem: each output element (of y, dx or dw) is one
// sum, taken in float64 and rounded once. No scratch, no packing; the parallel items are
// independent outputs.
//
//   fprop  y[n, o, k]   = sum over t, ci of      x[n, i(o, t), ci] * w[t, ci, k]
//   dgrad  dx[n, i, ci] = sum over t, k of       dy[n, o(i, t), k] * w[t, ci, k]     where o*stride
//   reaches i through t wgrad  dw[t, ci, k] = sum over n, o of       x[n, i(o, t), ci] * dy[n, o,
//   k]
//
// A block of up to kBlock neighbours in memory is summed at a time, so that the innermost loop runs
// along memory: channels in channels-last arrays, the width (or, for dw, partial sums over the
// width) in channels-first ones.
#include "cpu/conv.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

constexpr int64_t kBlock = ConvShape::kDirectBlock;

// sum[i] += scale * values[i * step]
template <typename T>
JAXCONV_MULTIVERSION void AddScaled(int64_t count, T scale, const T* values, int64_t step,
                                    double* sum) {
  if (step == 1) {
    for (int64_t i = 0; i < count; ++i) sum[i] += double(scale) * double(values[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) sum[i] += double(scale) * double(values[i * step]);
  }
}

// sum[i] += a[i * a_step] * b[i]
template <typename T>
JAXCONV_MULTIVERSION void AddProducts(int64_t count, const T* a, int64_t a_step, const T* b,
                                      double* sum) {
  if (a_step == 1) {
    for (int64_t i = 0; i < count; ++i) sum[i] += double(a[i]) * double(b[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) sum[i] += double(a[i * a_step]) * double(b[i]);
  }
}

// Calls visit(tap, t, r, s) for every tap.
template <typename Visit>
void ForEachTap(const ConvProblem& p, const Visit& visit) {
  int64_t tap = 0;
  for (int64_t t = 0; t < p.filter[0]; ++t) {
    for (int64_t r = 0; r < p.filter[1]; ++r) {
      for (int64_t s = 0; s < p.filter[2]; ++s) visit(tap++, t, r, s);
    }
  }
}

Range Intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace

template <typename T>
Status DirectFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                   const T* w, const T* bias, const T* residual, T* y, T* z) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const FilterStrides ws = WStrides(p);
  const int64_t cg = p.group_c(), kg = p.group_k();
  // Rounds a block of sums to y, whose neighbours are `step` biases apart.
  auto finish = [&](int64_t count, const double* sum, int64_t k, bool same_channel,
                    int64_t output) {
    T* to = y + output;
    for (int64_t i = 0; i < count; ++i) {
      const double b = bias == nullptr ? 0.0 : double(bias[same_channel ? k : k + i]);
      to[i] = static_cast<T>(sum[i] + b);
    }
    FinishInPlace(e, count, to, z == nullptr ? nullptr : z + output,
                  residual == nullptr ? nullptr : residual + output);
  };
  if (p.channels_last) {
    // One item: the pixels of one output row.
    ParallelFor(ctx, p.n * p.out[0] * p.out[1], [&](int64_t item) {
      const int64_t n = item / (p.out[0] * p.out[1]), o = item / p.out[1] % p.out[0];
      const int64_t row = item % p.out[1];
      double sum[kBlock];
      for (int64_t q = 0; q < p.out[2]; ++q) {
        for (int64_t g = 0; g < p.groups; ++g) {
          for (int64_t k0 = g * kg; k0 < (g + 1) * kg; k0 += kBlock) {
            const int64_t count = std::min((g + 1) * kg - k0, kBlock);
            std::fill(sum, sum + count, 0.0);
            ForEachTap(p, [&](int64_t tap, int64_t t, int64_t r, int64_t s) {
              const int64_t d = InputAt(p, 0, o, t), h = InputAt(p, 1, row, r);
              const int64_t v = InputAt(p, 2, q, s);
              if (!Inside(p, 0, d) || !Inside(p, 1, h) || !Inside(p, 2, v)) return;
              const T* from = x + n * xs.n + d * xs.d[0] + h * xs.d[1] + v * xs.d[2] + g * cg;
              const T* filter = w + tap * ws.tap + k0;
              for (int64_t ci = 0; ci < cg; ++ci) {
                AddScaled(count, from[ci], filter + ci * ws.c, 1, sum);
              }
            });
            finish(count, sum, k0, false,
                   n * ys.n + o * ys.d[0] + row * ys.d[1] + q * ys.d[2] + k0);
          }
        }
      }
    });
  } else {
    // One item: one output channel's row.
    ParallelFor(ctx, p.n * p.k * p.out[0] * p.out[1], [&](int64_t item) {
      const int64_t row = item % p.out[1], o = item / p.out[1] % p.out[0];
      const int64_t k = item / p.out[1] / p.out[0] % p.k, n = item / p.out[1] / p.out[0] / p.k;
      double sum[kBlock];
      for (int64_t q0 = 0; q0 < p.out[2]; q0 += kBlock) {
        const Range block{q0, std::min(q0 + kBlock, p.out[2])};
        std::fill(sum, sum + kBlock, 0.0);
        ForEachTap(p, [&](int64_t tap, int64_t t, int64_t r, int64_t s) {
          const int64_t d = InputAt(p, 0, o, t), h = InputAt(p, 1, row, r);
          const Range q = Intersect(block, OutputsReached(p, 2, s));
          if (!Inside(p, 0, d) || !Inside(p, 1, h) || q.begin == q.end) return;
          const T* from = x + n * xs.n + k / kg * cg * xs.c + d * xs.d[0] + h * xs.d[1] +
                          InputAt(p, 2, q.begin, s);
          const T* filter = w + k * ws.k + tap;
          for (int64_t ci = 0; ci < cg; ++ci) {
            AddScaled(q.end - q.begin, filter[ci * ws.c], from + ci * xs.c, p.stride[2],
                      sum + (q.begin - q0));
          }
        });
        finish(block.end - block.begin, sum, k, true,
               n * ys.n + k * ys.c + o * ys.d[0] + row * ys.d[1] + q0);
      }
    });
  }
  return Status::Ok();
}

template <typename T>
Status DirectDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const FilterStrides ws = WStrides(p);
  const int64_t cg = p.group_c(), kg = p.group_k();
  // One item: one row of dx, of all channels (channels-last) or of one.
  const int64_t planes = p.channels_last ? 1 : p.c;
  ParallelFor(ctx, p.n * planes * p.in[0] * p.in[1], [&](int64_t item) {
    const int64_t h = item % p.in[1], d = item / p.in[1] % p.in[0];
    const int64_t c = item / p.in[1] / p.in[0] % planes, n = item / p.in[1] / p.in[0] / planes;
    T* to = dx + n * xs.n + c * xs.c + d * xs.d[0] + h * xs.d[1];
    double sum[kBlock];
    for (int64_t v = 0; v < p.in[2] && p.channels_last; ++v) {
      for (int64_t g = 0; g < p.groups; ++g) {
        for (int64_t ci = 0; ci < cg; ci += kBlock) {
          const int64_t count = std::min(cg - ci, kBlock);
          std::fill(sum, sum + count, 0.0);
          ForEachTap(p, [&](int64_t tap, int64_t t, int64_t r, int64_t s) {
            const int64_t o = OutputOver(p, 0, d, t), row = OutputOver(p, 1, h, r);
            const int64_t q = OutputOver(p, 2, v, s);
            if (o < 0 || row < 0 || q < 0) return;
            const T* from = dy + n * ys.n + o * ys.d[0] + row * ys.d[1] + q * ys.d[2] + g * kg;
            const T* filter = w + tap * ws.tap + ci * ws.c + g * kg;
            for (int64_t k = 0; k < kg; ++k) AddScaled(count, from[k], filter + k, ws.c, sum);
          });
          for (int64_t i = 0; i < count; ++i)
            to[v * p.c + g * cg + ci + i] = static_cast<T>(sum[i]);
        }
      }
    }
    for (int64_t v0 = 0; v0 < p.in[2] && !p.channels_last; v0 += kBlock) {
      const int64_t g = c / cg, ci = c % cg, count = std::min(p.in[2] - v0, kBlock);
      std::fill(sum, sum + count, 0.0);
      ForEachTap(p, [&](int64_t tap, int64_t t, int64_t r, int64_t s) {
        const int64_t o = OutputOver(p, 0, d, t), row = OutputOver(p, 1, h, r);
        if (o < 0 || row < 0) return;
        // q reaches v = q*stride + first, which lies in the block.
        const int64_t stride = p.stride[2], first = InputAt(p, 2, 0, s);
        const int64_t begin = std::clamp<int64_t>(CeilDiv(v0 - first, stride), 0, p.out[2]);
        const int64_t end = std::clamp<int64_t>(CeilDiv(v0 + count - first, stride), 0, p.out[2]);
        const T* from = dy + n * ys.n + g * kg * ys.c + o * ys.d[0] + row * ys.d[1];
        const T* filter = w + g * kg * ws.k + ci * ws.c + tap;
        double* into = sum + (first - v0);  // dx at q is into[q * stride]
        for (int64_t k = 0; k < kg && begin < end; ++k) {
          if (stride == 1) {
            AddScaled(end - begin, filter[k * ws.k], from + k * ys.c + begin, 1, into + begin);
          } else {
            const double weight = filter[k * ws.k];
            for (int64_t q = begin; q < end; ++q)
              into[q * stride] += weight * double(from[k * ys.c + q]);
          }
        }
      });
      for (int64_t i = 0; i < count; ++i) to[v0 + i] = static_cast<T>(sum[i]);
    }
  });
  return Status::Ok();
}

template <typename T>
Status DirectWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const FilterStrides ws = WStrides(p);
  const int64_t cg = p.group_c(), kg = p.group_k(), taps = p.filter_size();
  // One item: one tap and channel of the filters, of all outputs (channels-last) or of one.
  const int64_t planes = p.channels_last ? 1 : p.k;
  ParallelFor(ctx, taps * cg * planes, [&](int64_t item) {
    const int64_t tap = item % taps, ci = item / taps % cg, plane = item / taps / cg;
    const int64_t s = tap % p.filter[2], r = tap / p.filter[2] % p.filter[1];
    const int64_t t = tap / p.filter[2] / p.filter[1];
    const Range q = OutputsReached(p, 2, s);
    T* to = dw + tap * ws.tap + ci * ws.c;
    double sum[kBlock];
    // Calls add(x at the first pixel, dy at the first pixel) for every row of outputs that this tap
    // reaches.
    auto for_each_row = [&](const auto& add) {
      for (int64_t n = 0; n < p.n; ++n) {
        for (int64_t o = 0; o < p.out[0]; ++o) {
          for (int64_t row = 0; row < p.out[1]; ++row) {
            const int64_t d = InputAt(p, 0, o, t), h = InputAt(p, 1, row, r);
            if (!Inside(p, 0, d) || !Inside(p, 1, h) || q.begin == q.end) continue;
            add(x + n * xs.n + d * xs.d[0] + h * xs.d[1] + InputAt(p, 2, q.begin, s) * xs.d[2] +
                    ci * xs.c,
                dy + n * ys.n + o * ys.d[0] + row * ys.d[1] + q.begin * ys.d[2]);
          }
        }
      }
    };
    if (p.channels_last) {
      for (int64_t k0 = 0, count; k0 < p.k; k0 += count) {
        const int64_t g = k0 / kg;
        count = std::min((g + 1) * kg - k0, kBlock);
        std::fill(sum, sum + count, 0.0);
        for_each_row([&](const T* x_row, const T* dy_row) {
          for (int64_t i = 0; i < q.end - q.begin; ++i) {
            AddScaled(count, x_row[i * p.stride[2] * xs.d[2] + g * cg], dy_row + i * ys.d[2] + k0,
                      1, sum);
          }
        });
        for (int64_t i = 0; i < count; ++i) to[k0 + i] = static_cast<T>(sum[i]);
      }
    } else {
      const int64_t k = plane, g = k / kg;
      std::fill(sum, sum + kBlock, 0.0);  // kBlock partial sums over the width
      for_each_row([&](const T* x_row, const T* dy_row) {
        for (int64_t i = 0; i < q.end - q.begin; i += kBlock) {
          AddProducts(std::min(q.end - q.begin - i, kBlock),
                      x_row + g * cg * xs.c + i * p.stride[2], p.stride[2], dy_row + k * ys.c + i,
                      sum);
        }
      });
      double total = 0;
      for (double part : sum) total += part;
      to[k * ws.k] = static_cast<T>(total);
    }
  });
  return Status::Ok();
}

JAXCONV_INSTANTIATE_CONV(Direct, float);
JAXCONV_INSTANTIATE_CONV(Direct, double);

}  // namespace jaxconv::cpu
