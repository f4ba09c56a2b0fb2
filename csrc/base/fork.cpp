#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace distopt {
namespace {

std::atomic<unsigned> forks{0};

}  // namespace

unsigned fork_count() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace distopt
