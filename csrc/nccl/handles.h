// CUDA streams and events that free themselves, and the context in which a thread calls.
#pragma once

#include <stdexcept>

#include "nccl/driver.h"

namespace distopt {

class Stream {
 public:
  // In the current context. Not synchronized with the default stream. Of the highest priority, because the next layers
  // wait for it.
  Stream() {
    int least = 0, greatest = 0;
    cuda::driver().ctx_get_stream_priority_range(&least, &greatest);
    cuda::driver().stream_create_with_priority(&stream_, cuda::stream_non_blocking, greatest);
  }
  ~Stream() { static_cast<void>(cuda::driver().stream_destroy.status(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cuda::Stream* get() const { return stream_; }

 private:
  cuda::Stream* stream_ = nullptr;
};

class Event {
 public:
  Event() { cuda::driver().event_create(&event_, cuda::event_disable_timing); }  // in the current context
  ~Event() { static_cast<void>(cuda::driver().event_destroy.status(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cuda::Stream* stream) { cuda::driver().event_record(event_, stream); }
  void hold_up(cuda::Stream* stream) const { cuda::driver().stream_wait_event(stream, event_, 0); }
  bool reached() const {
    const cuda::Status status = cuda::driver().event_query.status(event_);
    if (status != cuda::Status::not_ready) cuda::check(status, cuda::driver().event_query.name);
    return status == cuda::Status::success;
  }

 private:
  cuda::Event* event_ = nullptr;
};

// The context of this thread: the primary one of the device that the caller has selected. Throws std::runtime_error.
inline cuda::Context* current_context() {
  cuda::Context* context = nullptr;
  cuda::driver().ctx_get_current(&context);
  if (context == nullptr) throw std::runtime_error("this thread has no CUDA context; use a device before");
  return context;
}

// Within, the thread's current context is `context`.
class InContext {
 public:
  explicit InContext(cuda::Context* context) {
    cuda::driver().ctx_get_current(&before_);
    cuda::driver().ctx_set_current(context);
  }
  ~InContext() { static_cast<void>(cuda::driver().ctx_set_current.status(before_)); }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  cuda::Context* before_ = nullptr;
};

// For a thread of ours: it calls in `context`, and disturbs no capture. In the default mode, a query would end the
// capture of another thread that uses the global mode, as PyTorch does.
inline void enter_thread(cuda::Context* context) {
  static_cast<void>(cuda::driver().ctx_set_current.status(context));
  cuda::CaptureMode mode = cuda::CaptureMode::relaxed;
  static_cast<void>(cuda::driver().exchange_capture_mode.status(&mode));
}

// A collective in a graph would run at every replay, unseen by the time-outs and the comparison of the ranks.
inline void refuse_capture(cuda::Stream* stream) {
  cuda::CaptureStatus status{};
  cuda::driver().stream_is_capturing(stream, &status);
  if (status != cuda::CaptureStatus::none) throw std::runtime_error("a collective cannot be captured in a CUDA graph");
}

}  // namespace distopt
