// Depthwise convolution: groups == C, so output channel k reads input channel k / m only, m = K/C
// being the multiplier:
//
//   y[n, o, c*m + j] = sum over taps t of  x[n, o*stride - pad + t*dilation, c] * w[t, c*m + j]
//
// R*S multiply-adds per output and no reuse across channels: the work is bound by loads, so each
// output is summed in registers over all taps that reach it (a list of terms, built once per pixel
// or row) and written once. Channels-last arrays are vectorised along channels, channels-first ones
// along the width. Every sum has a fixed order: results do not depend on the number of threads.
#include <cstring>

#include "cpu/conv.h"
#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace jaxconv::cpu {
namespace {

// -------------------------------------------------------------------------------------------------
// Channels-last kernels: a term is a row of channels.

template <typename T>
struct PixelTerm {
  const T* values;   // (channels)
  const T* weights;  // (channels)
};

template <typename T, int kVectors>
JAXCONV_INLINE void SumPixelVectors(int64_t terms, const PixelTerm<T>* term, int64_t c, T* out) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  typename Simd<T>::Vector sum[kVectors] = {};
  for (int64_t i = 0; i < terms; ++i) {
    const T* values = term[i].values + c;
    const T* weights = term[i].weights + c;
    for (int v = 0; v < kVectors; ++v) {
      sum[v] += VectorAt(values + v * kLanes) * VectorAt(weights + v * kLanes);
    }
  }
  for (int v = 0; v < kVectors; ++v) VectorAt(out + c + v * kLanes) = sum[v];
}

// out[c] = sum over terms of values[c] * weights[c]
template <typename T>
JAXCONV_MULTIVERSION void SumPixel(int64_t channels, int64_t terms, const PixelTerm<T>* term,
                                   T* out) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes) SumPixelVectors<T, 4>(terms, term, c, out);
  for (; c + kLanes <= channels; c += kLanes) SumPixelVectors<T, 1>(terms, term, c, out);
  for (; c < channels; ++c) {
    T sum = 0;
    for (int64_t i = 0; i < terms; ++i) sum += term[i].values[c] * term[i].weights[c];
    out[c] = sum;
  }
}

// The pixels of one output row that one tap reaches.
template <typename T>
struct TapTerm {
  const T* x;   // (count, channels), pixels x_step apart
  const T* dy;  // (count, channels), pixels dy_step apart
  T* sum;       // (channels): this tap's row of dw
  int64_t count;
};

template <typename T, int kVectors>
JAXCONV_INLINE void AddTapVectors(const TapTerm<T>& term, int64_t c, int64_t x_step,
                                  int64_t dy_step) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  typename Simd<T>::Vector sum[kVectors] = {};
  const T* x = term.x + c;
  const T* dy = term.dy + c;
  for (int64_t q = 0; q < term.count; ++q, x += x_step, dy += dy_step) {
    for (int v = 0; v < kVectors; ++v)
      sum[v] += VectorAt(x + v * kLanes) * VectorAt(dy + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) VectorAt(term.sum + c + v * kLanes) += sum[v];
}

