// wgrad of float32 on the sm_90a tensor cores, in TF32 or of numbers that become bfloat16 terms on their
// way (channels last):
//
//   dw[(tap, c), k] = sum over places v of x[v at tap, c] * dy[v, k]    for each group
//
// wgmma reads TF32 k-major, and here both operands have the reduction, the places, as their slow
// axis. x goes through registers: a thread loads what its rows need from the pixels as TMA left
// them, from any place on, so that all taps read one buffer. dy is transposed once, by a warpgroup
// of its own, for all rows of the tile.
//
// Places are a line: every pixel of dy in order. sm90/halo's have gaps after rows and images
// (sm90/halo/halo.cuh), and all its taps read one strip of x: tap (r, s) of a plane of the filter reads
// place v + r * row_shift + s. Other tiles' blocks of rows have a strip each. A strip is a ring of
// slots, of 32 or 64 places x 64 channels.
//
// The reduction index of the tensor cores is any order of the places that both operands agree on. Of
// eight places k = j < 4 is place 2j, k = j + 4 place 2j + 1: then neither the threads' loads of x nor
// the transposition meets a bank twice. For the same reason row 16w + g of a block is channel 16w + 2g
// and row 16w + g + 8 the next.
//
// Terms (gemm/sm90_operands.h): the warpgroups that multiply split x in registers, a warpgroup of its own
// splits dy, which the tensor cores read as it lies.
//
// All tiles' steps are one line of work cut into equal runs (wgrad.cuh).
#include "cuda/conv/sm90/wgrad/wgrad_tf32.h"

#include <algorithm>
#include <type_traits>

#include "cuda/conv/sm90/wgrad/sums.cuh"
#include "cuda/core/device.h"
#include "cuda/core/divmod.h"
#include "cuda/gemm/sm90.cuh"
#include "cuda/gemm/sm90_split.cuh"

