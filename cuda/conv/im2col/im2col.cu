// Kernels: im2col (x to columns), pack (w to the column order, channels-last), col2im (columns back
// to dx). Each is one thread an output vector or element, and moves its tensors once; the columns
// are T*R*S times x, which is what the algorithm costs. The products are Gemm()'s.
//
//   columns, channels-first: [image][group][(ci, t, r, s)][(o, p, q)]
//   columns, channels-last:  [group][(image, o, p, q)][(ci, t, r, s)]
#include "cuda/conv/im2col/im2col.h"

#include <algorithm>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/reduce.h"
#include "cuda/gemm/gemm.h"

namespace jaxconv::cuda {
namespace conv {
namespace {

constexpr int kThreads = 256;

// What the kernels know of the problem and of the chunk.
struct Columns {
  Extents in, filter, out, stride, pad, dilation;
  FastDiv by_q, by_p, by_out;      // Q, P, O*P*Q
  FastDiv by_s, by_r, by_taps;     // S, R, T*R*S
  FastDiv by_rows, by_groups;      // C/G*T*R*S, G
  FastDiv by_w, by_h, by_d, by_c;  // W, H, D, C
  FastDiv by_group_c;
  FastDiv by_stride[3];
  int64_t image_pixels;  // images of the chunk * O*P*Q
  int64_t c;
  int group_c;
};

struct Pixel {
  int v[3];
};

JAXCONV_HD Pixel SplitPixel(int i, FastDiv by_last, FastDiv by_middle) {
  const uint32_t rest = by_last.Div(uint32_t(i));
  const uint32_t first = by_middle.Div(rest);
  return {{int(first), int(rest - first * by_middle.d), int(uint32_t(i) - rest * by_last.d)}};
}

// One column element: reduction row r = (ci, tap) at output pixel `pixel` of an image whose first
// element is x.
template <typename T, bool kChannelsLast>
__device__ __forceinline__ T ColumnElement(const Columns& k, const T* __restrict__ x, int channel0,
                                           int r, int pixel) {
  const int ci = int(k.by_taps.Div(uint32_t(r)));
  const Pixel t = SplitPixel(r - ci * int(k.by_taps.d), k.by_s, k.by_r);
  const Pixel o = SplitPixel(pixel, k.by_q, k.by_p);
  int at[3];
  bool inside = true;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    at[d] = o.v[d] * k.stride.v[d] - k.pad.v[d] + t.v[d] * k.dilation.v[d];
    inside = inside && Inside(at[d], 0, k.in.v[d]);
  }
  if (!inside) return FromFloat<T>(0.f);
  const int64_t source = (int64_t(at[0]) * k.in.v[1] + at[1]) * k.in.v[2] + at[2];
  const int c = channel0 + ci;
  return kChannelsLast ? x[source * k.c + c]
                       : x[int64_t(c) * k.in.v[0] * k.in.v[1] * k.in.v[2] + source];
}

// A thread writes `width` adjacent elements: 16 bytes where the inner extent allows, else one.
// Threads: [0, count/width).
template <typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    Im2colKernel(const Columns k, const T* __restrict__ x, T* __restrict__ columns, int64_t vectors,
                 int width) {
  constexpr int V = kVecWidth<T>;
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= vectors) return;
  const int64_t first = index * width;
  const int64_t image_size = k.c * k.in.v[0] * k.in.v[1] * k.in.v[2];
  int r, pixel, group;
  int64_t image;
  if (kChannelsLast) {
    const QuotRem row = DivMod(first, k.by_rows);  // quot: (group, image, pixel)
    r = row.rem;
    group = int(row.quot / k.image_pixels);
    const QuotRem p = DivMod(row.quot - group * k.image_pixels, k.by_out);
    image = p.quot;
    pixel = p.rem;
  } else {
    const QuotRem p = DivMod(first, k.by_out);
    pixel = p.rem;
    const QuotRem row = DivMod(p.quot, k.by_rows);
    r = row.rem;
    const QuotRem g = DivMod(row.quot, k.by_groups);
    group = g.rem;
    image = g.quot;
  }
  const T* from = x + image * image_size;
  const int channel0 = group * k.group_c;
  if (width == 1) {
    columns[first] = ColumnElement<T, kChannelsLast>(k, from, channel0, r, pixel);
    return;
  }
  Vec<T, V> v;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    v.v[i] = ColumnElement<T, kChannelsLast>(k, from, channel0, r + (kChannelsLast ? i : 0),
                                             pixel + (kChannelsLast ? 0 : i));
  }
  *reinterpret_cast<Vec<T, V>*>(columns + first) = v;
}