// sum[c] += sum over pixels of x[c] * dy[c], for every term. Channels outside, terms inside: the
// terms of a row read the same pixels, which stay in the first-level cache for one block of
// channels.
template <typename T>
JAXCONV_MULTIVERSION void AddTaps(int64_t channels, int64_t terms, const TapTerm<T>* term,
                                  int64_t x_step, int64_t dy_step) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
    for (int64_t i = 0; i < terms; ++i) AddTapVectors<T, 4>(term[i], c, x_step, dy_step);
  }
  for (; c + kLanes <= channels; c += kLanes) {
    for (int64_t i = 0; i < terms; ++i) AddTapVectors<T, 1>(term[i], c, x_step, dy_step);
  }
  for (; c < channels; ++c) {
    for (int64_t i = 0; i < terms; ++i) {
      T sum = 0;
      for (int64_t q = 0; q < term[i].count; ++q) {
        sum += term[i].x[q * x_step + c] * term[i].dy[q * dy_step + c];
      }
      term[i].sum[c] += sum;
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Channels-first kernels: a term is a row of pixels times one weight.

template <typename T>
struct RowTerm {
  const T* values;  // values[i] goes to out[begin + i * out_step]
  T weight;
  int64_t begin, count;
};

template <typename T, int kVectors>
JAXCONV_INLINE void SumRowVectors(int64_t terms, const RowTerm<T>* term, int64_t j, T* out) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  typename Simd<T>::Vector sum[kVectors] = {};
  for (int64_t i = 0; i < terms; ++i) {
    const T* values = term[i].values + (j - term[i].begin);
    for (int v = 0; v < kVectors; ++v) sum[v] += term[i].weight * VectorAt(values + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) VectorAt(out + j + v * kLanes) = sum[v];
}

// out[begin + i * out_step] = the sum over terms of weight * values[i * step], 0 where no term
// goes.
template <typename T>
JAXCONV_MULTIVERSION void SumRow(int64_t width, int64_t terms, const RowTerm<T>* term, int64_t step,
                                 int64_t out_step, T* __restrict out) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  // Contiguous rows: the part [begin, end) that all terms reach is summed in registers.
  int64_t begin = 0, end = terms > 0 && step == 1 && out_step == 1 ? width : 0;
  for (int64_t i = 0; i < terms; ++i) {
    begin = std::max(begin, term[i].begin);
    end = std::min(end, term[i].begin + term[i].count);
  }
  if (end - begin >= kLanes) {
    int64_t j = begin;
    for (; j + 4 * kLanes <= end; j += 4 * kLanes) SumRowVectors<T, 4>(terms, term, j, out);
    for (; j + kLanes <= end; j += kLanes) SumRowVectors<T, 1>(terms, term, j, out);
    if (j < end) SumRowVectors<T, 1>(terms, term, end - kLanes, out);  // some again, same sums
    for (j = begin > 0 ? 0 : end; j < width; j = j + 1 == begin ? end : j + 1) {
      T sum = 0;
      for (int64_t i = 0; i < terms; ++i) {
        const int64_t l = j - term[i].begin;
        if (0 <= l && l < term[i].count) sum += term[i].weight * term[i].values[l];
      }
      out[j] = sum;
    }
    return;
  }
  for (int64_t l = 0; l < width; ++l) out[l] = 0;
  for (int64_t i = 0; i < terms; ++i) {
    const T weight = term[i].weight;
    const T* __restrict values = term[i].values;
    T* __restrict to = out + term[i].begin;
    if (out_step == 1 && step == 2) {
      for (int64_t l = 0; l < term[i].count; ++l) to[l] += weight * values[l * 2];
    } else {
      for (int64_t l = 0; l < term[i].count; ++l) to[l * out_step] += weight * values[l * step];
    }
  }
}

// The sum of x[i, j * x_step] * dy[i, j] over `rows` rows of `cols`.
template <typename T>
JAXCONV_MULTIVERSION T DotRows(int64_t rows, int64_t cols, const T* x, int64_t x_row,
                               int64_t x_step, const T* dy, int64_t dy_row) {
  using Vector = typename Simd<T>::Vector;
  constexpr int64_t kLanes = Simd<T>::kLanes;
  Vector sum[2] = {};
  T rest = 0;
  for (int64_t i = 0; i < rows; ++i, x += x_row, dy += dy_row) {
    int64_t j = 0;
    if (x_step == 1) {
      for (; j + 2 * kLanes <= cols; j += 2 * kLanes) {
        sum[0] += VectorAt(x + j) * VectorAt(dy + j);
        sum[1] += VectorAt(x + j + kLanes) * VectorAt(dy + j + kLanes);
      }
      for (; j + kLanes <= cols; j += kLanes) sum[0] += VectorAt(x + j) * VectorAt(dy + j);
    } else {
      for (; j + kLanes <= cols; j += kLanes) {
        Vector strided;
        for (int64_t l = 0; l < kLanes; ++l) strided[l] = x[(j + l) * x_step];
        sum[0] += strided * VectorAt(dy + j);
      }
    }
    for (; j < cols; ++j) rest += x[j * x_step] * dy[j];
  }
  const Vector both = sum[0] + sum[1];
  for (int64_t l = 0; l < kLanes; ++l) rest += both[l];
  return rest;
}

// -------------------------------------------------------------------------------------------------
// Channels-last.

// Items are rows of pixels of y or dx; this is one of them.
struct RowIndex {
  int64_t n, d, h;  // image, and the first two spatial positions
};
RowIndex RowOf(int64_t item, const int64_t extent[3]) {
  return {item / extent[1] / extent[0], item / extent[1] % extent[0], item % extent[1]};
}

// With m > 1 the weights of y's channels c*m + j, c = 0, 1, ..., are brought together: packed[(j,
// tap, c)].
template <typename T>
void SplitByMultiple(int64_t pixels, int64_t c, int64_t m, const T* src, int64_t plane, T* dst) {
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      for (int64_t l = 0; l < c; ++l) dst[j * plane + i * c + l] = src[(i * c + l) * m + j];
    }
  }
}

