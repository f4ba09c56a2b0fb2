// Python's lock, the GIL, released and taken by scopes.
//
// While the interpreter ends, no other thread gets the lock, such as a daemon thread that a script left in a
// collective. Python before 3.14 ends such a thread by unwinding its stack (pthread_exit). That ends the process where
// the stack has a noexcept function, as nanobind's are. Here the thread stops for good instead, as in Python 3.14.
#pragma once

#include <Python.h>

namespace distopt {

// PyEval_RestoreThread and PyGILState_Ensure, which stop a thread that they would end.
void restore_thread(PyThreadState* state);
PyGILState_STATE ensure_state();

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { restore_thread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

class WithGil {
 public:
  WithGil() : state_(ensure_state()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace distopt
