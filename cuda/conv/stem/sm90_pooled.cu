// A stem and the max-pooling behind it in one pass on sm_90a:
//
//   y[n, o, k] = max over the window's taps i of f(b[k] + sum over taps t, c of x[n, i * stride + shift(t), c] * w[t, c, k])
//
// Windows have 2 or 3 rows and columns, and step by 2. f and the rounding to y's type keep the order of numbers. So they
// follow the maximum, of a quarter of the sums, and give the bits of a convolution and a pooling behind it. So does the
// conversion to 8 bits, and x of float32 gives those of a conversion in front (PooledTypes).
//
// The products are those of sm90_narrow_in.cu. A thread of wgmma has pairs of neighbouring columns, which are a column of
// y each; a window's third column is another pair's, a neighbouring lane's. A warpgroup walks down its rows of the tile,
// and the maximum of a window's rows stays in its registers. A row that two windows share is read once, but at the seam
// between two warpgroups' rows of y.
#include <algorithm>
#include <type_traits>

#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/conv/stem/sm90_windows.cuh"
#include "cuda/core/device.h"
#include "cuda/core/extremes.cuh"
#include "cuda/gemm/sm90_eight_numbers.cuh"

namespace jaxconv::cuda::conv {
namespace {

template <typename T>
struct PooledArgs : NarrowToWide<T> {
  CUtensorMap y_map;
  PooledTile pool;
  const T* bias;
  float least, greatest;  // of y, by the activation
  float scale;            // of y of 8 bits, else 0
  bool signed_y;
  int box_bytes;
};

template <typename T>
constexpr int kGroups = PooledGroups(sizeof(T));
template <typename T>
constexpr int kPooledThreads = (1 + kGroups<T>)*128;

// Of a row's sums, the maxima of each window's columns: column 4 j + lane % 4 of y at 2 j, and of channels 8 further at
// 2 j + 1. Columns outside the image are -inf.
template <int kN>
__device__ __forceinline__ void PoolColumns(const PooledTile& pool, const float (&acc)[kN / 2],
                                            float (&h)[kN / 4]) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) h[i] = MaxNan(acc[i * 2], acc[i * 2 + 1]);
  if (pool.window[1] == 2) return;
  if (pool.low[1] == 0) {  // and the next pair's first
    const int from = lane - quad + (quad + 1) % 4;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float next = i + 2 < kN / 4 ? acc[i * 2 + 4] : -INFINITY;
      h[i] = MaxNan(h[i], __shfl_sync(~0u, quad == 0 ? next : acc[i * 2], from));
    }
  } else {  // and the last pair's second
    const int from = lane - quad + (quad + 3) % 4;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float last = i >= 2 ? acc[i * 2 - 3] : -INFINITY;
      h[i] = MaxNan(h[i], __shfl_sync(~0u, quad == 3 ? last : acc[i * 2 + 1], from));
    }
  }
}

// A row of y in 8 bits into its box, 64 bytes a pixel: a warp has 16 channels, a thread two of them. `place`:
// where a column lies.
template <Number kType, typename T, int kCount, typename Place>
__device__ __forceinline__ void StoreRow8(uint32_t box, float scale, const Place& place,
                                          const float (&v)[kCount]) {
  constexpr int kPairs = kCount / 4;  // of j and j + 1, eight columns
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // A matrix has the pairs of j and j + 1, of rows 2 t + e those of lane t and j + e.
  const int row = lane % 8 / 2 + lane % 2 * 4;
  uint32_t word[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float u[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) u[k] = __fmul_rn(ToFloat(FromFloat<T>(v[i * 4 + k])), scale);
    word[i] = Narrowed<kType>(u[0], u[1], u[2], u[3]);
  }
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {
    // Behind the last pair it is stored again.
    const int pixel = place(min(i + lane / 8, kPairs - 1) * 8 + row);
    const uint32_t r[4] = {word[i], word[min(i + 1, kPairs - 1)], word[min(i + 2, kPairs - 1)],
                           word[min(i + 3, kPairs - 1)]};
    StoreMatrix4Transposed(box + ChunkOf<64>(pixel, warp), r);
  }
}

