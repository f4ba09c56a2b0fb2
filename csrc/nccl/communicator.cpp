#include "nccl/communicator.h"

#include <exception>
#include <utility>

namespace distopt {
namespace {

using nccl::DataType;
using nccl::Result;

// The host runs ahead of the device by so many collectives at most: calls of NCCL and of the driver would wait, and
// could not be left, where queues of the device are full; they hold about 1,000 launches.
constexpr std::size_t most_outstanding = 128;
constexpr std::size_t most_connected = 4096;
// Connections to a peer that has left fail after this time: others, which take longer, may have all that they need.
constexpr double connect_grace_seconds = 5.0;

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
Result call_ragged(const Opened& in, const NcclOperation& operation, int rank, cuda::Stream* stream) {
  const Arguments& arguments = operation.arguments;
  const Wire wire = wire_of(arguments.dtype);
  const std::size_t item = item_bytes(arguments.dtype) / wire.factor;
  const bool gathers = arguments.kind == OpKind::all_gather_ragged;
  if (const Result result = in.api.group_start(); result != Result::success) return result;
  for (int peer = 0; peer < static_cast<int>(operation.received.size()); ++peer) {
    const ByteSpan &to = arguments.parts[gathers ? 0 : peer], &from = operation.received[peer];
    if (gathers && from.bytes != 0)
      in.api.broadcast(peer == rank ? to.data : from.data, from.data, from.bytes / item, wire.type, peer, in.comm,
                       stream);
    if (gathers) continue;
    if (to.bytes != 0) in.api.send(to.data, to.bytes / item, wire.type, peer, in.comm, stream);
    if (from.bytes != 0) in.api.recv(from.data, from.bytes / item, wire.type, peer, in.comm, stream);
  }
  return in.api.group_end();
}

Result call_one(const Opened& in, const NcclOperation& operation, int rank, cuda::Stream* stream) {
  const Arguments& a = operation.arguments;
  if (is_ragged(a.kind)) return call_ragged(in, operation, rank, stream);
  const void* const input = a.parts[0].data;
  void* const output = operation.received[0].data;
  // NCCL leaves out what is empty, and a rank that has an empty array alone would pair the next with this one.
  if (a.count == 0) return in.api.all_reduce(input, output, 1, DataType::int32, nccl::RedOp::sum, in.comm, stream);
  const Wire wire = wire_of(a.dtype);
  const std::size_t count = a.count * wire.factor;
  const nccl::RedOp op = nccl_op(a.op, a.dtype);
  switch (a.kind) {
    case OpKind::barrier:
    case OpKind::all_reduce:
      return in.api.all_reduce(input, output, count, wire.type, op, in.comm, stream);
    case OpKind::reduce_scatter:
      return in.api.reduce_scatter(input, output, count, wire.type, op, in.comm, stream);
    case OpKind::all_gather:
      return in.api.all_gather(input, output, count, wire.type, in.comm, stream);
    case OpKind::broadcast:
      return in.api.broadcast(input, output, count, wire.type, a.root, in.comm, stream);
    default:
      return Result::success;
  }
}

Result call_all(const Opened& in, const std::vector<NcclOperation>& operations, int rank, cuda::Stream* stream) {
  if (operations.size() == 1) return call_one(in, operations[0], rank, stream);
  if (const Result result = in.api.group_start(); result != Result::success) return result;
  for (const NcclOperation& operation : operations) call_one(in, operation, rank, stream);
  return in.api.group_end();
}

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
  try {
    auto made = std::make_shared<Opened>(api_, context_, abort_seconds_);
    call("ncclCommInitRankConfig", made, true, [id, rank, world_size](Opened& in) {
      nccl::Config config;
      config.blocking = 1;
      return in.api.comm_init_rank_config(&in.comm, world_size, id, rank, &config);
    });
    opened_ = std::move(made);
  } catch (...) {
    board_->close();
    throw;
  }
  watcher_ = std::thread([this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() { close(); }

// -- collectives ------------------------------------------------------------------------------------------------------

NcclCommunicator::Work NcclCommunicator::start(const std::vector<NcclOperation>& operations, cuda::Stream* caller) {
  static_cast<void>(opened());
  const Lock turn(turn_);
  const InContext own(context_);  // another thread may have none
  refuse_capture(caller);
  wait_for_room();
  const std::uint64_t first = sequence_ + 1;
  sequence_ += operations.size();
  std::string text = describe(operations[0].arguments, first);
  if (operations.size() > 1) text += " and " + std::to_string(operations.size() - 1) + " with it";
  auto collective = std::make_shared<NcclCollective>(sequence_, std::move(text));
  for (std::size_t i = 0; i < operations.size(); ++i)
    if (const auto mismatch = board_->post(first + i, operations[i].arguments)) fail_and_throw(mismatch->failure());
  collective->ready.record(caller);
  collective->ready.hold_up(stream_->get());
  const Call function = [operations, rank = rank_, stream = stream_](Opened& in) {
    return call_all(in, operations, rank, stream->get());
  };
  call(collective->text.c_str(), opened(), may_connect(operations), function);
  collective->finished.record(stream_->get());
  {
    const Lock lock(mutex_);
    outstanding_.push_back(collective);
  }
  changed_.notify_all();
  return collective;
}

// NCCL connects ranks when an algorithm is first chosen, which depends on operation, type and count; messages connect
// with each peer.
bool NcclCommunicator::may_connect(const std::vector<NcclOperation>& operations) {
  std::string key;
  const auto add = [&key](auto value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (const auto& [arguments, received] : operations) {
    add(arguments.kind), add(arguments.dtype), add(arguments.op), add(received.size());
    if (!is_ragged(arguments.kind)) add(arguments.count);
    for (const ByteSpan& part : arguments.parts) add(part.bytes != 0);
    for (const ByteSpan& part : received) add(part.bytes != 0);
  }
  if (connected_.size() >= most_connected) connected_.clear();
  return connected_.insert(std::move(key)).second;
}

void NcclCommunicator::call(const char* what, std::shared_ptr<Opened> in, bool apart, const Call& function) {
  const Result result = apart ? call_apart(what, in, function) : function(*in);
  if (result == Result::success) return;
  const ErrorFields failure = nccl_error(what, result, *in);
  in.reset();
  fail_and_throw(failure);
}

Result NcclCommunicator::call_apart(const char* what, std::shared_ptr<Opened>& in, const Call& function) {
  std::future<Result> future = run_apart(in->context, [in, function]() mutable {
    const Result result = function(*in);
    in.reset();  // before the caller returns, who may end it
    return result;
  });
  Patience patience(limits_);
  std::optional<Stopwatch> gone_since;
  for (Stopwatch watch; future.wait_for(look_period) != std::future_status::ready;) {
    try {
      hooks_.check_signals();
    } catch (...) {
      in.reset();
      // A half-made connection can neither be resumed nor be abandoned.
      fail({ErrorKind::closed, board_->peers().me().name() + " left " + what + " because of an exception",
            "restart the job"});
      throw;
    }
    check_left(check_host(sequence_, what), gone_since, connect_grace_seconds, what);
    check_failure();
    patience.look(
        watch.seconds(), [&] { return waiting_in(what, sequence_); }, hooks_.warn,
        [this](const ErrorFields& failure) { fail_and_throw(failure); });
  }
  return future.get();
}

void NcclCommunicator::wait_for_room() {
  Stopwatch watch;
  auto looked = Clock::now();
  for (;;) {
    forget_finished();
    check_failure();
    {
      const Lock lock(mutex_);
      if (outstanding_.size() < most_outstanding) return;
    }
    pause(watch.seconds());
    if (Clock::now() - looked < look_period) continue;
    looked = Clock::now();
    hooks_.check_signals();
  }
}

bool NcclCommunicator::done(const NcclCollective& collective) {
  const bool reached = collective.finished.reached();
  // An abort lets the collective "finish": the failure is recorded before it.
  check_failure();
  return reached;
}

void NcclCommunicator::join(const NcclCollective& collective, cuda::Stream* stream) {
  check_failure();
  const InContext own(context_);
  collective.finished.hold_up(stream);
}

void NcclCommunicator::wait(const NcclCollective& collective, double timeout_seconds) {
  Stopwatch watch;
  auto looked = Clock::now();
  while (!done(collective)) {
    const double waited = watch.seconds();
    if (waited > timeout_seconds)
      fail_and_throw(Patience({timeout_seconds, timeout_seconds}, "result")
                         .stalled(waiting_in(collective.text, collective.sequence)));
    pause(waited);
    if (Clock::now() - looked > look_period) {
      looked = Clock::now();
      hooks_.check_signals();
    }
  }
}

}  // namespace distopt
