#include "nccl/communicator.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace distopt {
namespace {

using nccl::Result;

// Types that NCCL supports too; distopt.comm.nccl requests no others.
nccl::DataType nccl_type(DType dtype) {
  static constexpr nccl::DataType types[] = {nccl::DataType::float32,  nccl::DataType::float64, nccl::DataType::float16,
                                             nccl::DataType::bfloat16, nccl::DataType::int32,   nccl::DataType::int64};
  return types[static_cast<int>(dtype)];
}

nccl::RedOp nccl_op(RedOp op) {
  static constexpr nccl::RedOp ops[] = {nccl::RedOp::sum, nccl::RedOp::max, nccl::RedOp::min, nccl::RedOp::avg};
  return ops[static_cast<int>(op)];
}

// Everything between group_start and group_end takes effect together; the end must come even after an error.
class GroupCall {
 public:
  explicit GroupCall(const nccl::NcclApi& api) : api_(api) { add(api_.group_start()); }
  void add(Result result) {
    if (result_ == Result::success && result != Result::in_progress) result_ = result;
  }
  Result end() {
    const Result result = api_.group_end();
    return result_ == Result::success ? result : result_;
  }

 private:
  const nccl::NcclApi& api_;
  Result result_ = Result::success;
};

}  // namespace