// packed[(ci, tap)][k] = w[tap][ci][k]. Threads: elements of w, k fastest.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const T* __restrict__ w, T* __restrict__ packed, FastDiv by_k, FastDiv by_taps,
               int64_t group_c, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const QuotRem k = DivMod(i, by_k);
  const QuotRem tap = DivMod(k.quot, by_taps);
  packed[i] = w[(tap.rem * group_c + tap.quot) * int64_t(by_k.d) + k.rem];
}

// dx[i] = sum over taps that reach i, in order, of columns[.]. Threads: elements of dx of the
// chunk, in memory order.
template <typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    Col2imKernel(const Columns k, const float* __restrict__ columns, T* __restrict__ dx,
                 int64_t count) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count) return;
  int at[3], c;
  int64_t rest = index, image;
  if (kChannelsLast) {
    const QuotRem q = DivMod(rest, k.by_c);
    c = q.rem;
    rest = q.quot;
  }
  QuotRem q = DivMod(rest, k.by_w);
  at[2] = q.rem;
  q = DivMod(q.quot, k.by_h);
  at[1] = q.rem;
  q = DivMod(q.quot, k.by_d);
  at[0] = q.rem;
  image = q.quot;
  if (!kChannelsLast) {
    q = DivMod(image, k.by_c);
    c = q.rem;
    image = q.quot;
  }
  const int group = int(k.by_group_c.Div(uint32_t(c)));
  const int64_t taps = k.by_taps.d, out_size = k.by_out.d, rows = k.by_rows.d;
  const int64_t row0 = (c - int64_t(group) * k.group_c) * taps;
  // The columns of this channel: element (tap, pixel) at tap * tap_step + pixel * pixel_step.
  const int64_t tap_step = kChannelsLast ? 1 : out_size, pixel_step = kChannelsLast ? rows : 1;
  const float* from =
      columns + (kChannelsLast
                     ? (group * k.image_pixels + image * out_size) * rows + row0
                     : ((image * int64_t(k.by_groups.d) + group) * rows + row0) * out_size);

  // Output coordinate that reaches at[d] through tap t, or -1.
  const auto output_at = [&](int d, int t) {
    const int scaled = at[d] + k.pad.v[d] - t * k.dilation.v[d];
    if (scaled < 0) return -1;
    const int o = int(k.by_stride[d].Div(uint32_t(scaled)));
    return o * k.stride.v[d] == scaled && o < k.out.v[d] ? o : -1;
  };
  float sum = 0.f;
  for (int t = 0; t < k.filter.v[0]; ++t) {
    const int o = output_at(0, t);
    if (o < 0) continue;
    for (int r = 0; r < k.filter.v[1]; ++r) {
      const int p = output_at(1, r);
      if (p < 0) continue;
      for (int s = 0; s < k.filter.v[2]; ++s) {
        const int out_w = output_at(2, s);
        if (out_w < 0) continue;
        const int64_t tap = (int64_t(t) * k.filter.v[1] + r) * k.filter.v[2] + s;
        const int64_t pixel = (int64_t(o) * k.out.v[1] + p) * k.out.v[2] + out_w;
        sum += from[tap * tap_step + pixel * pixel_step];
      }
    }
  }
  dx[index] = FromFloat<T>(sum);
}

int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

// The sizes that every step needs, the regions of the workspace, and the launches.
class Im2col {
 public:
  Im2col(const Context& ctx, const ConvProblem& p, const Plan& plan, const char* op)
      : ctx_(ctx),
        p_(p),
        chunk_(std::min(plan.chunk, p.n)),
        item_(int64_t(SizeOf(p.dtype))),
        rows_(p.group_c() * p.filter_size()),
        out_(p.out_size()),
        what_(std::string(op) + "[im2col " + Name(p.dtype) + " chunk=" +
              std::to_string(plan.chunk) + " splits=" + std::to_string(plan.splits) + "]") {
    k_.in = ToExtents(p.in);
    k_.filter = ToExtents(p.filter);
    k_.out = ToExtents(p.out);
    k_.stride = ToExtents(p.stride);
    k_.pad = ToExtents(p.pad);
    k_.dilation = ToExtents(p.dilation);
    k_.c = p.c;
    k_.group_c = int(p.group_c());
  }

