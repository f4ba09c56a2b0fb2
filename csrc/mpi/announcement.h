// Announcements of one collective by all ranks, gathered so that ranks which call different collectives notice. Small
// data travel with them.
//
// Gathered in ceil(log2(world size)) rounds: by recursive doubling where the world size is a power of two, else by
// the algorithm of Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
// Systems", IEEE Transactions on Parallel and Distributed Systems 8(11), 1997, section 3.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/describe.h"
#include "mpi/context.h"

namespace distopt::mpi {

class Announcement {
 public:
  Announcement(Context& context, int tag) : context_(context), tag_(tag) {}
  ~Announcement() { context_.pool.give(std::move(memory_)); }
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;

  // Notifies the others; `payload` is copied.
  void begin(const Arguments& arguments, std::uint64_t sequence, const char* payload, std::size_t payload_bytes);
  // Does all that can be done without waiting; returns whether all ranks have announced it and agree. Throws
  // CommunicatorError (mismatch) with the name of the first rank that does not agree.
  bool advance();
  bool complete() const { return complete_; }
  // Ranks that have sent nothing.
  std::vector<int> unheard() const;

  // The announcement of `rank`, once all are complete.
  std::uint64_t count_of(int rank) const { return said_[rank]->descriptor.count; }
  const char* payload_of(int rank) const { return reinterpret_cast<const char*>(said_[rank] + 1); }

 private:
  // Followed by the payload, padded so that what comes next is aligned.
  struct Said {
    Descriptor descriptor;  // `location` is the rank
    char label[label_bytes];
    std::uint64_t payload_bytes;
  };

  static std::size_t block_bytes(std::size_t payload_bytes);
  std::size_t room_for(int blocks) const;
  int blocks_of_round() const { return std::min(distance_, context_.size() - distance_); }
  void exchange();
  void take_in();
  void compare() const;

  Context& context_;
  int tag_;
  Scratch memory_;  // blocks in the order of their arrival, this rank's first
  std::vector<const Said*> said_;
  std::vector<std::size_t> ends_;  // of the blocks
  int distance_ = 1;               // blocks of this rank, up to all; doubles in each round
  bool sent_ = true, received_ = true;
  bool complete_ = false;
};

}  // namespace distopt::mpi