// x of S (LoadSlot). kNarrow: y of 8 bits, a.pairs.
template <typename T, typename S, bool kNarrow, int kN, int kSteps>
__global__ void __launch_bounds__(kPooledThreads<T>, 1)
    PooledKernel(const __grid_constant__ PooledArgs<T> a) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const PooledTile& pool = a.pool;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, int(threadIdx.x / 128), 0) - 1;  // uniform
  const uint32_t barriers = shared + a.barriers_at;
  if (threadIdx.x == 0) InitSlots(barriers, kGroups<T>);
  StageFilter(a, cells);

  if (group < 0) {
    if constexpr (kGroups<T> == 3) RegistersDown<80>();
    // As many fours under way as registers hold.
    constexpr int kBatch = sizeof(S) == 2 ? (kNarrow ? 4 : 5) : sizeof(T) == 2 ? 3 : 4;
    FillSlots<kBatch, S>(a, shared, barriers, blockIdx.x, gridDim.x);
    return;
  }
  if constexpr (kGroups<T> == 3) RegistersUp<144>();
  constexpr int kCount = kN / 4;  // of a row of y, a thread's
  int slot = 0;
  uint32_t parity = 0;
  const uint32_t boxes = shared + a.boxes_at + group * pool.boxes * a.box_bytes;
  const bool elected = threadIdx.x % 128 == 0;
  for (int64_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const QuotRem w = DivMod(tile, a.by_tiles_w), h = DivMod(w.quot, a.by_tiles_h);
    const int first = (h.rem * kGroups<T> + group) * a.rows;  // row of y
    const int rows = min(a.rows, pool.out[0] - first);
    const int first_col = w.rem * a.tile_step[1] - a.tile_before[1];
    const bool edge = first_col < 0 || first_col + kN > g.wide[1];
    BarrierWait(barriers + slot * 16, parity);
    const uint32_t narrow =
        shared + a.narrow_at + slot * a.slot_bytes + group * a.rows * 2 * g.stride[0] * a.row_bytes;
    for (int tile_k = 0; tile_k < a.channel_tiles; ++tile_k) {
      const int channel = tile_k * 64 + warp * 16 + lane / 4 * (kNarrow ? 2 : 1);
      const int second = channel + (kNarrow ? 1 : 8);
      float bias[2] = {};
      if (a.bias != nullptr) {
        if (channel < g.wide_channels) bias[0] = ToFloat(a.bias[channel]);
        if (second < g.wide_channels) bias[1] = ToFloat(a.bias[second]);
      }
      // Row `to` of y leaves, whose maxima are v.
      const auto keep = [&](float (&v)[kCount], int to) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          v[i] = MinNan(MaxNan(v[i] + bias[i % 2], a.least), a.greatest);
        if (elected) StoreWaitRead<0>();
        NamedBarrier(1 + group, 128);
        // Where column `column` of the tile's pairs lies in a box; those that began early behind the others.
        const auto place = [&](int column) {
          const int at = column - a.tile_before[1] / 2;
          return at < 0 ? kN / 2 + column : at;
        };
        if constexpr (kNarrow) {
          if (a.signed_y) {
            StoreRow8<Number::kS8, T>(boxes, a.scale, place, v);
          } else {
            StoreRow8<Number::kU8, T>(boxes, a.scale, place, v);
          }
        } else if constexpr (sizeof(T) == 2) {
          // A matrix has the pairs of j and j + 1, of rows 2 t + e those of lane t and j + e.
          const int row = lane % 8 / 2 + lane % 2 * 4;
          if (tile_k * 64 + warp * 16 < g.wide_channels) {
#pragma unroll
            for (int j = 0; j < kN / 8; j += 4) {
              const bool four = j + 4 <= kN / 8;  // else the last two
              const int pixel = place(j * 4 + row + (four ? lane / 16 * 8 : 0));
              const uint32_t at =
                  boxes + pixel * 128 + ((warp * 2 + lane / 8 % 2) ^ (pixel % 8)) * 16;
              const uint32_t low = PackPair(v[j * 2], v[j * 2 + 2], T()),
                             high = PackPair(v[j * 2 + 1], v[j * 2 + 3], T());
              if (four) {
                const uint32_t r[4] = {low, high, PackPair(v[j * 2 + 4], v[j * 2 + 6], T()),
                                       PackPair(v[j * 2 + 5], v[j * 2 + 7], T())};
                StoreMatrix4Transposed(at, r);
              } else {
                StoreMatrix2Transposed(at, low, high);
              }
            }
          }
        } else {
          unsigned char* to_box = cells + (boxes - shared) + warp / 2 * a.box_bytes;
          const int c = warp % 2 * 16 + lane / 4;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int pixel = place(i / 2 * 4 + lane % 4), at = c + i % 2 * 8;
            *reinterpret_cast<float*>(to_box + pixel * 128 + ((at / 4) ^ (pixel % 8)) * 16 +
                                      at % 4 * 4) = v[i];
          }
        }
        FenceForTma();
        NamedBarrier(1 + group, 128);
        if (elected) {
          const int to_col = w.rem * pool.pooled, to_row = int(h.quot) * pool.out[0] + to;
          StoreTile(a.y_map, boxes, tile_k * 64, to_col, to_row);
          if (sizeof(T) == 4 && !kNarrow && tile_k * 64 + 32 < g.wide_channels)
            StoreTile(a.y_map, boxes + a.box_bytes, tile_k * 64 + 32, to_col, to_row);
          StoreCommit();
        }
      };

      float most[kCount];  // of the window's rows so far
