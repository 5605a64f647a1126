// The two products over windows of the narrow image on sm_90a (geometry.h says what narrow and wide are):
//
//   to wide  wide[i, k]  = sum over taps t, channels c of narrow[i * stride + shift(t), c] * w[t, c, k]
//   wgrad    dw[t, c, k] = sum over i of narrow[i * stride + shift(t), c] * wide[i, k]
//
// The windows are not gathered. Narrow pixels lie in shared memory as chunks of 16 bytes: two pixels of four 16-bit
// channels, or one pixel of more. The window of the next wide pixel starts `planes` chunks later, a whole number. The
// chunks of a row are dealt to `planes` planes. So chunk k of the windows of eight neighbouring wide pixels is eight
// chunks one after another. wgmma takes these as an operand without swizzle: eight columns of 16 bytes of k (to wide),
// or eight k of 16 bytes of columns (wgrad). The distance from one chunk to the next is a field of the operand's
// descriptor, so the chunks of a window may lie at any distance.
//
//   to wide  rows are 64 wide channels, columns the pixels of a row of wide, k the chunks
//   wgrad    rows are 64 wide channels, columns the chunks of a column of taps, k the pixels of a row of wide, as it lies
//
// A tile is some rows of up to 112 wide pixels of an image. Blocks are persistent (in wgrad, for each slice of wide
// channels) and walk over the tiles. One warpgroup fetches narrow tiles into the two slots of a ring, and two multiply.
// TMA reads and writes wide rows. The narrow image is read about once (its halo again), and w or the wide image once.
// The wide image, or partial sums of dw, are written once. The wide image's traffic is the limit.
#include <algorithm>

#include "cuda/conv/common/reduce.h"
#include "cuda/conv/stem/domain.h"
#include "cuda/conv/stem/kernels.h"
#include "cuda/conv/stem/sm90_windows.cuh"
#include "cuda/core/device.h"

namespace jaxconv::cuda::conv {
namespace {

constexpr int kWindowThreads = (1 + kConsumers) * 128;
// Blocks a multiprocessor. If two fit, one block works while the other waits at its barriers.
template <typename T, int kRegisters>
constexpr int kResident = sizeof(T) == 2 && kRegisters <= 32 ? 2 : 1;

// ---------------------------------------------------------------------------------------------------------------------
// From narrow to wide

template <typename T>
struct NarrowInArgs : NarrowToWide<T> {
  CUtensorMap wide_map, z_map;
  EpilogueArgs<T> epilogue;
};

template <typename T, int kN, int kSteps>
__global__ void __launch_bounds__(kWindowThreads, kResident<T, kN / 2>)
    NarrowInKernel(const __grid_constant__ NarrowInArgs<T> a) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, int(threadIdx.x / 128), 0) - 1;  // uniform
  const uint32_t barriers = shared + a.barriers_at;
  if (threadIdx.x == 0) InitSlots(barriers, kConsumers);
  StageFilter(a, cells);