template <typename T>
Status LastFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                 const T* w, const T* bias, const T* residual, T* y, T* z) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k();
  Scratch<T> packed(m > 1 ? taps * p.k : 0);
  JAXCONV_RETURN_IF_ERROR(packed.status());
  if (m > 1) {
    SplitByMultiple(taps, p.c, m, w, taps * p.c, packed.data());
    w = packed.data();
  }
  // Scratch of an item: the terms of one pixel, then (m > 1) the channels of one j.
  const int64_t terms_bytes = taps * sizeof(PixelTerm<T>);
  return ParallelForWithScratch<char>(
      ctx, p.n * p.out[0] * p.out[1], terms_bytes + (m > 1 ? p.c * sizeof(T) : 0),
      [&](int64_t item, char* scratch) {
        PixelTerm<T>* term = reinterpret_cast<PixelTerm<T>*>(scratch);
        T* channels = reinterpret_cast<T*>(scratch + terms_bytes);
        const RowIndex at = RowOf(item, p.out);
        const int64_t row = at.n * ys.n + at.d * ys.d[0] + at.h * ys.d[1];
        for (int64_t q = 0; q < p.out[2]; ++q) {
          int64_t terms = 0;
          for (int64_t t = 0; t < p.filter[0]; ++t) {
            const int64_t d = InputAt(p, 0, at.d, t);
            if (!Inside(p, 0, d)) continue;
            for (int64_t r = 0; r < p.filter[1]; ++r) {
              const int64_t h = InputAt(p, 1, at.h, r);
              if (!Inside(p, 1, h)) continue;
              const T* x_row = x + at.n * xs.n + d * xs.d[0] + h * xs.d[1];
              const T* w_row = w + (t * p.filter[1] + r) * p.filter[2] * p.c;
              for (int64_t s = 0; s < p.filter[2]; ++s) {
                const int64_t v = InputAt(p, 2, q, s);
                if (Inside(p, 2, v)) term[terms++] = {x_row + v * p.c, w_row + s * p.c};
              }
            }
          }
          T* to = y + row + q * p.k;
          if (m == 1) {
            SumPixel(p.c, terms, term, to);
          } else {
            for (int64_t j = 0; j < m; ++j) {
              SumPixel(p.c, terms, term, channels);
              for (int64_t c = 0; c < p.c; ++c) to[c * m + j] = channels[c];
              for (int64_t i = 0; i < terms; ++i) term[i].weights += taps * p.c;  // of the next j
            }
          }
          if (bias != nullptr) AddBias(p.k, bias, /*shared=*/false, to);
        }
        FinishInPlace(e, p.out[2] * p.k, y + row, z == nullptr ? nullptr : z + row,
                      residual == nullptr ? nullptr : residual + row);
      });
}