namespace jaxconv::cuda {
namespace tf32 {  // not anonymous: on other architectures most of it is unused

// kGroups warpgroups multiply, each kBlocks blocks of 64 rows. The three groups of a halo tile have a
// row of the filter each. kTerms: bfloat16 terms that stand for a number, or 1 where it is TF32.
template <int kGroups_, int kBlocks_, int kN_, int kTerms_ = 1>
struct Tf32Tile {
  static constexpr int kGroups = kGroups_, kBlocks = kBlocks_, kN = kN_, kTerms = kTerms_;
  static constexpr bool kHalo = kGroups == 3;
  static constexpr int kTileBlocks = kGroups * kBlocks;
  // The first warpgroup serves the others: a thread of each of its first warps has TMA
  // fetch x (each some of the halves of 32 channels) or dy, and kTurners threads transpose (terms:
  // split) dy. With two groups that multiply there is room for another one that transposes; terms
  // need its registers.
  static constexpr int kServers = kHalo || kTerms > 1 ? 1 : 2;  // warpgroups
  static constexpr int kXWarps = kServers, kDyWarps = kServers;
  static constexpr int kTurners = kServers * 64;  // threads
  static constexpr int kThreads = (kServers + kGroups) * 128;
  static constexpr int kConsumerRegs = kTerms > 1 ? 216 : kHalo ? 152 : 192;
  static constexpr int kServerRegs = kTerms > 1 ? 72 : kHalo ? 56 : 64;
  static constexpr int kRawPlaces =
      (kN == 64 ? 192 : 96) * (kTerms > 1 ? 2 : 3) / 3;  // of dy as it comes
  static constexpr int kRawBytes = kRawPlaces * kN * 4;
  static constexpr int kTermBytes = kN * 64;  // of a term of dy, a step
  // Of dy as the tensor cores read it, a step: transposed, or terms.
  static constexpr int kTurnedBytes = kTerms > 1 ? kTerms * kTermBytes : kN * 128;
  static constexpr int kTurned = (kN == 256 ? 2 : kN == 128 ? 3 : 4) - (kTerms > 1 ? 1 : 0);
  static constexpr int64_t kElements = int64_t(kTileBlocks) * 64 * kN;
  static constexpr int kFixedBytes = kRawBytes + kTurned * kTurnedBytes;
};

constexpr int kMaxRing = kTf32MaxRing;
constexpr int kBarrierBytes = kTf32BarrierBytes;

JAXCONV_HD int64_t RunBegin(const Tf32Wgrad& p, int part) {
  const int64_t total = p.whole_tiles ? p.tiles : p.tiles * p.steps;
  const int64_t begin = total * part / p.parts;
  return p.whole_tiles ? begin * p.steps : begin;
}

JAXCONV_HD int PartOf(const Tf32Wgrad& p, int64_t step) {
  return int(((step + 1) * p.parts - 1) / (p.tiles * p.steps));
}

JAXCONV_HD int64_t Slot(int part, bool enters) { return 2 * int64_t(part) + (enters ? 0 : 1); }

template <typename Body>
__device__ __forceinline__ void ForRun(const Tf32Wgrad& p, int part, Body&& body) {
  int64_t at = RunBegin(p, part);
  const int64_t end = RunBegin(p, part + 1);
  while (at < end) {
    const int64_t tile = at / p.steps;
    const int first = int(at - tile * p.steps);
    const int steps = int(end - at < p.steps - first ? end - at : p.steps - first);
    body(tile, first, steps);
    at += steps;
  }
}

struct Tf32Place {
  int instance, m, n;  // m: the number of the tile's rows
};

JAXCONV_HD Tf32Place Locate(const Tf32Wgrad& p, int64_t tile, int columns) {
  const unsigned index = unsigned(tile), tiles_m = unsigned(p.tiles_m);
  const unsigned in_instance = tiles_m * unsigned(p.tiles_n), rest = index % in_instance;
  return {int(index / in_instance), int(rest % tiles_m), int(rest / tiles_m) * columns};
}

// The tap and the first channel of block b of a tile.
struct Tf32Block {
  int tap, channel;
};
JAXCONV_HD Tf32Block LocateBlock(const Tf32Wgrad& p, int m, int b, int tile_blocks) {
  const int plane = p.taps[0] * p.taps[1];
  if (p.halo) {
    return {b < plane ? m % p.taps[2] * plane + b : p.taps[2] * plane, m / p.taps[2] * 64};
  }
  const int block = m * tile_blocks + b;
  return {block / p.channel_blocks, block % p.channel_blocks * 64};
}

JAXCONV_HD bool Exists(const Tf32Wgrad& p, const Tf32Block& block) {
  return block.tap < p.taps[0] * p.taps[1] * p.taps[2];
}

// Rings in shared memory; each role keeps its own copy of the positions.
struct Position {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// From the front: dy as it comes, dy transposed, the strips, the barriers.
template <typename Tile>
struct Tf32Memory {
  uint32_t shared;
  int slot, ring, strips;  // as in Tf32Wgrad
  __device__ __forceinline__ int RawSlots() const { return Tile::kRawPlaces / slot; }
  __device__ __forceinline__ uint32_t Raw(int s) const {
    return shared + s * slot * (Tile::kN * 4);
  }
  __device__ __forceinline__ uint32_t Turned(int s) const {
    return shared + Tile::kRawBytes + s * Tile::kTurnedBytes;
  }
  // Half a strip: 32 channels of all its slots.
  __device__ __forceinline__ uint32_t Strip(int strip, int half) const {
    return shared + Tile::kFixedBytes + (strip * 2 + half) * ring * slot * 128;
  }
  __device__ __forceinline__ uint32_t Barrier(int i) const {
    return shared + Tile::kFixedBytes + strips * ring * slot * 256 + i * 8;
  }
  __device__ __forceinline__ uint32_t RawFull(int s) const { return Barrier(s); }
  __device__ __forceinline__ uint32_t RawEmpty(int s) const { return Barrier(8 + s); }
  __device__ __forceinline__ uint32_t TurnedFull(int s) const { return Barrier(16 + s); }
  __device__ __forceinline__ uint32_t TurnedEmpty(int s) const { return Barrier(24 + s); }
  __device__ __forceinline__ uint32_t XFull(int s) const { return Barrier(32 + s); }
  __device__ __forceinline__ uint32_t XEmpty(int s) const { return Barrier(32 + kMaxRing + s); }
};

template <typename Tile>
__device__ __forceinline__ void ProduceX(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory,
                                         int part, int warp) {
  constexpr int kHalves = 2 / Tile::kXWarps;
  constexpr int kStrips = Tile::kHalo ? 1 : Tile::kTileBlocks;
  Position x;
  ForRun(p, part, [&](int64_t tile, int first, int steps) {
    const Tf32Place at = Locate(p, tile, Tile::kN);
    int channel[kStrips], offset[kStrips][3] = {}, strips = 1, line = first * kTf32Step;
    if constexpr (Tile::kHalo) {
      line += at.m % p.taps[2] * p.plane_shift;
      channel[0] = at.m / p.taps[2] * 64;
    } else {
      const int left = p.blocks - at.m * Tile::kTileBlocks;
      strips = left < kStrips ? left : kStrips;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        const Tf32Block block = LocateBlock(p, at.m, strip, Tile::kTileBlocks);
        const Digits4 tap = SplitDigits(block.tap, p.taps[2], p.taps[1], p.taps[0]);
#pragma unroll
        for (int i = 0; i < 3; ++i) offset[strip][i] = tap.digit[3 - i] * p.tap_step[i];
        channel[strip] = block.channel;
      }
    }
    const int end = line + steps * kTf32Step + p.reach;
#pragma unroll 1
    for (; line < end; line += p.slot) {
      const uint32_t full = memory.XFull(x.slot);
      const Digits4 place = SplitDigits(line, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
      int from[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) from[i] = place.digit[3 - i] * p.step[i] + p.first[i];
      BarrierWait(memory.XEmpty(x.slot), x.parity ^ 1);
      BarrierExpect(full, strips * p.slot * (kHalves * 128));
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        if (strip >= strips) continue;
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
          const int half = warp * kHalves + i, c = channel[strip] + half * 32;
          const uint32_t to = memory.Strip(strip, half) + x.slot * p.slot * 128;
          if (p.rank_x == 0) {
            LoadTile(to, p.x, full, c, at.instance, line);
          } else {
            LoadColumn(p.rank_x, to, p.x, full, at.instance * p.channels + c, from, place.digit[0],
                       offset[strip]);
          }
        }
      }
      x.Advance(p.ring);
    }
  });
}

template <typename Tile>
__device__ __forceinline__ void ProduceDy(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory,
                                          int part, int warp) {
  const int none[3] = {};
  Position raw;
  ForRun(p, part, [&](int64_t tile, int first, int steps) {
    const Tf32Place at = Locate(p, tile, Tile::kN);
    const int columns = (min(p.n - at.n, Tile::kN) + 31) / 32;
    const int end = (first + steps) * kTf32Step;
#pragma unroll 1
    for (int line = first * kTf32Step; line < end; line += p.slot) {
      const uint32_t full = memory.RawFull(raw.slot);
      const Digits4 place = SplitDigits(line, p.by_extent[2], p.by_extent[1], p.by_extent[0]);
      const int from[3] = {place.digit[3], place.digit[2], place.digit[1]};
      BarrierWait(memory.RawEmpty(raw.slot), raw.parity ^ 1);
      BarrierExpect(full, (columns + Tile::kDyWarps - 1 - warp) / Tile::kDyWarps * p.slot * 128);
#pragma unroll 1
      for (int i = warp; i < columns; i += Tile::kDyWarps) {
        const uint32_t to = memory.Raw(raw.slot) + i * p.slot * 128;
        if (p.rank_dy == 0) {
          LoadTile(to, p.dy, full, at.n + i * 32, at.instance, line);
        } else {
          LoadColumn(p.rank_dy, to, p.dy, full, at.instance * p.n + at.n + i * 32, from,
                     place.digit[0], none);
        }
      }
      raw.Advance(memory.RawSlots());
    }
  });
}

// The transposition: units of 4 channels x 4 places. Lane l of eight takes a unit such that neither
// the eight reads of a place nor the eight writes of a channel meet in a bank.
template <typename Tile>
__device__ __forceinline__ void Turn(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory, int part,
                                     int thread) {
  const int lane = thread % 8, eight = thread / 8;          // eight: [0, kTurners / 8)
  const int q = lane / 2 * 2 + eight % 2, half = lane % 2;  // 4 channels of 32
  const int k = lane / 2 ^ eight / 2 % 4;                   // 8 places of 32
  constexpr int kBoxes = Tile::kTurners / 64;               // of 32 channels, at a time
  // The unit's place i is i * 256 bytes on, another chunk; its channel i is i * 128 on.
  const uint32_t box_bytes = p.slot * 128;
  const uint32_t from = eight / 8 * box_bytes + (k * 8 + half) * 128 + (q ^ half) * 16;
  const uint32_t to = eight / 8 * 4096 + q * 4 * 128 + (k * 2 + half ^ q % 2 * 4) * 16;
  Position raw, turned;
  ForRun(p, part, [&](int64_t, int, int steps) {
    int inside = 0;  // places into the slot
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (inside == 0) BarrierWait(memory.RawFull(raw.slot), raw.parity);
      BarrierWait(memory.TurnedEmpty(turned.slot), turned.parity ^ 1);
      const uint32_t in = memory.Raw(raw.slot) + inside * 128, out = memory.Turned(turned.slot);
#pragma unroll 1
      for (int unit = 0; unit < Tile::kN * 2 / Tile::kTurners; ++unit) {
        const int box = unit * kBoxes;
        uint32_t v[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                       : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                       : "r"((in + from ^ i * 32) + i * 256 + box * box_bytes));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"((out + to ^ i * 16) +
                                                                          i * 128 + box * 4096),
                       "r"(v[0][i]), "r"(v[1][i]), "r"(v[2][i]), "r"(v[3][i])
                       : "memory");
        }
      }
      FenceForTma();
      __syncwarp();
      inside += kTf32Step;
      const bool emptied = inside == p.slot || step + 1 == steps;
      if (threadIdx.x % 32 == 0) {
        BarrierArrive(memory.TurnedFull(turned.slot));
        if (emptied) BarrierArrive(memory.RawEmpty(raw.slot));
      }
      if (emptied) {
        inside = 0;
        raw.Advance(memory.RawSlots());
      }
      turned.Advance(Tile::kTurned);
    }
  });
}

