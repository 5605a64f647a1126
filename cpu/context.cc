// ParallelFor: a shared counter hands out items; the caller works too and then waits for items
// still in other hands.
#include "cpu/context.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace jaxconv::cpu {
namespace {

// Shared with the tasks, because a task may start after ParallelFor has returned: it then finds
// `next` >= count and leaves without touching `body`, which is gone by then.
struct Loop {
  Loop(int64_t count, const std::function<void(int64_t)>& body) : count(count), body(&body) {}

  void Work() {
    int64_t finished = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++finished) {
      (*body)(i);
    }
    if (finished == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    done += finished;
    if (done == count) all_done.notify_one();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done == count; });
  }

  const int64_t count;
  const std::function<void(int64_t)>* const body;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;  // guarded by mutex
};

}  // namespace

void ParallelFor(const Context& ctx, int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(ctx.threads, count) - 1;
  if (helpers <= 0 || !ctx.schedule) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto loop = std::make_shared<Loop>(count, body);
  for (int64_t i = 0; i < helpers; ++i) ctx.schedule([loop] { loop->Work(); });
  loop->Work();
  loop->Wait();
}

}  // namespace jaxconv::cpu
