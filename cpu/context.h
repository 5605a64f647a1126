// The CPU backend's context: XLA's intra-op thread pool, behind a plain function so that cpu/ needs
// no XLA header.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxconv::cpu {

struct Context {
  int64_t threads;  // workers available, >= 1
  // Hands a task to the pool; returns at once.
  std::function<void(std::function<void()>)> schedule;
};

// Runs body(i) for every i in [0, count), the caller taking part, and returns when all are done.
// Items are handed out in order by an atomic counter, so a pool that is busy (or blocked: the
// caller may itself be a pool thread) costs speed and never a deadlock.
void ParallelFor(const Context& ctx, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace jaxconv::cpu
