// A forked child has its parent's memory, and is no rank: what a communicator does there is refused.
#pragma once

namespace distopt {

// Number of forks between the first call and this process.
unsigned fork_count();

}  // namespace distopt
