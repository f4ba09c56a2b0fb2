// The part of the model that is csrc/shm/communicator.cpp, but for ShmCommunicator::advance.
#include "protocol.h"

namespace {

bool overlaps(int a, int b) { return a == b; }

}  // namespace

const char* Protocol::next_call(State& s, int r) const {
  Rank& me = s.rank[r];
  const std::string& calls = program_.calls[r];
  if (me.call == calls.size()) {
    me.at = At::closes;
    return "has done all";
  }
  const char call = calls[me.call++];
  if (call == 'S') {
    if (s.record_state != 0) {
      me.at = At::reads_record;
      return "starts an operation and sees a failure";
    }
    const int number = ++me.started;
    for (int earlier = me.counters[finished] + 1; earlier < number && op(r, number).fill; ++earlier)
      expect(!overlaps(op(r, earlier).in, op(r, number).in) && !overlaps(op(r, earlier).out, op(r, number).in),
             "the program writes to an array that is in use");
    if (op(r, number).fill) fill(me, op(r, number).in, contents_[number - 1].in);
    resume(s, r, Caller::start);
    return "starts an operation";
  }
  me.awaited = static_cast<Byte>(call - '0');
  if (me.counters[finished] >= me.awaited)
    end_wait(s, r);
  else
    resume(s, r, Caller::wait);
  return "waits for an operation";
}

// To the beginning of ShmCommunicator::advance. What the rank waited for has come, or will be named anew.
void Protocol::resume(State& s, int r, Caller caller) const {
  Rank& me = s.rank[r];
  me.caller = caller;
  me.at = At::posts;
  me.blocker_signal = nothing;
  me.blocker_target = me.blocker_peer = 0;
}

// To where ShmCommunicator::advance was called.
void Protocol::returned(State& s, int r) const {
  Rank& me = s.rank[r];
  if (me.caller == Caller::start)
    me.at = At::calls;
  else if (me.counters[finished] >= me.awaited)
    end_wait(s, r);
  else
    me.at = me.caller == Caller::wait ? At::raises : At::checks;
}

// The caller looks at the result, and then does with its arrays what it likes.
void Protocol::end_wait(State& s, int r) const {
  Rank& me = s.rank[r];
  const Op& mine = op(r, me.awaited);
  const auto used_later = [&](int array) {
    for (int later = me.awaited + 1; later <= static_cast<int>(program_.ops.size()); ++later)
      if ((overlaps(op(r, later).in, array) && !op(r, later).fill) ||
          (later <= me.started && (overlaps(op(r, later).in, array) || overlaps(op(r, later).out, array))))
        return true;
    return false;
  };
  me.at = mine.kind == Kind::empty ? At::takes : At::calls;
  if (mine.kind == Kind::empty) return;
  if (!used_later(mine.out)) {
    expect_array(s, r, mine.out, contents_[me.awaited - 1].out, "a result is wrong");
    fill(me, mine.out, scribbled);
  }
  if (!used_later(mine.in)) fill(me, mine.in, scribbled);
}

const char* Protocol::post_ready(State& s, int r) const {
  Rank& me = s.rank[r];
  const int number = me.posted + 1;
  const int front = me.counters[finished] + 1;
  if (number > me.started || number - front >= ring_size || !may_post(s, r, number)) return advance(s, r);
  const int needed = number - ring_size - (is(Mutation::entry_reused_early) ? 1 : 0);
  for (int q = 0; q < n_; ++q) {
    if (s.rank[q].counters[finished] >= needed) continue;
    me.at = At::advances;
    return "finds its next ring entry in use";
  }
  if (op(r, number).mode == Mode::inlined)
    expect_array(s, r, op(r, number).in, contents_[number - 1].in, "arguments are posted before they are ready");
  publish(s, r, posted);
  if (is(Mutation::posted_before_written)) return "is about to post";
  me.entry[number % ring_size] = static_cast<Byte>(number);
  return "writes its ring entry";
}

// The part of it that looks at arrays, and so at no other rank.
bool Protocol::may_post(const State& s, int r, int number) const {
  const Op& later = op(r, number);
  for (int earlier = s.rank[r].counters[finished] + 1; earlier < number; ++earlier) {
    const Op& other = op(r, earlier);
    if (!is(Mutation::posts_over_output) && (overlaps(later.in, other.out) || overlaps(later.out, other.out)))
      return false;
    if (!is(Mutation::posts_over_input) && overlaps(later.out, other.in)) return false;
  }
  return true;
}

const char* Protocol::check_peers(State& s, int r) const {
  Rank& me = s.rank[r];
  int q = 0;
  while (me.absent != 0 && (me.absent >> q & 1) == 0) ++q;
  const auto next_peer = [&] {
    me.absent = static_cast<Byte>(me.absent & ~(1 << q));
    me.saw_closed = 0;
    me.at = At::asks_closed;
    if (me.absent == 0) resume(s, r, Caller::wait);
  };
  switch (me.at) {
    case At::checks:
      if (s.record_state != 0) {
        me.at = At::reads_record;
        return "sees a failure";
      }
      for (int p = 0; p < n_; ++p)
        if (me.blocker_signal != nothing && p != r &&
            word(s, me.blocker_signal, me.blocker_target, p) < me.blocker_target)
          me.absent = static_cast<Byte>(me.absent | 1 << p);
      me.at = At::asks_closed;
      if (me.absent == 0) resume(s, r, Caller::wait);
      return "looks who is absent";
    case At::asks_closed:
      me.saw_closed = s.rank[q].closed;
      me.at = me.saw_closed ? At::reads_again : At::asks_lock;
      return "asks whether a peer has closed";
    case At::asks_lock:
      if (s.rank[q].locked || is(Mutation::asks_no_lock))
        next_peer();
      else
        me.at = At::reads_again;
      return "asks for a peer's lock";
    case At::reads_again:
      if (word(s, me.blocker_signal, me.blocker_target, q) >= me.blocker_target &&
          !is(Mutation::counter_not_read_again))
        next_peer();
      else if (me.saw_closed)
        fail(s, r, ErrorKind::closed, q);
      else
        me.at = At::asks_again;
      return "reads the counter of a peer that has gone";
    default: {
      const bool closed = s.rank[q].closed && !is(Mutation::closed_not_read_again);
      fail(s, r, closed ? ErrorKind::closed : ErrorKind::peer_lost, q);
      return "asks again whether it closed";
    }
  }
}
