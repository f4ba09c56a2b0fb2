// Compiled without exceptions, which makes the cleanup handlers below C's: glibc jumps to them itself. A destructor of
// C++ would need the compiler's unwinder, which can be another than glibc's.
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
