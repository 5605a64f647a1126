// fprop, and dgrad as fprop of dy with the filter reversed, for 16-bit channels-last stride 1:
//
//   dst[n, p, q, c] = sum over r, s of  src[n, p - pad + r, q - pad + s, c] * w[r, s, c]
//
// For channel c, with the 16 streams (rows_mma.cuh) on M, an input row h adds
//
//   sum[row p][stream, j] += sum over i < 16 of  src[h][stream, i] * band_r[i, j],  r = h + pad - p,
//   band_r[i, j] = w[r, i - j] where that is a tap, else 0
//
// to the R output rows p that it contributes to. A warp owns two neighbouring channels: it reads an
// input row of theirs from shared memory once, with the bands and the sums of all rows under way in
// registers, so that its 2 R products a row wait for nothing but the row. The sums move up by one
// row with each input row; that costs nothing, because a product may add to other registers than it
// writes. Rows past the image's last are products with zeros.
//
// A block is specialised, so that the tensor cores need not wait for the transposition: 16 warps multiply,
// two channels each; of a warpgroup of helpers two transpose rows, two octets each, into a ring of kBandRows
// rows of cells, which the warps that multiply these octets read. Each side waits for the other only when
// the ring is full or empty. A token with each row says what it is.
//
// A finished row goes back through a ring in shared memory, channels x pixels to pixels x channels, to
// 16-byte stores by two of the helper warps; of the other two, which transpose the input, one thread is
// TMA's. What is added to a dgrad each storing thread fetches for itself, rows ahead, by cp.async.
//
// Products are exact and sums float32. The zeros of a band meet real inputs, so an infinity in src
// makes NaN in outputs up to 15 columns away, where a sum over the taps alone would not see it.
#include "cuda/conv/depthwise/kernels.h"

#include <type_traits>

#include "cuda/conv/common/kernel.cuh"
#include "cuda/conv/depthwise/rows_mma.cuh"
#include "cuda/conv/depthwise/rows_mma_ring.cuh"
#include "cuda/core/copy_async.cuh"
#include "cuda/core/wgmma.cuh"

namespace jaxconv::cuda::conv {
namespace {

// d = a * b + c of mma.m16n8k16.
template <typename T>
__device__ __forceinline__ void MmaOnto(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2], const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
}

template <typename T>
struct BandsArgs {
  CUtensorMap map;  // of src
  const T* w;
  const T* added;  // like dst, where something is added
  T* dst;
  EpilogueArgs<T> epilogue;
  RowUnits u;
  RowArray from, to;
  int pad_h, pad_w;
  int segs;
  uint32_t cells_bytes;  // of a row of src, transposed
  bool reverse;
};

// The bands of two neighbouring channels from `w` on: b operands of an mma.
template <typename T, int R>
__device__ __forceinline__ void LoadBands(const T* w, int channels, bool reverse,
                                          uint32_t (&band)[2][R][2]) {
  constexpr int S = R;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    uint32_t pair[4];  // of the band's rows 2t, 2t + 1, 2t + 8, 2t + 9, in its column lane / 4
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int s = lane % 4 * 2 + (e & 1) + (e >> 1) * 8 - lane / 4;
      const int tap = reverse ? (R - 1 - r) * S + S - 1 - s : r * S + s;
      pair[e] = 0;
      if (s >= 0 && s < S) {
        pair[e] = __ldg(reinterpret_cast<const unsigned*>(w + int64_t(tap) * channels));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      band[0][r][half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x5410);
      band[1][r][half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x7632);
    }
  }
}

// Staging of finished rows, [stream][octet][slot]: slot i ^ Turn is channel i. Neither 8 streams'
// same channel nor one stream's same two channels of all octets share a bank.
[[maybe_unused]] __device__ __forceinline__ int Turn(int stream, int octet) {
  return (octet * 2 & 7) ^ (stream & 1) << 2 ^ (stream >> 1 & 3);
}

constexpr int kStaged = 4;  // rows
constexpr uint32_t kStagedBytes = kBandStreams * kBandOctets * 128;
constexpr int kAdded = 4;  // rows of what is added: one is read while three are on their way

