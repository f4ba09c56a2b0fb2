// The protocol of csrc/host and csrc/shm, as a model that a checker can go through: see README.md beside this file.
//
// One step of a rank is one access to what the ranks share, with the private work before it. These go together where
// that hides nothing:
// - A look at all peers ("have all copied in?") is one step. The counters only grow, so looks one after the other end
//   as one at the moment of the last does.
// - Data is read or written as a whole, apart from the counter that announces it. Two accesses that nothing keeps
//   apart happen in both orders, and in one of them a reader finds the tag of another operation or chunk.
// A word is visible to all as soon as it is stored. What weaker machines do is for csrc/host/peers.cpp and genmc/.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "explore.h"

using Byte = std::uint8_t;

constexpr int max_ranks = 3;
// Small, so that everything is used again. With two staging buffers the ranks would wait for each other in a ring.
constexpr int ring_size = 2;
constexpr int staging_buffers = 3;
constexpr int arrays = 4;

enum Signal : Byte { copied_in, reduced, copied_out, finished, posted, nothing };
enum class Kind : Byte { all_reduce, reduce_scatter, all_gather, broadcast, empty };
enum class Mode : Byte { inlined, direct, staged };
enum class ErrorKind : Byte { none, closed, peer_lost, mismatch };

// A collective of the program that the ranks run. Arrays are numbers; equal ones overlap.
struct Op {
  Kind kind;
  Mode mode;
  int in;
  int out;
  int chunks = 1;
  int root = 0;
  bool fill = true;  // the caller writes its arguments first; else it takes what earlier operations leave there
};

struct Program {
  std::string name;
  std::vector<Op> ops;
  // For each rank: S starts its next operation, a digit waits for the operation of that number.
  std::vector<std::string> calls;
  bool mismatched = false;  // rank 0 begins with ops[1] instead of ops[0]
};

// Mistakes: the checker must find each, in the program that test_protocol.py names.
#define MUTATIONS                                                                                                    \
  none, entry_reused_early, buffer_reused_early, no_wait_for_copied_out, no_wait_for_copied_in, no_wait_for_reduced, \
      direct_leaves_early, root_leaves_early, posts_over_output, posts_over_input, refusal_read_late,                \
      posted_before_written, copied_in_before_copied, wake_before_store, no_wake, wakes_one, sleeper_not_counted,    \
      sleeps_without_comparing, sleeps_without_limit, asks_no_lock, counter_not_read_again, closed_not_read_again,   \
      record_given_up, record_not_read_again, record_valid_early, two_buffers, begun_before_check, moves_after_failure
enum class Mutation { MUTATIONS };

// Where a rank is, named after the function in csrc.
enum class At : Byte {
  calls,               // the script, between two calls
  takes,               // ShmCommunicator::empty, after its wait
  posts,               // ShmCommunicator::post_ready
  writes_entry,        // ShmCollective::post
  stores,              // Peers::publish, publish_post: the counter or the sequence number
  looks,               // Peers::wake: `sleepers`
  wakes,               // Peers::wake: FUTEX_WAKE
  advances,            // ShmCommunicator::advance, ShmCollective::advance: the operation in front
  finds,               // ... of an operation that looks for NaN: what the others have found
  raises,              // ShmCommunicator::wait_until: raise_recorded_failure
  waits,               // Peers::spin, or the beginning of Peers::sleep
  reads_word,          // Peers::sleep: the word, once `sleepers` is counted up
  falls_asleep,        // FUTEX_WAIT, which compares
  asleep,              //
  woken,               // after FUTEX_WAIT, because of FUTEX_WAKE or another value
  slice_over,          // after FUTEX_WAIT, because of its limit
  checks,              // ShmCommunicator::check_peers: the record, and who is absent
  asks_closed,         // ... `closed` of the first who is
  asks_lock,           // ... Segment::holds_lock
  reads_again,         // ... its counter once more
  asks_again,          // ... `closed` once more
  fails,               // Peers::fail: the exchange of `state`
  writes_record,       //
  stores_valid,        //
  reads_record,        // Peers::failure
  asks_writer,         // ... whether the rank that writes it lives
  reads_record_again,  //
  closes,              // ShmCommunicator::close: `closed`
  leaves,              // ... the lock
  ended,
  dead,
};

// Who called ShmCommunicator::advance.
enum class Caller : Byte { start, wait, wait_after_slice };

