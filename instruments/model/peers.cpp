// The part of the model that is csrc/host/peers.cpp: publishing, sleeping, the record of the first failure.
#include "protocol.h"

void Protocol::publish(State& s, int r, Signal signal) const {
  s.rank[r].publishing = signal;
  s.rank[r].at = is(Mutation::wake_before_store) ? At::looks : At::stores;
}

const char* Protocol::store(State& s, int r) const {
  Rank& me = s.rank[r];
  const bool stored = !is(Mutation::wake_before_store);
  switch (me.at) {
    case At::stores: {
      const int number = me.posted + 1;
      if (me.publishing == posted)
        me.sequence[number % ring_size] = static_cast<Byte>(number);
      else
        ++me.counters[me.publishing];
      const char* const names[] = {"publishes copied_in", "publishes reduced", "publishes copied_out",
                                   "publishes finished", "publishes posted"};
      const char* what = names[me.publishing];
      if (!stored) return published(s, r, what);
      me.at = At::looks;
      return what;
    }
    case At::looks:
      if (me.sleepers == 0 || is(Mutation::no_wake)) {
        me.at = At::stores;
        return stored ? published(s, r, "sees no sleeper") : "sees no sleeper";
      }
      me.at = At::wakes;
      return "sees a sleeper";
    default:
      for (int q = 0; q < n_; ++q) {
        if (s.rank[q].at != At::asleep || !same_word(s, q, r)) continue;
        s.rank[q].at = At::woken;
        if (is(Mutation::wakes_one)) break;
      }
      me.at = At::stores;
      return stored ? published(s, r, "calls FUTEX_WAKE") : "calls FUTEX_WAKE";
  }
}

// Whether what `sleeper` sleeps on is what `owner` publishes.
bool Protocol::same_word(const State& s, int sleeper, int owner) const {
  const Rank& a = s.rank[sleeper];
  const Rank& b = s.rank[owner];
  if (a.blocker_peer != owner || a.blocker_signal != b.publishing) return false;
  return a.blocker_signal != posted || a.blocker_target % ring_size == (b.posted + 1) % ring_size;
}

const char* Protocol::published(State& s, int r, const char* what) const {
  Rank& me = s.rank[r];
  const Signal signal = me.publishing;
  if (signal == posted) {
    me.at = is(Mutation::posted_before_written) ? At::writes_entry : At::posts;
    if (!is(Mutation::posted_before_written)) ++me.posted;
  } else if (signal == finished) {
    me.at = At::posts;
  } else {
    if (signal == copied_in && is(Mutation::copied_in_before_copied)) copy_in(s, r, me.step / 3);
    ++me.step;
    me.at = At::advances;
  }
  me.publishing = copied_in;
  return what;
}

Byte Protocol::word(const State& s, Signal signal, int target, int peer) const {
  return signal == posted ? s.rank[peer].sequence[target % ring_size] : s.rank[peer].counters[signal];
}

bool Protocol::reached(const State& s, int r) const {
  const Rank& me = s.rank[r];
  return me.blocker_signal == nothing ||
         word(s, me.blocker_signal, me.blocker_target, me.blocker_peer) >= me.blocker_target;
}

// Peers::all_reached. If not, the first that is short is what the rank waits for.
bool Protocol::block(State& s, int r, Signal signal, int target) const {
  Rank& me = s.rank[r];
  for (int q = 0; q < n_; ++q) {
    if (q == r || word(s, signal, target, q) >= target) continue;
    me.blocker_signal = signal;
    me.blocker_target = static_cast<Byte>(target);
    me.blocker_peer = static_cast<Byte>(q);
    return false;
  }
  return true;
}

const char* Protocol::wait(State& s, int r) const {
  Rank& me = s.rank[r];
  Rank& peer = s.rank[me.blocker_peer];
  const Byte current =
      me.blocker_signal == nothing ? Byte{0} : word(s, me.blocker_signal, me.blocker_target, me.blocker_peer);
  const bool counted = !is(Mutation::sleeper_not_counted);
  switch (me.at) {
    case At::waits:
      if (me.blocker_signal == nothing) return nullptr;  // the first poll succeeds
      peer.sleepers = static_cast<Byte>(peer.sleepers + (counted ? 1 : 0));
      me.at = At::reads_word;
      return "counts itself among the sleepers";
    case At::reads_word:
      me.seen = current;
      me.at = current >= me.blocker_target ? At::woken : At::falls_asleep;
      return "reads the word";
    case At::falls_asleep:
      me.at = current == me.seen || is(Mutation::sleeps_without_comparing) ? At::asleep : At::woken;
      me.seen = 0;
      return "calls FUTEX_WAIT";
    default:
      me.seen = 0;
      peer.sleepers = static_cast<Byte>(peer.sleepers - (counted ? 1 : 0));
      resume(s, r, me.at == At::woken ? Caller::wait : Caller::wait_after_slice);
      return "is awake";
  }
}

void Protocol::fail(State& s, int r, ErrorKind error, int about) const {
  Rank& me = s.rank[r];
  me.error = error;
  me.error_about = static_cast<Byte>(about);
  me.absent = me.saw_closed = 0;
  me.at = At::fails;
}

const char* Protocol::record(State& s, int r) const {
  Rank& me = s.rank[r];
  const bool early = is(Mutation::record_valid_early);
  const auto take = [&](ErrorKind error, int about) {
    me.error = error;
    me.error_about = static_cast<Byte>(about);
    me.at = At::closes;
  };
  switch (me.at) {
    case At::fails:
      if (s.record_state == 0) {
        s.record_state = static_cast<Byte>(1 + r);
        me.at = early ? At::stores_valid : At::writes_record;
      } else {
        me.at = At::reads_record;
      }
      return "wants to record a failure";
    case At::writes_record:
      s.record_error = me.error;
      s.record_about = me.error_about;
      me.at = early ? At::reads_record : At::stores_valid;
      return "writes the failure";
    case At::stores_valid:
      s.record_state = record_valid;
      me.at = early ? At::writes_record : At::reads_record;
      return "says that the failure is written";
    case At::asks_writer:
      me.at = s.rank[me.seen].locked ? At::reads_record : At::reads_record_again;
      return "asks for the lock of the rank that writes";
    default:
      if (s.record_state == record_valid && !(me.at == At::reads_record_again && is(Mutation::record_not_read_again)))
        take(s.record_error, s.record_about);
      else if (me.at == At::reads_record_again)
        take(ErrorKind::peer_lost, me.seen);
      else if (is(Mutation::record_given_up))
        take(ErrorKind::peer_lost, s.record_state - 1);
      else
        me.seen = static_cast<Byte>(s.record_state - 1), me.at = At::asks_writer;
      return "reads the failure";
  }
}
