// The part of CUDA's driver that is used: own declarations. It is loaded at run time, so that building needs no CUDA,
// and importing the module no driver. They hold from CUDA 12.0 to 13.5; tests/unit/test_native_abi.py compares them
// with cuda.h.
#pragma once

namespace distopt::cuda {

struct Context;  // opaque, as all handles
struct Stream;
struct Event;

enum class Status : int { success = 0, not_ready = 600 };
enum class CaptureStatus : int { none = 0 };
enum class CaptureMode : int { relaxed = 2 };

constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2;

// Throws std::runtime_error with the names of the function and of the error.
void check(Status status, const char* function);

template <class... Parameters>
struct Function {
  const char* name;
  Status (*status)(Parameters...);

  // Throws std::runtime_error, see check().
  void operator()(Parameters... arguments) const { check(status(arguments...), name); }
};

// X(field, symbol, types of parameters). cuda.h replaces some names by those of a second version.
#define DISTOPT_CUDA_DRIVER(X)                                                        \
  X(get_error_name, cuGetErrorName, Status, const char**)                             \
  X(driver_get_version, cuDriverGetVersion, int*)                                     \
  X(ctx_get_current, cuCtxGetCurrent, Context**)                                      \
  X(ctx_set_current, cuCtxSetCurrent, Context*)                                       \
  X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, int*, int*)           \
  X(stream_create_with_priority, cuStreamCreateWithPriority, Stream**, unsigned, int) \
  X(stream_destroy, cuStreamDestroy_v2, Stream*)                                      \
  X(stream_wait_event, cuStreamWaitEvent, Stream*, Event*, unsigned)                  \
  X(stream_is_capturing, cuStreamIsCapturing, Stream*, CaptureStatus*)                \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, CaptureMode*)           \
  X(event_create, cuEventCreate, Event**, unsigned)                                   \
  X(event_destroy, cuEventDestroy_v2, Event*)                                         \
  X(event_record, cuEventRecord, Event*, Stream*)                                     \
  X(event_query, cuEventQuery, Event*)

struct Driver {
#define DISTOPT_CUDA_FIELD(field, symbol, ...) Function<__VA_ARGS__> field{#symbol, nullptr};
  DISTOPT_CUDA_DRIVER(DISTOPT_CUDA_FIELD)
#undef DISTOPT_CUDA_FIELD
};

// Loads libcuda.so.1 at the first call. Throws std::runtime_error if there is none, or one of before CUDA 12.
const Driver& driver();

}  // namespace distopt::cuda