// 16 bytes a + b, each sum rounded.
template <typename T>
__device__ __forceinline__ void AddPacked(uint32_t (&a)[4], const uint4& b) {
  using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
  const uint32_t words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair sum =
        __hadd2(reinterpret_cast<const Pair&>(a[i]), reinterpret_cast<const Pair&>(words[i]));
    a[i] = reinterpret_cast<const uint32_t&>(sum);
  }
}

// Shared memory: the ring of stages, cells, staged rows, rows of what is added; then barriers and
// tokens.
template <typename T, int R, bool kAdds>
__global__ void __launch_bounds__(kBandThreads, 1)
    DepthwiseRowsMmaKernel(const __grid_constant__ BandsArgs<T> g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const RowUnits& u = g.u;
  const uint32_t ring_at = SharedAddress(shared);
  const uint32_t cells_at = ring_at + uint32_t(u.stages * u.stage_bytes);
  const uint32_t staged_at = cells_at + kBandRows * g.cells_bytes;
  const uint32_t added_at = staged_at + kStaged * kStagedBytes;
  const uint32_t extra = added_at + (kAdds ? kAdded * kStagedBytes : 0);
  const uint32_t tokens = extra + kBandRows * 2 * 16;
  const uint32_t staged_full = tokens + kBandRows * 2 * 4;  // empty 8 bytes after it
  const BandCells cells = {cells_at, g.cells_bytes, extra, tokens};
  RowRing ring(ring_at, staged_full + kStaged * 16, u);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.Init(2);
    cells.Init();
    for (int k = 0; k < kStaged; ++k) {
      BarrierInit(staged_full + k * 16, kBandWarps);
      BarrierInit(staged_full + k * 16 + 8, 2);
    }
    BarrierInitFence();
  }
  __syncthreads();

  const int slab = int(blockIdx.x % unsigned(u.slabs));
  const int begin = int(blockIdx.x / unsigned(u.slabs) * u.share);
  const int end = int(min(begin + u.share, u.rows));
  const auto first_row = [&](const RowUnit& at) { return max(at.p - g.pad_h, 0); };
  const auto last_row = [&](const RowUnit& at) {  // past it
    return min(at.end - g.pad_h + R - 1, g.from.h);
  };
  const int pitch = g.segs + 1, streams = u.images * g.segs;  // cells of an image's row

  if (warp < kBandWarps) {
    RegistersUp<kBandRegisters>();
    const int octet = warp / 4, i = warp % 4 * 2,
              half = warp / 8;  // channels i, i + 1 of the octet
    const int channel = (slab * kBandOctets + octet) * 8 + i;
    uint32_t take;  // where the lane's row of ldmatrix lies in a row of cells; ^ 16: channel i + 1
    {
      const int stream = min(lane % 16, streams - 1), image = stream / g.segs;
      const int phase = stream + lane / 16, cell = stream + image + lane / 16;
      take = uint32_t(((cell * kBandOctets + octet) * 8 + (i ^ (phase & 7))) * 16);
    }
    uint32_t put;  // in a staged row
    {
      const int stream = lane / 8 % 2 * 8 + lane % 8, in = i + lane / 16;
      put = uint32_t(((stream * kBandOctets + octet) * 8 + (in ^ Turn(stream, octet))) * 16);
    }
    Keep(take);
    Keep(put);
    uint32_t band[2][R][2] = {};
    float bias[2] = {};
    if (channel < g.to.channels) {
      LoadBands<T, R>(g.w + channel, g.to.channels, g.reverse, band);
      if (g.epilogue.bias != nullptr) {
        bias[0] = ToFloat(g.epilogue.bias[channel]);
        bias[1] = ToFloat(g.epilogue.bias[channel + 1]);
      }
    }

    BandPlaces<kBandRows> row;
    BandPlaces<kStaged> out;
    const auto stage = [&](const float (&v)[2][4]) {
      const uint32_t word[4] = {PackPair(v[0][0], v[0][1], T()), PackPair(v[0][2], v[0][3], T()),
                                PackPair(v[1][0], v[1][1], T()), PackPair(v[1][2], v[1][3], T())};
      const uint32_t full = staged_full + out.at * 16;
      BarrierWait(full + 8, out.parity ^ 1);
      StoreMatrix4(staged_at + out.at * kStagedBytes + put, word);
      __syncwarp();
      if (lane == 0) BarrierArrive(full);
      out.Advance();
    };
    const auto next = [&] {  // token
      BarrierWait(cells.Full(row.at, half), row.parity);
      // By one lane: read by all of them a row takes a tenth longer, and racecheck does not see that
      // __syncwarp() orders the others' reads before the place is handed back.
      return __shfl_sync(0xffffffffu, lane == 0 ? cells.Token(row.at, half) : 0u, 0);
    };
    for (uint32_t token = next(); !(token & kBandLast);) {
      // sum[k][j] is output row p + j of channel i + k before input row h, p = h + pad - (R - 1).
      float sum[2][R - 1][4] = {};
      do {
        uint32_t in[2][4] = {};
        if (token & kBandInput) {
          const uint32_t at = cells.At(row.at) + take;
          LoadMatrix(in[0], at);
          LoadMatrix(in[1], at ^ 16);
        }
        ReadsFirst();
        __syncwarp();
        if (lane == 0) BarrierArrive(cells.Empty(row.at, half));
        row.Advance();
        float done[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float zero[4] = {};
          MmaOnto<T>(done[k], in[k], band[k][R - 1], sum[k][0]);
#pragma unroll
          for (int j = 1; j + 1 < R; ++j) {
            MmaOnto<T>(sum[k][j - 1], in[k], band[k][R - 1 - j], sum[k][j]);
          }
          MmaOnto<T>(sum[k][R - 2], in[k], band[k][0], zero);
        }
        if (token & kBandOutput) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int e = 0; e < 4; ++e) done[k][e] += bias[k];
          }
          if (g.epilogue.z != nullptr) stage(done);
          if (g.epilogue.activation != Activation::kNone) {
            ApplyActivation(g.epilogue.activation, done[0], g.epilogue.slope);
            ApplyActivation(g.epilogue.activation, done[1], g.epilogue.slope);
          }
          stage(done);
        }
        token = next();
      } while (!(token & (kBandFirst | kBandLast)));
    }
  } else {
    RegistersDown<kBandHelperRegisters>();
    const int half = warp % 2;
    if (warp < kBandWarps + 2) {  // transposes
      const bool leader = warp == kBandWarps && lane == 0;
      const uint32_t bytes = uint32_t(u.images * pitch * (kBandOctets * 128));
      RowRing ahead = ring;
      int next_row = begin, next_image = 0, next_w = 0, next_h = 0, next_end = 0;
      const auto feed = [&] {
        if (next_h == next_end) {
          if (next_row >= end) return;
          const RowUnit next = UnitOf(u, next_row, end);
          next_row += next.end - next.p;
          next_image = next.image;
          next_w = next.q - g.pad_w;
          next_h = first_row(next);
          next_end = last_row(next);
        }
        const uint32_t full = ahead.Claim(bytes);
        LoadTile(ahead.At(), g.map, full, slab * kBandOctets * 8, next_w, next_h, next_image);
        ahead.Advance();
        ++next_h;
      };
      if (leader) {
        for (int s = 1; s < u.stages; ++s) feed();
      }
      __syncwarp();
      const BandMover mover(u.images * pitch, pitch, g.segs, half);
      BandPlaces<kBandRows> to;
      const auto pass = [&](uint32_t token) {
        __syncwarp();
        if (lane == 0) {
          cells.PutToken(to.at, half, token);
          BarrierArrive(cells.Full(to.at, half));
        }
        to.Advance();
      };
      const auto claim = [&] { BarrierWait(cells.Empty(to.at, half), to.parity ^ 1); };
      for (int row = begin; row < end;) {
        const RowUnit at = UnitOf(u, row, end);
        row += at.end - at.p;
        const int h0 = first_row(at), h1 = last_row(at);
        uint32_t token = kBandFirst | kBandInput;
        for (int h = h0, p = h0 + g.pad_h - (R - 1); p < at.end; ++h, ++p) {
          if (p >= at.p) token |= kBandOutput;
          if (h < h1) {
            if (leader) feed();
            __syncwarp();
            ring.Await();
            mover.Move(ring.At(), cells.At(to.at), claim);
            ring.GiveBack();
          } else {
            token &= ~kBandInput;
            claim();
          }
          pass(token);
          token &= ~kBandFirst;
        }
      }
      claim();
      pass(kBandLast);
    } else {  // stores streams 8 half and the next 7
      // Row 2t + b of matrix m is channel 2m + b of octet t, which lanes t of four store.
      const int t = lane % 8 / 2, in = lane / 8 * 2 + lane % 2;
      const uint32_t get = uint32_t(((half * 8 * kBandOctets + t) * 8 + (in ^ Turn(0, t))) * 16);
      const int channel = (slab * kBandOctets + lane % 4) * 8;
      int pixel[8];  // of the strip's images
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const int image = (half * 8 + m) / g.segs;
        pixel[m] = image * g.to.h * g.to.w + (half * 8 + m - image * g.segs) * 8 + lane / 4;
      }
      // Which of the lane's pixels there are, and where the first stream's would be.
      const auto live_of = [&](const RowUnit& at) {
        uint32_t live = 0;
#pragma unroll 1
        for (int m = 0; m < 8; ++m) {
          const int stream = half * 8 + m, image = stream / g.segs;
          const int col = (stream - image * g.segs) * 8 + lane / 4;
          const bool real = stream < streams && channel < g.to.channels &&
                            at.image + image < g.to.images && at.q + col < g.to.w;
          live |= uint32_t(real) << m;
        }
        return live;
      };
      const auto place_of = [&](const RowUnit& at) {
        return ((int64_t(at.image) * g.to.h + at.p) * g.to.w + at.q) * g.to.channels + channel;
      };
      // What is added, of the rows ahead: 16 bytes of each of the lane's pixels, which it alone reads.
      const uint32_t own = added_at + uint32_t((half * 8 * 32 + lane) * 16);
      int next_row = begin, next_rows = 0;  // rows: left of the unit
      int64_t next_place = 0;
      uint32_t next_live = 0, next_slot = 0;
      const auto fetch = [&] {
        if (next_rows == 0 && next_row < end) {
          const RowUnit at = UnitOf(u, next_row, end);
          next_rows = at.end - at.p;
          next_row += next_rows;
          next_live = live_of(at);
          next_place = place_of(at);
        }
        if (next_rows > 0) {
          const T* from = g.added + next_place;
#pragma unroll
          for (int m = 0; m < 8; ++m) {
            if (next_live >> m & 1) {
              CopyAsync(own + next_slot * kStagedBytes + m * 512,
                        reinterpret_cast<const uint4*>(from + int64_t(pixel[m]) * g.to.channels));
            }
          }
          next_place += int64_t(g.to.w) * g.to.channels;
          --next_rows;
        }
        CopyCommit();
        next_slot = (next_slot + 1) % kAdded;
      };
      if constexpr (kAdds) {
        for (int k = 1; k < kAdded; ++k) fetch();
      }
      constexpr int kAtOnce = kAdds ? 1 : 4;  // streams
      BandPlaces<kStaged> from;
      uint32_t slot = 0;
      for (int row = begin; row < end;) {
        const RowUnit at = UnitOf(u, row, end);
        row += at.end - at.p;
        const uint32_t live = live_of(at);
        int64_t out = place_of(at);
        const auto store = [&](T* to) {
          const uint32_t full = staged_full + from.at * 16;
          BarrierWait(full, from.parity);
          const uint32_t source = staged_at + from.at * kStagedBytes + get;
#pragma unroll
          for (int m0 = 0; m0 < 8; m0 += kAtOnce) {
            uint32_t v[kAtOnce][4];
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              const uint32_t stream = source + (m0 + m) * (kBandOctets * 128);
              LoadMatrixTransposed(v[m], stream ^ (Turn(m0 + m, 0) << 4));
            }
            if (m0 + kAtOnce == 8) {
              ReadsFirst();
              __syncwarp();
              if (lane == 0) BarrierArrive(full + 8);
            }
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              if (live >> (m0 + m) & 1) {
                if constexpr (kAdds) {
                  AddPacked<T>(v[m], LoadShared16(own + slot * kStagedBytes + (m0 + m) * 512));
                }
                __stwb(reinterpret_cast<uint4*>(to + out + int64_t(pixel[m0 + m]) * g.to.channels),
                       make_uint4(v[m][0], v[m][1], v[m][2], v[m][3]));
              }
            }
          }
          from.Advance();
        };
        for (int p = at.p; p < at.end; ++p) {
          if constexpr (kAdds) {
            fetch();
            CopyWait<kAdded - 1>();
          } else {
            if (g.epilogue.z != nullptr) store(g.epilogue.z);
          }
          store(g.dst);
          slot = (slot + 1) % kAdded;
          out += int64_t(g.to.w) * g.to.channels;
        }
      }
    }
  }
