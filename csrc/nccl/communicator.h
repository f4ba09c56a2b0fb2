// Collectives over NCCL on a stream of their own, separate from the stream on which the caller computes.
//
// Every collective waits, on the device, for the work on the caller's stream when it was started; `join` makes the
// caller's stream wait for its result. The host waits in `wait`, and in `start` for connections to be made and where it
// is far ahead of the device. A thread watches them: errors of NCCL, peers that end, and time-outs make it abort the
// communicator, so that no rank waits forever on the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/patience.h"
#include "base/stopwatch.h"
#include "nccl/api.h"
#include "nccl/board.h"
#include "nccl/handles.h"

namespace distopt {

// Arguments of a collective: kind, type, count, label, and device pointers: parts[0] is the input and received[0] the
// output. In ragged ones received[r] comes from rank r; parts[r] goes to it, or parts[0] to all if it is the only one.
struct NcclOperation {
  Arguments arguments;
  std::vector<ByteSpan> received{};
};

// One or several that were started together.
class NcclCollective {
 public:
  // In the current context.
  NcclCollective(std::uint64_t sequence, std::string text) : sequence(sequence), text(std::move(text)) {}

  const std::uint64_t sequence;  // of the last
  const std::string text;
  Event ready;     // the caller's data, on the caller's stream
  Event finished;  // the result, on the collective stream

  // Of the watching thread: since the data were there, and since a peer left.
  struct Waits {
    Waits(const Limits& limits, const char* lacking) : patience(limits, lacking) {}
    Stopwatch since{};
    Patience patience;
  };
  std::optional<Waits> waits;
  std::optional<Stopwatch> gone_since;
};

class NcclCommunicator {
 public:
  using Work = std::shared_ptr<NcclCollective>;

  // Collective. Waits until all ranks have joined; the context of the device must be the current one. `limits` are for
  // collectives whose data are ready on this rank; ncclCommAbort may take `abort_seconds`. Throws CommunicatorError.
  NcclCommunicator(const nccl::NcclApi& api, const nccl::UniqueId& id, int rank, int world_size,
                   std::shared_ptr<Board> board, Limits limits, double abort_seconds, Hooks hooks);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Collective. Starts operations as one, in this order; `caller` is the stream of the data.
  Work start(const std::vector<NcclOperation>& operations, cuda::Stream* caller);

  // Local. Whether the result is there. Throws CommunicatorError if the communicator has failed.
  bool done(const NcclCollective& collective);
  // Local. Work enqueued on `stream` from now on sees the result. Throws CommunicatorError if the communicator has
  // failed.
  void join(const NcclCollective& collective, cuda::Stream* stream);
  // Waits on the host. Throws CommunicatorError.
  void wait(const NcclCollective& collective, double timeout_seconds);

  // Local. Ends the communicator at once, with this error for all ranks of the host.
  void abort(const std::string& text);
  // Local in effect: waits a few seconds for collectives in progress, then leaves. Idempotent, throws nothing of NCCL.
  void close();
  // To be called in place of `delete`. A forked child has neither the threads nor the device, and NCCL's connections
  // are the parent's: there it does nothing, as all calls but close() are refused.
  static void dispose(NcclCommunicator* communicator) {
    if (!communicator->fork_guard_.forked()) delete communicator;
  }

 private:
  ~NcclCommunicator();
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  using Call = std::function<nccl::Result(Opened&)>;

  // A call into NCCL, in this thread, or `apart`, in a thread of its own that can be left, as it may wait for peers.
  void call(const char* what, std::shared_ptr<Opened> in, bool apart, const Call& function);
  nccl::Result call_apart(const char* what, std::shared_ptr<Opened>& in, const Call& function);
  // Whether the connections that these operations need may not have been made yet.
  bool may_connect(const std::vector<NcclOperation>& operations);
  void wait_for_room();
  // The communicator of NCCL. Throws CommunicatorError if it has failed or is closed.
  std::shared_ptr<Opened> opened();
  void check_failure();

  // Fails if a rank of this host has failed, or has ended without starting `sequence`. Returns a rank that has ended.
  std::optional<int> check_host(std::uint64_t sequence, const std::string& text);
  // Fails if that rank, if any, has ended so long ago, as far as `since` knows, that it would have sent its data.
  void check_left(std::optional<int> rank, std::optional<Stopwatch>& since, double grace, const std::string& text);
  ErrorFields left(int rank, const std::string& text) const;
  // The caller must hold neither the lock nor a reference to the communicator of NCCL.
  void fail(const ErrorFields& failure);
  [[noreturn]] void fail_and_throw(const ErrorFields& failure);
  ErrorFields nccl_error(const char* what, nccl::Result result, const Opened& opened) const;
  // "rank 0 (...) waits in all_reduce #3 ... for rank 1 (...): the last operation it started is ..."
  Waiting waiting_in(const std::string& text, std::uint64_t sequence) const;

  void watch();
  void look_after_oldest();
  void warn(const std::string& text);
  Work oldest();
  void forget_finished();
  bool drained(double seconds);
  void stop_watching();

  const nccl::NcclApi& api_;
  const int rank_, world_size_;
  cuda::Context* const context_;  // of the device, in which all handles are
  std::shared_ptr<Board> board_;
  const Limits limits_;
  const double abort_seconds_;
  const Hooks hooks_;
  const ForkGuard fork_guard_;
  const std::shared_ptr<Stream> stream_ = std::make_shared<Stream>();  // threads that are left in NCCL use it

  // One caller at a time; taken before mutex_. The next two are its own.
  std::mutex turn_;
  std::uint64_t sequence_ = 0;
  std::set<std::string> connected_;  // operations that have been called before

  std::mutex mutex_;  // all below; not held during calls of NCCL, of the driver or of Python
  std::condition_variable changed_;
  std::shared_ptr<Opened> opened_;
  std::deque<Work> outstanding_;
  std::optional<CommunicatorError> failure_;
  bool closed_ = false, stop_ = false;
  std::future<void> warning_;
  std::thread watcher_;
};

}  // namespace distopt