  // Before anything else: the numbers that FastDiv may divide by.
  Status Check(const Plan& plan) {
    JAXCONV_RETURN_IF_ERROR(CheckIndexable(p_, what_.c_str()));
    if (plan.chunk < 1 || plan.splits < 1) {
      return Status::Invalid(what_ + ": expected chunk and splits of at least 1");
    }
    k_.by_q = FastDiv(p_.out[2]);
    k_.by_p = FastDiv(p_.out[1]);
    k_.by_out = FastDiv(out_);
    k_.by_s = FastDiv(p_.filter[2]);
    k_.by_r = FastDiv(p_.filter[1]);
    k_.by_taps = FastDiv(p_.filter_size());
    k_.by_rows = FastDiv(rows_);
    k_.by_groups = FastDiv(p_.groups);
    k_.by_w = FastDiv(p_.in[2]);
    k_.by_h = FastDiv(p_.in[1]);
    k_.by_d = FastDiv(p_.in[0]);
    k_.by_c = FastDiv(p_.c);
    k_.by_group_c = FastDiv(p_.group_c());
    for (int d = 0; d < 3; ++d) k_.by_stride[d] = FastDiv(p_.stride[d]);
    return Status::Ok();
  }

  const std::string& what() const { return what_; }
  int64_t chunk() const { return chunk_; }
  int64_t weights() const { return p_.k * rows_; }
  int64_t column_count(int64_t images) const { return images * p_.groups * rows_ * out_; }

  // x: the chunk's first image. Fills columns for `images` images.
  Status FillColumns(const void* x, int64_t images, void* columns) {
    k_.image_pixels = images * out_;
    const int64_t count = column_count(images);
    return ForElement(p_.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t inner = p_.channels_last ? rows_ : out_;
      const int width = inner % kVecWidth<T> == 0 ? kVecWidth<T> : 1;
      const int64_t vectors = count / width, blocks = CeilDiv(vectors, kThreads);
      JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what_));
      if (p_.channels_last) {
        Im2colKernel<T, true><<<unsigned(blocks), kThreads, 0, ctx_.stream>>>(
            k_, static_cast<const T*>(x), static_cast<T*>(columns), vectors, width);
      } else {
        Im2colKernel<T, false><<<unsigned(blocks), kThreads, 0, ctx_.stream>>>(
            k_, static_cast<const T*>(x), static_cast<T*>(columns), vectors, width);
      }
      return LaunchStatus(what_ + " im2col");
    });
  }

  // dx: the chunk's first image.
  Status GatherColumns(const float* columns, int64_t images, void* dx) {
    k_.image_pixels = images * out_;
    const int64_t count = images * p_.c * p_.in_size(), blocks = CeilDiv(count, kThreads);
    JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what_));
    return ForElement(p_.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (p_.channels_last) {
        Col2imKernel<T, true><<<unsigned(blocks), kThreads, 0, ctx_.stream>>>(
            k_, columns, static_cast<T*>(dx), count);
      } else {
        Col2imKernel<T, false><<<unsigned(blocks), kThreads, 0, ctx_.stream>>>(
            k_, columns, static_cast<T*>(dx), count);
      }
      return LaunchStatus(what_ + " col2im");
    });
  }

  Status Pack(const void* w, void* packed) {
    const int64_t count = weights(), blocks = CeilDiv(count, kThreads);
    JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what_));
    return ForElement(p_.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      PackKernel<T><<<unsigned(blocks), kThreads, 0, ctx_.stream>>>(
          static_cast<const T*>(w), static_cast<T*>(packed), FastDiv(p_.k),
          FastDiv(p_.filter_size()), p_.group_c(), count);
      return LaunchStatus(what_ + " pack");
    });
  }

  GemmArgs Args() const {
    GemmArgs a;
    a.dtype = p_.dtype;
    a.full_float32 = p_.full_float32;
    return a;
  }

  // Two axes of instances. Strides in elements, in the order a b d bias.
  struct Axis {
    int64_t count, a, b, d, bias;
  };

  // The longer axis is the product's batch, the shorter one a loop of launches.
  Status Multiply(GemmArgs args, Axis one, Axis two) const {
    if (one.count > two.count) std::swap(one, two);
    args.batch = two.count;
    args.stride_a = two.a;
    args.stride_b = two.b;
    args.stride_d = two.d;
    args.stride_bias = two.bias;
    const int64_t item_d = args.float32_out ? 4 : item_;
    for (int64_t i = 0; i < one.count; ++i) {
      JAXCONV_RETURN_IF_ERROR(Gemm(ctx_, args, what_.c_str()));
      args.a = At(args.a, one.a * item_);
      args.b = At(args.b, one.b * item_);
      args.d = At(args.d, one.d * item_d);
      args.z = At(args.z, one.d * item_d);
      args.bias = At(args.bias, one.bias * item_);
    }
    return Status::Ok();
  }

  static const void* At(const void* p, int64_t bytes) {
    return p == nullptr ? p : static_cast<const char*>(p) + bytes;
  }
  static void* At(void* p, int64_t bytes) {
    return p == nullptr ? p : static_cast<char*>(p) + bytes;
  }

 private:
  const Context& ctx_;
  const ConvProblem& p_;
  int64_t chunk_, item_, rows_, out_;
  std::string what_;
  Columns k_{};
};

}  // namespace
}  // namespace conv