#endif
}

template <typename T, int R, bool kAdds>
Status Launch(const Context& ctx, BandsArgs<T> g, const void* src, DType dtype,
              const std::string& what) {
  RowUnits& u = g.u;
  g.segs = BandSegs(u, g.to.images, g.to.w);
  u.slabs = int(CeilDiv(g.to.channels, kBandOctets * 8));
  ShareRows(u, g.to.images, g.to.h, g.to.w, std::max(1, Multiprocessors() / u.slabs));
  u.stage_bytes = BandRowBytes(u.images * (g.segs + 1));
  g.cells_bytes = uint32_t(u.stage_bytes);
  u.stages = std::clamp(96 * 1024 / u.stage_bytes, 2, 16);
  JAXCONV_RETURN_IF_ERROR(
      EncodeBands(dtype, src, g.from, (g.segs + 1) * 8, u.images, what, &g.map));
  const int64_t blocks = CeilDiv(u.rows, u.share) * u.slabs;
  JAXCONV_RETURN_IF_ERROR(CheckBlocks(blocks, what));
  const int bytes = u.stages * (u.stage_bytes + 16) + kBandRows * int(g.cells_bytes) +
                    BandCells::kExtra + kStaged * (int(kStagedBytes) + 16) +
                    (kAdds ? kAdded * int(kStagedBytes) : 0);
  const auto kernel = DepthwiseRowsMmaKernel<T, R, kAdds>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(blocks), kBandThreads, bytes, ctx.stream>>>(g);
  return LaunchStatus(what);
}

}  // namespace

