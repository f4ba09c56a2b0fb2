// The part of the model that is csrc/shm/collective.cpp, and ShmCommunicator::advance, which drives it.
#include "protocol.h"

namespace {

constexpr int stages = 3;
constexpr const char* argument_changed = "an argument is changed while it is read";
constexpr const char* buffer_wrong = "a staging buffer is read too early or too late";
constexpr const char* wire_wrong = "wire memory is read too early or too late";

bool reduces(const Op& op) { return op.kind == Kind::all_reduce || op.kind == Kind::reduce_scatter; }

}  // namespace

const char* Protocol::advance(State& s, int r) const {
  Rank& me = s.rank[r];
  me.at = At::advances;
  const int number = me.counters[finished] + 1;
  if (number > me.started) {
    returned(s, r);
    return "has nothing to do";
  }
  if (me.posted < number) {
    block(s, r, finished, number - ring_size);
    returned(s, r);
    return "cannot post";
  }
  const Op& mine = op(r, number);
  if (!me.decided) {
    for (int q = 0; q < n_; ++q) {
      if (q == r) continue;
      if (s.rank[q].sequence[number % ring_size] < number) {
        block(s, r, posted, number);
        returned(s, r);
        return "finds that a peer has not posted";
      }
      const Op& other = op(q, number);
      if (other.kind == mine.kind && other.mode == mine.mode) continue;
      fail(s, r, ErrorKind::mismatch, q);
      return "finds a mismatch";
    }
    expect_entries(s, number);
    me.decided = 1;
    return "finds that all have posted";
  }
  if (mine.mode == Mode::staged) return advance_staged(s, r);
  if (me.step == 0) {
    expect_entries(s, number);
    run(s, r, number);
    if (mine.mode == Mode::inlined)
      finish(s, r);
    else
      publish(s, r, reduced);
    return "reduces or copies";
  }
  const bool receives = mine.kind == Kind::broadcast && mine.root != r;
  const bool leaves =
      is(Mutation::direct_leaves_early) || (is(Mutation::root_leaves_early) && mine.kind == Kind::broadcast);
  if (!receives && !leaves && !block(s, r, reduced, me.counters[reduced])) {
    returned(s, r);
    return "finds that a peer has not done its share";
  }
  ends(s, r, mine);
  return "finds that all have done their share";
}

// The work is done; of an operation that looks for NaN, not what the others have found. What the root of a broadcast
// has sent is the result from now on, on all ranks.
void Protocol::ends(State& s, int r, const Op& mine) const {
  if (mine.kind == Kind::broadcast) fill(s.rank[r], mine.out, contents_[s.rank[r].counters[finished]].out);
  if (mine.kind == Kind::all_reduce && mine.mode != Mode::inlined)
    s.rank[r].at = At::finds;
  else
    finish(s, r);
}

void Protocol::finish(State& s, int r) const {
  s.rank[r].decided = s.rank[r].step = 0;
  publish(s, r, finished);
}

// ShmCollective::run_inline and run_direct.
void Protocol::run(State& s, int r, int number) const {
  Rank& me = s.rank[r];
  const Op& mine = op(r, number);
  const Contents& tags = contents_[number - 1];
  if (mine.kind == Kind::empty) {
    me.allocated = static_cast<Byte>(number);
  } else if (mine.mode == Mode::inlined) {
    fill(me, mine.out, tags.out);  // the entries were looked at
  } else if (mine.kind == Kind::all_reduce) {
    for (int q = 0; q < n_; ++q) {
      expect(s.rank[q].array[mine.in][r] == tags.in, wire_wrong);
      s.rank[q].array[mine.in][r] = tags.out;
    }
    me.nonfinite[number % ring_size] = tag_of(number, 0);
  } else if (mine.kind == Kind::broadcast) {
    if (mine.root == r) return;
    expect_array(s, mine.root, mine.in, tags.in, wire_wrong);
    fill(me, mine.out, tags.out);
  } else {
    for (int q = 0; q < n_; ++q) {
      if (mine.kind == Kind::all_gather) expect_array(s, q, mine.in, tags.in, wire_wrong);
      expect(s.rank[q].array[mine.in][r] == tags.in, wire_wrong);
    }
    fill(me, mine.out, tags.out);
  }
}

// -- staged -----------------------------------------------------------------------------------------------------------

// This rank's count when the operation began.
int Protocol::first(Signal signal, int number) const {
  int count = 0;
  for (int i = 0; i + 1 < number; ++i) {
    const Op& earlier = program_.ops[i];
    if (earlier.mode == Mode::staged && (signal != reduced || reduces(earlier))) count += earlier.chunks;
    if (earlier.mode == Mode::direct && signal == reduced) ++count;
  }
  return count;
}