using conv::Im2col;

Status Im2colFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, void* y, void* z,
                   Workspace workspace) {
  Im2col op(ctx, p, plan, "conv_fprop");
  JAXCONV_RETURN_IF_ERROR(op.Check(plan));
  const int64_t item = int64_t(SizeOf(p.dtype)), kg = p.group_k(), out = p.out_size();
  const int64_t rows = p.group_c() * p.filter_size();
  const int64_t column_bytes = conv::AlignUp(op.column_count(op.chunk()) * item);
  const int64_t packed_bytes = p.channels_last ? conv::AlignUp(op.weights() * item) : 0;
  JAXCONV_RETURN_IF_ERROR(conv::CheckWorkspace(workspace, column_bytes + packed_bytes, op.what()));
  void* columns = workspace.data;
  void* packed = Im2col::At(columns, column_bytes);
  if (p.channels_last) JAXCONV_RETURN_IF_ERROR(op.Pack(w, packed));

  for (int64_t image = 0; image < p.n; image += op.chunk()) {
    const int64_t images = std::min(op.chunk(), p.n - image);
    const int64_t from = image * p.c * p.in_size() * item, to = image * p.k * out * item;
    JAXCONV_RETURN_IF_ERROR(op.FillColumns(Im2col::At(x, from), images, columns));
    GemmArgs a = op.Args();
    a.d = Im2col::At(y, to);
    if (e.save_preactivation) a.z = Im2col::At(z, to);
    if (e.bias) {
      a.bias = bias;
      a.bias_kind = p.channels_last ? BiasKind::kColumn : BiasKind::kRow;
    }
    a.activation = e.activation;
    a.slope = e.slope;
    if (p.channels_last) {
      a.m = images * out, a.n = kg, a.k = rows;
      a.a = columns, a.lda = rows;
      a.b = packed, a.ldb = p.k;
      a.ldd = p.k;
      JAXCONV_RETURN_IF_ERROR(op.Multiply(a, {1, 0, 0, 0, 0}, {p.groups, a.m * rows, kg, kg, kg}));
    } else {
      a.m = kg, a.n = out, a.k = rows;
      a.a = w, a.lda = rows;
      a.b = columns, a.ldb = out;
      a.ldd = out;
      JAXCONV_RETURN_IF_ERROR(op.Multiply(a, {images, 0, p.groups * rows * out, p.k * out, 0},
                                          {p.groups, kg * rows, rows * out, kg * out, kg}));
    }
  }
  return Status::Ok();
}

Status Im2colDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace) {
  Im2col op(ctx, p, plan, "conv_dgrad");
  JAXCONV_RETURN_IF_ERROR(op.Check(plan));
  const int64_t item = int64_t(SizeOf(p.dtype)), kg = p.group_k(), out = p.out_size();
  const int64_t rows = p.group_c() * p.filter_size();
  const int64_t column_bytes = conv::AlignUp(op.column_count(op.chunk()) * 4);
  const int64_t packed_bytes = p.channels_last ? conv::AlignUp(op.weights() * item) : 0;
  JAXCONV_RETURN_IF_ERROR(conv::CheckWorkspace(workspace, column_bytes + packed_bytes, op.what()));
  void* columns = workspace.data;
  void* packed = Im2col::At(columns, column_bytes);
  if (p.channels_last) JAXCONV_RETURN_IF_ERROR(op.Pack(w, packed));

  for (int64_t image = 0; image < p.n; image += op.chunk()) {
    const int64_t images = std::min(op.chunk(), p.n - image);
    const void* from = Im2col::At(dy, image * p.k * out * item);
    GemmArgs a = op.Args();
    a.float32_out = true;
    a.d = columns;
    a.k = kg;
    if (p.channels_last) {
      a.m = images * out, a.n = rows;
      a.a = from, a.lda = p.k;
      a.b = packed, a.ldb = p.k, a.trans_b = true;
      a.ldd = rows;
      JAXCONV_RETURN_IF_ERROR(op.Multiply(a, {1, 0, 0, 0, 0}, {p.groups, kg, kg, a.m * rows, 0}));
    } else {
      a.m = rows, a.n = out;
      a.a = w, a.lda = rows, a.trans_a = true;
      a.b = from, a.ldb = out;
      a.ldd = out;
      JAXCONV_RETURN_IF_ERROR(op.Multiply(a, {images, 0, p.k * out, p.groups * rows * out, 0},
                                          {p.groups, kg * rows, kg * out, rows * out, 0}));
    }
    JAXCONV_RETURN_IF_ERROR(op.GatherColumns(static_cast<const float*>(columns), images,
                                             Im2col::At(dx, image * p.c * p.in_size() * item)));
  }
  return Status::Ok();
}