Status DepthwiseRowsMma(const Context& ctx, const ConvProblem& p, bool dgrad, const Epilogue& e,
                        const void* src, const void* w, const void* bias, void* dst, void* z,
                        const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    BandsArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.dst = static_cast<T*>(dst);
    g.epilogue = MakeEpilogue<T>(e, bias, z);
    SetRows(g, p, dgrad, dgrad);
    g.reverse = dgrad;
    if (p.filter[1] == 5) return Launch<T, 5, false>(ctx, g, src, p.dtype, what);
    return Launch<T, 7, false>(ctx, g, src, p.dtype, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

Status DepthwiseRowsMmaDgradAdd(const Context& ctx, const ConvProblem& p, const void* dy,
                                const void* w, const void* c, void* dx, const std::string& what) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    BandsArgs<T> g{};
    g.w = static_cast<const T*>(w);
    g.added = static_cast<const T*>(c);
    g.dst = static_cast<T*>(dx);
    SetRows(g, p, true, true);
    g.reverse = true;
    if (p.filter[1] == 5) return Launch<T, 5, true>(ctx, g, dy, p.dtype, what);
    return Launch<T, 7, true>(ctx, g, dy, p.dtype, what);
  };
  return p.dtype == DType::kBF16 ? run(TypeTag<__nv_bfloat16>{}) : run(TypeTag<__half>{});
}

}  // namespace jaxconv::cuda::conv