// A thread's rows of x, of eight places: the words of kLoads pairs of neighbouring channels.
template <typename Tile>
struct Tf32Rows {
  static constexpr int kStrips = Tile::kHalo ? 1 : Tile::kBlocks;
  static constexpr int kLoads = Tile::kHalo ? Tile::kBlocks + 1 : 2 * Tile::kBlocks;
  uint32_t v[kLoads][2];

  __device__ __forceinline__ void Load(const uint32_t (&from)[kLoads], uint32_t at, uint32_t size,
                                       const uint32_t (&base)[kStrips]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint32_t place = at + from[i];
      if (place >= size) place -= size;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
                   : "=r"(v[i][0]), "=r"(v[i][1])
                   : "r"(base[Tile::kHalo ? 0 : i / 2] + place)
                   : "memory");
    }
  }
  __device__ __forceinline__ void Take(int b, uint32_t (&a)[4]) const {
    const int i = Tile::kHalo ? b : 2 * b;
    a[0] = v[i][0];
    a[1] = v[i][1];
    a[2] = v[i + 1][0];
    a[3] = v[i + 1][1];
  }
};

template <bool kTerms>
__device__ __forceinline__ void StoreTf32(const Tf32Wgrad& p, const Tf32Place& at, int b,
                                          int tile_blocks, int j, int thread, const float4& v) {
  const Tf32Block block = LocateBlock(p, at.m, b, tile_blocks);
  const int c = block.channel + thread / 32 * 16 + thread % 32 / 4 * 2;
  const int n = at.n + j * 8 + thread % 4 * 2;
  if (!Exists(p, block) || c >= p.channels || n >= p.n) return;
  if (kTerms && p.swapped) {
    float* out = static_cast<float*>(p.dw) + int64_t(n) * p.pitch + at.instance * p.channels + c;
    *reinterpret_cast<float2*>(out) = make_float2(v.x, v.z);
    *reinterpret_cast<float2*>(out + p.pitch) = make_float2(v.y, v.w);
    return;
  }
  float* out = static_cast<float*>(p.dw) + (int64_t(block.tap) * p.channels + c) * p.pitch +
               at.instance * p.n + n;
  *reinterpret_cast<float2*>(out) = make_float2(v.x, v.y);
  *reinterpret_cast<float2*>(out + p.pitch) = make_float2(v.z, v.w);
}

