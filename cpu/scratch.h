// Scratch memory of the CPU backend (XLA plans none there): one aligned allocation, freed on
// return.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <string>

#include "common/status.h"
#include "cpu/context.h"

namespace jaxconv::cpu {

inline constexpr int64_t kCacheLine = 64;  // bytes

// `count` elements of T, uninitialised. Allocation failure is a Status, since nothing may throw
// through a handler.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : count_(count), data_(count <= kMost ? static_cast<T*>(Allocate(count)) : nullptr) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t(kCacheLine)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Status status() const {
    if (data_ != nullptr) return Status::Ok();
    return Status::Internal("cannot allocate " + std::to_string(count_) + " elements of " +
                            std::to_string(sizeof(T)) + " bytes of scratch memory");
  }
  T* data() const { return data_; }

 private:
  static constexpr int64_t kMost = (int64_t{1} << 62) / sizeof(T);  // bytes fit 64 bits
  static void* Allocate(int64_t count) {
    return ::operator new(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T),
                          std::align_val_t(kCacheLine), std::nothrow);
  }

  int64_t count_;
  T* data_;
};

// body(i, scratch) for i in [0, count): like ParallelFor, with `elements` of T that belong to one
// item at a time.
template <typename T, typename Body>
Status ParallelForWithScratch(const Context& ctx, int64_t count, int64_t elements,
                              const Body& body) {
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  const int64_t workers = std::min(std::max<int64_t>(ctx.threads, 1), count);
  const int64_t each =
      (elements + kLine - 1) / kLine * kLine;  // no cache line shared by two workers
  Scratch<T> scratch(workers * each);
  JAXCONV_RETURN_IF_ERROR(scratch.status());
  std::atomic<int64_t> next{0};
  ParallelFor(ctx, workers, [&](int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      body(i, scratch.data() + worker * each);
    }
  });
  return Status::Ok();
}

}  // namespace jaxconv::cpu
