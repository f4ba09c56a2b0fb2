#include "nccl/communicator.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <future>
#include <utility>

namespace distopt {
namespace {

using nccl::Result;
using Seconds = std::chrono::duration<double>;

// Of the watching thread, and of whoever waits long. In this time a dead peer is noticed.
constexpr std::chrono::milliseconds look_period{20};
// A gone peer may have given all its data before it left.
constexpr double grace_seconds = 1.0;
// That close() waits for what is under way.
constexpr double close_seconds = 5.0;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return Seconds(std::chrono::steady_clock::now() - begin).count();
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

nccl::DataType nccl_type(DType dtype) {
  static constexpr nccl::DataType types[] = {nccl::DataType::float32,  nccl::DataType::float64, nccl::DataType::float16,
                                             nccl::DataType::bfloat16, nccl::DataType::int32,   nccl::DataType::int64};
  return types[static_cast<int>(dtype)];
}

nccl::RedOp nccl_op(RedOp op) {
  static constexpr nccl::RedOp ops[] = {nccl::RedOp::sum, nccl::RedOp::max, nccl::RedOp::min, nccl::RedOp::avg};
  return ops[static_cast<int>(op)];
}

// Runs `body` in a thread of its own; whether it has come back in time. If not, it goes on by itself.
bool run_bounded(double seconds, std::function<void()> body) {
  auto finished = std::make_shared<std::promise<void>>();
  auto future = finished->get_future();
  std::thread([body = std::move(body), finished] {
    body();
    finished->set_value();
  }).detach();
  return future.wait_for(Seconds(seconds)) == std::future_status::ready;
}

// Waits that grow with the time waited: a late peer costs no processor, a short wait no latency.
void pause(double waited) {
  if (waited < 2e-4)
    ::sched_yield();
  else
    std::this_thread::sleep_for(Seconds(std::min(1e-3, waited / 8)));
}

// Everything between group_start and group_end takes effect together; the end must come even after an error.
class Group {
 public:
  explicit Group(const nccl::Api& api) : api_(api) { add(api_.group_start()); }
  void add(Result result) {
    if (result_ == Result::success && result != Result::in_progress) result_ = result;
  }
  Result end() {
    const Result result = api_.group_end();
    return result_ == Result::success ? result : result_;
  }