  if (group < 0) {
    FillSlots<4, T>(a, shared, barriers, blockIdx.x, gridDim.x);
    return;
  }
  int slot = 0, count = 0;
  uint32_t parity = 0;
  constexpr int kBox = kN * 128;
  const uint32_t boxes = shared + a.boxes_at + group * 2 * kBox;
  const bool elected = threadIdx.x % 128 == 0;
  int box = 0;
  for (int64_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x, ++count) {
    const QuotRem w = DivMod(tile, a.by_tiles_w), h = DivMod(w.quot, a.by_tiles_h);
    const int rows = min(a.rows, g.wide[0] - h.rem * a.rows);
    const int to_row = int(h.quot) * g.wide[0] + h.rem * a.rows, to_col = w.rem * a.cols;
    BarrierWait(barriers + slot * 16, parity);
    const uint32_t narrow = shared + a.narrow_at + slot * a.slot_bytes;
    for (int row = group ^ (count * a.rows & 1); row < rows; row += kConsumers) {
      for (int tile_k = 0; tile_k < a.channel_tiles; ++tile_k) {
        float acc[kN / 2];
        SumRow<T, kN, kSteps>(a, shared + tile_k * a.filter_tile,
                              narrow + row * g.stride[0] * a.row_bytes, acc);

        const int channel = tile_k * 64 + warp * 16 + lane / 4;
        float bias[2] = {};
        if (a.epilogue.bias != nullptr) {
          if (channel < g.wide_channels) bias[0] = ToFloat(a.epilogue.bias[channel]);
          if (channel + 8 < g.wide_channels) bias[1] = ToFloat(a.epilogue.bias[channel + 8]);
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) acc[i] += bias[i / 2 % 2];
        }
        const auto keep = [&](const CUtensorMap& map) {
          if (elected) {
            if constexpr (sizeof(T) == 2) {
              StoreWaitRead<1>();
            } else {
              StoreWaitRead<0>();
            }
          }
          NamedBarrier(1 + group, 128);
          if constexpr (sizeof(T) == 2) {
            const uint32_t at = boxes + box * kBox + (lane / 16 * 8 + lane % 8) * 128 +
                                ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
            if (tile_k * 64 + warp * 16 < g.wide_channels) {
#pragma unroll
              for (int j = 0; j < kN / 8; j += 2) {
                const float* u = acc + j * 4;
                asm volatile(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                        "r"(at + j * 1024),
                    "r"(PackPair(u[0], u[1], T())), "r"(PackPair(u[2], u[3], T())),
                    "r"(PackPair(u[4], u[5], T())), "r"(PackPair(u[6], u[7], T()))
                    : "memory");
              }
            }
          } else {
            unsigned char* to = cells + (boxes - shared) + warp / 2 * kBox;
            const int c = warp % 2 * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) {
              const int pixel = i / 4 * 8 + lane % 4 * 2 + i % 2, at = c + i / 2 % 2 * 8;
              *reinterpret_cast<float*>(to + pixel * 128 + ((at / 4) ^ (pixel % 8)) * 16 +
                                        at % 4 * 4) = acc[i];
            }
          }
          FenceForTma();
          NamedBarrier(1 + group, 128);
          if (elected) {
            StoreTile(map, boxes + box * kBox, tile_k * 64, to_col, to_row + row);
            if (sizeof(T) == 4 && tile_k * 64 + 32 < g.wide_channels) {
              StoreTile(map, boxes + kBox, tile_k * 64 + 32, to_col, to_row + row);
            }
            StoreCommit();
          }
          if (sizeof(T) == 2) box ^= 1;
        };
        if (a.epilogue.z != nullptr) keep(a.z_map);
        ApplyActivation(a.epilogue.activation, acc, a.epilogue.slope);
        keep(a.wide_map);
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

// ---------------------------------------------------------------------------------------------------------------------
// wgrad

template <typename T>
struct NarrowInWgradArgs : NarrowSlots<T> {
  CUtensorMap wide_map;
  float* partials;  // (parts, elements of dw)
  int64_t dw_count;
  int parts;                       // of the tiles, each with blocks of its own
  bool by_channel;                 // the warpgroups take 64 channels each, not every other row
  int stages, stage_bytes, steps;  // of wide, a row of a warpgroup each; steps: of 16 pixels
  uint32_t part_at[kWgradParts];   // where a column of chunks lies from a window's first pixel
  uint32_t ring_at, barriers_at;
};

// clang-format off
#define JAXCONV_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXCONV_F12(i) JAXCONV_F4(i), JAXCONV_F4(i + 4), JAXCONV_F4(i + 8)
#define JAXCONV_WGRAD(SHAPE, TYPE, REGISTERS, A, B, ...)                                           \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" REGISTERS "}, %" A \
               ", %" B ", 1, 1, 1, 1, 1;\n" : __VA_ARGS__ : "l"(a), "l"(b))
#define JAXCONV_WGRAD_N(TYPE)                                                                      \
  if constexpr (kRegisters == 16) {                                                                \
    JAXCONV_WGRAD("m64n32k16", TYPE,                                                               \
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "16",    \
                  "17", JAXCONV_F4(0), JAXCONV_F12(4));                                            \
  } else {                                                                                         \
    JAXCONV_WGRAD("m64n56k16", TYPE,                                                               \
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "    \
                  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27", "28", "29",             \
                  JAXCONV_F4(0), JAXCONV_F12(4), JAXCONV_F12(16));                                 \
  }
// clang-format on

// D (64 x 2 kRegisters) += A * B, 16 k, neither k-major.
template <typename T, int kRegisters>
__device__ __forceinline__ void WgmmaWindows(float (&d)[kRegisters], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXCONV_WGRAD_N("bf16")
  } else {
    JAXCONV_WGRAD_N("f16")
  }
}
#undef JAXCONV_WGRAD_N
#undef JAXCONV_WGRAD
#undef JAXCONV_F12
#undef JAXCONV_F4

