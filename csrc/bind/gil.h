// Python's lock, the GIL, released and taken by scopes.
//
// While the interpreter ends, no other thread gets the lock, such as a daemon thread that a script left in a
// collective. Python before 3.14 ends such a thread by unwinding its stack (pthread_exit). That ends the process where
// the stack has a noexcept function, as nanobind's are. Here the thread stops for good instead, as in Python 3.14.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace distopt {

// Stops a thread that is unwound within.
class Unwinding {
 public:
  ~Unwinding() {
    while (stops_) ::pause();
  }
  void allow() { stops_ = false; }

 private:
  bool stops_ = true;
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) {
    Unwinding unwinding;
    PyEval_RestoreThread(state_);
    unwinding.allow();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Of a bound function that waits.
using Unlocked = nanobind::call_guard<WithoutGil>;

class WithGil {
 public:
  WithGil() {
    Unwinding unwinding;
    state_ = PyGILState_Ensure();
    unwinding.allow();
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace distopt
