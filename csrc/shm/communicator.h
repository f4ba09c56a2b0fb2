// Collectives over the ranks of one host through shared memory.
//
// Collectives run strictly in the order in which they were started. Starting one only posts it; later calls
// (another start, progress, a wait) move all outstanding ones forward, so that the skew between ranks hides behind
// other work. It has no thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/flight.h"
#include "base/fork.h"
#include "base/turn.h"
#include "shm/collective.h"
#include "shm/messages.h"

namespace distopt {

class ShmCommunicator : public std::enable_shared_from_this<ShmCommunicator> {
 public:
  static constexpr bool finds_nonfinite = true;

  // Takes over the descriptor from create_segment. Every rank must have constructed its own before any starts a
  // collective.
  ShmCommunicator(int fd, int rank, std::vector<Process> processes, Limits limits, Hooks hooks);
  ~ShmCommunicator();
  ShmCommunicator(const ShmCommunicator&) = delete;
  ShmCommunicator& operator=(const ShmCommunicator&) = delete;

  // Called once, when all ranks have constructed theirs.
  void count_cores();
  // Wire memory of `owner`, a communicator of the same ranks that outlives this one, is wire memory here, too. To be
  // called once, by all ranks before their first collective; this one's own empty() must not be used then.
  void use_wire_memory_of(const ShmCommunicator& owner) { segment_.use_blocks_of(owner.segment_); }

  // Starts a collective and returns at once: true if it is brief and no other is outstanding, and so has advanced as
  // far as it can. Otherwise progress() must be called next, which may take the time of large copies.
  bool start(std::shared_ptr<ShmCollective> collective);
  // Moves outstanding collectives forward without waiting; returns whether this one has ended.
  bool test(const ShmCollective& collective);
  void wait(const ShmCollective& collective, double timeout_seconds);
  // Waits for some microseconds at most, if nothing but a brief collective is outstanding; returns whether it has
  // ended.
  bool wait_briefly(const ShmCollective& collective);
  void progress();

  // Collective; waits. `bytes_available` counts on rank 0 only: the bytes that the host can give to all ranks together.
  std::shared_ptr<char> empty(std::uint64_t count, DType dtype, std::uint64_t bytes_available);

  // The messages of the same ranks.
  Messages& messages() { return messages_; }

  // Local. Outstanding collectives and messages are dropped. Idempotent.
  void close();

  int size() const { return peers_.size(); }
  // The number of the collective that is started next.
  std::uint64_t next_number() const { return started_ + 1; }
  Flight& flight() { return flight_; }
  double default_timeout() const { return limits_.timeout_seconds; }

 private:
  void require_open() const;
  Turn::Held take_turn();
  void raise_recorded_failure() const;
  [[noreturn]] void fail(const ErrorFields& failure);
  void enqueue(std::shared_ptr<ShmCollective> collective);
  bool only_brief() const { return queue_.size() == 1 && queue_.front()->brief(peers_.size()); }
  void post_ready();
  bool may_post(const ShmCollective& collective);
  void advance(bool helps = false);
  void help();
  template <typename Condition>
  void wait_until(Condition condition, double timeout_seconds);
  void check_peers(double waited, Patience& patience);
  std::string waiting_for(const std::vector<int>& ranks) const;

  Segment segment_;
  Peers peers_;
  Limits limits_;
  Hooks hooks_;
  Messages messages_;
  std::deque<std::shared_ptr<ShmCollective>> queue_;
  std::vector<std::shared_ptr<ShmCollective>> ended_;  // in help()
  std::size_t posted_ = 0;                             // of the queue
  std::uint64_t started_ = 0;
  Flight flight_;
  Blocker blocker_{Signal::posted, 0, 0};
  Turn turn_;
  bool has_failed_ = false;  // on this rank, perhaps in the middle of a collective
  std::atomic<bool> closed_{false};
  const ForkGuard fork_guard_;
};

}  // namespace distopt
