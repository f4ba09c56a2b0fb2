// A forked child has its parent's memory, and is no rank: what a communicator does there is refused.
#pragma once

#include "base/errors.h"

namespace distopt {

// The process in which it was made.
class Origin {
 public:
  // Whether this is another one: a child.
  bool forked() const;
  // Throws CommunicatorError in a child of `me`.
  void require(const Process& me) const;

 private:
  const unsigned forks_ = fork_count();
  // Number of forks between the first call and this process.
  static unsigned fork_count();
};

}  // namespace distopt