// kRows: of taps, 4 or 7; kParts: columns of chunks.
template <typename T, int kRows, int kParts>
__global__ void __launch_bounds__(kWindowThreads, kResident<T, kRows * 4 * kParts>)
    NarrowInWgradKernel(const __grid_constant__ NarrowInWgradArgs<T> a) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char cells[];
  const uint32_t shared = SharedAddress(cells);
  const StemGeometry& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group = __shfl_sync(~0u, int(threadIdx.x / 128), 0) - 1;  // uniform
  const uint32_t barriers = shared + a.barriers_at;
  // Places that are no pixel must be zeros: the pixels past a row's last, and the places that their windows reach.
  for (uint32_t at = threadIdx.x * 16; at < a.barriers_at; at += kWindowThreads * 16) {
    StoreShared16(shared + at, make_uint4(0, 0, 0, 0));
  }
  const auto full = [&](int stage) {
    return barriers + 32 + (max(group, 0) * a.stages + stage) * 8;
  };
  if (threadIdx.x == 0) InitSlots(barriers, kConsumers);
  if (group >= 0 && threadIdx.x % 128 == 0) {
    for (int stage = 0; stage < a.stages; ++stage) BarrierInit(full(stage), 1);
    BarrierInitFence();
  }
  FenceForTma();
  __syncthreads();
  const int part = int(blockIdx.x % unsigned(a.parts));
  const int slice = int(blockIdx.x / unsigned(a.parts));
  if (group < 0) {
    FillSlots<4, T>(a, shared, barriers, part, a.parts);
  }
  const int channel0 = (slice * (1 + a.by_channel) + (a.by_channel ? max(group, 0) : 0)) * 64;
  const int stride_row = a.by_channel ? 1 : kConsumers;
  const uint32_t ring = shared + a.ring_at + max(group, 0) * a.stages * a.stage_bytes;
  float acc[kParts][kRows * 4] = {};
  if (group >= 0) {
    // The first row of a tile that is this warpgroup's.
    const auto first_row = [&](int count) {
      return a.by_channel ? 0 : group ^ (count * a.rows & 1);
    };
    const auto rows_of = [&](int64_t tile, int* to_row, int* to_col) {
      const QuotRem w = DivMod(tile, a.by_tiles_w), h = DivMod(w.quot, a.by_tiles_h);
      *to_row = int(h.quot) * g.wide[0] + h.rem * a.rows;
      *to_col = w.rem * a.cols;
      return min(a.rows, g.wide[0] - h.rem * a.rows);
    };
    const bool feeds = threadIdx.x % 128 == 0;
    // Its thread 0 runs ahead by stages - 1 rows: the stage it fills is one that all four warps
    // have done with.
    int64_t ahead_tile = part;
    int ahead_count = 0, ahead_row = first_row(0), ahead_stage = 0;
    int ahead_rows = 0, ahead_to = 0, ahead_col = 0;
    if (ahead_tile < a.tiles) ahead_rows = rows_of(ahead_tile, &ahead_to, &ahead_col);
    const auto feed = [&] {
      while (ahead_tile < a.tiles && ahead_row >= ahead_rows) {
        ahead_tile += a.parts;
        ahead_row = first_row(++ahead_count);
        if (ahead_tile < a.tiles) ahead_rows = rows_of(ahead_tile, &ahead_to, &ahead_col);
      }
      if (ahead_tile >= a.tiles) return;
      BarrierExpect(full(ahead_stage), a.cols * 128);
      LoadTile(ring + ahead_stage * a.stage_bytes, a.wide_map, full(ahead_stage), channel0,
               ahead_col, ahead_to + ahead_row);
      if (++ahead_stage == a.stages) ahead_stage = 0;
      ahead_row += stride_row;
    };
    if (feeds) {
      for (int stage = 1; stage < a.stages; ++stage) feed();
    }
    int slot = 0, stage = 0, count = 0;
    uint32_t parity = 0, stage_parity = 0;
    for (int64_t tile = part; tile < a.tiles; tile += a.parts, ++count) {
      int to_row, to_col;
      const int rows = rows_of(tile, &to_row, &to_col);
      BarrierWait(barriers + slot * 16, parity);
      const uint32_t narrow = shared + a.narrow_at + slot * a.slot_bytes;
      for (int row = first_row(count); row < rows; row += stride_row) {
        NamedBarrier(1 + group, 128);  // all have done with the row before
        if (feeds) feed();
        __syncwarp();
        BarrierWait(full(stage), stage_parity);
        const uint64_t wide = OperandDescriptor<false>(ring + stage * a.stage_bytes);
        // Not swizzled: eight k are 128 bytes, the next eight follow; rows of taps are columns.
        const uint64_t from = uint64_t(g.step[0] * a.row_bytes / 16) << 32 |
                              uint64_t(128 / 16) << 16 |
                              uint64_t((narrow + row * g.stride[0] * a.row_bytes) >> 4);
        int step = 0;
#pragma unroll 1
        do {
          WgmmaFence();
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            WgmmaWindows<T>(acc[i], wide + step * (2048 / 16),
                            from + a.part_at[i] + step * (256 / 16));
          }
          WgmmaCommit();
        } while (++step < a.steps);
        WgmmaWait<0>();
#pragma unroll
        for (int i = 0; i < kParts; ++i) Pin(acc[i]);
        if (++stage == a.stages) {
          stage = 0;
          stage_parity ^= 1;
        }
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(barriers + slot * 16 + 8);
      slot ^= 1;
      parity ^= slot == 0;
    }
  }
  if (!a.by_channel) {
    __syncthreads();
    float* sums = reinterpret_cast<float*>(cells) + threadIdx.x % 128;
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < kParts * kRows * 4; ++i)
        sums[i * 128] = acc[i / (kRows * 4)][i % (kRows * 4)];
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < kParts * kRows * 4; ++i)
        acc[i / (kRows * 4)][i % (kRows * 4)] += sums[i * 128];
    }
  }
  if (group < 0 || (group == 1 && !a.by_channel)) return;
  float* to = a.partials + part * a.dw_count;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const StemElement at = a.Element(r, i, (lane % 4 * 2 + e) * int(sizeof(T)));
        if (at.tap < 0) continue;
        float* line = to + at.tap * g.w_tap + at.channel * g.w_narrow;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = channel0 + warp * 16 + half * 8 + lane / 4;
          if (channel < g.wide_channels) line[channel * g.w_wide] = acc[i][r * 4 + half * 2 + e];
        }
      }
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