// A group's sums over `steps` steps: to dw, or to the workspace.
template <typename Tile>
__device__ __forceinline__ void PutSums(const Tf32Wgrad& p, const Tf32Place& at, int part,
                                        int first, int steps, int group, int thread,
                                        const float (&acc)[Tile::kBlocks][Tile::kN / 2]) {
  float4* sums = reinterpret_cast<float4*>(p.partials + Slot(part, first > 0) * Tile::kElements);
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
    for (int j = 0; j < Tile::kN / 8; ++j) {
      const float* v = &acc[b][j * 4];
      const float4 four = make_float4(v[0], v[1], v[2], v[3]);
      const int block = group * Tile::kBlocks + b;
      if (steps == p.steps) {
        StoreTf32<(Tile::kTerms > 1)>(p, at, block, Tile::kTileBlocks, j, thread, four);
      } else {
        sums[(block * (Tile::kN / 8) + j) * 128 + thread] = four;
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void Multiply(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory,
                                         int part, int group) {
  using Rows = Tf32Rows<Tile>;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int chunk = warp % 2 * 4 + lane / 8, word = lane / 4 % 2;
  const uint32_t size = p.ring * p.slot * 128;
  // Where a thread's loads begin, from the first of eight places on.
  uint32_t from[Rows::kLoads], base[Rows::kStrips];
#pragma unroll
  for (int i = 0; i < Rows::kLoads; ++i) {
    const int place = lane % 4 * 2 + (Tile::kHalo ? group * p.row_shift + i : i % 2);
    from[i] = place * 128 + ((chunk ^ place % 8) * 16) + word * 8;
  }
#pragma unroll
  for (int i = 0; i < Rows::kStrips; ++i) {
    // A block past the last reads what another does.
    base[i] =
        memory.Strip(min(Tile::kHalo ? 0 : group * Tile::kBlocks + i, p.strips - 1), warp / 2);
  }
  Position x, ready, turned;  // x: the first slot that is not free; ready: the next to wait for
  ForRun(p, part, [&](int64_t tile, int first, int steps) {
    const int lines = steps * kTf32Step + p.reach;
    int seen = 0, freed = 0;  // lines of the run, a multiple of slots
    const auto await = [&](int line) {
      while (seen < line) {
        BarrierWait(memory.XFull(ready.slot), ready.parity);
        ready.Advance(p.ring);
        seen += p.slot;
      }
    };
    const auto release = [&](int line) {
      while (freed < line) {
        if (lane == 0) BarrierArrive(memory.XEmpty(x.slot));
        x.Advance(p.ring);
        freed += p.slot;
      }
    };
    const Tf32Place at = Locate(p, tile, Tile::kN);
    if (!Exists(p, LocateBlock(p, at.m, group * Tile::kBlocks, Tile::kTileBlocks))) {
      for (int step = 0; step < steps; ++step) {
        await((step + 1) * kTf32Step + p.reach);
        BarrierWait(memory.TurnedFull(turned.slot), turned.parity);
        if (lane == 0) BarrierArrive(memory.TurnedEmpty(turned.slot));
        turned.Advance(Tile::kTurned);
        release((step + 1) * kTf32Step - p.slot + 1);
      }
      release(lines);
      return;
    }
    float acc[Tile::kBlocks][Tile::kN / 2];
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) acc[b][i] = 0.f;
    }
    Rows rows[2];
    uint32_t place = x.slot * p.slot * 128;  // the next eight places
    int before = -1;                         // the stage of dy whose products may still run
    await(kTf32Step + p.reach);
    rows[0].Load(from, place, size, base);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      BarrierWait(memory.TurnedFull(turned.slot), turned.parity);
      const uint64_t b_desc = OperandDescriptor<true>(memory.Turned(turned.slot));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int b = 0; b < Tile::kBlocks; ++b) Pin(acc[b]);
        WgmmaFence();
#pragma unroll
        for (int b = 0; b < Tile::kBlocks; ++b) {
          uint32_t a[4];
          rows[k % 2].Take(b, a);
          WgmmaRows(acc[b], a, b_desc + k * kOperandStep<true>);
        }
        WgmmaCommit();
        WgmmaWait<1>();
        if (k == 0 && before >= 0 && lane == 0) BarrierArrive(memory.TurnedEmpty(before));
        if (k < 3) rows[(k + 1) % 2].Load(from, place + (k + 1) * 1024, size, base);
      }
      place += kTf32Step * 128;
      if (place == size) place = 0;
      // The next step's first places, while this one's last products run.
      if (step + 1 < steps) {
        await((step + 2) * kTf32Step + p.reach);
        rows[0].Load(from, place, size, base);
      }
      before = turned.slot;
      __syncwarp();
      release((step + 1) * kTf32Step - p.slot + 1);
      turned.Advance(Tile::kTurned);
    }
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) Pin(acc[b]);
    WgmmaWait<0>();
    if (lane == 0) BarrierArrive(memory.TurnedEmpty(before));
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) Pin(acc[b]);
    release(lines);
    PutSums<Tile>(p, at, part, first, steps, group, thread, acc);
  });
}

