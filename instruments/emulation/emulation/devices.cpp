// Versions, errors and the contexts of threads.
#include "runtime.h"

namespace emulation {
thread_local std::intptr_t context = 0;
}  // namespace emulation

using namespace emulation;

#define EXPORT extern "C"

EXPORT Status cuGetErrorName(Status status, const char** text) {
  *text = status == invalid_context ? "CUDA_ERROR_INVALID_CONTEXT" : "an error of the emulated driver";
  return Status::success;
}
EXPORT Status cuDriverGetVersion(int* version) {
  *version = 13000;
  return Status::success;
}

EXPORT Status cuCtxGetCurrent(Context** current) {
  *current = reinterpret_cast<Context*>(context);
  return Status::success;
}
EXPORT Status cuCtxSetCurrent(Context* current) {
  context = reinterpret_cast<std::intptr_t>(current);
  return Status::success;
}
EXPORT Status cuCtxSynchronize() {
  synchronize_device(current_device());
  return Status::success;
}
EXPORT Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return context ? Status::success : invalid_context;
}

// For _emulation.py.
EXPORT int emulation_device() { return current_device(); }
EXPORT void emulation_make_context() { make_context(); }
