// Two kernels, each a thread an element: Im2colKernel writes the columns from x, Col2imKernel makes an element of dx from
// the columns of every output that reads it. Columns are [group][(image, o, p, q)][C/G * T*R*S], T*R*S times x: that
// traffic, there and back, is what the algorithm costs. The products are Gemm()'s.
#include "cuda/conv/im2col/im2col.h"

#include <algorithm>
#include <utility>

#include "cuda/conv/common/index.cuh"
#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/common/reduce.h"
#include "cuda/conv/im2col/domain.h"
#include "cuda/core/describe.h"
#include "cuda/gemm/gemm.h"

namespace jaxconv::cuda {
namespace conv {
namespace {

// How `images` images' columns lie.
struct Columns {
  Meeting m;
  int64_t images;

  __host__ __device__ int64_t row() const { return m.group_c * m.w.taps; }
  __host__ __device__ int64_t rows() const { return images * m.y.pixels(); }  // of a group
  __host__ __device__ int64_t count() const { return m.groups * rows() * row(); }
  // Of an element of a row, as w has it for one output channel.
  __device__ FilterPosition Split(int64_t at) const {
    return FilterArray{m.w.taps, m.w.c, 1, m.w.channels_last}.Split(at);
  }
  __device__ int64_t At(int64_t group, int64_t pixel, const FilterPosition& f) const {
    const int64_t at = FilterArray{m.w.taps, m.w.c, 1, m.w.channels_last}.At({f.tap, f.c, 0});
    return (group * rows() + pixel) * row() + at;
  }
};

template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    Im2colKernel(const Columns g, const T* __restrict__ x, T* __restrict__ columns) {
  // Output pixels of all images, as channels-last arrays of one channel number them.
  const ImageArray one{1, {g.m.y.extent[0], g.m.y.extent[1], g.m.y.extent[2]}, true};
  for (int64_t i = FirstElement(); i < g.count(); i += ElementStride()) {
    const int64_t line = i / g.row(), group = line / g.rows();
    const FilterPosition f = g.Split(i - line * g.row());
    const Position out = one.Split(line - group * g.rows());
    Position in{out.n, group * g.m.group_c + f.c, {}};
    columns[i] = g.m.InputAt(out.at, f.tap, in.at) ? x[g.m.x.At(in)] : FromFloat<T>(0.f);
  }
}

template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    Col2imKernel(const Columns g, const float* __restrict__ columns, T* __restrict__ dx,
                 int64_t count) {
  const ImageArray one{1, {g.m.y.extent[0], g.m.y.extent[1], g.m.y.extent[2]}, true};
  for (int64_t i = FirstElement(); i < count; i += ElementStride()) {
    const Position in = g.m.x.Split(i);
    const int64_t group = in.c / g.m.group_c, c = in.c - group * g.m.group_c;
    Position out{in.n, 0, {}};
    float sum = 0.f;
    for (int64_t tap = 0; tap < g.m.w.taps; ++tap) {
      if (g.m.OutputAt(in.at, tap, out.at)) sum += columns[g.At(group, one.At(out), {tap, c, 0})];
    }
    dx[i] = FromFloat<T>(sum);
  }
}

const void* At(const void* p, int64_t bytes) {
  return p == nullptr ? p : static_cast<const char*>(p) + bytes;
}
void* At(void* p, int64_t bytes) { return p == nullptr ? p : static_cast<char*>(p) + bytes; }

// Instances of a product along two axes. Strides in elements, in the order a b d bias.
struct Axis {
  int64_t count, a, b, d, bias;
};

// A chunk of images, and the launches that pass over its columns.
struct Chunk {
  const Context& ctx;
  const ConvProblem& p;
  const std::string& what;
  int64_t first, images;  // of the batch

  int64_t item() const { return int64_t(SizeOf(p.dtype)); }
  int64_t row() const { return p.group_c() * p.filter_size(); }
  // The chunk's part of x or dx, and of y, z or dy.
  const void* OfX(const void* x) const { return At(x, first * p.c * p.in_size() * item()); }
  void* OfX(void* x) const { return At(x, first * p.c * p.in_size() * item()); }
  const void* OfY(const void* y) const { return At(y, first * p.k * p.out_size() * item()); }
  void* OfY(void* y) const { return At(y, first * p.k * p.out_size() * item()); }
  // Strides between images, and between groups. Channels last, the groups of a row of y and of w are neighbours.
  int64_t column_image() const { return p.out_size() * row(); }
  int64_t column_group() const { return images * column_image(); }
  int64_t y_image() const { return p.out_size() * p.k; }
  int64_t y_group() const { return p.channels_last ? p.group_k() : p.group_k() * p.out_size(); }
  int64_t w_group() const { return p.channels_last ? p.group_k() : p.group_k() * row(); }

