// The end of a communicator: failures, the thread that detects them, and close().
#include <algorithm>
#include <exception>
#include <utility>

#include "nccl/communicator.h"

namespace distopt {
namespace {

using nccl::Result;

// Collectives with a peer that has left fail after this time: it may have sent all its data before.
constexpr double grace_seconds = 1.0;
// The longest wait of close() for collectives in progress.
constexpr double close_seconds = 5.0;

}  // namespace

// -- failure and end --------------------------------------------------------------------------------------------------

std::shared_ptr<Opened> NcclCommunicator::opened() {
  fork_guard_.require(board_->peers().me());  // before the lock, which a thread of the parent may hold
  const Lock lock(mutex_);
  if (failure_) throw CommunicatorError(*failure_);
  if (closed_)
    throw CommunicatorError(ErrorKind::closed, board_->peers().me().name() + " has closed this communicator",
                            "use it before close()");
  return opened_;
}

void NcclCommunicator::check_failure() {
  fork_guard_.require(board_->peers().me());
  const Lock lock(mutex_);
  if (failure_) throw CommunicatorError(*failure_);
}

ErrorFields NcclCommunicator::nccl_error(const char* what, Result result, const Opened& opened) const {
  std::string text = board_->peers().me().name() + ": NCCL failed in " + what + ": " + api_.get_error_string(result);
  const char* last = opened.comm == nullptr ? nullptr : api_.get_last_error(opened.comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return {ErrorKind::other, text, "NCCL_DEBUG=WARN tells more", {board_->peers().me()}};
}

Waiting NcclCommunicator::waiting_in(const std::string& text, std::uint64_t sequence) const {
  std::string story = board_->peers().me().name() + " waits in " + text + " for ";
  const std::vector<int> absent = board_->absent(sequence);
  for (std::size_t i = 0; i < absent.size(); ++i) story += (i ? "; " : "") + board_->tell(absent[i]);
  if (absent.empty())
    story += board_->peers().size() < world_size_
                 ? "ranks of other hosts, or the network (NCCL_DEBUG=INFO tells more)"
                 : "data of ranks that have all started it (NCCL_DEBUG=INFO tells more)";
  return {story, board_->peers().processes(absent)};
}

std::optional<int> NcclCommunicator::check_host(std::uint64_t sequence, const std::string& text) {
  std::optional<int> gone;
  if (board_->peers().failed()) {
    fail({ErrorKind::other, ""});  // keeps the failure that a peer has recorded
    return gone;
  }
  const std::vector<int> absent = board_->absent(sequence);
  for (int q = 0; q < board_->peers().size(); ++q) {
    if (q == board_->peers().rank() || board_->peers().presence(q) == Peers::Presence::here) continue;
    gone = q;
    if (std::find(absent.begin(), absent.end(), q) == absent.end()) continue;
    fail(left(q, text));
    break;
  }
  return gone;
}

void NcclCommunicator::check_left(std::optional<int> rank, std::optional<Stopwatch>& since, double grace,
                                  const std::string& text) {
  if (rank && !since) since.emplace();
  if (rank && since->seconds() > grace) fail(left(*rank, text));
}

ErrorFields NcclCommunicator::left(int rank, const std::string& text) const {
  const bool closed = board_->peers().presence(rank) == Peers::Presence::closed;
  return {closed ? ErrorKind::closed : ErrorKind::peer_lost,
          board_->peers().me().name() + " waits in " + text + ", but a peer " +
              (closed ? "has closed its communicator" : "has ended") + ": " + board_->tell(rank),
          "see that rank's output for the cause, then restart the job",
          {board_->peers().process(rank)}};
}

// The failure is there before the abort lets collectives "finish", and before the device may stop for `abort_seconds`.
void NcclCommunicator::fail(const ErrorFields& failure) {
  std::shared_ptr<Opened> last;  // aborts as it goes, unless a thread is in NCCL: then that thread does
  {
    const Lock lock(mutex_);
    if (failure_) return;
    failure_ = board_->peers().fail(failure);
    last = std::move(opened_);
  }
  changed_.notify_all();
}

void NcclCommunicator::fail_and_throw(const ErrorFields& failure) {
  fail(failure);
  check_failure();
  throw CommunicatorError(failure);
}

void NcclCommunicator::abort(const std::string& text) {
  fork_guard_.require(board_->peers().me());
  {
    const Lock lock(mutex_);
    if (closed_) return;
  }
  fail({ErrorKind::other, board_->peers().me().name() + " has aborted the communicator: " + text});
}

void NcclCommunicator::close() {
  if (fork_guard_.forked()) return;
  const Lock turn(turn_);
  {
    const Lock lock(mutex_);
    if (closed_) return;
  }
  const bool orderly = drained(close_seconds);
  std::shared_ptr<Opened> last;
  {
    const Lock lock(mutex_);
    closed_ = true;
    last = std::move(opened_);
    outstanding_.clear();
  }
  if (last) last->orderly = orderly;
  last.reset();
  stop_watching();
  board_->close();
}

bool NcclCommunicator::drained(double seconds) {
  for (Stopwatch watch;;) {
    try {
      forget_finished();
    } catch (const std::exception&) {
      return false;
    }
    {
      const Lock lock(mutex_);
      if (failure_ || outstanding_.empty()) return !failure_;
    }
    const double waited = watch.seconds();
    if (waited > seconds) return false;
    pause(waited);
  }
}

// -- the watching thread ----------------------------------------------------------------------------------------------

void NcclCommunicator::watch() {
  static_cast<void>(cuda::driver().ctx_set_current.status(context_));
  // Else a query would end the capture of another thread that uses the global mode, as PyTorch does by default.
  cuda::CaptureMode mode = cuda::CaptureMode::relaxed;
  static_cast<void>(cuda::driver().exchange_capture_mode.status(&mode));
  Lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock, [&] { return stop_ || (!outstanding_.empty() && !failure_); });
    if (changed_.wait_for(lock, look_period, [&] { return stop_; })) return;
    lock.unlock();
    try {
      look_after_oldest();
    } catch (const std::exception& error) {
      fail(
          {ErrorKind::other, board_->peers().me().name() + ": " + error.what(), "the GPU has failed, restart the job"});
    }
    lock.lock();
  }
}

