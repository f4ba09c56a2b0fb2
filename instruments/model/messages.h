// Messages from rank 0 to rank 1, as a model: csrc/shm/messages.cpp. Two threads of rank 1 wait, one for each message.
//
// One step is what a thread does in its turn, or what the sender does to the ring: a header or the data of a message.
#pragma once

#include "protocol.h"

class MessageProtocol {
 public:
  static constexpr int messages = 2;
  enum class Wait : Byte { under_way, ended, raised };

  struct State {
    Byte written, taken;  // headers and data so far
    Byte begun, into;     // the stream: whether a header has been taken, and the message that it is for, from 1
    Byte failed;
    Byte finished[messages];
    Wait wait[messages];
  };

  // `mismatched`: the message that differs from its receive; -1: none.
  MessageProtocol(int mismatched, Mutation mutation) : mismatched_(mismatched), mutation_(mutation) {}

  State initial() const { return {}; }
  bool ended(const State& s) const {
    for (Wait wait : s.wait)
      if (wait == Wait::under_way) return false;
    return true;
  }

  template <typename Emit>
  void successors(const State& s, Emit emit) const {
    if (s.written < 2 * messages) {
      State next = s;
      ++next.written;
      emit(next, 0, s.written % 2 == 0 ? "writes a header" : "writes data");
    }
    for (int thread = 0; thread < messages; ++thread) {
      if (s.wait[thread] != Wait::under_way) continue;
      State next = s;
      advance(next);
      if (next.finished[thread])
        next.wait[thread] = Wait::ended;
      else if (next.failed)
        next.wait[thread] = Wait::raised;
      expect(next.begun == (next.into != 0), "a message has begun to arrive and has no place");
      expect(next.wait[thread] != Wait::ended || thread != mismatched_, "a message that differs is received");
      expect(next.wait[thread] != Wait::raised || mismatched_ >= 0, "a wait raises without a mismatch");
      emit(next, 1, thread == 0 ? "looks, in the first thread" : "looks, in the second thread");
    }
  }

 private:
  // Messages::advance, pull and begin.
  void advance(State& s) const {
    if (s.failed && mutation_ != Mutation::moves_after_failure) return;
    for (; s.taken < s.written; ++s.taken) {
      expect(!s.failed, "bytes move after a failure");
      if (s.begun) {
        s.finished[s.into - 1] = 1;
        s.begun = s.into = 0;
        continue;
      }
      const int message = s.taken / 2;
      if (mutation_ == Mutation::begun_before_check) s.begun = 1;
      if (message == mismatched_) {
        s.failed = 1;
        return;
      }
      s.begun = 1;
      s.into = static_cast<Byte>(message + 1);
    }
  }

  const int mismatched_;
  const Mutation mutation_;
};
