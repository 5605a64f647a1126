// What the two "one_pass" kernels share: a thread's place, the slab of its vectors that stay, sums over a CTA, a cluster's
// exchanges, the two small products, and the launch.
//
//   images, channels last            a CTA's slab: a step is a vector of every thread, which alone reads it again
//   +------+------+                  +------------------------+
//   |######|      |  share 0  rank 0 | step 0: rows x lanes   |  cp.async, kInFlight steps ahead
//   |######|      |                  | step 1                 |
//   +------+      |                  | ...                    |
//   |      |      |  share 1  rank 1 | held - 1               |
//   +------+------+                  +------------------------+
//    tile 0 tile 1  (ranks 2, 3)       later steps are read twice
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/core/copy_async.cuh"
#include "cuda/core/device.h"
#include "cuda/core/mbarrier.cuh"
#include "cuda/core/mma.cuh"
#include "cuda/core/raw.cuh"
#include "cuda/squeeze_excite/domain.h"
#include "cuda/squeeze_excite/squeeze_excite.h"

namespace jaxconv::cuda::squeeze_excite {

constexpr int kInFlight = 8;  // steps of a thread whose copies are on their way
template <typename T>
constexpr int kVectorOf = 16 / int(sizeof(T));  // elements
constexpr int kMostParts = 16;  // of a product's rows: their sums are added one by one
constexpr int kAtOnce = 4;  // vectors of a thread, and tensor, that are on their way to registers

struct Place {
  int64_t image;  // the cluster's first
  int images;     // of the cluster
  int tile, share, rank;
  int of;           // the thread's image, of the cluster's
  int lane;         // its vector of the tile
  int channel;      // the tile's first
  int channels;     // of the tile
  int first_mine;   // of the tile's channels, whose sums meet here
  int mine;         // so many
  uint32_t at;      // its first vector, from its image's first
  uint32_t stride;  // from one of its vectors to the next
  uint32_t count;   // of its vectors, steps
};

// kImages: the most of a cluster.
template <int kImages>
__device__ __forceinline__ Place PlaceOf(const Layout& t, int vector) {
  Place s;
  const uint32_t cluster = blockIdx.x >> t.ctas_shift;
  s.rank = int(blockIdx.x - (cluster << t.ctas_shift));
  s.tile = s.rank >> t.shares_shift;
  s.share = s.rank - (s.tile << t.shares_shift);
  s.image = int64_t(cluster) * t.images;
  s.images = kImages == 1 ? 1 : int(min(int64_t(t.images), t.all_images - s.image));
  const int row = int(t.by_lanes.Div(threadIdx.x));
  s.lane = int(threadIdx.x) - row * t.lanes;
  s.of = kImages == 1 ? row >= t.rows : int(t.by_rows.Div(row));
  const int width = t.lanes * vector;
  s.channel = s.tile * width;
  s.channels = min(width, t.channels - s.channel);
  s.first_mine = s.share * t.own;
  s.mine = max(min(t.own, s.channels - s.first_mine), 0);
  const uint32_t first = s.share * t.pixels + (row - s.of * t.rows);
  const uint32_t end = min(t.all_pixels, (s.share + 1) * t.pixels);
  s.at = first * t.row + s.tile * t.lanes + s.lane;
  s.stride = t.rows * t.row;
  const bool inside = s.of < s.images && s.tile * t.lanes + s.lane < t.row && first < end;
  s.count = inside ? t.by_rows.Div(end - first - 1) + 1 : 0;
  return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// What stays

// A thread's vectors of a tensor, of which those of the first `held` steps stay. A step is a group of copies, also where
// there is nothing to copy: when a step is waited for, those of the kInFlight - 1 after it are on their way.
class Slab {
 public:
  // `from`: the thread's image.
  __device__ __forceinline__ Slab(const Layout& t, const Place& at, const void* from,
                                  const char* memory)
      : from_(static_cast<const uint4*>(from)),
        slot_(static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + threadIdx.x * 16),
        pitch_(16 * blockDim.x),
        at_(at.at),
        stride_(at.stride),
        count_(at.count),
        held_(min(at.count, t.held)) {
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) CopyAhead(s);
  }

  // The vector of a step below held(). All of them, in turn.
  __device__ __forceinline__ uint4 Await(uint32_t step) {
    CopyWait<kInFlight - 1>();
    const uint4 raw = Read(step);
    CopyAhead(step + kInFlight);
    return raw;
  }

  // The second walk, behind Await of all that stays: use(vector, its offset from the image's first), from the last step on.
  template <typename Use>
  __device__ __forceinline__ void Backwards(const Use& use) {
    for (uint32_t left = count_; left > held_;) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (left > held_ + u) raw[u] = __ldcs(from_ + at_ + (left - 1 - u) * stride_);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (left > held_ + u) use(raw[u], at_ + (left - 1 - u) * stride_);
      }
      left -= min(left - held_, uint32_t(kAtOnce));
    }
#pragma unroll 2
    for (uint32_t s = held_; s-- > 0;) use(Read(s), at_ + s * stride_);
  }

  __device__ __forceinline__ uint32_t held() const { return held_; }
  __device__ __forceinline__ uint32_t count() const { return count_; }
  // Of a step, from the image's first vector.
  __device__ __forceinline__ uint32_t Offset(uint32_t step) const { return at_ + step * stride_; }

 private:
  __device__ __forceinline__ void CopyAhead(uint32_t s) {
    if (s < held_) CopyAsync(slot_ + s * pitch_, from_ + at_ + s * stride_);
    CopyCommit();
  }
  __device__ __forceinline__ uint4 Read(uint32_t s) const {
    uint4 raw;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(slot_ + s * pitch_)
                 : "memory");
    return raw;
  }

  const uint4* from_;
  const uint32_t slot_, pitch_;  // shared memory; bytes of a step
  const uint32_t at_, stride_, count_, held_;
};

