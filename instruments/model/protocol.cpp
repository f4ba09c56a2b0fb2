// The model: initial state, steps of a rank, what may happen to a rank, and what must hold.
#include "protocol.h"

#include <cstddef>

namespace {

// Clears what an ended rank knew, so that equal ends are one state.
void forget(Rank& rank, At end) {
  const Byte left = rank.left;
  std::memset(&rank.call, 0, sizeof(Rank) - offsetof(Rank, call));
  rank.left = left;
  rank.at = end;
}

}  // namespace

Protocol::Protocol(int ranks, Program program, int faults, Mutation mutation)
    : n_(ranks),
      program_(std::move(program)),
      faults_(faults),
      idle_slices_(ranks == 2),
      mutation_(mutation),
      buffers_(mutation == Mutation::two_buffers ? 2 : staging_buffers) {
  Byte held[arrays] = {};
  int number = 0;
  for (const Op& op : program_.ops) {
    ++number;
    if (op.fill) held[op.in] = static_cast<Byte>(2 * number);
    const Byte in = held[op.in];
    held[op.out] = static_cast<Byte>(2 * number + 1);
    contents_.push_back({in, held[op.out]});
  }
}

State Protocol::initial() const {
  State s;
  std::memset(&s, 0, sizeof(s));
  s.faults = static_cast<Byte>(faults_);
  for (int r = 0; r < n_; ++r) {
    s.rank[r].locked = 1;
    s.rank[r].blocker_signal = nothing;
  }
  return s;
}

bool Protocol::ended(const State& s) const {
  for (int r = 0; r < n_; ++r)
    if (s.rank[r].at != At::ended && s.rank[r].at != At::dead) return false;
  return true;
}

const Op& Protocol::op(int r, int number) const {
  if (program_.mismatched && r == 0) return program_.ops[1];
  return program_.ops[number - 1];
}

// -- the next step of a rank, which it does not choose; nullptr if it can take none -----------------------------------

const char* Protocol::step(State& s, int r) const {
  Rank& me = s.rank[r];
  switch (me.at) {
    case At::calls:
      return next_call(s, r);
    case At::takes:
      for (int q = 0; q < n_; ++q) expect(s.rank[q].allocated == me.awaited, "memory of another empty() is mapped");
      if (is(Mutation::refusal_read_late)) expect_entries(s, me.awaited);
      me.at = At::calls;
      return "takes the memory";
    case At::posts:
      return post_ready(s, r);
    case At::writes_entry:  // mutation
      me.entry[(me.posted + 1) % ring_size] = static_cast<Byte>(me.posted + 1);
      ++me.posted;
      me.at = At::posts;
      return "writes its ring entry";
    case At::stores:
    case At::looks:
    case At::wakes:
      return store(s, r);
    case At::advances:
      return advance(s, r);
    case At::finds: {
      const int number = me.counters[finished] + 1;
      for (int q = 0; q < n_; ++q)
        expect(s.rank[q].nonfinite[number % ring_size] == tag_of(number, op(r, number).chunks - 1),
               "what a rank has found is read too early or too late");
      finish(s, r);
      return "reads what all have found";
    }
    case At::raises:
      me.at = s.record_state != 0 ? At::reads_record : At::waits;
      return "looks for a failure";
    case At::waits:
    case At::reads_word:
    case At::falls_asleep:
    case At::woken:
    case At::slice_over:
      return wait(s, r);
    case At::checks:
    case At::asks_closed:
    case At::asks_lock:
    case At::reads_again:
    case At::asks_again:
      return check_peers(s, r);
    case At::fails:
    case At::writes_record:
    case At::stores_valid:
    case At::reads_record:
    case At::asks_writer:
    case At::reads_record_again:
      return record(s, r);
    case At::closes:
      me.closed = 1;
      me.at = At::leaves;
      return "closes";
    case At::leaves:
      check_outcome(s, r);
      me.locked = 0;
      forget(me, At::ended);
      return "gives up its lock";
    case At::asleep:
    case At::ended:
    case At::dead:
      break;
  }
  return nullptr;
}

// -- what may happen to a rank ----------------------------------------------------------------------------------------

void Protocol::die(State& s, int r) const {
  forget(s.rank[r], At::dead);
  s.rank[r].locked = 0;
  --s.faults;
}

void Protocol::leave(State& s, int r) const {
  Rank& me = s.rank[r];
  if (me.at == At::slice_over) --s.rank[me.blocker_peer].sleepers;
  me.left = 1;
  me.at = At::closes;
  --s.faults;
}

// Whether a rank that looks around may find something.
bool Protocol::eventful(const State& s) const {
  bool gone = s.record_state != 0;
  for (int q = 0; q < n_; ++q) gone = gone || s.rank[q].closed || !s.rank[q].locked;
  return gone;
}

// -- what must hold ---------------------------------------------------------------------------------------------------

// In every state: no rank sleeps on a word that arrived, unless its owner is about to wake it. (An owner that was
// killed in between wakes none; the limit of the sleep does.)
void Protocol::check(const State& s) const {
  for (int r = 0; r < n_; ++r) {
    if (s.rank[r].at != At::asleep || !reached(s, r)) continue;
    const int owner = s.rank[r].blocker_peer;
    const At at = s.rank[owner].at;
    const bool will_wake = (at == At::looks || at == At::wakes) && same_word(s, r, owner);
    expect(will_wake || at == At::dead, "a wake-up is lost");
  }
}

// A rank that ends with an error names one that was killed or that left, and says which; no other ends with an error.
void Protocol::check_outcome(const State& s, int r) const {
  const Rank& me = s.rank[r];
  if (me.left) return;
  const Rank& about = s.rank[me.error_about];
  switch (me.error) {
    case ErrorKind::none:
      return expect(me.counters[finished] == program_.ops.size(), "a rank ends too early");
    case ErrorKind::closed:
      return expect(about.left && about.closed, "an error blames a rank that has not left");
    case ErrorKind::peer_lost:
      return expect(about.at == At::dead && !about.closed, "an error blames a rank that was not killed");
    case ErrorKind::mismatch:
      return expect(program_.mismatched, "a mismatch is found where there is none");
  }
}

void Protocol::expect_entries(const State& s, int number) const {
  for (int q = 0; q < n_; ++q)
    expect(s.rank[q].entry[number % ring_size] == number, "a ring entry is read too early or too late");
}

void Protocol::expect_array(const State& s, int owner, int array, Byte tag, const char* wrong) const {
  for (int part = 0; part < n_; ++part) expect(s.rank[owner].array[array][part] == tag, wrong);
}