// An n-major term of dy: blocks of 64 columns x 32 places.
__device__ __forceinline__ uint64_t TermDescriptor(uint32_t address) {
  constexpr uint64_t kFixed =
      uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(4096 / 16) << 16;
  return kFixed | uint64_t((address & 0x3FFFF) >> 4);
}

// dy into terms: a thread takes 8 channels of a place.
template <typename Tile>
__device__ __forceinline__ void SplitDy(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory,
                                        int part, int thread) {
  const int place = thread % 32;
  const uint32_t box_bytes = p.slot * 128;
  Position raw, turned;
  ForRun(p, part, [&](int64_t, int, int steps) {
    int inside = 0;  // places into the slot
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (inside == 0) BarrierWait(memory.RawFull(raw.slot), raw.parity);
      BarrierWait(memory.TurnedEmpty(turned.slot), turned.parity ^ 1);
      const uint32_t in = memory.Raw(raw.slot) + (inside + place) * 128;
      const uint32_t out = memory.Turned(turned.slot) + place * 128;
#pragma unroll 1
      for (int j = thread / 32; j < Tile::kN / 8; j += Tile::kTurners / 32) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                       : "=f"(v[i * 4]), "=f"(v[i * 4 + 1]), "=f"(v[i * 4 + 2]), "=f"(v[i * 4 + 3])
                       : "r"(in + j / 4 * box_bytes + ((j % 4 * 2 + i) ^ place % 8) * 16));
        }
        uint32_t terms[4][Tile::kTerms];
        SplitEight(v, terms);
#pragma unroll
        for (int t = 0; t < Tile::kTerms; ++t) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(
                           out + t * Tile::kTermBytes + j / 8 * 4096 + ((j % 8) ^ place % 8) * 16),
                       "r"(terms[0][t]), "r"(terms[1][t]), "r"(terms[2][t]), "r"(terms[3][t])
                       : "memory");
        }
      }
      FenceForTma();
      __syncwarp();
      inside += kTf32Step;
      const bool emptied = inside == p.slot || step + 1 == steps;
      if (threadIdx.x % 32 == 0) {
        BarrierArrive(memory.TurnedFull(turned.slot));
        if (emptied) BarrierArrive(memory.RawEmpty(raw.slot));
      }
      if (emptied) {
        inside = 0;
        raw.Advance(memory.RawSlots());
      }
      turned.Advance(Tile::kTurned);
    }
  });
}