// dx[c] sums taps and j; the sum over taps is taken for all K channels, then neighbours are added
// up.
template <typename T>
Status LastDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k();
  const int64_t terms_bytes = taps * sizeof(PixelTerm<T>);
  return ParallelForWithScratch<char>(
      ctx, p.n * p.in[0] * p.in[1], terms_bytes + (m > 1 ? p.k * sizeof(T) : 0),
      [&](int64_t item, char* scratch) {
        PixelTerm<T>* term = reinterpret_cast<PixelTerm<T>*>(scratch);
        T* channels = reinterpret_cast<T*>(scratch + terms_bytes);
        const RowIndex at = RowOf(item, p.in);
        for (int64_t v = 0; v < p.in[2]; ++v) {
          int64_t terms = 0;
          for (int64_t t = 0; t < p.filter[0]; ++t) {
            const int64_t o = OutputOver(p, 0, at.d, t);
            if (o < 0) continue;
            for (int64_t r = 0; r < p.filter[1]; ++r) {
              const int64_t row = OutputOver(p, 1, at.h, r);
              if (row < 0) continue;
              const T* dy_row = dy + at.n * ys.n + o * ys.d[0] + row * ys.d[1];
              const T* w_row = w + (t * p.filter[1] + r) * p.filter[2] * p.k;
              for (int64_t s = 0; s < p.filter[2]; ++s) {
                const int64_t q = OutputOver(p, 2, v, s);
                if (q >= 0) term[terms++] = {dy_row + q * p.k, w_row + s * p.k};
              }
            }
          }
          T* to = dx + at.n * xs.n + at.d * xs.d[0] + at.h * xs.d[1] + v * p.c;
          SumPixel(p.k, terms, term, m == 1 ? to : channels);
          for (int64_t c = 0; c < p.c && m > 1; ++c) {
            T sum = 0;
            for (int64_t j = 0; j < m; ++j) sum += channels[c * m + j];
            to[c] = sum;
          }
        }
      });
}

// Parts of the output rows, each with its own dw; then the sum of the parts, in order.
template <typename T>
Status LastWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  constexpr int64_t kParts = 32;  // whatever the number of threads
  constexpr int64_t kPartsBytes = int64_t{16}
                                  << 20;  // all parts together, unless that leaves fewer than 4
  constexpr int64_t kPixels = ConvShape::kDepthwisePixels;  // where m > 1 needs a copy of dy
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k(), size = taps * p.k;
  const int64_t rows = p.n * p.out[0] * p.out[1];
  const int64_t wanted =
      std::clamp<int64_t>(kPartsBytes / int64_t{sizeof(T)} / std::max<int64_t>(size, 1), 4, kParts);
  const int64_t parts = std::clamp<int64_t>(rows, 1, wanted);
  const int64_t block = m > 1 ? kPixels : std::max<int64_t>(p.out[2], 1);  // pixels
  Scratch<T> sums(parts * size);                                           // (parts, m, taps, C)
  JAXCONV_RETURN_IF_ERROR(sums.status());
  const int64_t terms_bytes =
      (taps * sizeof(TapTerm<T>) + kCacheLine - 1) / kCacheLine * kCacheLine;
  JAXCONV_RETURN_IF_ERROR(ParallelForWithScratch<char>(
      ctx, parts, terms_bytes + (m > 1 ? kPixels * p.k * sizeof(T) : 0),
      [&](int64_t part, char* scratch) {
        TapTerm<T>* term = reinterpret_cast<TapTerm<T>*>(scratch);
        T* dy_split = reinterpret_cast<T*>(scratch + terms_bytes);  // (m, kPixels, C)
        T* sum = sums.data() + part * size;
        std::memset(sum, 0, size * sizeof(T));
        const int64_t last = rows * (part + 1) / parts;
        for (int64_t item = rows * part / parts; item < last; ++item) {
          const RowIndex at = RowOf(item, p.out);
          const T* dy_row = dy + at.n * ys.n + at.d * ys.d[0] + at.h * ys.d[1];
          for (int64_t q0 = 0; q0 < p.out[2]; q0 += block) {
            const int64_t q1 = std::min(q0 + block, p.out[2]);
            const T* dy_block = dy_row + q0 * p.k;
            if (m > 1) {
              SplitByMultiple(q1 - q0, p.c, m, dy_block, kPixels * p.c, dy_split);
              dy_block = dy_split;
            }
            int64_t terms = 0;
            for (int64_t tap = 0; tap < taps; ++tap) {
              const int64_t s = tap % p.filter[2], r = tap / p.filter[2] % p.filter[1];
              const int64_t d = InputAt(p, 0, at.d, tap / p.filter[2] / p.filter[1]);
              const int64_t h = InputAt(p, 1, at.h, r);
              const Range reached = OutputsReached(p, 2, s);
              const int64_t begin = std::max(reached.begin, q0), end = std::min(reached.end, q1);
              if (!Inside(p, 0, d) || !Inside(p, 1, h) || begin >= end) continue;
              term[terms++] = {
                  x + at.n * xs.n + d * xs.d[0] + h * xs.d[1] + InputAt(p, 2, begin, s) * p.c,
                  dy_block + (begin - q0) * p.c, sum + tap * p.c, end - begin};
            }
            for (int64_t j = 0; j < m; ++j) {
              AddTaps(p.c, terms, term, p.stride[2] * p.c, p.c);
              for (int64_t i = 0; i < terms; ++i) {  // of the next j
                term[i].dy += kPixels * p.c;
                term[i].sum += taps * p.c;
              }
            }
          }
        }
      }));
  ParallelFor(ctx, taps, [&](int64_t tap) {
    for (int64_t c = 0; c < p.c; ++c) {
      for (int64_t j = 0; j < m; ++j) {
        T sum = 0;
        for (int64_t part = 0; part < parts; ++part) {
          sum += sums.data()[part * size + (j * taps + tap) * p.c + c];
        }
        dw[tap * p.k + c * m + j] = sum;
      }
    }
  });
  return Status::Ok();
}