// The rows of a tile; false where none fit. `row_cost`: cycles of a row of wide.
template <typename T>
bool ChooseRows(NarrowSlots<T>& a, const NarrowWindows& windows, int room, int blocks,
                double row_cost) {
  const StemGeometry& g = a.g;
  const int tiles_w = int(CeilDiv(g.wide[1], a.cols));
  const auto set = [&](int rows) {
    SetRows(a, windows, rows, rows);
    a.tiles = int64_t(g.images) * tiles_w * CeilDiv(g.wide[0], rows);
  };
  const int best =
      BestRows(a, g.wide[0], room, blocks, set, [&](int rows) { return rows * row_cost; });
  if (best == 0) return false;
  a.tile_step[0] = best;
  a.tile_step[1] = a.cols;
  a.by_tiles_h = FastDiv(CeilDiv(g.wide[0], best));
  a.by_tiles_w = FastDiv(tiles_w);
  return true;
}

// Rows of `cols` wide pixels, 128 bytes of channels.
template <typename T>
Status EncodeWide(DType dtype, const NarrowSlots<T>& a, const void* wide, const std::string& what,
                  CUtensorMap* map) {
  const int64_t k = a.g.wide_channels, rows = int64_t(a.g.images) * a.g.wide[0];
  const TmaTensor tensor = {wide, 3, {k, a.g.wide[1], rows}, {1, k, k * a.g.wide[1]}};
  return EncodeTiled(dtype, tensor, {0, a.cols, 1, 1, 1}, what, map);
}

