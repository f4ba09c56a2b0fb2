// A call of C's exit(0), by the script or a library, that would end a rank as if its work were done.
#pragma once

#include <string>

namespace distopt {

// From now on, exit(0) in this process writes `text` to stderr and ends it with code 1. An empty text cancels this.
// It does not change codes other than 0, and has no effect in forked children. Not thread-safe.
void refuse_early_exit(std::string text);

}  // namespace distopt
