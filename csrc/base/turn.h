// Exclusive use of an object that one thread may call at a time.
#pragma once

#include <sched.h>

#include <atomic>
#include <utility>

#include "base/errors.h"
#include "base/fork.h"

namespace distopt {

class Turn {
 public:
  // A turn, which the destructor gives back; false if it was not taken.
  class Held {
   public:
    explicit Held(Turn* turn) : turn_(turn) {}
    ~Held() {
      if (turn_ != nullptr) turn_->give_back();
    }
    Held(Held&& other) noexcept : turn_(std::exchange(other.turn_, nullptr)) {}
    Held& operator=(Held&&) = delete;
    explicit operator bool() const { return turn_ != nullptr; }

   private:
    Turn* turn_;
  };

  // The turn of a caller, which may last. Two threads in one communicator would make the order of collectives random.
  Held of_caller() {
    if (!take())
      throw CommunicatorError(ErrorKind::usage,
                              "two threads use one communicator at the same time; call collectives from one thread");
    return Held(this);
  }
  // The turn of a caller. Waits until no other caller has it.
  Held awaited() {
    await();
    return Held(this);
  }
  // The turn of a helper, which makes progress for a moment; false if another thread has the turn.
  Held of_helper() {
    Holder found = Holder::none;
    return Held(holder_.compare_exchange_strong(found, Holder::helper, std::memory_order_acquire) ? this : nullptr);
  }
  // Gives the turn back while `body` runs, and waits for it afterwards.
  template <typename Body>
  auto apart(Body body) {
    give_back();
    struct Retake {
      Turn& turn;
      ~Retake() { turn.await(); }
    } retake{*this};
    return body();
  }
  bool taken() const { return holder_.load(std::memory_order_acquire) == Holder::caller && !fork_guard_.forked(); }

 private:
  enum class Holder { none, caller, helper };

  bool take() {
    for (Holder found = Holder::none; !holder_.compare_exchange_weak(found, Holder::caller, std::memory_order_acquire);
         found = Holder::none) {
      if (fork_guard_.forked()) return true;  // the thread that had it is not in this process
      if (found == Holder::caller) return false;
      if (found == Holder::helper) ::sched_yield();
    }
    return true;
  }
  void await() {
    while (!take()) ::sched_yield();
  }
  void give_back() { holder_.store(Holder::none, std::memory_order_release); }

  std::atomic<Holder> holder_{Holder::none};
  const ForkGuard fork_guard_;
};

}  // namespace distopt
