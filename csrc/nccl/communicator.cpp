#include "nccl/communicator.h"

#include <exception>
#include <utility>

namespace distopt {
namespace {

using nccl::Comm;
using nccl::DataType;
using nccl::NcclApi;
using nccl::Result;

// The host runs ahead of the device by so many collectives at most: calls of NCCL and of the driver would wait, and
// could not be left, where queues of the device are full; they hold about 1,000 launches.
constexpr std::size_t most_outstanding = 128;

// A type of NCCL, and how many of it make an element. Types that NCCL lacks travel as bytes.
struct Wire {
  DataType type;
  std::size_t factor = 1;
};

Wire wire_of(DType dtype) {
  static constexpr Wire wires[] = {{DataType::float32},  {DataType::float64}, {DataType::float16}, {DataType::bfloat16},
                                   {DataType::int32},    {DataType::int64},   {DataType::int8},    {DataType::uint8},
                                   {DataType::uint8, 2}, {DataType::uint8}};
  static_assert(static_cast<int>(DType::int16) == 8, "the table has the order of DType");
  return wires[static_cast<int>(dtype)];
}

// Of a reduction that NCCL has; distopt.comm.nccl requests no others. Booleans are bytes of 0 and 1.
nccl::RedOp nccl_op(RedOp op, DType dtype) {
  if (dtype == DType::boolean)
    return op == RedOp::min || op == RedOp::product || op == RedOp::bit_and ? nccl::RedOp::min : nccl::RedOp::max;
  static constexpr nccl::RedOp ops[] = {nccl::RedOp::sum, nccl::RedOp::max, nccl::RedOp::min, nccl::RedOp::avg,
                                        nccl::RedOp::prod};
  return ops[static_cast<int>(op)];
}

// NCCL keeps an error of a call in a group and returns it from the end (ncclGroupErrCheck in src/include/group.h).
Result call_ragged(const NcclApi& api, Comm* comm, const NcclOperation& operation, int rank, cuda::Stream* stream) {
  const Arguments& arguments = operation.arguments;
  const Wire wire = wire_of(arguments.dtype);
  const std::size_t item = item_bytes(arguments.dtype) / wire.factor;
  const bool gathers = arguments.kind == OpKind::all_gather_ragged;
  if (const Result result = api.group_start(); result != Result::success) return result;
  for (int peer = 0; peer < static_cast<int>(operation.received.size()); ++peer) {
    const ByteSpan &to = arguments.parts[gathers ? 0 : peer], &from = operation.received[peer];
    if (gathers && from.bytes != 0)
      api.broadcast(peer == rank ? to.data : from.data, from.data, from.bytes / item, wire.type, peer, comm, stream);
    if (gathers) continue;
    if (to.bytes != 0) api.send(to.data, to.bytes / item, wire.type, peer, comm, stream);
    if (from.bytes != 0) api.recv(from.data, from.bytes / item, wire.type, peer, comm, stream);
  }
  return api.group_end();
}

Result call_one(const NcclApi& api, Comm* comm, const NcclOperation& operation, int rank, cuda::Stream* stream) {
  const Arguments& a = operation.arguments;
  if (is_ragged(a.kind)) return call_ragged(api, comm, operation, rank, stream);
  const void* const input = a.parts[0].data;
  void* const output = operation.received[0].data;
  // NCCL leaves out what is empty, and a rank that has an empty array alone would pair the next with this one.
  if (a.count == 0) return api.all_reduce(input, output, 1, DataType::int32, nccl::RedOp::sum, comm, stream);
  const Wire wire = wire_of(a.dtype);
  const std::size_t count = a.count * wire.factor;
  const nccl::RedOp op = nccl_op(a.op, a.dtype);
  switch (a.kind) {
    case OpKind::barrier:
    case OpKind::all_reduce:
      return api.all_reduce(input, output, count, wire.type, op, comm, stream);
    case OpKind::reduce_scatter:
      return api.reduce_scatter(input, output, count, wire.type, op, comm, stream);
    case OpKind::all_gather:
      return api.all_gather(input, output, count, wire.type, comm, stream);
    case OpKind::broadcast:
      return api.broadcast(input, output, count, wire.type, a.root, comm, stream);
    default:
      return Result::success;
  }
}

Result call_all(const NcclApi& api, Comm* comm, const std::vector<NcclOperation>& operations, int rank,
                cuda::Stream* stream) {
  if (operations.size() == 1) return call_one(api, comm, operations[0], rank, stream);
  if (const Result result = api.group_start(); result != Result::success) return result;
  for (const NcclOperation& operation : operations) call_one(api, comm, operation, rank, stream);
  return api.group_end();
}

}  // namespace

NcclCommunicator::NcclCommunicator(const NcclApi& api, int rank, int world_size, std::shared_ptr<Board> board,
                                   Limits limits, Hooks hooks)
    : api_(api),
      rank_(rank),
      world_size_(world_size),
      context_(current_context()),
      board_(std::move(board)),
      limits_(limits),
      hooks_(std::move(hooks)) {}

std::shared_ptr<NcclCommunicator> NcclCommunicator::connect(const NcclApi& api, const nccl::UniqueId& id, int rank,
                                                            int world_size, std::shared_ptr<Board> board, Limits limits,
                                                            Hooks hooks) {
  const std::shared_ptr<NcclCommunicator> made(
      new NcclCommunicator(api, rank, world_size, std::move(board), limits, std::move(hooks)));
  const auto join = [made = made.get(), id] {
    nccl::Config config;
    config.blocking = 1;
    Comm* comm = nullptr;
    const Result result = made->api_.comm_init_rank_config(&comm, made->world_size_, id, made->rank_, &config);
    const Lock lock(made->mutex_);
    made->comm_ = comm;
    return result;
  };
  std::thread([made] { made->call_nccl(); }).detach();
  made->detector_ = std::thread([made] { made->detect_failures(); });
  try {
    made->launch(std::make_shared<NcclCollective>(0, "ncclCommInitRankConfig", join));
  } catch (...) {
    made->close();
    throw;
  }
  return made;
}

// -- collectives ------------------------------------------------------------------------------------------------------

NcclCommunicator::Work NcclCommunicator::start(std::vector<NcclOperation> operations, cuda::Stream* caller) {
  check_failure();  // before the lock, which in a forked child may be held for ever
  const Lock turn(turn_);
  const InContext own(context_);  // another thread may have none
  refuse_capture(caller);
  const auto has_room = [this] {
    forget_finished();
    const Lock lock(mutex_);
    if (closed_)
      throw CommunicatorError(ErrorKind::closed, board_->peers().me().name() + " has closed this communicator",
                              "use it before close()");
    return outstanding_.size() < most_outstanding;
  };
  await(has_room, forever);
  const std::uint64_t first = sequence_ + 1;
  sequence_ += operations.size();
  std::string text = describe(operations[0].arguments, first);
  if (operations.size() > 1) text += " and " + std::to_string(operations.size() - 1) + " with it";
  for (std::size_t i = 0; i < operations.size(); ++i)
    if (const auto mismatch = board_->post(first + i, operations[i].arguments)) fail_and_throw(mismatch->failure());
  auto collective = std::make_shared<NcclCollective>(
      sequence_, std::move(text),
      [this, operations = std::move(operations)] { return call_all(api_, comm_, operations, rank_, stream_.get()); });
  collective->ready.record(caller);
  launch(collective);
  return collective;
}

void NcclCommunicator::launch(const Work& collective) {
  {
    const Lock lock(mutex_);
    next_ = collective;
    outstanding_.push_back(collective);
  }
  changed_.notify_all();
  try {
    await([&] { return collective->launched.load(); }, forever);
  } catch (const CommunicatorError&) {
    throw;
  } catch (...) {
    // The device may still use the arrays of the caller, who does not keep them.
    fail({ErrorKind::closed, board_->peers().me().name() + " left " + collective->text + " because of an exception",
          "restart the job"});
    throw;
  }
}

bool NcclCommunicator::await(const std::function<bool()>& reached, double seconds) {
  fork_guard_.require(board_->peers().me());
  const double period = std::chrono::duration<double>(check_period).count();
  double looked = 0.0;
  for (Stopwatch stopwatch;;) {
    const bool there = reached();
    check_failure();  // afterwards: it is recorded before an abort lets a collective "finish"
    const double waited = stopwatch.seconds();
    if (there || waited > seconds) return there;
    pause(waited);
    if (waited - looked < period) continue;
    looked = waited;
    hooks_.check_signals();
  }
}

bool NcclCommunicator::done(const NcclCollective& collective) {
  return await([&] { return collective.reached(); }, -1.0);
}

void NcclCommunicator::join(const NcclCollective& collective, cuda::Stream* stream) {
  check_failure();
  const InContext own(context_);
  collective.finished.hold_up(stream);
}

void NcclCommunicator::wait(const NcclCollective& collective, double timeout_seconds) {
  const auto reached = [&] { return collective.reached(); };
  await([&] { return reached() || has_data(collective); }, forever);
  if (!await(reached, timeout_seconds))
    fail_and_throw(Patience({timeout_seconds, timeout_seconds}, "result").stalled(waiting_in(collective)));
}

// -- the calling thread -----------------------------------------------------------------------------------------------

void NcclCommunicator::call_nccl() {
  enter_thread(context_);
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return failure_ || closed_ || next_; });
    if (failure_ || closed_) break;
    const Work collective = std::exchange(next_, nullptr);
    lock.unlock();
    try {
      call(*collective);
    } catch (const std::exception& error) {
      fail_by(error);
    }
    lock.lock();
  }
  Comm* const comm = std::exchange(comm_, nullptr);
  const bool orderly = orderly_ && !failure_;
  lock.unlock();
  // To finalize waits until the threads that NCCL has for this rank have sent its data; an abort does not.
  const bool finalized = comm != nullptr && orderly && api_.comm_finalize(comm) == Result::success;
  if (comm != nullptr) finalized ? api_.comm_destroy(comm) : api_.comm_abort(comm);
  lock.lock();
  ended_ = true;
  lock.unlock();
  changed_.notify_all();
}

void NcclCommunicator::call(NcclCollective& collective) {
  collective.ready.hold_up(stream_.get());
  if (const Result result = collective.call(); result != Result::success)
    return fail(nccl_error(collective.text, result));
  collective.finished.record(stream_.get());
  collective.launched = true;
}

}  // namespace distopt