 private:
  const nccl::Api& api_;
  Result result_ = Result::success;
};

}  // namespace

NcclCommunicator::NcclCommunicator(const nccl::Api& api, const nccl::UniqueId& id, int rank, int world_size,
                                   std::shared_ptr<Board> board, NcclLimits limits, NcclHooks hooks)
    : api_(api),
      rank_(rank),
      world_size_(world_size),
      board_(std::move(board)),
      limits_(limits),
      hooks_(std::move(hooks)) {
  DISTOPT_CUDA_CHECK(cudaGetDevice(&device_));
  nccl::Config config;
  config.blocking = 0;
  Lock lock(mutex_);
  try {
    call(lock, "ncclCommInitRankConfig",
         [&] { return api_.comm_init_rank_config(&comm_, world_size_, id, rank_, &config); });
  } catch (...) {
    end_comm(false);
    board_->close();
    throw;
  }
  watcher_ = std::thread([this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() { close(); }

// -- operations -------------------------------------------------------------------------------------------------------

NcclCommunicator::Work NcclCommunicator::start(const Request& request, cudaStream_t caller) {
  const nccl::DataType type = nccl_type(request.dtype);
  return enqueue(request, caller, [&](nccl::Comm* comm, cudaStream_t stream) {
    switch (request.count == 0 ? OpKind::empty : request.kind) {
      case OpKind::barrier:
      case OpKind::all_reduce:
        return api_.all_reduce(request.input, request.output, request.count, type, nccl_op(request.op), comm, stream);
      case OpKind::reduce_scatter:
        return api_.reduce_scatter(request.input, request.output, request.count, type, nccl_op(request.op), comm,
                                   stream);
      case OpKind::all_gather:
        return api_.all_gather(request.input, request.output, request.count, type, comm, stream);
      case OpKind::broadcast:
        return api_.broadcast(request.input, request.output, request.count, type, request.root, comm, stream);
      default:
        return Result::success;
    }
  });
}

NcclCommunicator::Work NcclCommunicator::gather_parts(const Request& request, NcclPart own,
                                                      const std::vector<NcclPart>& parts, cudaStream_t caller) {
  const nccl::DataType type = nccl_type(request.dtype);
  return enqueue(request, caller, [&](nccl::Comm* comm, cudaStream_t stream) {
    Group group(api_);
    for (int root = 0; root < world_size_; ++root) {
      const NcclPart& part = parts[root];
      const void* from = root == rank_ ? own.data : part.data;
      if (part.count != 0) group.add(api_.broadcast(from, part.data, part.count, type, root, comm, stream));
    }
    return group.end();
  });
}

NcclCommunicator::Work NcclCommunicator::exchange_parts(const Request& request, const std::vector<NcclPart>& sent,
                                                        const std::vector<NcclPart>& received, cudaStream_t caller) {
  const nccl::DataType type = nccl_type(request.dtype);
  return enqueue(request, caller, [&](nccl::Comm* comm, cudaStream_t stream) {
    Group group(api_);
    for (int peer = 0; peer < world_size_; ++peer) {
      const NcclPart& to = sent[peer];
      const NcclPart& from = received[peer];
      if (to.count != 0) group.add(api_.send(to.data, to.count, type, peer, comm, stream));
      if (from.count != 0) group.add(api_.recv(from.data, from.count, type, peer, comm, stream));
    }
    return group.end();
  });
}

NcclCommunicator::Work NcclCommunicator::enqueue(const Request& request, cudaStream_t caller, const Enqueue& start) {
  const Lock turn(start_mutex_);
  Lock lock(mutex_);
  require_usable();
  refuse_capture(caller);
  forget_finished();
  ++sequence_;
  auto operation =
      std::make_shared<NcclOperation>(sequence_, describe(request, sequence_), events_.take(), events_.take());
  if (const std::string mismatch = board_->post(sequence_, request); !mismatch.empty())
    fail_and_throw(ErrorKind::mismatch, mismatch);
  operation->ready->record(caller);
  operation->ready->hold_up(stream_.get());
  call(lock, operation->text.c_str(), [&] { return start(comm_, stream_.get()); });
  operation->finished->record(stream_.get());
  outstanding_.push_back(operation);
  changed_.notify_all();
  return operation;
}

void NcclCommunicator::call(Lock& lock, const char* what, const std::function<Result()>& function) {
  Result result = function();
  const auto began = Clock::now();
  auto looked = began;
  while (result == Result::in_progress) {
    lock.unlock();
    std::exception_ptr interruption;
    const double waited = seconds_since(began);
    pause(waited);
    const bool look = Clock::now() - looked > look_period;
    try {
      if (look) hooks_.check_signals();
    } catch (...) {
      interruption = std::current_exception();
    }
    lock.lock();
    if (failure_) throw ShmError(*failure_);
    if (interruption) {
      // What is half made can neither be taken up again nor be left alone.
      fail(ErrorKind::closed, board_->me() + " left " + what + " because of an exception; restart the job");
      std::rethrow_exception(interruption);
    }
    if (look) {
      looked = Clock::now();
      check_host(sequence_, what);
      if (failure_) throw ShmError(*failure_);
      if (waited > limits_.timeout)
        fail_and_throw(ErrorKind::stalled, "no answer within " + seconds_text(limits_.timeout) + ": " +
                                               waiting_in(what, sequence_) +
                                               "; find out what holds it, or raise DISTOPT_TIMEOUT");
    }
    if (const Result asked = api_.comm_get_async_error(comm_, &result); asked != Result::success) result = asked;
  }
  if (result != Result::success) fail_and_throw(ErrorKind::other, nccl_error(what, result));
}

bool NcclCommunicator::done(const NcclOperation& operation) {
  const bool reached = operation.finished->reached();
  const Lock lock(mutex_);
  // An abort lets the operation "finish": the failure is recorded before it.
  if (failure_) throw ShmError(*failure_);
  return reached;
}

void NcclCommunicator::join(const NcclOperation& operation, cudaStream_t stream) {
  const Lock lock(mutex_);
  if (failure_) throw ShmError(*failure_);
  operation.finished->hold_up(stream);
}

void NcclCommunicator::wait(const NcclOperation& operation, double timeout_seconds) {
  const auto began = Clock::now();
  auto looked = began;
  while (!done(operation)) {
    const double waited = seconds_since(began);
    if (waited > timeout_seconds) {
      const Lock lock(mutex_);
      if (failure_) throw ShmError(*failure_);
      fail_and_throw(ErrorKind::stalled, "no result within " + seconds_text(timeout_seconds) + ": " +
                                             waiting_in(operation.text, operation.sequence) +
                                             "; find out what holds it, or raise DISTOPT_TIMEOUT");
    }
    pause(waited);
    if (Clock::now() - looked > look_period) {
      looked = Clock::now();
      hooks_.check_signals();
    }
  }
}

// -- memory -----------------------------------------------------------------------------------------------------------

void* NcclCommunicator::allocate(std::size_t bytes) {
  if (api_.mem_alloc == nullptr || api_.mem_free == nullptr) return nullptr;
  const Lock turn(start_mutex_);
  Lock lock(mutex_);
  require_usable();
  void* memory = nullptr;
  if (api_.mem_alloc(&memory, bytes) != Result::success) return nullptr;
  void* registration = nullptr;
  if (api_.comm_register != nullptr && api_.comm_deregister != nullptr &&
      api_.comm_register(comm_, memory, bytes, &registration) != Result::success)
    registration = nullptr;  // the memory is as good as any other then
  memory_.emplace_back(memory, registration);
  return memory;
}

void NcclCommunicator::release(void* memory) {
  // Kernels of the caller may still use it; nothing orders ncclMemFree behind them.
  static_cast<void>(cudaDeviceSynchronize());
  const Lock lock(mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(), [&](auto& entry) { return entry.first == memory; });
  if (found == memory_.end()) return;
  if (comm_ != nullptr && found->second != nullptr) static_cast<void>(api_.comm_deregister(comm_, found->second));
  memory_.erase(found);
  static_cast<void>(api_.mem_free(memory));
}

// -- failure and end --------------------------------------------------------------------------------------------------

void NcclCommunicator::require_usable() const {
  if (failure_) throw ShmError(*failure_);
  if (closed_) throw ShmError(ErrorKind::closed, board_->me() + " has closed this communicator; use it before close()");
}

std::string NcclCommunicator::nccl_error(const char* what, Result result) const {
  std::string text = board_->me() + ": NCCL failed in " + what + ": " + api_.get_error_string(result);
  const char* last = comm_ == nullptr ? nullptr : api_.get_last_error(comm_);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text + "; NCCL_DEBUG=WARN tells more";
}

std::string NcclCommunicator::waiting_in(const std::string& text, std::uint64_t sequence) const {
  std::string story = board_->me() + " waits in " + text + " for ";
  const std::vector<int> absent = board_->absent(sequence);
  for (std::size_t i = 0; i < absent.size(); ++i) story += (i ? "; " : "") + board_->tell(absent[i]);
  if (!absent.empty()) return story;
  return story + (board_->size() < world_size_ ? "ranks of other hosts, or the network (NCCL_DEBUG=INFO tells more)"
                                               : "data of ranks that have all started it (NCCL_DEBUG=INFO tells more)");
}

bool NcclCommunicator::check_host(std::uint64_t sequence, const std::string& text) {
  if (board_->failed()) {
    fail(ErrorKind::other, "");  // gives the recorded one
    return true;
  }
  bool any_gone = false;
  for (int q = 0; q < board_->size(); ++q) {
    const Board::Presence presence = q == board_->rank() ? Board::Presence::here : board_->presence(q);
    if (presence == Board::Presence::here) continue;
    any_gone = true;
    const std::vector<int> absent = board_->absent(sequence);
    if (std::find(absent.begin(), absent.end(), q) == absent.end()) continue;
    const bool closed = presence == Board::Presence::closed;
    fail(closed ? ErrorKind::closed : ErrorKind::peer_lost,
         board_->me() + " waits in " + text + ", but a peer " + (closed ? "has closed its communicator" : "has ended") +
             ": " + board_->tell(q) + "; see that rank's output for the cause, then restart the job");
    return true;
  }
  return any_gone;
}

void NcclCommunicator::fail(ErrorKind kind, const std::string& text) {
  if (failure_) return;
  failure_ = board_->fail(kind, text);
  if (!end_comm(false))
    failure_.emplace(failure_->kind(), std::string(failure_->what()) +
                                           "; besides, ncclCommAbort has not come back within " +
                                           seconds_text(limits_.abort) + ", so end this process");
  changed_.notify_all();
}

void NcclCommunicator::fail_and_throw(ErrorKind kind, const std::string& text) {
  fail(kind, text);
  throw ShmError(*failure_);
}

void NcclCommunicator::abort(const std::string& text) {
  const Lock lock(mutex_);
  if (!closed_) fail(ErrorKind::other, board_->me() + " has aborted the communicator: " + text);
}

// Whether NCCL came back in time. Orderly: finalize, which waits for the proxies of this rank, then destroy.
bool NcclCommunicator::end_comm(bool orderly) {
  nccl::Comm* comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return true;
  const nccl::Api& api = api_;
  for (auto& [memory, registration] : memory_)
    if (orderly && registration != nullptr)
      static_cast<void>(api.comm_deregister(comm, std::exchange(registration, nullptr)));
  return run_bounded(2 * limits_.abort, [&api, comm, orderly, device = device_, seconds = limits_.abort] {
    static_cast<void>(cudaSetDevice(device));
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
  static_cast<void>(cudaSetDevice(device_));
  Lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock, [&] { return stop_ || (!outstanding_.empty() && !failure_); });
    if (changed_.wait_for(lock, look_period, [&] { return stop_; })) return;
    try {
      forget_finished();
      if (!outstanding_.empty() && !failure_) look_after_oldest(lock);
    } catch (const std::exception& error) {
      fail(ErrorKind::other, board_->me() + ": " + error.what() + "; the GPU has failed, restart the job");
    }
  }
}

void NcclCommunicator::look_after_oldest(Lock& lock) {
  const Work oldest = outstanding_.front();
  if (watched_ != oldest->sequence) {
    watched_ = oldest->sequence;
    waits_since_.reset();
    gone_since_.reset();
    warned_ = false;
  }
  Result result = Result::success;
  if (comm_ != nullptr && api_.comm_get_async_error(comm_, &result) == Result::success && result != Result::success &&
      result != Result::in_progress)
    return fail(ErrorKind::other, nccl_error(oldest->text.c_str(), result));
  const bool any_gone = check_host(oldest->sequence, oldest->text);
  if (failure_ || !oldest->ready->reached()) return;
  const auto now = Clock::now();
  if (!waits_since_) waits_since_ = now;
  if (any_gone && !gone_since_) gone_since_ = now;
  if (gone_since_ && seconds_since(*gone_since_) > grace_seconds)
    return fail(ErrorKind::peer_lost, board_->me() + " waits in " + oldest->text +
                                          " for the data of a rank that has left; see the ranks' output");
  const double waited = seconds_since(*waits_since_);
  if (waited > limits_.timeout)
    return fail(ErrorKind::stalled, "no result within " + seconds_text(limits_.timeout) + ": " +
                                        waiting_in(oldest->text, oldest->sequence) +
                                        "; find out what holds it, or raise DISTOPT_TIMEOUT");
  if (waited > limits_.stall_warning && !std::exchange(warned_, true)) {
    const std::string text = "for " + seconds_text(waited) + " now " + waiting_in(oldest->text, oldest->sequence);
    lock.unlock();
    hooks_.warn(text);
    lock.lock();
  }
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