// The same as Multiply for operands that become terms, without a halo: a slot is a step. Of 32 places and
// a block of 64 rows a warpgroup splits x in registers, then multiplies them by 64 columns at a time,
// the small products first; the tensor cores cut sums off, so these are added up in float32. Another
// warpgroup's products run meanwhile.
template <typename Tile>
__device__ __forceinline__ void MultiplyTerms(const Tf32Wgrad& p, const Tf32Memory<Tile>& memory,
                                              int part, int group) {
  // Pairs by how small they are; terms count from the largest, in memory the smallest comes first.
  constexpr int kTermA[6] = {0, 2, 1, 0, 1, 0}, kTermB[6] = {2, 0, 1, 1, 0, 0};
  constexpr int kSmallest = Tile::kTerms - 1;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int chunk = warp % 2 * 4 + lane / 8, word = lane / 4 % 2;
  uint32_t base[Tile::kBlocks];
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    // A block past the last is not read.
    base[i] = memory.Strip(min(group * Tile::kBlocks + i, p.strips - 1), warp / 2) + word * 8;
  }
  // This thread's numbers of 16 places of a block, as the tensor cores take them.
  const auto load = [&](uint32_t from, uint32_t (&a)[Tile::kTerms][4]) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = lane % 4 * 2 + i % 2, at = i / 2 * 4 + i % 2;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                   : "=f"(v[at]), "=f"(v[at + 2])
                   : "r"(from + (place + i / 2 * 8) * 128 + ((chunk ^ place) * 16))
                   : "memory");
    }
    uint32_t terms[4][Tile::kTerms];
    SplitEight(v, terms);
