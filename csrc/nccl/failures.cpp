// The end of a communicator: failures, the thread that detects them, and close().
#include <algorithm>
#include <chrono>
#include <exception>

#include "nccl/communicator.h"

namespace distopt {
namespace {

using nccl::Result;

// A collective with a peer that has left fails after this time: it may have sent all its data before. Connections may
// take longer, and others may have all that they need.
constexpr double grace_seconds = 1.0, connect_grace_seconds = 5.0;
// The longest waits of close(): for collectives in progress; for NCCL to send the rest; after a failure, for the abort.
constexpr double close_seconds = 5.0;
constexpr std::chrono::seconds finalize_seconds{10}, abort_seconds{2};

}  // namespace

// -- failure and end --------------------------------------------------------------------------------------------------

void NcclCommunicator::check_failure() {
  fork_guard_.require(board_->peers().me());
  const Lock lock(mutex_);
  if (failure_) throw CommunicatorError(*failure_);
}

bool NcclCommunicator::failed() {
  const Lock lock(mutex_);
  return failure_.has_value() || board_->peers().failed();
}

ErrorFields NcclCommunicator::nccl_error(const std::string& what, Result result) const {
  std::string text = board_->peers().me().name() + ": NCCL failed in " + what + ": " + api_.get_error_string(result);
  const char* last = api_.get_last_error(nullptr);  // NCCL does not use the argument
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return {ErrorKind::other, text, "NCCL_DEBUG=WARN tells more", {board_->peers().me()}};
}

Waiting NcclCommunicator::waiting_in(const NcclCollective& collective) const {
  std::string story = board_->peers().me().name() + " waits in " + collective.text + " for ";
  const std::vector<int> absent = board_->absent(collective.sequence);
  for (std::size_t i = 0; i < absent.size(); ++i) story += (i ? "; " : "") + board_->describe(absent[i]);
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

ErrorFields NcclCommunicator::left(int rank, const std::string& text) const {
  const bool closed = board_->peers().presence(rank) == Peers::Presence::closed;
  return {closed ? ErrorKind::closed : ErrorKind::peer_lost,
          board_->peers().me().name() + " waits in " + text + ", but a peer " +
              (closed ? "has closed its communicator" : "has ended") + ": " + board_->describe(rank),
          "see that rank's output for the cause, then restart the job",
          {board_->peers().process(rank)}};
}

void NcclCommunicator::fail(const ErrorFields& failure) {
  {
    const Lock lock(mutex_);
    if (failure_) return;
    failure_ = board_->peers().fail(failure);
  }
  changed_.notify_all();
}

void NcclCommunicator::fail_and_throw(const ErrorFields& failure) {
  fail(failure);
  check_failure();
  throw CommunicatorError(failure);
}

void NcclCommunicator::fail_by(const std::exception& error) {
  fail({ErrorKind::other, board_->peers().me().name() + ": " + error.what(), "the GPU has failed, restart the job"});
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
  {
    Lock lock(mutex_);
    closed_ = true;
    orderly_ = orderly;
    outstanding_.clear();
    changed_.notify_all();
    // A thread that waits in NCCL for a lost peer is left behind, with all that it uses.
    changed_.wait_for(lock, orderly ? finalize_seconds : abort_seconds, [&] { return ended_; });
  }
  detector_.join();
  // Both hold a function of Python. The calling thread, often the last that lets go of this, cannot free it: the
  // interpreter may have ended.
  warning_ = {};  // waits
  hooks_.warn = nullptr;
  board_->close();
}

bool NcclCommunicator::drained(double seconds) {
  for (Stopwatch stopwatch;;) {
    try {
      forget_finished();
    } catch (const std::exception&) {
      return false;
    }
    {
      const Lock lock(mutex_);
      if (failure_ || outstanding_.empty()) return !failure_;
    }
    const double waited = stopwatch.seconds();
    if (waited > seconds) return false;
    pause(waited);
  }
}

// -- the detector thread ----------------------------------------------------------------------------------------------

void NcclCommunicator::detect_failures() {
  enter_thread(context_);
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || (!outstanding_.empty() && !failure_); });
    if (changed_.wait_for(lock, check_period, [&] { return closed_; })) return;
    lock.unlock();
    try {
      check_oldest();
    } catch (const std::exception& error) {
      fail_by(error);
    }
    lock.lock();
  }
}

// Checks without the driver come first: its queries may wait for a thread that launches on a full queue.
void NcclCommunicator::check_oldest() {
  Work work = oldest();
  if (!work) return;
  Result result = Result::success;
  {
    // It reads atomic values only; without the lock, the communicator could end below it.
    const Lock lock(mutex_);
    if (comm_ != nullptr) static_cast<void>(api_.comm_get_async_error(comm_, &result));
  }
  if (result != Result::success) return fail(nccl_error(work->text, result));
  const std::optional<int> gone = check_host(work->sequence, work->text);
  forget_finished();
  work = oldest();
  if (!work || !work->ready.reached()) return;
  if (!work->waits) work->waits.emplace(limits_, "result");
  if (gone && !work->gone_since) work->gone_since.emplace();
  if (gone && work->gone_since->seconds() > (work->launched ? grace_seconds : connect_grace_seconds))
    fail(left(*gone, work->text));
  work->waits->patience.check(
      work->waits->since.seconds(), [&] { return waiting_in(*work); }, [&](const std::string& text) { warn(text); },
      [this](const ErrorFields& failure) { fail(failure); });
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

bool NcclCommunicator::has_data(const NcclCollective& collective) {
  std::deque<Work> before;  // a copy, since a query of the driver may wait
  {
    const Lock lock(mutex_);
    for (const Work& work : outstanding_)
      if (work->sequence < collective.sequence) before.push_back(work);
  }
  return std::all_of(before.begin(), before.end(), [](const Work& work) { return work->ready.reached(); }) &&
         collective.ready.reached();
}

void NcclCommunicator::forget_finished() {
  for (Work first = oldest(); first && first->reached(); first = oldest()) {
    const Lock lock(mutex_);
    if (!outstanding_.empty() && outstanding_.front() == first) outstanding_.pop_front();
  }
}

}  // namespace distopt