Status Im2colWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace) {
  Im2col op(ctx, p, plan, "conv_wgrad");
  JAXCONV_RETURN_IF_ERROR(op.Check(plan));
  const int64_t item = int64_t(SizeOf(p.dtype)), kg = p.group_k(), out = p.out_size();
  const int64_t rows = p.group_c() * p.filter_size(), weights = op.weights();
  const int64_t splits = std::min(plan.splits, op.chunk());
  const int64_t column_bytes = conv::AlignUp(op.column_count(op.chunk()) * item);
  JAXCONV_RETURN_IF_ERROR(
      conv::CheckWorkspace(workspace, column_bytes + splits * weights * 4, op.what()));
  void* columns = workspace.data;
  float* partials = static_cast<float*>(Im2col::At(columns, column_bytes));

  // Part i of every chunk is its images [i * part_images, (i + 1) * part_images): the same sum
  // grows over the chunks.
  const int64_t part_images = CeilDiv(op.chunk(), splits);
  const int64_t parts = CeilDiv(op.chunk(), part_images);  // <= splits
  for (int64_t image = 0; image < p.n; image += op.chunk()) {
    const int64_t images = std::min(op.chunk(), p.n - image);
    JAXCONV_RETURN_IF_ERROR(
        op.FillColumns(Im2col::At(x, image * p.c * p.in_size() * item), images, columns));
    const void* from = Im2col::At(dy, image * p.k * out * item);
    GemmArgs a = op.Args();
    a.float32_out = true;
    if (p.channels_last) {
      // Images are adjacent rows, so one product sums over a part; the last part may be short.
      const int64_t whole = images / part_images, rest = images % part_images;
      a.m = rows, a.n = kg;
      a.lda = rows, a.trans_a = true;
      a.ldb = p.k;
      a.ldd = p.k;
      a.accumulate = image > 0;
      const auto add = [&](int64_t part, int64_t count, int64_t depth) {
        a.k = depth * out;
        a.a = Im2col::At(columns, part * part_images * out * rows * item);
        a.b = Im2col::At(from, part * part_images * out * p.k * item);
        a.d = partials + part * weights;
        return op.Multiply(a,
                           {count, part_images * out * rows, part_images * out * p.k, weights, 0},
                           {p.groups, images * out * rows, kg, kg, 0});
      };
      if (whole > 0) JAXCONV_RETURN_IF_ERROR(add(0, whole, part_images));
      if (rest > 0) JAXCONV_RETURN_IF_ERROR(add(whole, 1, rest));
    } else {
      // dy has the channels between images: image i of every part at a time.
      a.m = kg, a.n = rows, a.k = out;
      a.lda = out;
      a.ldb = out, a.trans_b = true;
      a.ldd = rows;
      const int64_t dy_image = p.k * out, column_image = p.groups * rows * out;
      for (int64_t i = 0; i < std::min(part_images, images); ++i) {
        const int64_t count = (images - 1 - i) / part_images + 1;
        a.accumulate = image > 0 || i > 0;
        a.a = Im2col::At(from, i * dy_image * item);
        a.b = Im2col::At(columns, i * column_image * item);
        a.d = partials;
        JAXCONV_RETURN_IF_ERROR(
            op.Multiply(a, {count, part_images * dy_image, part_images * column_image, weights, 0},
                        {p.groups, kg * out, rows * out, kg * rows, 0}));
      }
    }
  }
  conv::PartialOrder order;
  if (p.channels_last) order = {p.filter_size(), p.group_c(), p.k, true};
  return conv::SumPartials(ctx, p.dtype, partials, parts, weights, order, dw, op.what().c_str());
}

}  // namespace jaxconv::cuda