// -------------------------------------------------------------------------------------------------
// Channels-first: every (image, channel) is a plane by itself.

template <typename T>
Status FirstFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                  const T* w, const T* bias, const T* residual, T* y, T* z) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k();
  Scratch<Range> reached(p.filter[2]);
  JAXCONV_RETURN_IF_ERROR(reached.status());
  for (int64_t s = 0; s < p.filter[2]; ++s) reached.data()[s] = OutputsReached(p, 2, s);
  return ParallelForWithScratch<RowTerm<T>>(
      ctx, p.n * p.k, taps, [&](int64_t item, RowTerm<T>* term) {
        const int64_t n = item / p.k, k = item % p.k;
        const T* x_plane = x + n * xs.n + k / m * xs.c;
        const int64_t plane = n * ys.n + k * ys.c;
        for (int64_t row = 0; row < p.out[0] * p.out[1]; ++row) {
          int64_t terms = 0;
          for (int64_t t = 0; t < p.filter[0]; ++t) {
            const int64_t d = InputAt(p, 0, row / p.out[1], t);
            if (!Inside(p, 0, d)) continue;
            for (int64_t r = 0; r < p.filter[1]; ++r) {
              const int64_t h = InputAt(p, 1, row % p.out[1], r);
              if (!Inside(p, 1, h)) continue;
              const T* w_row = w + k * taps + (t * p.filter[1] + r) * p.filter[2];
              for (int64_t s = 0; s < p.filter[2]; ++s) {
                const Range q = reached.data()[s];
                if (q.begin == q.end) continue;
                term[terms++] = {x_plane + d * xs.d[0] + h * xs.d[1] + InputAt(p, 2, q.begin, s),
                                 w_row[s], q.begin, q.end - q.begin};
              }
            }
          }
          SumRow(p.out[2], terms, term, p.stride[2], 1, y + plane + row * p.out[2]);
        }
        if (bias != nullptr) AddBias(ys.c, bias + k, /*shared=*/true, y + plane);
        FinishInPlace(e, ys.c, y + plane, z == nullptr ? nullptr : z + plane,
                      residual == nullptr ? nullptr : residual + plane);
      });
}