  Status Fill(const void* x, void* columns) const {
    return conv::ForElement(p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Columns g{Meeting(p), images};
      Im2colKernel<T><<<ElementBlocks(g.count()), kElementThreads, 0, ctx.stream>>>(
          g, static_cast<const T*>(OfX(x)), static_cast<T*>(columns));
      return LaunchStatus(what + " im2col");
    });
  }

  Status Gather(const void* columns, void* dx) const {
    return conv::ForElement(p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t count = images * p.c * p.in_size();
      Col2imKernel<T><<<ElementBlocks(count), kElementThreads, 0, ctx.stream>>>(
          Columns{Meeting(p), images}, static_cast<const float*>(columns), static_cast<T*>(OfX(dx)),
          count);
      return LaunchStatus(what + " col2im");
    });
  }

  // The longer axis is the product's batch, the shorter one a loop of launches.
  Status Multiply(GemmArgs args, Axis one, Axis two) const {
    if (one.count > two.count) std::swap(one, two);
    args.dtype = p.dtype;
    args.full_float32 = p.full_float32;
    args.tile = "64x64";
    args.batch = two.count;
    args.stride_a = two.a;
    args.stride_b = two.b;
    args.stride_c = args.stride_d = two.d;  // c lies like d
    args.stride_bias = two.bias;
    const int64_t item_d = args.float32_out ? 4 : item();
    for (int64_t i = 0; i < one.count; ++i) {
      JAXCONV_RETURN_IF_ERROR(Gemm(ctx, args, what.c_str()));
      args.a = At(args.a, one.a * item());
      args.b = At(args.b, one.b * item());
      args.c = At(args.c, one.d * item());
      args.d = At(args.d, one.d * item_d);
      args.z = At(args.z, one.d * item());
      args.bias = At(args.bias, one.bias * item());
    }
    return Status::Ok();
  }
};

// step(chunk) for one chunk of images after another.
template <typename Step>
Status ForChunks(const Context& ctx, const ConvProblem& p, const Plan& plan,
                 const std::string& what, Step&& step) {
  const int64_t most = im2col::Chunk(p, plan);
  for (int64_t first = 0; first < p.n; first += most) {
    JAXCONV_RETURN_IF_ERROR(step(Chunk{ctx, p, what, first, std::min(most, p.n - first)}));
  }
  return Status::Ok();
}

}  // namespace
}  // namespace conv

using conv::Chunk;

Status Im2colFprop(const Context& ctx, const ConvProblem& p, const Epilogue& e, const Plan& plan,
                   const void* x, const void* w, const void* bias, const void* residual, void* y,
                   void* z, Workspace workspace) {
  const std::string what = Describe("conv_fprop", p, plan);
  return conv::ForChunks(ctx, p, plan, what, [&](const Chunk& c) {
    void* columns = workspace.data;
    JAXCONV_RETURN_IF_ERROR(c.Fill(x, columns));
    GemmArgs a;
    a.d = c.OfY(y);
    if (e.save_preactivation) a.z = c.OfY(z);
    if (e.bias) {
      a.bias = bias;
      a.bias_kind = p.channels_last ? BiasKind::kColumn : BiasKind::kRow;
    }
    if (residual != nullptr) a.c = c.OfY(residual), a.beta = 1.0;
    a.activation = e.activation;
    a.slope = e.slope;
    a.k = c.row();
    const int64_t kg = p.group_k();
    if (p.channels_last) {  // (pixels, K) = columns * w
      a.m = c.images * p.out_size(), a.n = kg;
      a.a = columns, a.lda = c.row();
      a.b = w, a.ldb = p.k;
      a.ldc = a.ldd = p.k;
      return c.Multiply(a, {1, 0, 0, 0, 0},
                        {p.groups, c.column_group(), c.w_group(), c.y_group(), kg});
    }
    a.m = kg, a.n = p.out_size();  // (K, pixels of an image) = w * columns'
    a.a = w, a.lda = c.row();
    a.b = columns, a.ldb = c.row(), a.trans_b = true;
    a.ldc = a.ldd = p.out_size();
    return c.Multiply(a, {c.images, 0, c.column_image(), c.y_image(), 0},
                      {p.groups, c.w_group(), c.column_group(), c.y_group(), kg});
  });
}