const char* Protocol::advance_staged(State& s, int r) const {
  Rank& me = s.rank[r];
  const int number = me.counters[finished] + 1;
  const Op& mine = op(r, number);
  const auto wait = [&](Signal signal, int target, const char* what) {
    if (block(s, r, signal, target)) return static_cast<const char*>(nullptr);
    returned(s, r);
    return what;
  };
  for (; me.step < stages * (mine.chunks + stages - 1); ++me.step) {
    const int iteration = me.step / stages;
    const int stage = me.step % stages;
    const int chunk = iteration - stage;
    if (chunk < 0 || chunk >= mine.chunks) continue;
    if (stage == 0) {
      const int reused = me.counters[copied_in] + 1 - buffers_ - (is(Mutation::buffer_reused_early) ? 1 : 0);
      if (reused > 0 && !is(Mutation::no_wait_for_copied_out))
        if (const char* what = wait(copied_out, reused, "finds its next staging buffer in use")) return what;
      if (!is(Mutation::copied_in_before_copied)) copy_in(s, r, chunk);
      publish(s, r, copied_in);
      return "copies in";
    }
    if (stage == 1 && reduces(mine)) {
      if (!is(Mutation::no_wait_for_copied_in))
        if (const char* what = wait(copied_in, first(copied_in, number) + chunk + 1, "finds a peer not copied in"))
          return what;
      reduce_chunk(s, r, chunk);
      publish(s, r, reduced);
      return "reduces a chunk";
    }
    if (stage == 2) {
      const Signal needed = mine.kind == Kind::all_reduce ? reduced : copied_in;
      const bool waits = mine.kind != Kind::reduce_scatter &&
                         !is(needed == reduced ? Mutation::no_wait_for_reduced : Mutation::no_wait_for_copied_in);
      if (waits)
        if (const char* what = wait(needed, first(needed, number) + chunk + 1, "finds a chunk not ready")) return what;
      copy_out(s, r, chunk);
      publish(s, r, copied_out);
      return "copies out";
    }
  }
  ends(s, r, mine);
  return "has done all chunks";
}

void Protocol::copy_in(State& s, int r, int chunk) const {
  const int number = s.rank[r].counters[finished] + 1;
  const Op& mine = op(r, number);
  if (mine.kind == Kind::broadcast && mine.root != r) return;
  expect_array(s, r, mine.in, contents_[number - 1].in, argument_changed);
  s.rank[r].staged_input[(first(copied_in, number) + chunk) % buffers_] = tag_of(number, chunk);
}

void Protocol::reduce_chunk(State& s, int r, int chunk) const {
  Rank& me = s.rank[r];
  const int number = me.counters[finished] + 1;
  const Op& mine = op(r, number);
  const int buffer = (first(copied_in, number) + chunk) % buffers_;
  expect_array(s, r, mine.in, contents_[number - 1].in, argument_changed);
  for (int q = 0; q < n_; ++q) expect(q == r || s.rank[q].staged_input[buffer] == tag_of(number, chunk), buffer_wrong);
  if (mine.kind == Kind::all_reduce) {
    me.staged_result[buffer] = tag_of(number, chunk);
    me.nonfinite[number % ring_size] = tag_of(number, chunk);
  } else if (chunk + 1 == mine.chunks) {
    fill(me, mine.out, contents_[number - 1].out);
  }
}

void Protocol::copy_out(State& s, int r, int chunk) const {
  Rank& me = s.rank[r];
  const int number = me.counters[finished] + 1;
  const Op& mine = op(r, number);
  const Contents& tags = contents_[number - 1];
  const int buffer = (first(copied_in, number) + chunk) % buffers_;
  for (int q = 0; q < n_; ++q) {
    if (q == r) continue;
    const Byte staged =
        mine.kind == Kind::all_reduce ? s.rank[q].staged_result[buffer] : s.rank[q].staged_input[buffer];
    const bool sends = mine.kind == Kind::all_reduce || mine.kind == Kind::all_gather || mine.root == q;
    expect(mine.kind == Kind::reduce_scatter || !sends || staged == tag_of(number, chunk), buffer_wrong);
  }
  if (mine.kind == Kind::all_gather) expect_array(s, r, mine.in, tags.in, argument_changed);
  const bool writes = mine.kind != Kind::reduce_scatter && !(mine.kind == Kind::broadcast && mine.root == r);
  if (writes && chunk + 1 == mine.chunks) fill(me, mine.out, tags.out);
}
