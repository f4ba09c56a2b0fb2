// The end of a communicator: failures, the thread that detects them, and close().
#include <algorithm>
#include <exception>
#include <future>
#include <utility>

#include "nccl/communicator.h"

namespace distopt {
namespace {

using nccl::Result;

// Collectives with a peer that has left fail after this time: it may have sent all its data before.
constexpr double grace_seconds = 1.0;
// The longest wait of close() for collectives in progress.
constexpr double close_seconds = 5.0;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs `body` in a thread of its own; returns whether it has returned in time. If not, it continues by itself.
bool run_bounded(double seconds, std::function<void()> body) {
  auto finished = std::make_shared<std::promise<void>>();
  auto future = finished->get_future();
  std::thread([body = std::move(body), finished] {
    body();
    finished->set_value();
  }).detach();
  return future.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
}

}  // namespace

// -- failure and end --------------------------------------------------------------------------------------------------

void NcclCommunicator::require_usable() const {
  if (failure_) throw CommunicatorError(*failure_);
  if (closed_)
    throw CommunicatorError(ErrorKind::closed, board_->peers().me().name() + " has closed this communicator",
                            "use it before close()");
}

ErrorFields NcclCommunicator::nccl_error(const char* what, Result result) const {
  std::string text = board_->peers().me().name() + ": NCCL failed in " + what + ": " + api_.get_error_string(result);
  const char* last = comm_ == nullptr ? nullptr : api_.get_last_error(comm_);
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

bool NcclCommunicator::check_host(std::uint64_t sequence, const std::string& text) {
  if (board_->peers().failed()) {
    fail({ErrorKind::other, ""});  // keeps the failure that a peer has recorded
    return true;
  }
  bool any_gone = false;
  for (int q = 0; q < board_->peers().size(); ++q) {
    const Peers::Presence presence = q == board_->peers().rank() ? Peers::Presence::here : board_->peers().presence(q);
    if (presence == Peers::Presence::here) continue;
    any_gone = true;
    const std::vector<int> absent = board_->absent(sequence);
    if (std::find(absent.begin(), absent.end(), q) == absent.end()) continue;
    const bool closed = presence == Peers::Presence::closed;
    fail({closed ? ErrorKind::closed : ErrorKind::peer_lost,
          board_->peers().me().name() + " waits in " + text + ", but a peer " +
              (closed ? "has closed its communicator" : "has ended") + ": " + board_->tell(q),
          "see that rank's output for the cause, then restart the job",
          {board_->peers().process(q)}});
    return true;
  }
  return any_gone;
}

void NcclCommunicator::fail(const ErrorFields& failure) {
  if (failure_) return;
  failure_ = board_->peers().fail(failure);
  if (!end_comm(false)) {
    ErrorFields both = failure_->failure();
    both.cure +=
        "; besides, ncclCommAbort has not come back within " + seconds_text(abort_seconds_) + ", so end this process";
    failure_ = CommunicatorError(std::move(both));
  }
  changed_.notify_all();
}

void NcclCommunicator::fail_and_throw(const ErrorFields& failure) {
  fail(failure);
  throw CommunicatorError(*failure_);
}

void NcclCommunicator::abort(const std::string& text) {
  const Lock lock(mutex_);
  if (!closed_) fail({ErrorKind::other, board_->peers().me().name() + " has aborted the communicator: " + text});
}

// Whether NCCL came back in time. Orderly: finalize, which waits for the proxies of this rank, then destroy.
bool NcclCommunicator::end_comm(bool orderly) {
  nccl::Comm* comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return true;
  const nccl::NcclApi& api = api_;
  for (auto& [memory, registration] : memory_)
    if (orderly && registration != nullptr)
      static_cast<void>(api.comm_deregister(comm, std::exchange(registration, nullptr)));
  return run_bounded(2 * abort_seconds_, [&api, comm, orderly, context = context_, seconds = abort_seconds_] {
    static_cast<void>(cuda::driver().ctx_set_current.status(context));
    Result result = orderly ? api.comm_finalize(comm) : Result::internal_error;
    const auto began = Clock::now();
    while (result == Result::in_progress && seconds_since(began) < seconds) {
      pause(seconds_since(began));
      if (const Result asked = api.comm_get_async_error(comm, &result); asked != Result::success) result = asked;
    }
    static_cast<void>(result == Result::success ? api.comm_destroy(comm) : api.comm_abort(comm));
  });
}

void NcclCommunicator::close() {
  const Lock turn(start_mutex_);
  Lock lock(mutex_);
  if (closed_) return;
  const bool orderly = drained(lock, close_seconds);
  closed_ = true;
  end_comm(orderly);
  outstanding_.clear();
  lock.unlock();
  stop_watching();
  board_->close();
}

bool NcclCommunicator::drained(Lock& lock, double seconds) {
  const auto began = Clock::now();
  for (;;) {
    try {
      forget_finished();
    } catch (const std::exception&) {
      return false;
    }
    if (failure_ || outstanding_.empty()) return !failure_;
    const double waited = seconds_since(began);
    if (waited > seconds) return false;
    lock.unlock();
    pause(waited);
    lock.lock();
  }
}

// -- the watching thread ----------------------------------------------------------------------------------------------

void NcclCommunicator::watch() {
  static_cast<void>(cuda::driver().ctx_set_current.status(context_));
  Lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock, [&] { return stop_ || (!outstanding_.empty() && !failure_); });
    if (changed_.wait_for(lock, look_period, [&] { return stop_; })) return;
    try {
      forget_finished();
      if (!outstanding_.empty() && !failure_) look_after_oldest(lock);
    } catch (const std::exception& error) {
      fail(
          {ErrorKind::other, board_->peers().me().name() + ": " + error.what(), "the GPU has failed, restart the job"});
    }
  }
}

void NcclCommunicator::look_after_oldest(Lock& lock) {
  const Work oldest = outstanding_.front();
  if (watched_ != oldest->sequence) {
    watched_ = oldest->sequence;
    waits_since_.reset();
    gone_since_.reset();
    patience_.emplace(limits_, "result");
  }
  Result result = Result::success;
  if (comm_ != nullptr && api_.comm_get_async_error(comm_, &result) == Result::success && result != Result::success &&
      result != Result::in_progress)
    return fail(nccl_error(oldest->text.c_str(), result));
  const bool any_gone = check_host(oldest->sequence, oldest->text);
  if (failure_ || !oldest->ready->reached()) return;
  if (!waits_since_) waits_since_.emplace();
  if (any_gone && !gone_since_) gone_since_.emplace();
  if (gone_since_ && gone_since_->seconds() > grace_seconds)
    return fail({ErrorKind::peer_lost,
                 board_->peers().me().name() + " waits in " + oldest->text + " for the data of a rank that has left",
                 "see the ranks' output"});
  patience_->look(
      waits_since_->seconds(), [&] { return waiting_in(oldest->text, oldest->sequence); },
      [&](const std::string& text) {
        lock.unlock();
        hooks_.warn(text);
        lock.lock();
      },
      [this](const ErrorFields& failure) { fail(failure); });
}

void NcclCommunicator::forget_finished() {
  while (!outstanding_.empty() && outstanding_.front()->finished->reached()) outstanding_.pop_front();
}

void NcclCommunicator::stop_watching() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

}  // namespace distopt
