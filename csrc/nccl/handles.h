// CUDA streams and events that free themselves.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cuda/check.h"

namespace distopt {

class Stream {
 public:
  // Not synchronized with the default stream. Of the highest priority, because the next layers wait for it.
  Stream() {
    int least = 0, greatest = 0;
    DISTOPT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    DISTOPT_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { DISTOPT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { DISTOPT_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void hold_up(cudaStream_t stream) const { DISTOPT_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
  bool reached() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code != cudaErrorNotReady) DISTOPT_CUDA_CHECK(code);
    return code == cudaSuccess;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Within, the thread's current device is `device`.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    DISTOPT_CUDA_CHECK(cudaGetDevice(&before_));
    DISTOPT_CUDA_CHECK(cudaSetDevice(device));
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// A collective in a graph would run at every replay, unseen by the time-outs and the comparison of the ranks.
inline void refuse_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  DISTOPT_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone)
    throw std::runtime_error("a collective cannot be captured in a CUDA graph");
}

// Events that return to the pool when unused: to create one takes longer than to record it. A stream that
// waits for an event waits for its record at that time, so the next user does not disturb it.
class EventPool {
 public:
  std::shared_ptr<Event> take() {
    const std::lock_guard<std::mutex> lock(idle_->mutex);
    std::unique_ptr<Event> event;
    if (idle_->events.empty()) {
      event = std::make_unique<Event>();
    } else {
      event = std::move(idle_->events.back());
      idle_->events.pop_back();
    }
    return {event.release(), [idle = idle_](Event* used) {
              std::unique_ptr<Event> owner(used);
              const std::lock_guard<std::mutex> lock(idle->mutex);
              idle->events.push_back(std::move(owner));
            }};
  }

 private:
  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<Event>> events;
  };
  std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
};

}  // namespace distopt
