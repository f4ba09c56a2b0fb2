// The counters through which ranks see each other, and the wait for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/patience.h"
#include "host/segment.h"

namespace distopt {

// The condition that a collective waits for: `signal` of rank `peer` at `target` or more.
struct Blocker {
  Signal signal;
  std::uint64_t target;
  int peer;
};

// Sleeps while the word's lower half is `seen`, for at most `seconds`; returns whether it was woken by a change, or did
// not sleep.
bool futex_wait(std::atomic<std::uint64_t>& word, std::uint64_t seen, double seconds);
void futex_wake(std::atomic<std::uint64_t>& word);

class Peers {
 public:
  Peers(Segment& segment, std::vector<Process> processes);

  Segment& segment() const { return segment_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Process& process(int rank) const { return processes_[rank]; }
  std::string name(int rank) const { return processes_[rank].name(); }
  const Process& me() const { return processes_[rank_]; }
  std::vector<Process> processes(const std::vector<int>& ranks) const;
  RingEntry& entry(int rank, std::uint64_t sequence) const { return segment_.slot(rank).ring[sequence % ring_size]; }

  // Own counters. Publishing makes everything written before visible to the peers that see the new value.
  std::uint64_t count(Signal signal) const;
  void publish(Signal signal);
  void publish_post(std::uint64_t sequence);

  bool reached(const Blocker& blocker) const;
  // Whether every peer has got to `target`; if not, `blocker` names the first that has not.
  bool all_reached(Signal signal, std::uint64_t target, Blocker& blocker) const;
  std::vector<int> absent(const Blocker& blocker) const;
  // Whether every peer has finished that collective.
  bool all_finished(std::uint64_t sequence);
  // Shows the peers that this rank itself waits or polls.
  void show_life() const;
  // The ranks to blame for a wait that has lasted `waited` seconds: all that show no life or, if all do, all `ranks`.
  std::vector<int> silent(const std::vector<int>& ranks, double waited) const;
  // Records a failure; the first of all ranks is kept and returned, as later failures of others only follow from it.
  CommunicatorError fail(const ErrorFields& failure);
  // Records that a rank has ended; `waiting` describes this rank's wait for it.
  enum class Presence { here, closed, ended };
  Presence presence(int rank) const;
  CommunicatorError lost(int rank, Presence presence, const std::string& waiting);
  // Whether any rank has recorded one, or is about to.
  bool failed() const { return segment_.header().failure.state.load(std::memory_order_acquire) != 0; }
  // The recorded failure; once failed().
  CommunicatorError failure() const;

  // One element for each rank, as scratch memory.
  std::vector<const void*>& scratch() { return scratch_; }

  // Polls a few times, and counts each against `polls`; returns whether the blocker is gone. Useless if ranks share
  // cores.
  bool glance(const Blocker& blocker, int& polls);
  // Polls for a time that suits the machine; returns whether the blocker is gone.
  bool spin(const Blocker& blocker);
  // Sleeps until the blocker's word changes or a signal arrives, for at most `seconds`; returns whether it was woken by
  // a change.
  bool sleep(const Blocker& blocker, double seconds) const;

  bool cores_shared() const { return cores_shared_; }
  // To be called once every rank has joined, and before the first wait. Finds out whether ranks have to share cores:
  // then polling takes the core from the rank that this rank waits for.
  void count_cores();

 private:
  std::atomic<std::uint64_t>& word(const Blocker& blocker) const;
  void wake(std::atomic<std::uint64_t>& word) const;

  Segment& segment_;
  int rank_;
  int size_;
  std::vector<Process> processes_;
  bool cores_shared_ = false;
  unsigned failed_spins_ = 0;        // since one succeeded
  std::uint64_t finished_seen_ = 0;  // collectives that all peers had finished when last looked at
  std::vector<const void*> scratch_;
};

}  // namespace distopt
