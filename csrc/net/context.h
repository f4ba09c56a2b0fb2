// The state that all collectives of a communicator share.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/errors.h"
#include "net/scratch.h"
#include "net/transport.h"

namespace distopt::net {

// Ranks that exchange data, in the order of the sum.
struct Group {
  std::vector<int> ranks;
  std::size_t place = 0;  // index of this rank in `ranks`

  std::size_t size() const { return ranks.size(); }
};

struct Context {
  Transport& transport;
  ScratchPool& pool;
  int rank;
  const std::vector<Process>& processes;  // one for each rank
  std::size_t inline_bytes;               // most data that travel with a rank's announcement
  std::size_t chunk_bytes;                // largest message that carries data
  bool is_far;                            // a message takes long, even a short one

  Group everyone;
  // For ranks on two hosts, the first half on one and the second half on the other, and more than one on each: the
  // ranks of this host and the one with the same local index on the other host, in rank order. Else empty.
  Group two_hosts;

  // Whether each rank sends its announcement to all others: one delay, but more messages than in rounds.
  bool announces_to_all() const { return size() <= (is_far ? 64 : 8); }
  int size() const { return static_cast<int>(processes.size()); }
};

}  // namespace distopt::net
