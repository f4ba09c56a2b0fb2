// Whose turn it is in an object that one thread may call at a time.
#pragma once

#include <sched.h>

#include <atomic>

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

}  // namespace distopt