#pragma unroll
    for (int t = 0; t < Tile::kTerms; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[t][i] = terms[i][t];
    }
  };
  Position x, turned;
  ForRun(p, part, [&](int64_t tile, int first, int steps) {
    const Tf32Place at = Locate(p, tile, Tile::kN);
    const int mine = p.blocks - (at.m * Tile::kGroups + group) * Tile::kBlocks;  // that there are
    float sum[Tile::kBlocks][Tile::kN / 2];
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) sum[b][i] = 0.f;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      BarrierWait(memory.XFull(x.slot), x.parity);
      BarrierWait(memory.TurnedFull(turned.slot), turned.parity);
      const uint64_t b_desc = TermDescriptor(memory.Turned(turned.slot));
      const uint32_t place = x.slot * kTf32Step * 128;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        if (b >= mine) continue;
        uint32_t a[2][Tile::kTerms][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) load(base[b] + place + k * 16 * 128, a[k]);
#pragma unroll
        for (int column = 0; column < Tile::kN / 64; ++column) {
          float acc[32];
          WgmmaFence();
#pragma unroll
          for (int pair = 0; pair < 6; ++pair) {
            const int term_a = kSmallest - kTermA[pair], term_b = kSmallest - kTermB[pair];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const uint64_t b_part = b_desc + (column * 4096 + term_b * Tile::kTermBytes) / 16 +
                                      k * kOperandStep<false>;
              if (pair == 0 && k == 0) {
                WgmmaTermRowsNew<false>(acc, a[k][term_a], b_part);
              } else {
                WgmmaTermRows<false>(acc, a[k][term_a], b_part, 1);
              }
            }
          }
          WgmmaCommit();
          WgmmaWait<0>();
          Pin(acc);
#pragma unroll
          for (int i = 0; i < 32; ++i) sum[b][column * 32 + i] += acc[i];
        }
      }
      __syncwarp();
      if (lane == 0) {
        BarrierArrive(memory.TurnedEmpty(turned.slot));
        BarrierArrive(memory.XEmpty(x.slot));
      }
      x.Advance(p.ring);
      turned.Advance(Tile::kTurned);
    }
    if (mine > 0) PutSums<Tile>(p, at, part, first, steps, group, thread, sum);
  });
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    Tf32WgradKernel(const __grid_constant__ Tf32Wgrad p) {
#ifdef JAXCONV_SM90A
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Tf32Memory<Tile> memory = {SharedAddress(shared_bytes), p.slot, p.ring, p.strips};
  if (threadIdx.x == 0) {
    for (int i = 0; i < memory.RawSlots(); ++i) {
      BarrierInit(memory.RawFull(i), Tile::kDyWarps);
      BarrierInit(memory.RawEmpty(i), Tile::kTurners / 32);
    }
    for (int i = 0; i < Tile::kTurned; ++i) {
      BarrierInit(memory.TurnedFull(i), Tile::kTurners / 32);
      BarrierInit(memory.TurnedEmpty(i), 4 * Tile::kGroups);
    }
    for (int i = 0; i < p.ring; ++i) {
      BarrierInit(memory.XFull(i), Tile::kXWarps);
      BarrierInit(memory.XEmpty(i), 4 * Tile::kGroups);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int part = blockIdx.x;
  const int group =
      __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - Tile::kServers;  // uniform
  if (group < 0) {
    RegistersDown<Tile::kServerRegs>();
    constexpr int kFirst = Tile::kServers * 128 - Tile::kTurners;
    const int warp = threadIdx.x / 32;
    if (warp < Tile::kXWarps) {
      if (threadIdx.x % 32 == 0) {
        PrefetchMap(p.x);
        ProduceX(p, memory, part, warp);
      }
    } else if (warp < Tile::kXWarps + Tile::kDyWarps) {
      if (threadIdx.x % 32 == 0) {
        PrefetchMap(p.dy);
        ProduceDy(p, memory, part, warp - Tile::kXWarps);
      }
    } else if (threadIdx.x >= kFirst) {
      if constexpr (Tile::kTerms > 1) {
        SplitDy(p, memory, part, threadIdx.x - kFirst);
      } else {
        Turn(p, memory, part, threadIdx.x - kFirst);
      }
    }
  } else {
    RegistersUp<Tile::kConsumerRegs>();
    if constexpr (Tile::kTerms > 1) {
      MultiplyTerms(p, memory, part, group);
    } else {
      Multiply(p, memory, part, group);
    }
  }
#endif
}

// The shared tiles, as in wgrad.cuh.
template <int kShares, bool kTerms>
__global__ void __launch_bounds__(256)
    Tf32WgradSumKernel(const __grid_constant__ Tf32Wgrad p, int tile_blocks, int columns) {
  const int64_t fours = int64_t(tile_blocks) * 64 * columns / 4;
  constexpr int kWidth = 256 / kShares;
  const int index = int(blockIdx.x) * kWidth + int(threadIdx.x) % kWidth;
  const float4* from = reinterpret_cast<const float4*>(p.partials) + index;
  for (int64_t tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
    const int begin = PartOf(p, tile * p.steps), end = PartOf(p, (tile + 1) * p.steps - 1) + 1;
    if (begin + 1 == end) continue;
    const Tf32Place at = Locate(p, tile, columns);
    const int block = index / 128 / (columns / 8);  // the same of all threads
    if (!Exists(p, LocateBlock(p, at.m, block, tile_blocks))) continue;
    float4 sum;
    if (!SumParts<kShares>(
            begin, end, [&](int part) { return from + Slot(part, part > begin) * fours; }, &sum)) {
      continue;
    }
    StoreTf32<kTerms>(p, at, block, tile_blocks, index / 128 % (columns / 8), index % 128, sum);
  }
}

template <typename Tile>
void Prepare(Tf32Wgrad& p) {
  static_assert(!Tile::kHalo ||
                (Tile::kFixedBytes == kTf32HaloFixedBytes &&
                 Tile::kElements == int64_t(kTf32HaloTile.rows) * kTf32HaloTile.columns));
  p.blocks = p.taps[0] * p.taps[1] * p.taps[2] * p.channel_blocks;
  if (p.halo) {
    p.tiles_m = p.channel_blocks * p.taps[2];
  } else {
    p.tiles_m = (p.blocks + Tile::kTileBlocks - 1) / Tile::kTileBlocks;
  }
  p.strips = Tile::kHalo ? 1 : std::min(Tile::kTileBlocks, p.blocks);
  p.reach = Tile::kHalo ? 2 * (p.row_shift + 1) : 0;
  const int lines = (kSm90SharedBytes - Tile::kFixedBytes - kBarrierBytes) / (p.strips * 256);
  const auto least = [&](int slot) { return Tf32LeastRing(slot, p.reach); };
  p.slot = Tile::kN == 64 && Tile::kTerms == 1 && lines / 64 > least(64) ? 64 : 32;
  p.ring = std::min(lines / p.slot, kMaxRing);
}

template <typename Tile>
Status Launch(const Context& ctx, Tf32Wgrad& p, int multiprocessors, const std::string& what) {
  p.tiles_n = (p.n + Tile::kN - 1) / Tile::kN;
  p.tiles = int64_t(p.tiles_m) * p.tiles_n * p.instances;
  p.whole_tiles = p.parts == 1;
  if (p.whole_tiles) {
    p.parts = int(std::min<int64_t>(p.tiles, multiprocessors));
  } else {
    p.parts = int(std::min(int64_t(p.parts), p.tiles * p.steps));  // no run is empty
  }
  for (int i = 0; i < 3; ++i) p.by_extent[i] = FastDiv(p.extent[i]);
  const int shared = Tile::kFixedBytes + p.strips * p.ring * p.slot * 256 + kBarrierBytes;
  auto kernel = Tf32WgradKernel<Tile>;
  JAXCONV_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(kernel), what));
  kernel<<<unsigned(p.parts), Tile::kThreads, shared, ctx.stream>>>(p);
  JAXCONV_RETURN_IF_ERROR(LaunchStatus(what));
  if (p.whole_tiles) return Status::Ok();
  const unsigned sums = unsigned(Tile::kElements / 4 / 256);
  const unsigned tiles = unsigned(std::min<int64_t>(p.tiles, 65535));
  if (p.parts > 8 * p.tiles) {
    Tf32WgradSumKernel<8, (Tile::kTerms > 1)>
        <<<dim3(sums * 8, tiles), 256, 0, ctx.stream>>>(p, Tile::kTileBlocks, Tile::kN);
  } else {
    Tf32WgradSumKernel<1, (Tile::kTerms > 1)>
        <<<dim3(sums, tiles), 256, 0, ctx.stream>>>(p, Tile::kTileBlocks, Tile::kN);
  }
  return LaunchStatus(what + " (sum of parts)");
}

}  // namespace tf32

