// Ends of a process that come too early: for its job, by a call of C's exit(0), or for a child.
#pragma once

#include <string>

namespace distopt {

// From now on, exit(0) in this process writes `text` to stderr and ends it with code 1. An empty text cancels this.
// It does not change codes other than 0, and has no effect in forked children. Not thread-safe.
void refuse_early_exit(std::string text);

// From now on, exit() in this process hangs up `fd`, a socket, and waits for its child `pid`: after handlers that are
// registered later, such as MPICH's. It has no effect in forked children.
void exit_after(int pid, int fd);

}  // namespace distopt
