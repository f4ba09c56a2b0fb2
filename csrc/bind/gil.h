// Python's lock, the GIL, released and taken by scopes.
//
// While the interpreter ends, no other thread gets the lock, such as a daemon thread that a script left in a
// collective. Python before 3.14 ends such a thread by unwinding its stack (pthread_exit). That ends the process where
// the stack has a noexcept function, as nanobind's are. Here the thread stops for good instead, as in Python 3.14.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace distopt {

// Calls a function that takes the lock, and stops a thread that is unwound within. Not inlined: in a destructor, while
// an exception is on its way, compilers replace the cleanup by std::terminate.
template <class Take>
[[gnu::noinline]] auto take_gil(Take take) {
  struct Unwinding {
    bool stops = true;
    ~Unwinding() {
      while (stops) ::pause();
    }
  } unwinding;
  const auto taken = take();
  unwinding.stops = false;
  return taken;
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    take_gil([this] {
      PyEval_RestoreThread(state_);
      return true;
    });
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
  WithGil()
      : state_(take_gil([] {
          // Once the interpreter has ended, no thread has a state in it, and one cannot be made.
          while (!Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) ::pause();
          return PyGILState_Ensure();
        })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace distopt