NcclCommunicator::NcclCommunicator(const nccl::NcclApi& api, const nccl::UniqueId& id, int rank, int world_size,
                                   std::shared_ptr<Board> board, Limits limits, double abort_seconds, Hooks hooks)
    : api_(api),
      rank_(rank),
      world_size_(world_size),
      context_(current_context()),
      board_(std::move(board)),
      limits_(limits),
      abort_seconds_(abort_seconds),
      hooks_(std::move(hooks)) {
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

// -- collectives ------------------------------------------------------------------------------------------------------

NcclCommunicator::Work NcclCommunicator::start(const Arguments& arguments, cuda::Stream* caller) {
  const nccl::DataType type = nccl_type(arguments.dtype);
  return enqueue(arguments, caller, [&](nccl::Comm* comm, cuda::Stream* stream) {
    // NCCL leaves out what is empty, and a rank that has an empty array alone would pair the next with this one.
    if (arguments.count == 0)
      return api_.all_reduce(arguments.input, arguments.output, 1, nccl::DataType::int32, nccl_op(RedOp::sum), comm,
                             stream);
    switch (arguments.kind) {
      case OpKind::barrier:
      case OpKind::all_reduce:
        return api_.all_reduce(arguments.input, arguments.output, arguments.count, type, nccl_op(arguments.op), comm,
                               stream);
      case OpKind::reduce_scatter:
        return api_.reduce_scatter(arguments.input, arguments.output, arguments.count, type, nccl_op(arguments.op),
                                   comm, stream);
      case OpKind::all_gather:
        return api_.all_gather(arguments.input, arguments.output, arguments.count, type, comm, stream);
      case OpKind::broadcast:
        return api_.broadcast(arguments.input, arguments.output, arguments.count, type, arguments.root, comm, stream);
      default:
        return Result::success;
    }
  });
}

NcclCommunicator::Work NcclCommunicator::start_ragged(const Arguments& arguments, const std::vector<ByteSpan>& received,
                                                      cuda::Stream* caller) {
  const nccl::DataType type = nccl_type(arguments.dtype);
  const std::size_t item = item_bytes(arguments.dtype);
  const bool gathers = arguments.kind == OpKind::all_gather_ragged;
  return enqueue(arguments, caller, [&](nccl::Comm* comm, cuda::Stream* stream) {
    GroupCall group(api_);
    for (int peer = 0; peer < world_size_; ++peer) {
      const ByteSpan &to = arguments.parts[gathers ? 0 : peer], &from = received[peer];
      if (gathers && from.bytes != 0)
        group.add(api_.broadcast(peer == rank_ ? to.data : from.data, from.data, from.bytes / item, type, peer, comm,
                                 stream));
      if (gathers) continue;
      if (to.bytes != 0) group.add(api_.send(to.data, to.bytes / item, type, peer, comm, stream));
      if (from.bytes != 0) group.add(api_.recv(from.data, from.bytes / item, type, peer, comm, stream));
    }
    return group.end();
  });
}

NcclCommunicator::Work NcclCommunicator::enqueue(const Arguments& arguments, cuda::Stream* caller,
                                                 const Enqueue& start) {
  const Lock turn(start_mutex_);
  Lock lock(mutex_);
  require_usable();
  const InContext own(context_);  // another thread may have none
  refuse_capture(caller);
  forget_finished();
  ++sequence_;
  auto collective =
      std::make_shared<NcclCollective>(sequence_, describe(arguments, sequence_), events_.take(), events_.take());
  if (const auto mismatch = board_->post(sequence_, arguments)) fail_and_throw(mismatch->failure());
  collective->ready->record(caller);
  collective->ready->hold_up(stream_.get());
  call(lock, collective->text.c_str(), [&] { return start(comm_, stream_.get()); });
  collective->finished->record(stream_.get());
  outstanding_.push_back(collective);
  changed_.notify_all();
  return collective;
}

void NcclCommunicator::call(Lock& lock, const char* what, const std::function<Result()>& function) {
  Result result = function();
  Stopwatch watch;
  auto looked = Clock::now();
  while (result == Result::in_progress) {
    lock.unlock();
    std::exception_ptr interruption;
    const double waited = watch.seconds();
    pause(waited);
    const bool look = Clock::now() - looked > look_period;
    try {
      if (look) hooks_.check_signals();
    } catch (...) {
      interruption = std::current_exception();
    }
    lock.lock();
    if (failure_) throw CommunicatorError(*failure_);
    if (interruption) {
      // A half-made connection can neither be resumed nor be abandoned.
      fail({ErrorKind::closed, board_->peers().me().name() + " left " + what + " because of an exception",
            "restart the job"});
      std::rethrow_exception(interruption);
    }
    if (look) {
      looked = Clock::now();
      check_host(sequence_, what);
      if (failure_) throw CommunicatorError(*failure_);
      if (waited > limits_.timeout_seconds) fail_and_throw(Patience(limits_).stalled(waiting_in(what, sequence_)));
    }
    if (const Result asked = api_.comm_get_async_error(comm_, &result); asked != Result::success) result = asked;
  }
  if (result != Result::success) fail_and_throw(nccl_error(what, result));
}

bool NcclCommunicator::done(const NcclCollective& collective) {
  const bool reached = collective.finished->reached();
  const Lock lock(mutex_);
  // An abort lets the collective "finish": the failure is recorded before it.
  if (failure_) throw CommunicatorError(*failure_);
  return reached;
}

void NcclCommunicator::join(const NcclCollective& collective, cuda::Stream* stream) {
  const Lock lock(mutex_);
  if (failure_) throw CommunicatorError(*failure_);
  const InContext own(context_);
  collective.finished->hold_up(stream);
}

void NcclCommunicator::wait(const NcclCollective& collective, double timeout_seconds) {
  Stopwatch watch;
  auto looked = Clock::now();
  while (!done(collective)) {
    const double waited = watch.seconds();
    if (waited > timeout_seconds) {
      const Lock lock(mutex_);
      if (failure_) throw CommunicatorError(*failure_);
      fail_and_throw(Patience({timeout_seconds, timeout_seconds}, "result")
                         .stalled(waiting_in(collective.text, collective.sequence)));
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
  const InContext own(context_);  // where the last reference is dropped, another may be current
  // Kernels of the caller may still use it; nothing orders ncclMemFree behind them.
  static_cast<void>(cuda::driver().ctx_synchronize.status());
  const Lock lock(mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(), [&](auto& entry) { return entry.first == memory; });
  if (found == memory_.end()) return;
  if (comm_ != nullptr && found->second != nullptr) static_cast<void>(api_.comm_deregister(comm_, found->second));
  memory_.erase(found);
  static_cast<void>(api_.mem_free(memory));
}

}  // namespace distopt