#pragma unroll
      for (float& m : most) m = -INFINITY;
      const int count = rows > 0 ? rows * 2 + pool.window[0] - 2 : 0;  // rows of wide
#pragma unroll 1
      for (int row = 0; row < count; ++row) {
        float of_row[kCount];
        if (unsigned(first * 2 - pool.low[0] + row) < unsigned(g.wide[0])) {
          float acc[kN / 2];
          SumRow<T, kN, kSteps>(a, shared + tile_k * a.filter_tile,
                                narrow + row * g.stride[0] * a.row_bytes, acc);
          if (edge) {
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) {
              const int col = first_col + i / 4 * 8 + lane % 4 * 2 + i % 2;
              if (unsigned(col) >= unsigned(g.wide[1])) acc[i] = -INFINITY;
            }
          }
          PoolColumns<kN>(pool, acc, of_row);
        } else {
#pragma unroll
          for (float& m : of_row) m = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) most[i] = MaxNan(most[i], of_row[i]);
        // The window that this row is the last of begins there.
        const int ended = row + 1 - pool.window[0];
        if (ended >= 0 && ended % 2 == 0) {
          keep(most, first + ended / 2);
          // Of three rows the last one is the next window's first.
#pragma unroll
          for (int i = 0; i < kCount; ++i) most[i] = pool.window[0] == 3 ? of_row[i] : -INFINITY;
        }
      }
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(barriers + slot * 16 + 8);
    slot ^= 1;
    parity ^= slot == 0;
  }
  if (elected) StoreWaitRead<0>();
#endif
}

// The rows of y of a warpgroup's part of a tile; false where none fit.
template <typename T>
bool ChoosePooledRows(PooledArgs<T>& a, const NarrowWindows& windows, int room, int blocks) {
  const StemGeometry& g = a.g;
  const PooledTile& pool = a.pool;
  const auto set = [&](int rows) {
    SetRows(a, windows, rows, pool.WideRows(rows));
    a.tiles = int64_t(g.images) * pool.tiles_w * CeilDiv(pool.out[0], rows * pool.groups);
  };
  const double row_cost = a.steps * a.channel_tiles * (pool.kernel_columns / 2.0);
  const int best = BestRows(a, pool.out[0], room, blocks, set, [&](int rows) {
    return pool.groups * (rows * 2 + pool.window[0] - 2) * row_cost;
  });
  if (best == 0) return false;
  a.tile_step[0] = best * pool.groups * 2;
  a.tile_before[0] = pool.low[0];
  a.tile_step[1] = pool.pooled * 2;
  a.tile_before[1] = pool.before;
  a.by_tiles_h = FastDiv(CeilDiv(pool.out[0], best * pool.groups));
  a.by_tiles_w = FastDiv(pool.tiles_w);
  return true;
}