struct Rank {
  // Visible to peers.
  Byte counters[4];
  Byte sequence[ring_size];
  Byte entry[ring_size];      // the operation whose arguments lie there
  Byte nonfinite[ring_size];  // tag of the operation and chunk up to which this rank has looked
  Byte allocated;             // the last `empty` for which memory was allocated
  Byte sleepers;
  Byte closed;
  Byte locked;
  Byte staged_input[staging_buffers];   // tag of what was copied in
  Byte staged_result[staging_buffers];  // tag of what was reduced
  Byte array[arrays][max_ranks];        // tags of an array's parts, one for each rank
  // Private to the rank.
  Byte call;
  At at;
  Caller caller;
  Byte awaited;
  Byte started;
  Byte posted;
  Byte decided;
  Byte step;
  Signal publishing;
  Signal blocker_signal;
  Byte blocker_target;
  Byte blocker_peer;
  Byte seen;
  Byte absent;
  Byte saw_closed;
  ErrorKind error;
  Byte error_about;
  Byte left;  // by an exception of its own
};

struct State {
  Rank rank[max_ranks];
  Byte record_state;
  ErrorKind record_error;
  Byte record_about;
  Byte faults;
};
static_assert(sizeof(State) == max_ranks * sizeof(Rank) + 4, "states are compared byte by byte");

constexpr Byte record_valid = 255;
constexpr Byte scribbled = 255;

inline Byte tag_of(int number, int chunk) { return static_cast<Byte>(number * 8 + chunk + 1); }
inline void fill(Rank& rank, int array, Byte tag) { std::memset(rank.array[array], tag, sizeof(rank.array[array])); }
inline void expect(bool holds, const char* wrong) {
  if (!holds) throw Wrong{wrong};
}

class Protocol {
 public:
  using State = ::State;

  // `faults`: how often a rank is killed or gets an exception, at any step. A slice of sleep that ends though no rank
  // has gone leads back to where it began; with three ranks it makes several times as many states, so only two have it.
  Protocol(int ranks, Program program, int faults, Mutation mutation);

  State initial() const;
  bool ended(const State& s) const;

  template <typename Emit>
  void successors(const State& s, Emit emit) const {
    for (int r = 0; r < n_; ++r) {
      const At at = s.rank[r].at;
      if (at == At::ended || at == At::dead) continue;
      const auto take = [&](const char* what, auto change) {
        State next = s;
        change(next);
        check(next);
        emit(next, r, what);
      };
      State next = s;
      if (const char* what = step(next, r)) {
        check(next);
        emit(next, r, what);
      }
      if (at == At::waits && reached(s, r)) take("polls with success", [&](State& t) { resume(t, r, Caller::wait); });
      if (at == At::asleep && !is(Mutation::sleeps_without_limit) && (idle_slices_ || eventful(s)))
        take("has slept long enough", [&](State& t) { t.rank[r].at = At::slice_over; });
      if (s.faults == 0) continue;
      take("is killed", [&](State& t) { die(t, r); });
      if (at == At::calls || at == At::slice_over) take("gets an exception", [&](State& t) { leave(t, r); });
    }
  }

 private:
  // The arguments and the result of an operation, as tags.
  struct Contents {
    Byte in, out;
  };
  struct Blocker {
    Signal signal;
    int target, peer;
  };

  const char* step(State& s, int r) const;
  const char* next_call(State& s, int r) const;
  const char* post_ready(State& s, int r) const;
  const char* advance(State& s, int r) const;
  const char* advance_staged(State& s, int r) const;
  int first(Signal signal, int number) const;
  void copy_in(State& s, int r, int chunk) const;
  void reduce_chunk(State& s, int r, int chunk) const;
  void copy_out(State& s, int r, int chunk) const;
  void run(State& s, int r, int number) const;
  void ends(State& s, int r, const Op& mine) const;
  const char* store(State& s, int r) const;
  const char* published(State& s, int r, const char* what) const;
  const char* wake(State& s, int r) const;
  const char* wait(State& s, int r) const;
  const char* check_peers(State& s, int r) const;
  const char* record(State& s, int r) const;

  void resume(State& s, int r, Caller caller) const;
  void returned(State& s, int r) const;
  void publish(State& s, int r, Signal signal) const;
  void finish(State& s, int r) const;
  void fail(State& s, int r, ErrorKind error, int about) const;
  void die(State& s, int r) const;
  void leave(State& s, int r) const;
  void end_wait(State& s, int r) const;

  bool may_post(const State& s, int r, int number) const;
  bool block(State& s, int r, Signal signal, int target) const;
  Byte word(const State& s, Signal signal, int target, int peer) const;
  bool reached(const State& s, int r) const;
  bool eventful(const State& s) const;
  void check(const State& s) const;
  void check_outcome(const State& s, int r) const;
  void expect_entries(const State& s, int number) const;
  void expect_array(const State& s, int owner, int array, Byte tag, const char* wrong) const;
  bool same_word(const State& s, int sleeper, int owner) const;

  // The operation of that number on that rank; the first is 1.
  const Op& op(int r, int number) const;
  bool is(Mutation mutation) const { return mutation_ == mutation; }

  int n_;
  Program program_;
  int faults_;
  bool idle_slices_;
  Mutation mutation_;
  int buffers_;
  std::vector<Contents> contents_;
};
