// Collectives over NCCL on a stream of their own, separate from the stream on which the caller computes.
//
// One thread makes all calls of NCCL, from the connection to the end: a call may wait for peers without end (ranks
// connect when an algorithm is first chosen), and nothing may abort the communicator below it. A caller waits for the
// launch of its collective, which it can leave, so that collectives of several communicators keep the script's order.
//
// Every collective waits, on the device, for the work on the caller's stream when it was started; `join` makes the
// caller's stream wait for its result. The host waits in `wait`, and in `start` for the launch and where it is far
// ahead of the device. A second thread, the detector, notices failures: errors of NCCL, peers that end, and
// time-outs make the first one abort the communicator, so that no rank waits forever on the device.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
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

// One or several that were started together; or the connection of the ranks.
class NcclCollective {
 public:
  using Call = std::function<nccl::Result()>;

  // In the current context.
  NcclCollective(std::uint64_t sequence, std::string text, Call call)
      : sequence(sequence), text(std::move(text)), call(std::move(call)) {}
  // Whether the result is there, or an abort has ended it: check for a failure afterwards.
  bool reached() const { return launched && finished.reached(); }

  const std::uint64_t sequence;  // of the last
  const std::string text;
  const Call call;                    // into NCCL
  Event ready;                        // the caller's data, on the caller's stream
  Event finished;                     // the result, on the collective stream, once `launched`
  std::atomic<bool> launched{false};  // by the calling thread

  // Of the detector thread: since the data were there, and since a peer left.
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
  // collectives whose data are ready on this rank. To be closed by close(): the threads keep it alive until then.
  // Throws CommunicatorError.
  static std::shared_ptr<NcclCommunicator> connect(const nccl::NcclApi& api, const nccl::UniqueId& id, int rank,
                                                   int world_size, std::shared_ptr<Board> board, Limits limits,
                                                   Hooks hooks);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Collective. Starts operations as one, in this order; `caller` is the stream of the data.
  Work start(std::vector<NcclOperation> operations, cuda::Stream* caller);

  // Local. Whether the result is there. Throws CommunicatorError if the communicator has failed.
  bool done(const NcclCollective& collective);
  // Local. Work enqueued on `stream` from now on sees the result. Throws CommunicatorError if the communicator has
  // failed.
  void join(const NcclCollective& collective, cuda::Stream* stream);
  // Waits on the host. The time counts while the data of this collective and of those before it are ready on this rank.
  // Throws CommunicatorError.
  void wait(const NcclCollective& collective, double timeout_seconds);

  // Local. Whether it has failed, on this rank or on another one of its host.
  bool failed();
  // Local. Ends the communicator at once, with this error for all ranks of the host.
  void abort(const std::string& text);
  // Local in effect: waits a few seconds for collectives in progress, then leaves. Idempotent, throws nothing of NCCL.
  // A forked child has neither the threads nor the device: there it does nothing, and all other calls are refused.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr double forever = std::numeric_limits<double>::infinity();

  NcclCommunicator(const nccl::NcclApi& api, int rank, int world_size, std::shared_ptr<Board> board, Limits limits,
                   Hooks hooks);
  // Gives it to the calling thread, and waits until that has launched it.
  void launch(const Work& collective);
  // Waits on the host, with an eye on signals. Whether `reached` within so many seconds. Throws CommunicatorError.
  bool await(const std::function<bool()>& reached, double seconds);

  // The calling thread.
  void call_nccl();
  void call(NcclCollective& collective);

  // The detector thread.
  void detect_failures();
  void check_oldest();
  // Fails if a rank of this host has failed, or has ended without starting `sequence`. Returns a rank that has ended.
  std::optional<int> check_host(std::uint64_t sequence, const std::string& text);
  ErrorFields left(int rank, const std::string& text) const;
  // "rank 0 (...) waits in all_reduce #3 ... for rank 1 (...): the last operation it started is ..."
  Waiting waiting_in(const NcclCollective& collective) const;
  void warn(const std::string& text);

  // The caller must not hold the lock.
  void fail(const ErrorFields& failure);
  [[noreturn]] void fail_and_throw(const ErrorFields& failure);
  void fail_by(const std::exception& error);
  ErrorFields nccl_error(const std::string& what, nccl::Result result) const;
  void check_failure();

  Work oldest();
  // Whether the data of this collective, and of those that are under way before it, are ready on this rank.
  bool has_data(const NcclCollective& collective);
  void forget_finished();
  bool drained(double seconds);

  const nccl::NcclApi& api_;
  const int rank_, world_size_;
  cuda::Context* const context_;  // of the device, in which all handles are
  const std::shared_ptr<Board> board_;
  const Limits limits_;
  Hooks hooks_;  // the warning is the detector's, until close()
  const ForkGuard fork_guard_;
  const Stream stream_;

  std::mutex turn_;  // one caller at a time; taken before mutex_
  std::uint64_t sequence_ = 0;

  std::mutex mutex_;  // all below; not held during calls that may wait, nor of Python
  std::condition_variable changed_;
  nccl::Comm* comm_ = nullptr;    // written by the calling thread
  Work next_;                     // to be launched
  std::deque<Work> outstanding_;  // to be finished, this one too
  std::optional<CommunicatorError> failure_;
  bool closed_ = false, orderly_ = false;
  bool ended_ = false;  // the calling thread has ended the communicator of NCCL

  std::thread detector_;
  std::future<void> warning_;  // of the detector
};

}  // namespace distopt