template <typename T, typename S, bool kNarrow, int kN>
Status LaunchPooled(const Context& ctx, PooledArgs<T> a, const NarrowWindows& windows, DType dtype,
                    void* y, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const StemGeometry& g = a.g;
  if (!ChoosePooledRows(a, windows, a.pool.Room(g, a.steps), device.multiprocessors))
    return Status::Internal(what + ": no tile fits");
  a.box_bytes = a.pool.BoxBytes();
  a.boxes_at = uint32_t(a.channel_tiles * a.filter_tile);
  a.narrow_at = a.boxes_at + a.pool.groups * a.pool.boxes * a.box_bytes;
  a.barriers_at = a.narrow_at + 2 * a.slot_bytes + kN * 16;
  const int64_t k = g.wide_channels, rows = int64_t(g.images) * a.pool.out[0];
  const TmaTensor tensor = {y, 3, {k, a.pool.out[1], rows}, {1, k, k * a.pool.out[1]}};
  JAXCONV_RETURN_IF_ERROR(
      kNarrow ? EncodeBytes(tensor, {64, a.pool.pooled, 1, 1, 1}, what, &a.y_map)
              : EncodeTiled(dtype, tensor, {0, a.pool.pooled, 1, 1, 1}, what, &a.y_map));
  const int64_t blocks = std::min<int64_t>(a.tiles, device.multiprocessors);
  constexpr int kSteps = kN == 112 ? kStepsOf7x7<T> : 0;
  const auto kernel = a.steps == kSteps ? PooledKernel<T, S, kNarrow, kN, kSteps>
                                        : PooledKernel<T, S, kNarrow, kN, 0>;
  return Launch(ctx, kernel, a, blocks, kPooledThreads<T>, int(a.barriers_at) + 64, what);
}

}  // namespace

Status StemConvPooled(const Context& ctx, const ConvProblem& p, const Epilogue& e,
                      const PoolProblem& q, const PooledTypes& types, const void* x, const void* w,
                      const void* bias, void* y, const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const StemGeometry g = MakeGeometry(p);
    const PooledTile pool(g, q, sizeof(T));
    PooledArgs<T> a{};
    a.pool = pool;
    const NarrowWindows windows(g, sizeof(T), pool.cols);
    SetSlots(a, g, windows, x);
    SetFilter(a, windows, w);
    a.pairs = IsInteger8(types.y);
    a.signed_y = types.y == Number::kS8;
    a.scale = types.scale;
    a.bias = static_cast<const T*>(bias);
    a.least = e.activation == Activation::kNone ? -INFINITY : 0.f;
    a.greatest = e.activation == Activation::kRelu6 ? 6.f : INFINITY;
    const auto launch = [&](auto of_x, auto narrow) {
      using S = decltype(of_x);
      constexpr bool kNarrow = decltype(narrow)::value;
      const auto columns = pool.kernel_columns == 64 ? LaunchPooled<T, S, kNarrow, 64>
                                                     : LaunchPooled<T, S, kNarrow, 112>;
      return columns(ctx, a, windows, p.dtype, y, what);
    };
    const auto launch_to = [&](auto of_x) {
      return a.pairs ? launch(of_x, std::true_type()) : launch(of_x, std::false_type());
    };
    if constexpr (sizeof(T) == 2) {
      if (types.x == Number::kF32) return launch_to(float());
    }
    return launch_to(T());
  });
}

}  // namespace jaxconv::cuda::conv