template <typename T>
Status FirstDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k();
  Scratch<Range> reached(p.filter[2]);
  JAXCONV_RETURN_IF_ERROR(reached.status());
  for (int64_t s = 0; s < p.filter[2]; ++s) reached.data()[s] = OutputsReached(p, 2, s);
  return ParallelForWithScratch<RowTerm<T>>(
      ctx, p.n * p.c, taps * m, [&](int64_t item, RowTerm<T>* term) {
        const int64_t n = item / p.c, c = item % p.c;
        for (int64_t row = 0; row < p.in[0] * p.in[1]; ++row) {
          int64_t terms = 0;
          for (int64_t t = 0; t < p.filter[0]; ++t) {
            const int64_t o = OutputOver(p, 0, row / p.in[1], t);
            if (o < 0) continue;
            for (int64_t r = 0; r < p.filter[1]; ++r) {
              const int64_t out_row = OutputOver(p, 1, row % p.in[1], r);
              if (out_row < 0) continue;
              const T* dy_row = dy + n * ys.n + c * m * ys.c + o * ys.d[0] + out_row * ys.d[1];
              const T* w_row = w + c * m * taps + (t * p.filter[1] + r) * p.filter[2];
              for (int64_t s = 0; s < p.filter[2]; ++s) {
                const Range q = reached.data()[s];
                for (int64_t j = 0; j < m && q.begin < q.end; ++j) {
                  term[terms++] = {dy_row + j * ys.c + q.begin, w_row[j * taps + s],
                                   InputAt(p, 2, q.begin, s), q.end - q.begin};
                }
              }
            }
          }
          SumRow(p.in[2], terms, term, 1, p.stride[2], dx + n * xs.n + c * xs.c + row * p.in[2]);
        }
      });
}

template <typename T>
Status FirstWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  const ImageStrides xs = XStrides(p), ys = YStrides(p);
  const int64_t taps = p.filter_size(), m = p.group_k();
  Scratch<T> sums(p.n * p.k * taps);  // of each image
  JAXCONV_RETURN_IF_ERROR(sums.status());
  ParallelFor(ctx, p.n * p.k, [&](int64_t item) {
    const int64_t n = item / p.k, k = item % p.k;
    const T* x_plane = x + n * xs.n + k / m * xs.c;
    const T* dy_plane = dy + n * ys.n + k * ys.c;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t s = tap % p.filter[2], r = tap / p.filter[2] % p.filter[1];
      const int64_t t = tap / p.filter[2] / p.filter[1];
      const Range rows = OutputsReached(p, 1, r), q = OutputsReached(p, 2, s);
      T sum = 0;
      for (int64_t o = 0; o < p.out[0]; ++o) {
        const int64_t d = InputAt(p, 0, o, t);
        if (!Inside(p, 0, d) || rows.begin == rows.end || q.begin == q.end) continue;
        sum += DotRows(rows.end - rows.begin, q.end - q.begin,
                       x_plane + d * xs.d[0] + InputAt(p, 1, rows.begin, r) * xs.d[1] +
                           InputAt(p, 2, q.begin, s),
                       p.stride[1] * xs.d[1], p.stride[2],
                       dy_plane + o * ys.d[0] + rows.begin * ys.d[1] + q.begin, ys.d[1]);
      }
      sums.data()[item * taps + tap] = sum;
    }
  });
  for (int64_t i = 0; i < p.k * taps; ++i) {
    T sum = 0;
    for (int64_t n = 0; n < p.n; ++n) sum += sums.data()[n * p.k * taps + i];
    dw[i] = sum;
  }
  return Status::Ok();
}

}  // namespace

template <typename T>
Status DepthwiseFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const T* x,
                      const T* w, const T* bias, const T* residual, T* y, T* z) {
  return p.channels_last ? LastFprop(ctx, p, e, x, w, bias, residual, y, z)
                         : FirstFprop(ctx, p, e, x, w, bias, residual, y, z);
}

template <typename T>
Status DepthwiseDgrad(const Context& ctx, const ConvProblem& p, const T* dy, const T* w, T* dx) {
  return p.channels_last ? LastDgrad(ctx, p, dy, w, dx) : FirstDgrad(ctx, p, dy, w, dx);
}

template <typename T>
Status DepthwiseWgrad(const Context& ctx, const ConvProblem& p, const T* x, const T* dy, T* dw) {
  return p.channels_last ? LastWgrad(ctx, p, x, dy, dw) : FirstWgrad(ctx, p, x, dy, dw);
}

JAXCONV_INSTANTIATE_CONV(Depthwise, float);
JAXCONV_INSTANTIATE_CONV(Depthwise, double);

}  // namespace jaxconv::cpu