template <typename T, int kN>
Status LaunchToWide(const Context& ctx, NarrowInArgs<T> a, const NarrowWindows& windows,
                    DType dtype, void* wide, const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const StemGeometry& g = a.g;
  const int boxes = kConsumers * 2 * kN * 128, filter = a.channel_tiles * a.filter_tile;
  // Of a row's products, or of its bytes.
  const double row_cost = std::max<double>(a.steps * a.channel_tiles * (kN / 2.0),
                                           a.cols * g.wide_channels * double(sizeof(T)) / 19.0);
  // As many blocks of a multiprocessor as fit; the domain promises one.
  int resident = kResident<T, kN / 2>;
  while (!ChooseRows(a, windows, NarrowInRoom(g, a.steps, kN, resident),
                     device.multiprocessors * resident, row_cost * resident)) {
    if (--resident == 0) return Status::Internal(what + ": no tile fits");
  }
  const int blocks = device.multiprocessors * resident;
  a.boxes_at = uint32_t(filter);
  a.narrow_at = a.boxes_at + boxes;
  a.barriers_at = a.narrow_at + 2 * a.slot_bytes + kN * 16;
  JAXCONV_RETURN_IF_ERROR(EncodeWide(dtype, a, wide, what, &a.wide_map));
  if (a.epilogue.z != nullptr) {
    JAXCONV_RETURN_IF_ERROR(EncodeWide(dtype, a, a.epilogue.z, what, &a.z_map));
  }
  constexpr int kSteps = kN == 112 ? kStepsOf7x7<T> : 0;
  const auto kernel = a.steps == kSteps ? NarrowInKernel<T, kN, kSteps> : NarrowInKernel<T, kN, 0>;
  return Launch(ctx, kernel, a, std::min<int64_t>(a.tiles, blocks), kWindowThreads,
                int(a.barriers_at) + 64, what);
}

template <typename T>
Status RunToWide(const Context& ctx, const ConvProblem& p, const Epilogue& e, const void* narrow,
                 const void* w, const void* bias, void* wide, void* z, const std::string& what) {
  NarrowInArgs<T> a{};
  a.epilogue = MakeEpilogue<T>(e, bias, z);
  const StemGeometry g = MakeGeometry(p);
  const NarrowWindows windows(g, sizeof(T));
  SetSlots(a, g, windows, narrow);
  SetFilter(a, windows, w);
  return a.cols <= 64 ? LaunchToWide<T, 64>(ctx, a, windows, p.dtype, wide, what)
                      : LaunchToWide<T, 112>(ctx, a, windows, p.dtype, wide, what);
}

