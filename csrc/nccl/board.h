// Data that the ranks of one host share beside NCCL, which neither notices a dead peer nor compares what the ranks
// call: which ranks live, the last collective of each, and the first failure. In a segment as in the shared-memory
// communicator, without its data.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "host/describe.h"

namespace distopt {

class Board {
 public:
  // Takes over `fd`, of create_segment(). `rank` is an index into `processes`, the ranks of this host.
  Board(int fd, int rank, std::vector<Process> processes)
      : segment_(fd, rank, static_cast<int>(processes.size())), peers_(segment_, std::move(processes)) {}

  // The ranks of this host: who lives, and the first failure.
  Peers& peers() { return peers_; }
  const Peers& peers() const { return peers_; }

  // Announces a collective of this rank. The mismatch with a peer that has started another under that number, if any.
  std::optional<CommunicatorError> post(std::uint64_t sequence, const Arguments& arguments);

  // Ranks of this host that have not started collective `sequence`.
  std::vector<int> absent(std::uint64_t sequence) const { return peers_.absent({Signal::posted, sequence, 0}); }
  // "rank 1 (host a, pid 7): the last operation it started is all_reduce #3 of 5 float32, sum"
  std::string describe(int rank) const { return peers_.name(rank) + ": " + last_collective(peers_, rank); }

  // Says that this rank takes no part any more.
  void close();

 private:
  std::optional<CommunicatorError> mismatch(std::uint64_t sequence) const;

  Segment segment_;
  Peers peers_;
};

}  // namespace distopt
