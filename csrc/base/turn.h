// Whose turn it is in an object that one thread may call at a time.
#pragma once

#include <sched.h>

#include <atomic>

#include "base/errors.h"

namespace distopt {

class Turn {
 public:
  // A caller's turn, which may last; false if another caller has it.
  bool take() {
    for (Holder found = Holder::none; !holder_.compare_exchange_weak(found, Holder::caller, std::memory_order_acquire);
         found = Holder::none) {
      if (found == Holder::caller) return false;
      if (found == Holder::helper) ::sched_yield();
    }
    return true;
  }
  // The same, as soon as no other caller has it.
  void await() {
    while (!take()) ::sched_yield();
  }
  // Others may have their turns while `body` runs.
  template <typename Body>
  auto apart(Body body) {
    give_back();
    struct Retake {
      Turn& turn;
      ~Retake() { turn.await(); }
    } retake{*this};
    return body();
  }
  // That of one who passes by to move things forward, for a moment; false if anybody has it.
  bool help() {
    Holder found = Holder::none;
    return holder_.compare_exchange_strong(found, Holder::helper, std::memory_order_acquire);
  }
  void give_back() { holder_.store(Holder::none, std::memory_order_release); }
  bool taken() const { return holder_.load(std::memory_order_acquire) == Holder::caller; }

 private:
  enum class Holder { none, caller, helper };

  std::atomic<Holder> holder_{Holder::none};
};

// A caller's turn, as long as this lives. Two threads in one communicator would make the order of operations a matter
// of luck.
class CallersTurn {
 public:
  explicit CallersTurn(Turn& turn) : turn_(turn) {
    if (!turn.take())
      throw CommunicatorError(ErrorKind::usage,
                              "two threads use one communicator at the same time; call collectives from one thread");
  }
  ~CallersTurn() { turn_.give_back(); }
  CallersTurn(const CallersTurn&) = delete;
  CallersTurn& operator=(const CallersTurn&) = delete;

 private:
  Turn& turn_;
};

// A helper's, if it has got it.
class HelpersTurn {
 public:
  explicit HelpersTurn(Turn& turn) : turn_(turn), taken_(turn.help()) {}
  ~HelpersTurn() {
    if (taken_) turn_.give_back();
  }
  HelpersTurn(const HelpersTurn&) = delete;
  HelpersTurn& operator=(const HelpersTurn&) = delete;
  explicit operator bool() const { return taken_; }

 private:
  Turn& turn_;
  const bool taken_;
};

}  // namespace distopt