// Checks without the driver come first: its queries may wait for a thread that launches on a full queue.
void NcclCommunicator::look_after_oldest() {
  Work watched = oldest();
  std::shared_ptr<Opened> in;
  {
    const Lock lock(mutex_);
    in = opened_;
  }
  if (!watched || !in) return;
  Result result = Result::success;
  if (api_.comm_get_async_error(in->comm, &result) == Result::success && result != Result::success) {
    const ErrorFields failure = nccl_error(watched->text.c_str(), result, *in);
    in.reset();
    return fail(failure);
  }
  in.reset();
  const std::optional<int> gone = check_host(watched->sequence, watched->text);
  forget_finished();
  watched = oldest();
  if (!watched) return;
  if (!watched->ready.reached()) return;
  if (!watched->waits) watched->waits.emplace(limits_, "result");
  check_left(gone, watched->gone_since, grace_seconds, watched->text);
  watched->waits->patience.look(
      watched->waits->since.seconds(), [&] { return waiting_in(watched->text, watched->sequence); },
      [&](const std::string& text) { warn(text); }, [this](const ErrorFields& failure) { fail(failure); });
}

// In a thread of its own: it takes Python's lock, which a thread that waits for the device may hold.
void NcclCommunicator::warn(const std::string& text) {
  if (warning_.valid() && warning_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
  warning_ = std::async(std::launch::async, hooks_.warn, text);
}

NcclCommunicator::Work NcclCommunicator::oldest() {
  const Lock lock(mutex_);
  return outstanding_.empty() ? nullptr : outstanding_.front();
}

void NcclCommunicator::forget_finished() {
  for (Work first = oldest(); first && first->finished.reached(); first = oldest()) {
    const Lock lock(mutex_);
    if (!outstanding_.empty() && outstanding_.front() == first) outstanding_.pop_front();
  }
}

void NcclCommunicator::stop_watching() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  if (warning_.valid()) warning_.wait();
}

}  // namespace distopt