template <typename T, int kRows, int kParts>
Status LaunchWgrad(const Context& ctx, NarrowInWgradArgs<T> a, const NarrowWindows& windows,
                   DType dtype, int64_t splits, const void* wide, void* dw,
                   const std::string& what) {
  Device device;
  JAXCONV_RETURN_IF_ERROR(CurrentDevice(what, &device));
  const StemGeometry& g = a.g;
  const int tiles = int(CeilDiv(g.wide_channels, 64));
  a.by_channel = tiles > 1;
  const int slices = int(CeilDiv(tiles, 1 + a.by_channel));
  a.steps = int(CeilDiv(a.cols, 16));
  a.stage_bytes = WgradStageBytes(windows);
  const int past = WindowsPast(g, windows, kRows);
  const double row_cost = std::max(a.steps * kParts * (kRows * 4 + 16.0) * (1 + a.by_channel),
                                   a.cols * 128.0 * (1 + a.by_channel) / 19);
  // Two blocks only with four stages each: MobileNet's wgrad took 0.068 ms with three stages, and 0.064 with one block.
  int resident = kResident<T, kRows * 4 * kParts>;
  const auto fits = [&](int stages) {
    a.parts = int(std::clamp<int64_t>(device.multiprocessors * resident / slices, 1, splits));
    a.stages = stages;
    return ChooseRows(a, windows, WgradRoom(g, windows, kRows, stages, resident), a.parts,
                      row_cost * resident);
  };
  if (resident > 1 && !fits(4)) resident = 1;
  if (!fits(4) && !fits(kLeastWgradStages)) return Status::Internal(what + ": no tile fits");
  a.parts = int(std::min<int64_t>(a.parts, a.tiles));
  a.narrow_at = uint32_t(kConsumers * a.stages * a.stage_bytes);
  // Consumers that share channels add their sums where the ring was; barriers lie behind both.
  const int sums = a.by_channel ? 0 : kParts * kRows * 4 * 128 * 4;
  a.barriers_at =
      uint32_t(std::max<int64_t>(a.narrow_at + 2 * a.slot_bytes + CeilDiv(past, 16) * 16, sums));
  const int bytes = int(a.barriers_at) + 32 + 2 * a.stages * 8;
  JAXCONV_RETURN_IF_ERROR(EncodeWide(dtype, a, wide, what, &a.wide_map));
  JAXCONV_RETURN_IF_ERROR(Launch(ctx, NarrowInWgradKernel<T, kRows, kParts>, a,
                                 int64_t(a.parts) * slices, kWindowThreads, bytes, what));
  return SumPartials(ctx, dtype, a.partials, a.parts, a.dw_count, {}, dw, what.c_str());
}

template <typename T>
Status RunWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* narrow,
                const void* wide, void* dw, float* partials, const std::string& what) {
  NarrowInWgradArgs<T> a{};
  const StemGeometry g = MakeGeometry(p);
  const NarrowWindows windows(g, sizeof(T));
  SetSlots(a, g, windows, narrow);
  a.partials = partials;
  a.dw_count = FilterCount(p);
  for (int i = 0; i < kWgradParts; ++i) {
    a.part_at[i] = uint32_t(windows.ChunkAt(g, 0, std::min(i, a.row_chunks - 1)) / 16);
  }
  const auto launch = WgradKernelRows(g) == 7 ? LaunchWgrad<T, 7, 4>
                      : a.row_chunks > 2      ? LaunchWgrad<T, 4, 4>
                                              : LaunchWgrad<T, 4, 2>;
  return launch(ctx, a, windows, p.dtype, splits, wide, dw, what);
}

}  // namespace

Status StemNarrowIn(const Context& ctx, ConvOp, const ConvProblem& p, const Epilogue& e,
                    const void* src, const void* w, const void* bias, void* dst, void* z,
                    const std::string& what) {
  return ForElement(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return RunToWide<T>(ctx, p, e, src, w, bias, dst, z, what);
  });
}

Status StemNarrowInWgrad(const Context& ctx, const ConvProblem& p, int64_t splits, const void* x,
                         const void* dy, void* dw, float* partials, const std::string& what) {
  const bool few_in = FewInputs(p);
  const void* narrow = few_in ? x : dy;
  const void* wide = few_in ? dy : x;
  return p.dtype == DType::kBF16
             ? RunWgrad<__nv_bfloat16>(ctx, p, splits, narrow, wide, dw, partials, what)
             : RunWgrad<__half>(ctx, p, splits, narrow, wide, dw, partials, what);
}

}  // namespace jaxconv::cuda::conv
