// CUDA streams and events and communicators of NCCL that free themselves, and the context in which a thread calls.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "nccl/api.h"

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

// A collective in a graph would run at every replay, unseen by the time-outs and the comparison of the ranks.
inline void refuse_capture(cuda::Stream* stream) {
  cuda::CaptureStatus status{};
  cuda::driver().stream_is_capturing(stream, &status);
  if (status != cuda::CaptureStatus::none) throw std::runtime_error("a collective cannot be captured in a CUDA graph");
}

// Runs `body` in a thread of its own, in that context. Who does not wait for the result leaves the thread behind.
inline std::future<nccl::Result> run_apart(cuda::Context* context, std::function<nccl::Result()> body) {
  std::packaged_task<nccl::Result()> task([context, body = std::move(body)] {
    static_cast<void>(cuda::driver().ctx_set_current.status(context));
    return body();
  });
  std::future<nccl::Result> future = task.get_future();
  std::thread(std::move(task)).detach();
  return future;
}

// A communicator of NCCL. Every thread that is in NCCL with `comm` holds a reference. The last one to go ends it: by
// ncclCommAbort, which frees what another thread in NCCL would use, or, if `orderly`, by ncclCommFinalize and
// ncclCommDestroy, which wait for the threads that NCCL has for this rank.
struct Opened {
  Opened(const nccl::NcclApi& api, cuda::Context* context, double seconds)
      : api(api), context(context), seconds(seconds) {}
  // Returns after 2 * `seconds` at the latest.
  ~Opened() {
    if (comm == nullptr) return;
    const auto ended = run_apart(context, [&api = api, comm = comm, orderly = orderly.load()] {
      const bool finalized = orderly && api.comm_finalize(comm) == nccl::Result::success;
      return finalized ? api.comm_destroy(comm) : api.comm_abort(comm);
    });
    ended.wait_for(std::chrono::duration<double>(2 * seconds));
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  const nccl::NcclApi& api;
  cuda::Context* const context;
  const double seconds;
  nccl::Comm* comm = nullptr;
  std::atomic<bool> orderly{false};
};

}  // namespace distopt
