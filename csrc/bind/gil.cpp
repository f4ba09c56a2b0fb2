// Compiled without exceptions, so that the handlers below are those of C: glibc jumps to them by itself. Those of C++
// would be reached by the unwinder of a compiler, which need not be the one that glibc uses.
#include "bind/gil.h"

#include <pthread.h>
#include <unistd.h>

namespace distopt {
namespace {

void stop(void*) {
  for (;;) ::pause();
}

}  // namespace

void restore_thread(PyThreadState* state) {
  pthread_cleanup_push(stop, nullptr);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}

PyGILState_STATE ensure_state() {
  // Once the interpreter has ended, no thread has a state in it, and one cannot be made.
  if (!Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) stop(nullptr);
  PyGILState_STATE state;
  pthread_cleanup_push(stop, nullptr);
  state = PyGILState_Ensure();
  pthread_cleanup_pop(0);
  return state;
}

}  // namespace distopt
