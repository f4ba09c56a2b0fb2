#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace distopt {
namespace {

std::atomic<unsigned> forks{0};

}  // namespace

bool Origin::forked() const { return fork_count() != forks_; }

void Origin::require(const Process& me) const {
  if (forked())
    throw CommunicatorError(ErrorKind::usage,
                            "this process was forked from " + me.name() + " and is no rank of the job",
                            "use the communicator in the parent only");
}

unsigned Origin::fork_count() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace distopt
