// What the ranks of one host tell each other beside NCCL, which neither notices a dead peer nor compares what the ranks
// call: who lives, which collective each has started, and the first failure. In a segment as of the shared-memory
// communicator, without its data.
#pragma once

#include <string>
#include <vector>

#include "base/errors.h"
#include "host/describe.h"

namespace distopt {

class Board {
 public:
  // Takes over `fd`, of create_segment(). `rank` counts the ranks of this host; `names` says how messages call them.
  Board(int fd, int rank, std::vector<std::string> names)
      : segment_(fd, rank, static_cast<int>(names.size())), peers_(segment_, std::move(names)) {}

  const std::string& me() const { return peers_.name(peers_.rank()); }

  // Says what this rank starts. The mismatch with a peer that has started something else under that number, or "".
  std::string post(std::uint64_t sequence, const Request& request);

  // Ranks of this host that have not started operation `sequence`.
  std::vector<int> absent(std::uint64_t sequence) const { return peers_.absent({Signal::posted, sequence, 0}); }
  enum class Presence { here, closed, ended };
  Presence presence(int rank) const;
  int size() const { return peers_.size(); }
  int rank() const { return peers_.rank(); }
  // "rank 1 (host a, pid 7): the last operation it started is all_reduce #3 of 5 float32, sum"
  std::string tell(int rank) const { return peers_.name(rank) + ": " + last_operation(peers_, rank); }

  // See Peers.
  CommunicatorError fail(ErrorKind kind, const std::string& text) { return peers_.fail(kind, text); }
  bool failed() const { return peers_.failed(); }
  CommunicatorError failure() const { return peers_.failure(); }

  // Says that this rank takes no part any more.
  void close();

 private:
  std::string mismatch(std::uint64_t sequence) const;
  bool read(int rank, std::uint64_t sequence, Descriptor& descriptor, std::string& label) const;

  Segment segment_;
  Peers peers_;
};

}  // namespace distopt
