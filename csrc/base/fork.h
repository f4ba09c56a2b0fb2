// A forked child has its parent's memory but is not a rank: its calls to a communicator are refused.
#pragma once

#include <pthread.h>

#include <atomic>

#include "base/errors.h"

namespace distopt {

// Distinguishes the process that made it from forked children.
class ForkGuard {
 public:
  // Whether this process is a forked child.
  bool forked() const { return fork_count() != forks_; }
  // Throws CommunicatorError in a child of `me`.
  void require(const Process& me) const {
    if (forked())
      throw CommunicatorError(ErrorKind::usage,
                              "this process was forked from " + me.name() + " and is not a rank of the job",
                              "use the communicator in the parent only");
  }

 private:
  // Number of forks between the first call and this process.
  static unsigned fork_count() {
    static std::atomic<unsigned> forks{0};
    static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
  }

  const unsigned forks_ = fork_count();
};

}  // namespace distopt