// ---------------------------------------------------------------------------------------------------------------------
// A cluster

// What CTAs tell one another: each kind once.
enum Exchange { kSums, kHidden, kGates, kExchanges };

// Each CTA puts what others need into their shared memory, and with it the number of its bytes into the transaction barrier of
// the exchange there, which knows how many will come. So a CTA waits for what it reads and for nothing else: a barrier of the
// cluster that hands over would be a fence of the whole device, which waits for global stores. What is put has a place of
// its own, and nobody reads another's memory: a CTA may end when all it is told has come.
class Cluster {
 public:
  // `barriers`: of the exchanges, shared memory. `bytes`: that each will bring.
  __device__ __forceinline__ Cluster(int ctas, uint64_t* barriers,
                                     const uint32_t (&bytes)[kExchanges])
      : ctas_(ctas), barriers_(Address(barriers)) {
#if __CUDA_ARCH__ >= 900
    if (ctas_ == 1) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int e = 0; e < kExchanges; ++e) {
        BarrierInit(barriers_ + 8 * e, 1);
        BarrierExpect(barriers_ + 8 * e, bytes[e]);
      }
      BarrierInitFence();
    }
    asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
#endif
  }

  // All CTAs have begun, and their barriers are there. Once, before anything is put.
  __device__ __forceinline__ void Meet() const {
#if __CUDA_ARCH__ >= 900
    if (ctas_ > 1) asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
#endif
  }

  // What all have put can be read. Also of one CTA, whose threads' writes are there for all of them.
  __device__ __forceinline__ void Await(Exchange exchange) const {
    if (ctas_ == 1) {
      __syncthreads();
      return;
    }
#if __CUDA_ARCH__ >= 900
    BarrierWait(barriers_ + 8 * exchange, 0);
#endif
  }

  // *to = v, of CTA `rank`.
  __device__ __forceinline__ void Put(Exchange exchange, float* to, int rank, float v) const {
#if __CUDA_ARCH__ >= 900
    if (ctas_ > 1) {
      asm volatile(
          "{\n"
          ".reg .b32 remote, barrier;\n"
          "mapa.shared::cluster.u32 remote, %0, %2;\n"
          "mapa.shared::cluster.u32 barrier, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [barrier];\n"
          "}\n" ::"r"(Address(to)),
          "r"(barriers_ + 8 * exchange), "r"(rank), "r"(__float_as_uint(v))
          : "memory");
      return;
    }
#endif
    *to = v;
  }

  __device__ __forceinline__ void PutToAll(Exchange exchange, float* to, float v) const {
#pragma unroll 1
    for (int rank = 0; rank < ctas_; ++rank) Put(exchange, to, rank, v);
  }

 private:
  static __device__ __forceinline__ uint32_t Address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }

  const int ctas_;
  const uint32_t barriers_;
};