#define JAXCONV_TF32_TILES(call)                                               \
  if (p.terms) {                                                               \
    if (tile == TileSize{256, 128}) return call(tf32::Tf32Tile<2, 2, 128, 3>); \
    if (tile == TileSize{256, 64}) return call(tf32::Tf32Tile<2, 2, 64, 3>);   \
  } else {                                                                     \
    if (tile == kTf32HaloTile) return call(tf32::Tf32Tile<3, 3, 64>);          \
    if (tile == TileSize{256, 128}) return call(tf32::Tf32Tile<2, 2, 128>);    \
    if (tile == TileSize{128, 256}) return call(tf32::Tf32Tile<2, 1, 256>);    \
    if (tile == TileSize{256, 64}) return call(tf32::Tf32Tile<2, 2, 64>);      \
  }                                                                            \
  return Status::Internal(what + ": no launcher");

Status PrepareTf32Wgrad(Tf32Wgrad& p, TileSize tile, const std::string& what){
#define JAXCONV_CALL(...) (tf32::Prepare<__VA_ARGS__>(p), Status::Ok())
    JAXCONV_TF32_TILES(JAXCONV_CALL)
#undef JAXCONV_CALL
}

Status LaunchTf32Wgrad(const Context& ctx, Tf32Wgrad& p, TileSize tile, int multiprocessors,
                       const std::string& what) {
#define JAXCONV_CALL(...) tf32::Launch<__VA_ARGS__>(ctx, p, multiprocessors, what)
  JAXCONV_TF32_TILES(JAXCONV_CALL)
#undef JAXCONV_CALL
}
#undef JAXCONV_TF32_TILES

}  // namespace jaxconv::cuda
