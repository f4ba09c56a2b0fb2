// Collectives over NCCL on a stream of their own, separate from the stream on which the caller computes.
//
// Every collective waits, on the device, for the work on the caller's stream when it was started; `join` makes the
// caller's stream wait for its result. The host waits in `wait` alone, and in `start` for connections to be made. A
// thread watches them: errors of NCCL, peers that end, and time-outs make it abort the communicator, so that no rank
// waits forever on the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/patience.h"
#include "base/stopwatch.h"
#include "nccl/api.h"
#include "nccl/board.h"
#include "nccl/handles.h"

namespace distopt {

class NcclCollective {
 public:
  NcclCollective(std::uint64_t sequence, std::string text, std::shared_ptr<Event> ready,
                 std::shared_ptr<Event> finished)
      : sequence(sequence), text(std::move(text)), ready(std::move(ready)), finished(std::move(finished)) {}

  const std::uint64_t sequence;
  const std::string text;
  const std::shared_ptr<Event> ready;     // the caller's data, on the caller's stream
  const std::shared_ptr<Event> finished;  // the result, on the collective stream
};

class NcclCommunicator {
 public:
  using Work = std::shared_ptr<NcclCollective>;

  // Collective. Waits until all ranks have joined; the context of the device must be the current one. `limits` are for
  // collectives whose data are ready on this rank; ncclCommAbort may take `abort_seconds`. Throws CommunicatorError.
  NcclCommunicator(const nccl::NcclApi& api, const nccl::UniqueId& id, int rank, int world_size,
                   std::shared_ptr<Board> board, Limits limits, double abort_seconds, Hooks hooks);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int world_size() const { return world_size_; }

  // Collective. `arguments` has kind, type, count, label and device pointers; `caller` is the stream of the data.
  Work start(const Arguments& arguments, cuda::Stream* caller);
  // Collective, of parts of any length. received[r] comes from rank r; parts[r] of the arguments goes to it, or
  // parts[0] to all if it is the only one.
  Work start_ragged(const Arguments& arguments, const std::vector<ByteSpan>& received, cuda::Stream* caller);

  // Local. Whether the result is there. Throws CommunicatorError if the communicator has failed.
  bool done(const NcclCollective& collective);
  // Local. Work enqueued on `stream` from now on sees the result. Throws CommunicatorError if the communicator has
  // failed.
  void join(const NcclCollective& collective, cuda::Stream* stream);
  // Waits on the host. Throws CommunicatorError.
  void wait(const NcclCollective& collective, double timeout_seconds);

  // Memory that NCCL has registered, or null where it cannot. To be freed by release() or close().
  void* allocate(std::size_t bytes);
  void release(void* memory);

  // Local. Ends the communicator at once, with this error for all ranks of the host.
  void abort(const std::string& text);
  // Local in effect: waits a few seconds for collectives in progress, then leaves. Idempotent, throws nothing of NCCL.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  using Enqueue = std::function<nccl::Result(nccl::Comm*, cuda::Stream*)>;

  Work enqueue(const Arguments& arguments, cuda::Stream* caller, const Enqueue& call);
  // Calls, and polls until the call has taken effect, because the communicator is non-blocking.
  void call(Lock& lock, const char* what, const std::function<nccl::Result()>& function);
  void require_usable() const;
  // Fails if a rank of this host has failed, or has ended without starting `sequence`. Returns whether any has ended.
  bool check_host(std::uint64_t sequence, const std::string& text);
  void fail(const ErrorFields& failure);
  [[noreturn]] void fail_and_throw(const ErrorFields& failure);
  bool end_comm(bool orderly);
  ErrorFields nccl_error(const char* what, nccl::Result result) const;
  // "rank 0 (...) waits in all_reduce #3 ... for rank 1 (...): the last operation it started is ..."
  Waiting waiting_in(const std::string& text, std::uint64_t sequence) const;

  void watch();
  void look_after_oldest(Lock& lock);
  void forget_finished();
  void stop_watching();
  bool drained(Lock& lock, double seconds);

  const nccl::NcclApi& api_;
  const int rank_, world_size_;
  cuda::Context* const context_;  // of the device, in which all handles are
  std::shared_ptr<Board> board_;
  const Limits limits_;
  const double abort_seconds_;
  const Hooks hooks_;
  Stream stream_;
  EventPool events_;

  std::mutex start_mutex_;    // one caller at a time; taken before mutex_
  mutable std::mutex mutex_;  // all below
  std::condition_variable changed_;
  nccl::Comm* comm_ = nullptr;
  std::uint64_t sequence_ = 0;
  std::deque<Work> outstanding_;
  std::optional<CommunicatorError> failure_;
  bool closed_ = false, stop_ = false;
  std::vector<std::pair<void*, void*>> memory_;  // address, registration or null

  // State of the watching thread: times since the oldest collective had its data, and since a peer left.
  std::uint64_t watched_ = 0;
  std::optional<Stopwatch> waits_since_, gone_since_;
  std::optional<Patience> patience_;
  std::thread watcher_;
};

}  // namespace distopt