// Bytes that a CTA is told in each exchange.
template <int V>
struct Told {
  uint32_t bytes[kExchanges];

  __device__ __forceinline__ Told(const Layout& t, const Place& at) {
    const int sums =
        max(min(t.own, t.lanes * V - at.first_mine), 0);  // of all channels of the tile, zeros too
    bytes[kSums] = 4u * t.shares * t.images * sums;
    bytes[kHidden] = 4u * t.ctas * at.images * t.hidden;
    bytes[kGates] = 4u * at.images * at.channels;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums. The order of each is decided by the layout alone.

// Adds v up over the CTA's pixels: put(image, channel of the tile, sum), by one thread each. `scratch`: kScratch floats of
// each thread.
template <int V, int kImages, typename Put>
__device__ __forceinline__ void SumRows(const Layout& t, const Place& at, const float (&v)[V],
                                        float* scratch, const Put& put) {
  static_assert(V <= kScratch);
  const int images = kImages == 1 ? 1 : t.images, width = t.lanes * V, columns = images * width;
  const auto image_of = [&](int column) { return kImages == 1 ? 0 : int(t.by_width.Div(column)); };
  if (at.of < images) {
    float* mine = scratch + threadIdx.x * V;  // (images, rows, channels)
#pragma unroll
    for (int j = 0; j < V; j += 4)
      *reinterpret_cast<float4*>(mine + j) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
  }
  __syncthreads();
  const auto over = [&](int column, int first, int step) {
    const float* from = scratch + image_of(column) * (t.rows - 1) * width + column;
    float total = 0.f;
#pragma unroll 4
    for (int row = first; row < t.rows; row += step) total += from[row * width];
    return total;
  };
  const int parts = t.pixel_parts;
  // Where there are parts, columns are fewer than threads.
  const int part = parts == 1     ? 0
                   : kImages == 1 ? int(t.by_width.Div(threadIdx.x))
                                  : int(threadIdx.x) / columns;
  for (int first = 0; first < columns;
       first += int(blockDim.x)) {  // one round where there are parts
    const int column = first + int(threadIdx.x) - part * columns;
    float total = part < parts && column < columns ? over(column, part, parts) : 0.f;
    if (parts > 1) {
      __syncthreads();
      if (part < parts) scratch[threadIdx.x] = total;
      __syncthreads();
      if (part > 0) return;
      total = 0.f;
#pragma unroll 4
      for (int other = 0; other < parts; ++other) total += scratch[other * columns + column];
    }
    if (column < columns) {
      const int image = image_of(column);
      put(image, column - image * width, total);
    }
  }
}

// kStaged: from shared memory.
template <int N, bool kStaged>
__device__ __forceinline__ void ReadWeights(const float* from, float (&w)[N]) {
  if constexpr (N == 4) {
    const auto* four = reinterpret_cast<const float4*>(from);
    const float4 v = kStaged ? *four : __ldg(four);
    w[0] = v.x;
    w[1] = v.y;
    w[2] = v.z;
    w[3] = v.w;
  } else {
    static_assert(N == 1);
    w[0] = kStaged ? *from : __ldg(from);
  }
}

// put(image, k, sum of v[image][row] * m[row][k] over `rows` rows) for k in [0, count), by one thread each. N divides count,
// the rows' `stride` and the place of m. v: shared memory, rows of `pitch`. `scratch`: as above, free when all have come.
template <int N, int kImages, bool kStaged, typename Put>
__device__ __forceinline__ void AddRowsBy(const SmallProduct& t, const float* m, int stride,
                                          int rows, int count, const float* v, int pitch,
                                          int images, float* scratch, const Put& put) {
  const int columns = count / N, threads = int(blockDim.x), lanes = int(t.lanes.d);
  const int cells = images * lanes * N;
  const int part = int(t.lanes.Div(threadIdx.x)), lane = int(threadIdx.x) - part * lanes;
  for (int first = 0; first < columns; first += lanes) {
    const int column = first + lane;
    float sum[kImages][N] = {};
    if (part < t.parts && column < columns) {
      const float* from = m + column * N;
#pragma unroll(N == 1 ? 4 : 2)
      for (int row = part; row < rows; row += t.parts) {
        float w[N];
        ReadWeights<N, kStaged>(from + int64_t(row) * stride, w);
#pragma unroll
        for (int i = 0; i < kImages; ++i) {
          if (i >= images) break;
          const float x = v[i * pitch + row];
#pragma unroll
          for (int n = 0; n < N; ++n) sum[i][n] = fmaf(x, w[n], sum[i][n]);
        }
      }
    }
    __syncthreads();
    if (part < t.parts) {
#pragma unroll
      for (int i = 0; i < kImages; ++i) {
        if (i >= images) break;
#pragma unroll
        for (int n = 0; n < N; ++n) scratch[part * cells + (i * lanes + lane) * N + n] = sum[i][n];
      }
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < cells; cell += threads) {
      float total = 0.f;
#pragma unroll 4
      for (int other = 0; other < t.parts; ++other) total += scratch[other * cells + cell];
      const int image = kImages == 1 || cell < lanes * N ? 0 : 1;
      const int k = first * N + cell - image * lanes * N;
      if (k < count) put(image, k, total);
    }
  }
}

// put(image, row, sum of v[image][k] * m[row][k] over k in [0, count)) for each of `rows` rows, by one thread each.
template <int N, int kImages, bool kStaged, typename Put>
__device__ __forceinline__ void DotRowsBy(const float* m, int stride, int rows, int count,
                                          const float* v, int pitch, int images, const Put& put) {
  const int columns = count / N, threads = int(blockDim.x);
  int log = 0;  // 2^log lanes of a warp have a row
  while (1 << log < kWarp && 1 << log < columns) ++log;
  while (log > 2 && rows << log > threads) --log;
  const int lanes = 1 << log, lane = int(threadIdx.x) & (lanes - 1), step = threads >> log;
  // The rounds are the same for all threads of a warp, which exchange their sums.
  for (int first = 0; first < rows; first += step) {
    const int row = first + (int(threadIdx.x) >> log);
    float sum[kImages] = {};
    if (row < rows) {
      const float* from = m + int64_t(row) * stride;
#pragma unroll(N == 1 ? 8 : 4)
      for (int k = lane * N; k < count; k += lanes * N) {
        float w[N];
        ReadWeights<N, kStaged>(from + k, w);
#pragma unroll
        for (int i = 0; i < kImages; ++i) {
          if (i >= images) break;
#pragma unroll
          for (int n = 0; n < N; ++n) sum[i] = fmaf(v[i * pitch + k + n], w[n], sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      if (i >= images) break;
      for (int o = lanes / 2; o > 0; o /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], o);
      if (lane == 0 && row < rows) put(i, row, sum[i]);
    }
  }
}

// The same, four weights at a time where they can be read together. kFours: they can.
template <bool kFours, int kImages, bool kStaged, typename Put>
__device__ __forceinline__ void AddRows(const SmallProduct& t, const float* m, int stride, int rows,
                                        int count, const float* v, int pitch, int images,
                                        float* scratch, const Put& put) {
  if (kFours || (stride | count) % 4 == 0) {
    AddRowsBy<4, kImages, kStaged>(t, m, stride, rows, count, v, pitch, images, scratch, put);
  } else {
    AddRowsBy<1, kImages, kStaged>(t, m, stride, rows, count, v, pitch, images, scratch, put);
  }
}
template <bool kFours, int kImages, bool kStaged, typename Put>
__device__ __forceinline__ void DotRows(const float* m, int stride, int rows, int count,
                                        const float* v, int pitch, int images, const Put& put) {
  if (kFours || (stride | count) % 4 == 0) {
    DotRowsBy<4, kImages, kStaged>(m, stride, rows, count, v, pitch, images, put);
  } else {
    DotRowsBy<1, kImages, kStaged>(m, stride, rows, count, v, pitch, images, put);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What both kernels do between the sums over pixels and what is written

struct Shared {
  uint64_t* barriers;  // kExchanges
  float *scratch, *parts, *mine, *hidden_parts, *hidden, *gates, *first, *second, *biases;

  __device__ __forceinline__ Shared(const Layout& t, char* memory)
      : barriers(reinterpret_cast<uint64_t*>(memory + t.slab + t.barriers)),
        scratch(reinterpret_cast<float*>(memory + t.slab)),
        parts(scratch + t.parts),
        mine(scratch + t.mine),
        hidden_parts(scratch + t.hidden_parts),
        hidden(scratch + t.hidden_at),
        gates(scratch + t.gates),
        first(scratch + t.first),
        second(scratch + t.second),
        biases(scratch + t.biases) {}
};

// The weights of a CTA's two products: `rows` of w1, of its channels, and `columns` of w2. Staged, they are brought beside x,
// so that no product waits for them; else each is read where it lies. They are a group of copies behind those of the slab's
// first kInFlight steps: each of these steps is waited for with the one after it.
template <bool kStaged>
struct Weights {
  const float* const w1;  // the CTA's first row
  const float* const w2;  // its first column
  const int w2_stride;

  // By all threads, behind the slab's first copies. `rows_at`, `columns_at`: places in shared memory; `by_columns`: the most
  // vectors of 4 columns that a CTA has.
  __device__ __forceinline__ Weights(const Layout& t, const float* from1, int rows, float* rows_at,
                                     const float* from2, int columns, float* columns_at,
                                     const FastDiv& by_columns)
      : w1(kStaged ? rows_at : from1),
        w2(kStaged ? columns_at : from2),
        w2_stride(kStaged ? 4 * int(by_columns.d) : t.channels) {
    if constexpr (!kStaged) return;
    const auto copy = [](float* to, const float* from) {
      CopyAsync(SharedAddress(to), reinterpret_cast<const uint4*>(from));
    };
    for (int i = 4 * threadIdx.x; i < rows * t.hidden; i += 4 * blockDim.x)
      copy(rows_at + i, from1 + i);
    for (uint32_t i = threadIdx.x; i < t.hidden * by_columns.d; i += blockDim.x) {
      const uint32_t row = by_columns.Div(i), column = 4 * (i - row * by_columns.d);
      if (int(column) < columns)
        copy(columns_at + 4 * i, from2 + int64_t(row) * t.channels + column);
    }
  }
};

// Forward's biases, b1 and the CTA's of b2. Committed with its weights.
template <bool kStaged>
struct Biases {
  const float* const b1;
  const float* const b2;

  __device__ __forceinline__ Biases(const Layout& t, const float* from1, const float* from2,
                                    int count, float* at)
      : b1(kStaged ? at : from1), b2(kStaged ? at + t.hidden : from2) {
    if constexpr (!kStaged) return;
    Bring(at, from1, t.hidden);
    Bring(at + t.hidden, from2, count);
  }

 private:
  static __device__ __forceinline__ void Bring(float* to, const float* from, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x)
      CopyAsync(SharedAddress(to + i), from + i);
  }
};

// Sums over pixels: take(image, channel of the tile, sum), by one thread each, in the CTA where those of this channel meet.
// Behind a barrier for what it leaves.
template <int V, int kImages, typename Take>
__device__ __forceinline__ void SumPixels(const Layout& t, const Place& at, const Shared& shared,
                                          const Cluster& cluster, const float (&v)[V],
                                          const Take& take) {
  if (t.shares == 1) {
    SumRows<V, kImages>(t, at, v, shared.scratch, [&](int image, int channel, float sum) {
      if (image < at.images && channel < at.channels) take(image, channel, sum);
    });
    __syncthreads();
    cluster.Meet();
    return;
  }
  cluster.Meet();
  SumRows<V, kImages>(t, at, v, shared.scratch, [&](int image, int channel, float sum) {
    const int share = int(t.by_own.Div(channel));
    float* to = shared.parts + (at.share * t.images + image) * t.own + channel - share * t.own;
    cluster.Put(kSums, to, at.tile * t.shares + share, sum);
  });
  cluster.Await(kSums);
  for (int i = threadIdx.x; i < at.images * t.own; i += blockDim.x) {
    const int image = kImages == 1 ? 0 : int(t.by_own.Div(i)), channel = i - image * t.own;
    if (channel >= at.mine) continue;
    const float* from = shared.parts + image * t.own + channel;
    float sum = 0.f;
    for (int share = 0; share < t.shares; ++share) sum += from[share * t.images * t.own];
    take(image, at.first_mine + channel, sum);
  }
  __syncthreads();
}

// The hidden numbers, whose parts all CTAs have put to all: take(image, number, sum) by one thread each, in every CTA.
template <int kImages, typename Take>
__device__ __forceinline__ void SumHidden(const Layout& t, const Place& at, const Shared& shared,
                                          const Take& take) {
  for (int i = threadIdx.x; i < at.images * t.hidden; i += blockDim.x) {
    const int image = kImages == 1 ? 0 : int(t.by_hidden.Div(i)), number = i - image * t.hidden;
    float sum = 0.f;
    for (int rank = 0; rank < t.ctas; ++rank)
      sum += shared.hidden_parts[rank * t.images * t.hidden + i];
    take(image, number, sum);
  }
  __syncthreads();
}

// The channels of the tile that a CTA computes from the hidden numbers, and the CTAs that need them.
template <int V>
class Gates {
 public:
  __device__ __forceinline__ Gates(const Layout& t, const Place& at, const Shared& shared,
                                   const Cluster& cluster)
      : first(t.passes_on ? at.first_mine : 0),
        count(t.passes_on ? at.mine : at.channels),
        t_(t),
        at_(at),
        cluster_(cluster),
        gates_(shared.gates) {}

  __device__ __forceinline__ void Leave(int image, int channel, float v) const {
    float* to = gates_ + image * t_.lanes * V + channel;
    if (!t_.passes_on) {
      *to = v;
      return;
    }
#pragma unroll 1
    for (int share = 0; share < t_.shares; ++share)
      cluster_.Put(kGates, to, at_.tile * t_.shares + share, v);
  }

  __device__ __forceinline__ void Barrier() const {
    if (t_.passes_on) {
      cluster_.Await(kGates);
    } else {
      __syncthreads();
    }
  }

  // Those of the thread's vector. Of a thread without one whatever is there.
  __device__ __forceinline__ void Read(float (&v)[V]) const {
    const float* from = gates_ + (at_.of < t_.images ? at_.of : 0) * t_.lanes * V + at_.lane * V;
#pragma unroll
    for (int j = 0; j < V; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + j);
      v[j] = four.x;
      v[j + 1] = four.y;
      v[j + 2] = four.z;
      v[j + 3] = four.w;
    }
  }

  const int first, count;

 private:
  const Layout& t_;
  const Place& at_;
  const Cluster& cluster_;
  float* gates_;
};

// Registers for 768 threads of a multiprocessor, three CTAs of 256.
constexpr int kBound = 768;
static_assert(kBound >= kMostThreads);

// ---------------------------------------------------------------------------------------------------------------------
// The launch, on the host

template <typename Kernel, typename Args>
Status LaunchKernel(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
                    const Tiling& tiling, Kernel kernel, const Args& args,
                    const std::string& what) {
  Layout t = {};
  t.all_images = p.images;
  t.row = static_cast<int>(p.channels / Vector(p));
  t.image_vectors = p.pixels * t.row;
  t.channels = static_cast<int>(p.channels);
  t.hidden = static_cast<int>(p.hidden);
  t.all_pixels = static_cast<uint32_t>(p.pixels);
  t.ctas = static_cast<int>(plan.splits);
  t.lanes = static_cast<int>(tiling.lanes);
  t.shares = static_cast<int>(tiling.shares);
  t.images = static_cast<int>(tiling.images);
  t.rows = static_cast<int>(tiling.rows);
  t.pixels = static_cast<uint32_t>(tiling.pixels);
  t.held = static_cast<uint32_t>(tiling.held);
  t.own = static_cast<int>(tiling.own);
  t.passes_on = tiling.passes_on;
  t.slab = static_cast<int>(tiling.slab);
  t.parts = static_cast<int>(tiling.parts);
  t.mine = static_cast<int>(tiling.mine);
  t.hidden_parts = static_cast<int>(tiling.hidden_parts);
  t.hidden_at = static_cast<int>(tiling.hidden);
  t.gates = static_cast<int>(tiling.gates);
  t.first = static_cast<int>(tiling.first);
  t.second = static_cast<int>(tiling.second);
  t.biases = static_cast<int>(tiling.biases);
  t.barriers = static_cast<int>(4 * tiling.barriers);
  t.count = static_cast<float>(p.pixels);
  const auto log2 = [](int64_t power) {
    int log = 0;
    while (int64_t{1} << log < power) ++log;
    return log;
  };
  t.ctas_shift = log2(plan.splits);
  t.shares_shift = log2(tiling.shares);
  const int64_t width = tiling.lanes * Vector(p);
  t.pixel_parts = static_cast<int>(
      std::max<int64_t>(std::min(tiling.rows, tiling.threads / (tiling.images * width)), 1));
  t.by_lanes = FastDiv(tiling.lanes);
  t.by_rows = FastDiv(tiling.rows);
  t.by_width = FastDiv(width);
  t.by_own = FastDiv(tiling.own);
  t.by_hidden = FastDiv(std::max<int64_t>(p.hidden, 1));
  const auto product = [&](int64_t rows, int64_t columns, int64_t n) {
    SmallProduct s;
    const int64_t lanes = std::max<int64_t>(std::min(columns / n, tiling.threads), 1);
    const int64_t room = kScratch * tiling.threads / (tiling.images * lanes * n);
    s.parts = static_cast<int>(
        std::max<int64_t>(std::min({tiling.threads / lanes, room, rows, int64_t{kMostParts}}), 1));
    s.lanes = FastDiv(lanes);
    return s;
  };
  t.hidden_product = product(tiling.own, p.hidden, p.hidden % 4 == 0 ? 4 : 1);
  t.gate_product = product(p.hidden, tiling.gated, 4);
  t.by_gates = FastDiv(tiling.gated / 4);
  t.by_sums = FastDiv(tiling.own / 4);
  t.activation = p.activation;
  t.slope = static_cast<float>(p.slope);
  t.gating = p.gating;
  JAXCONV_RETURN_IF_ERROR(PreferSharedMemory(reinterpret_cast<const void*>(kernel), what));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(plan.splits);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(CeilDivide(p.images, tiling.images) * plan.splits));
  config.blockDim = dim3(static_cast<unsigned>(tiling.threads));
  config.dynamicSmemBytes = static_cast<size_t>(tiling.bytes);
  config.stream = ctx.stream;
  config.attrs = &cluster;
  config.numAttrs = plan.splits > 1 ? 1 : 0;
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, args, t), what);
}

// kernel_of(T(), std::bool_constant<kStaged>()): the kernel of this type and arrangement.
template <typename KernelOf, typename Args>
Status Launch(const Context& ctx, const SqueezeExciteProblem& p, const Plan& plan,
              const Device& device, const KernelOf& kernel_of, const Args& args,
              const std::string& what) {
  const Tiling tiling = TilingOf(p, plan.chunk, plan.splits, device);
  const auto launch = [&](auto type) {
    return tiling.staged
               ? LaunchKernel(ctx, p, plan, tiling, kernel_of(type, std::true_type()), args, what)
               : LaunchKernel(ctx, p, plan, tiling, kernel_of(type, std::false_type()), args, what);
  };
  if (p.dtype == DType::kF32) return launch(float());
  if (p.dtype == DType::kBF16) return launch(__nv_bfloat16());
  return launch(__half());
}

}  // namespace jaxconv::cuda::squeeze_excite
