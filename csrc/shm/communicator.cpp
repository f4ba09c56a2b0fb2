#include "shm/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "base/fork.h"
#include "base/stopwatch.h"

namespace distopt {
namespace {

// Some microseconds, in which the calling thread keeps Python's lock from the others: longer than ranks that work in
// step wait for each other in a small collective.
constexpr int brief_polls = 128;
// Of a rank that waits in a collective while messages of its own are under way.
constexpr double helping_seconds = 1e-3;

}  // namespace

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

// Two threads in one communicator would make the order of operations a matter of luck.
class ShmCommunicator::Guard {
 public:
  explicit Guard(ShmCommunicator& owner) : owner_(owner) {
    owner.require_open();
    if (!owner.turn_.take())
      throw CommunicatorError(ErrorKind::usage,
                              "two threads use one communicator at the same time; call collectives from one thread");
  }
  ~Guard() { owner_.turn_.give_back(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  ShmCommunicator& owner_;
};

ShmCommunicator::ShmCommunicator(int fd, int rank, std::vector<Process> processes, Limits limits, Hooks hooks)
    : segment_(fd, rank, static_cast<int>(processes.size())),
      peers_(segment_, std::move(processes)),
      limits_(limits),
      hooks_(std::move(hooks)),
      messages_(
          segment_, peers_, limits_, hooks_, [this] { require_open(); }, [this] { help(); }),
      fork_generation_(fork_count()) {}

ShmCommunicator::~ShmCommunicator() { close(); }

void ShmCommunicator::count_cores() { peers_.count_cores(); }

// -- life cycle and failure -------------------------------------------------------------------------------------------

void ShmCommunicator::close() {
  if (closed_) return;
  if (turn_.taken())
    throw CommunicatorError(ErrorKind::usage,
                            "another thread waits in this communicator; close it when that wait has ended");
  messages_.close();
  closed_ = true;
  queue_.clear();
  ended_.clear();
  // In a forked child this is the parent's memory: only the parent may say that the rank has left.
  if (fork_count() == fork_generation_) segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

void ShmCommunicator::require_open() const {
  if (fork_count() != fork_generation_)
    throw CommunicatorError(ErrorKind::usage,
                            "this process was forked from " + peers_.name(peers_.rank()) +
                                " and is no rank of the job; use the communicator in the parent only");
  if (closed_)
    throw CommunicatorError({ErrorKind::closed,
                             peers_.name(peers_.rank()) + " has closed this communicator",
                             "use it before close()",
                             {peers_.process(peers_.rank())}});
}

void ShmCommunicator::raise_recorded_failure() const {
  if (peers_.failed()) throw peers_.failure();
}

void ShmCommunicator::fail(const Failure& failure) { throw peers_.fail(failure); }

// A collective that needs both sides at every step cannot be left half done.
template <typename Body>
auto ShmCommunicator::or_fail(const char* what, Body body) {
  try {
    return body();
  } catch (const CommunicatorError&) {
    throw;  // recorded already
  } catch (...) {
    try {
      fail({ErrorKind::closed,
            peers_.name(peers_.rank()) + " left " + what + " because of an exception",
            "restart the job",
            {peers_.process(peers_.rank())}});
    } catch (const CommunicatorError&) {  // the exception itself tells this rank more
    }
    throw;
  }
}

// -- waiting ----------------------------------------------------------------------------------------------------------

template <typename Condition>
void ShmCommunicator::wait_until(Condition condition, double timeout_seconds) {
  std::optional<Stopwatch> watch;
  bool warned = false;
  for (;;) {
    advance();
    if (condition()) return;
    raise_recorded_failure();
    if (peers_.spin(blocker_)) continue;
    if (!watch) watch.emplace();
    const double left = timeout_seconds - watch->seconds();
    const double slice = messages_.help() ? helping_seconds : slice_seconds;
    const std::chrono::duration<double> nap(std::min(slice, std::max(left, 1e-6)));
    if (peers_.sleep(blocker_, std::chrono::duration_cast<std::chrono::nanoseconds>(nap))) continue;
    call_hook(hooks_.check_signals);
    require_open();
    advance();
    if (condition()) return;
    check_peers(watch->seconds(), timeout_seconds, warned);
  }
}

template <typename Hook>
void ShmCommunicator::call_hook(Hook hook) {
  // The hook may run a signal handler that closes this communicator.
  turn_.give_back();
  struct Retake {
    Turn& turn;
    ~Retake() { turn.take(); }
  } retake{turn_};
  hook();
}

// The order matters: a peer that left after its last counter is read as absent only if the counter, read again, is
// still short.
void ShmCommunicator::check_peers(double waited, double timeout_seconds, bool& warned) {
  raise_recorded_failure();
  for (int q : peers_.absent(blocker_)) {
    const bool closed = segment_.slot(q).closed.load(std::memory_order_acquire) != 0;
    const bool gone = closed || !segment_.holds_lock(q);
    if (!gone || peers_.reached({blocker_.signal, blocker_.target, q})) continue;
    const bool closed_first = closed || segment_.slot(q).closed.load(std::memory_order_acquire) != 0;
    fail({closed_first ? ErrorKind::closed : ErrorKind::peer_lost,
          peers_.name(q) + (closed_first ? " closed its communicator" : " ended") + " while " + waiting_for({q}),
          "see that rank's output for the cause, then restart the job",
          {peers_.process(q)}});
  }
  const std::vector<int> absent = peers_.absent(blocker_);
  if (absent.empty()) return;
  if (waited >= timeout_seconds)
    fail({ErrorKind::stalled, "no answer within " + seconds_text(timeout_seconds) + ": " + waiting_for(absent),
          "find out what it is busy with, or raise DISTOPT_TIMEOUT", peers_.processes(absent)});
  if (!warned && waited >= limits_.warning_seconds) {
    warned = true;
    const std::string text = "for " + seconds_text(waited) + " now " + waiting_for(absent);
    call_hook([&] { hooks_.warn(text); });
  }
}

// "rank 0 (...) waited in all_reduce #412 of 50,000 float32 for rank 1 (...): the last operation it started is ..."
std::string ShmCommunicator::waiting_for(const std::vector<int>& ranks) const {
  const Operation& front = *queue_.front();
  std::string text = peers_.name(peers_.rank()) + " waits ";
  if (posted_ != 0) text += "in " + describe(front.request(), front.sequence()) + " ";
  text += "for ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i ? "; " : "") + peers_.name(ranks[i]) + ": " + last_operation(peers_, ranks[i]);
  return text;
}

// -- operations -------------------------------------------------------------------------------------------------------

bool ShmCommunicator::start(std::shared_ptr<Operation> operation) {
  Guard guard(*this);
  enqueue(std::move(operation));
  if (!only_brief()) return false;
  advance();
  return true;
}

void ShmCommunicator::enqueue(std::shared_ptr<Operation> operation) {
  raise_recorded_failure();
  check_arguments(*operation);
  operation->begin(++started_);
  queue_.push_back(std::move(operation));
}

void ShmCommunicator::check_arguments(const Operation& operation) const {
  const Request& request = operation.request();
  const int n = peers_.size();
  if (request.parts.size() * sizeof(std::uint64_t) > inline_bytes)
    throw CommunicatorError(ErrorKind::usage, "all_to_all_ragged in shared memory serves at most " +
                                                  std::to_string(inline_bytes / sizeof(std::uint64_t)) +
                                                  " ranks on one host; choose the mpi communicator");
  if (request.kind != OpKind::reduce_scatter && request.kind != OpKind::all_gather) return;
  const std::size_t own = request.part_bytes() * static_cast<std::size_t>(peers_.rank());
  const bool in_place = request.kind == OpKind::reduce_scatter ? request.output == request.input + own
                                                               : request.input == request.output + own;
  if (!in_place && overlap(request.input, request.input_bytes(n), request.output, request.output_bytes(n)))
    throw CommunicatorError(
        ErrorKind::usage,
        "input and output overlap; pass separate arrays, or as the part this rank's own part of the whole");
}

bool ShmCommunicator::may_post(const Operation& operation) {
  // The ring entry is free when every rank, this one too, has finished the operation that used it before.
  if (operation.sequence() - queue_.front()->sequence() >= ring_size) return false;
  if (operation.sequence() > ring_size && !peers_.all_finished(operation.sequence() - ring_size)) return false;
  // Posting says "my arguments are ready", which they are not while an earlier operation still writes to them, and that
  // peers may write the result, which they may not while an earlier one still reads what was there.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &operation) break;
    if (conflict(earlier->request(), operation.request(), peers_.size())) return false;
  }
  return true;
}

void ShmCommunicator::post_ready() {
  for (; posted_ < queue_.size() && may_post(*queue_[posted_]); ++posted_) queue_[posted_]->post(peers_);
}

void ShmCommunicator::advance(bool helps) {
  if (!helps) ended_.clear();
  post_ready();
  while (!queue_.empty()) {
    Operation& front = *queue_.front();
    if (posted_ == 0) {
      peers_.all_reached(Signal::finished, front.sequence() - ring_size, blocker_);
      return;
    }
    try {
      if (!front.advance(peers_, blocker_)) return;
    } catch (const CommunicatorError& error) {
      fail(error.failure());
    } catch (const std::bad_alloc&) {
      fail(
          {ErrorKind::memory,
           peers_.name(peers_.rank()) + " cannot allocate the result of " + describe(front.request(), front.sequence()),
           "send smaller parts",
           {peers_.process(peers_.rank())}});
    }
    front.finish();
    // To let go of its arrays takes Python's lock, which a thread may hold that waits for its turn.
    if (helps) ended_.push_back(queue_.front());
    queue_.pop_front();
    --posted_;
    peers_.publish(Signal::finished);
    post_ready();
  }
}

// For a rank that waits for a message.
void ShmCommunicator::help() {
  if (!turn_.help()) return;
  struct Return {
    Turn& turn;
    ~Return() { turn.give_back(); }
  } at_end{turn_};
  advance(true);
}

bool ShmCommunicator::test(const Operation& operation) {
  if (operation.finished()) return true;
  Guard guard(*this);
  advance();
  if (!operation.finished()) raise_recorded_failure();
  return operation.finished();
}

void ShmCommunicator::progress() {
  Guard guard(*this);
  advance();
}

void ShmCommunicator::wait(const Operation& operation, double timeout_seconds) {
  if (operation.finished()) return;
  Guard guard(*this);
  wait_until([&] { return operation.finished(); }, timeout_seconds);
}

bool ShmCommunicator::wait_briefly(const Operation& operation) {
  if (operation.finished()) return true;
  Guard guard(*this);
  for (int polls = brief_polls; only_brief() && peers_.glance(blocker_, polls);) {
    advance();
    if (operation.finished()) return true;
  }
  return false;
}

std::shared_ptr<char> ShmCommunicator::empty(std::uint64_t count, DType dtype, std::uint64_t bytes_available) {
  Guard guard(*this);
  std::size_t bytes = 0;
  std::size_t total = 0;
  const bool overflows = __builtin_mul_overflow(count, item_bytes(dtype), &bytes) ||
                         __builtin_mul_overflow(bytes, static_cast<std::size_t>(peers_.size()), &total);
  Request request;
  request.kind = OpKind::empty;
  request.dtype = dtype;
  request.count = count;
  request.refused = peers_.rank() == 0 && (overflows || total > bytes_available);
  return or_fail("empty()", [&]() -> std::shared_ptr<char> {
    auto operation = std::make_shared<Operation>(std::move(request));
    enqueue(operation);
    wait_until([&] { return operation->finished(); }, limits_.timeout_seconds);
    const std::string what =
        std::to_string(bytes >> 20) + " MiB of wire memory for each of " + std::to_string(peers_.size()) + " ranks";
    if (operation->request().refused)
      fail({ErrorKind::memory, what + " do not fit in the memory that " + peers_.name(0) + " finds available",
            "use fewer ranks or a smaller model"});
    for (int q = 0; q < peers_.size(); ++q)
      if (const auto error = segment_.slot(q).allocation_errno.load(std::memory_order_relaxed))
        fail({ErrorKind::memory,
              peers_.name(q) + " cannot allocate its share of " + what + " (" + std::strerror(static_cast<int>(error)) +
                  ")",
              "free memory or enlarge /dev/shm",
              {peers_.process(q)}});
    if (bytes == 0) return {};
    Block block;
    try {
      block = segment_.map_block(bytes);
    } catch (const CommunicatorError& error) {
      Failure failure = error.failure();
      failure.fact = peers_.name(peers_.rank()) + ": " + failure.fact;
      fail(failure);
    }
    char* own = block.memory.get() + block.stride * static_cast<std::size_t>(peers_.rank());
    return {block.memory, own};
  });
}

}  // namespace distopt
