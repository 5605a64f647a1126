// What the squeeze-and-excitation kernel "one_pass" can run, and how it lies on the device. Host C++17 without CUDA headers
// (cuda/domain.h).
//
// A cluster of `splits` CTAs has an image, or a few. Its CTAs share the channels, in tiles of `chunk` bytes, and where they
// are more than tiles the pixels too. A CTA keeps its part of x (backward: of dy) in shared memory, as far as it fits.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/domain.h"

namespace jaxconv::cuda::squeeze_excite {

constexpr int kWarp = 32;
constexpr int64_t kThreads = 256, kMostThreads = 512;  // of a CTA
constexpr int64_t kMostWidth = 16 * kMostThreads;      // of a tile, bytes
constexpr int64_t kMostHidden = 2048;
constexpr int kMostImages = 2;              // of a cluster
constexpr int64_t kManyImages = 48 * 1024;  // bytes: the slab of a CTA that has several
// Weights of a CTA that are brought beside x, bytes. More are room that others need, unless it has a multiprocessor to itself
// and all of x stays as well. kLeastHeld: steps of x for which there must be room besides.
constexpr int64_t kMostStaged = 16 * 1024, kLeastHeld = 4;
constexpr int kScratch = 8;                             // floats of a thread
constexpr int64_t kMostItems = (int64_t{1} << 30) - 1;  // elements of an image, images, CTAs

// Elements in an access: 16 bytes where they divide the channels.
inline int64_t Vector(const SqueezeExciteProblem& p) {
  const int64_t vector = 16 / static_cast<int64_t>(SizeOf(p.dtype));
  return p.channels % vector != 0 ? 1 : vector;
}

// A pixel is `tiles` tiles of `lanes` vectors, a thread each. `shares` CTAs of a cluster have the pixels of a tile: `pixels`
// each, of `images` images, of each of which it takes `rows` pixels in a step. The first `held` of its `steps` stay.
struct Tiling {
  int64_t lanes, tiles, shares, images;
  int64_t threads, rows, pixels, steps, held;
  int64_t own;    // channels of a tile whose sums meet in one of its CTAs; a multiple of 4
  int64_t gated;  // whose gates a CTA computes: these alone, or all of the tile's
  bool
      passes_on;  // a CTA computes the gates of its own alone, and passes them on to the other shares
  bool staged;    // a CTA's weights and biases are brought into shared memory while it reads x
  // Shared memory: bytes of what stays; behind it, in floats from its end
  int64_t slab;
  int64_t parts;          // (shares, images, own): sums of all shares
  int64_t mine;           // (images, own): their sums
  int64_t hidden_parts;   // (CTAs of a cluster, images, hidden)
  int64_t hidden;         // (images, hidden)
  int64_t gates;          // (images, channels of a tile)
  int64_t barriers;       // 8 bytes for each exchange
  int64_t first, second;  // weights of the two products, where they are staged
  int64_t biases;         // of both, behind each other
  int64_t bytes;          // of all
};

// Of a problem and a plan that are not refused. What is neither the slab nor weights is at most 136 KB, 80 KB where there are
// no clusters: it fits everywhere. Weights are brought where they fit as well.
inline Tiling TilingOf(const SqueezeExciteProblem& p, int64_t width, int64_t ctas,
                       const Device& device) {
  Tiling t = {};
  const int64_t vector = Vector(p);
  t.lanes = std::min(width / 16, p.channels / vector);
  t.tiles = CeilDivide(p.channels / vector, t.lanes);
  t.shares = ctas / t.tiles;
  t.pixels = CeilDivide(p.pixels, t.shares);
  const int64_t each = t.pixels * t.lanes * 16;  // bytes of an image
  // Two CTAs or more on a multiprocessor, of which one reads while another computes, also where a third is read twice.
  const int64_t half = device.shared_memory_of_all() / 2 - 1024;
  const bool alone = p.images * ctas <= device.multiprocessors;  // on a multiprocessor
  const bool small = 2 * each <= 3 * half, two = !alone && t.lanes <= kThreads && small;
  // More threads read faster, and wait longer for one another: too long where a cluster has the image.
  t.threads = t.lanes <= kThreads && (small || (alone && ctas > 1)) ? kThreads : kMostThreads;
  // Several images read a weight once; there should be CTAs enough for all multiprocessors, and some in turn.
  t.images = kMostImages;
  while (t.images > 1 && (t.images > p.images || each * t.images > kManyImages ||
                          t.images * t.lanes > t.threads || t.images * p.hidden > kMostHidden ||
                          CeilDivide(p.images, t.images) * ctas < 6 * device.multiprocessors)) {
    t.images /= 2;
  }
  t.rows = t.threads / t.lanes / t.images;
  t.steps = CeilDivide(t.pixels, t.rows);
  const int64_t channels = t.lanes * vector;
  t.own = t.shares == 1 ? channels : CeilDivide(CeilDivide(channels, t.shares), 4) * 4;
  t.passes_on = t.shares > 1 && channels * p.hidden > 4096;
  t.gated = t.passes_on ? t.own : channels;
  int64_t at = kScratch * t.threads;
  const auto take = [&](int64_t floats) {
    const int64_t first = at;
    at += CeilDivide(floats, 4) * 4;
    return first;
  };
  t.parts = take(t.shares * t.images * t.own);
  t.mine = take(t.images * t.own);
  t.hidden_parts = take(ctas * t.images * p.hidden);
  t.hidden = take(t.images * p.hidden);
  t.gates = take(t.images * channels);
  t.barriers = take(8);
  const int64_t slot = 16 * t.threads, whole = two ? half : device.shared_memory();
  const int64_t first = p.hidden * t.own, second = p.hidden * t.gated, biases = p.hidden + t.gated;
  const int64_t staged = first + second + biases + 12;  // at most 3 more each: `take` takes fours
  const int64_t free = whole - 4 * (at + staged);
  t.staged = t.images == 1 && free >= slot * std::min(t.steps, kLeastHeld) &&
             (4 * staged <= kMostStaged || (alone && free >= slot * t.steps));
  if (t.staged) {
    t.first = take(first);
    t.second = take(second);
    t.biases = take(biases);
  }
  const int64_t room = whole - 4 * at;
  t.held = std::min(t.steps, std::max<int64_t>(room, 0) / slot);
  t.slab = t.held * slot;
  t.bytes = t.slab + 4 * at;
  return t;
}

inline std::string Refusal(const SqueezeExciteProblem& p, const Plan& plan, const Device& device) {
  if (plan.kernel != "one_pass") return "there is no such kernel";
  if (p.dtype == DType::kF64) return "it needs float32, bfloat16 or float16, got float64";
  const int64_t vector = Vector(p);
  if (vector == 1)
    return "it reads 16 bytes at a time: " + std::to_string(p.channels) +
           " channels are no multiple of " + std::to_string(16 / SizeOf(p.dtype));
  if (p.channels > kMostItems || p.pixels > kMostItems || p.pixels > kMostItems / p.channels)
    return "it needs images of fewer than 2^30 elements";
  if (p.hidden > kMostHidden)
    return "it takes at most " + std::to_string(kMostHidden) + " hidden numbers, got " +
           std::to_string(p.hidden);
  if (plan.chunk < 16 || plan.chunk > kMostWidth || plan.chunk % 16 != 0)
    return "it needs a tile's width (chunk) in multiples of 16 bytes up to " +
           std::to_string(kMostWidth) + ", got " + std::to_string(plan.chunk);
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8)
    return "it needs clusters (splits) of 1, 2, 4 or 8 CTAs, got " + std::to_string(plan.splits);
  if (plan.splits > 1 && !device.sm90())
    return "clusters need a GPU of compute capability 9.0 and code for it";
  const int64_t tiles = CeilDivide(p.channels / vector, plan.chunk / 16);
  if (tiles > plan.splits || plan.splits % tiles != 0)
    return "its " + std::to_string(tiles) + " tiles of channels do not divide a cluster of " +
           std::to_string(plan.splits);
  if (p.images > kMostItems / plan.splits) return "it needs fewer than 2^30 CTAs";
  return "";
}

}  // namespace jaxconv::cuda::squeeze_excite