Status Im2colDgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* dy,
                   const void* w, void* dx, Workspace workspace) {
  const std::string what = Describe("conv_dgrad", p, plan);
  return conv::ForChunks(ctx, p, plan, what, [&](const Chunk& c) {
    GemmArgs a;  // columns = dy * w'
    a.float32_out = true;
    a.k = p.group_k(), a.n = c.row();
    a.a = c.OfY(dy), a.b = w, a.d = workspace.data;
    a.ldd = c.row();
    if (p.channels_last) {
      a.m = c.images * p.out_size();
      a.lda = p.k;
      a.ldb = p.k, a.trans_b = true;
      JAXCONV_RETURN_IF_ERROR(c.Multiply(
          a, {1, 0, 0, 0, 0}, {p.groups, c.y_group(), c.w_group(), c.column_group(), 0}));
    } else {
      a.m = p.out_size();
      a.lda = p.out_size(), a.trans_a = true;
      a.ldb = c.row();
      JAXCONV_RETURN_IF_ERROR(
          c.Multiply(a, {c.images, c.y_image(), 0, c.column_image(), 0},
                     {p.groups, c.y_group(), c.w_group(), c.column_group(), 0}));
    }
    return c.Gather(workspace.data, dx);
  });
}

Status Im2colWgrad(const Context& ctx, const ConvProblem& p, const Plan& plan, const void* x,
                   const void* dy, void* dw, Workspace workspace) {
  const std::string what = Describe("conv_wgrad", p, plan);
  const int64_t weights = conv::FilterCount(p), parts = conv::im2col::Parts(p, plan);
  const int64_t part_images = CeilDiv(conv::im2col::Chunk(p, plan), parts);
  void* columns = workspace.data;
  float* partials = reinterpret_cast<float*>(static_cast<char*>(columns) +
                                             conv::im2col::ColumnBytes(ConvOp::kWgrad, p, plan));
  // Part i of every chunk is its images [i * part_images, (i + 1) * part_images): the same sum grows over them, the
  // first, second, ... image of all parts at a time. The first chunk is the fullest: it begins every sum.
  JAXCONV_RETURN_IF_ERROR(conv::ForChunks(ctx, p, plan, what, [&](const Chunk& c) {
    JAXCONV_RETURN_IF_ERROR(c.Fill(x, columns));
    for (int64_t i = 0; i < std::min(part_images, c.images); ++i) {
      GemmArgs a;
      a.float32_out = true;
      a.accumulate = c.first > 0 || i > 0;
      a.k = p.out_size();
      a.d = partials;
      const void* of_x = conv::At(columns, i * c.column_image() * c.item());
      const void* of_y = conv::At(c.OfY(dy), i * c.y_image() * c.item());
      const int64_t count = (c.images - 1 - i) / part_images + 1;  // of parts with such an image
      const int64_t x_part = part_images * c.column_image(), y_part = part_images * c.y_image();
      if (p.channels_last) {  // (row, K) = columns' * dy
        a.m = c.row(), a.n = p.group_k();
        a.a = of_x, a.lda = c.row(), a.trans_a = true;
        a.b = of_y, a.ldb = p.k;
        a.ldd = p.k;
        JAXCONV_RETURN_IF_ERROR(
            c.Multiply(a, {count, x_part, y_part, weights, 0},
                       {p.groups, c.column_group(), c.y_group(), c.w_group(), 0}));
      } else {  // (K, row) = dy * columns
        a.m = p.group_k(), a.n = c.row();
        a.a = of_y, a.lda = p.out_size();
        a.b = of_x, a.ldb = c.row();
        a.ldd = c.row();
        JAXCONV_RETURN_IF_ERROR(
            c.Multiply(a, {count, y_part, x_part, weights, 0},
                       {p.groups, c.y_group(), c.column_group(), c.w_group(), 0}));
      }
    }
    return Status::Ok();
  }));
  return conv::SumPartials(ctx, p.dtype, partials, parts, weights, {}, dw, what.c_str());
}

}  // namespace jaxconv::cuda
