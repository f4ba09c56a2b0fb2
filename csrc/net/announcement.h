// Announcements of one collective by all ranks, gathered so that ranks which call different collectives notice. Small
// data travel with them.
//
// By messages from each rank to each other one, or, if these are too many, in ceil(log2(world size)) rounds: by
// recursive doubling where the world size is a power of two, else by
// the algorithm of Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
// Systems", IEEE Transactions on Parallel and Distributed Systems 8(11), 1997, section 3.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/describe.h"
#include "net/context.h"

namespace distopt::net {

class Announcement {
 public:
  Announcement(Context& context, int tag) : context_(context), tag_(tag) {}
  ~Announcement() { context_.pool.give(std::move(memory_)); }
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;

  // Makes the announcement of this rank; `payload` is copied.
  void describe(const Arguments& arguments, std::uint64_t sequence, const char* payload, std::size_t payload_bytes);
  // Begins to exchange announcements with the others.
  void begin();
  // Does all that can be done without waiting; returns whether all ranks have announced it and agree. Throws
  // CommunicatorError (mismatch) with the name of the first rank that does not agree.
  bool advance();
  bool complete() const { return complete_; }
  // Whether a rank that is known to have announced something does not agree.
  bool differs() const;
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
  // Takes in the block that a rank has sent; returns what follows it. The block must stay where it is.
  const char* note(const char* block);
  int blocks_of_round() const { return std::min(distance_, context_.size() - distance_); }
  void exchange();
  void take_in();
  void send_to_all();
  bool advance_to_all();
  void compare() const;

  Context& context_;
  int tag_;
  Scratch memory_;  // blocks in the order of their arrival, this rank's first
  std::vector<const Said*> said_;
  std::size_t n_said_ = 0;
  std::vector<std::size_t> ends_;  // of the blocks
  int distance_ = 1;               // blocks of this rank, up to all; doubles in each round
  bool exchanges_ = false, sent_ = true, received_ = true;
  std::unique_ptr<bool[]> direct_;  // without rounds: whether the message to, and from, each rank has ended
  bool complete_ = false;
};

}  // namespace distopt::net
