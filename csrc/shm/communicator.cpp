#include "shm/communicator.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "base/stopwatch.h"

namespace distopt {
ShmCommunicator::ShmCommunicator(int fd, int rank, std::vector<Process> processes, Limits limits, Hooks hooks)
    : segment_(fd, rank, static_cast<int>(processes.size())),
      peers_(segment_, std::move(processes)),
      limits_(limits),
      hooks_(std::move(hooks)),
      messages_(segment_, peers_, limits_, hooks_, [this] { require_open(); }, [this] { help(); }) {}

ShmCommunicator::~ShmCommunicator() { close(); }

void ShmCommunicator::count_cores() { peers_.count_cores(); }

// -- life cycle and failure -------------------------------------------------------------------------------------------

void ShmCommunicator::close() {
  if (closed_) return;
  if (turn_.taken())
    throw CommunicatorError(ErrorKind::usage,
                            "another thread waits in this communicator; close it when that wait has ended");
  // A thread that asks for its turn now finds the communicator closed.
  const auto turn = turn_.of_caller();
  const auto turn_of_messages = messages_.close();
  closed_ = true;
  queue_.clear();
  ended_.clear();
  // In a forked child this is the parent's memory: only the parent may say that the rank has left.
  if (!fork_guard_.forked()) segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

void ShmCommunicator::require_open() const {
  fork_guard_.require(peers_.me());
  if (closed_)
    throw CommunicatorError({ErrorKind::closed,
                             peers_.me().name() + " has closed this communicator",
                             "use it before close()",
                             {peers_.me()}});
}

Turn::Held ShmCommunicator::take_turn() {
  require_open();
  auto turn = turn_.of_caller();
  require_open();  // another thread may have closed it
  return turn;
}

void ShmCommunicator::raise_recorded_failure() const {
  if (peers_.failed()) throw peers_.failure();
}

void ShmCommunicator::fail(const ErrorFields& failure) {
  has_failed_ = true;
  throw peers_.fail(failure);
}

// -- waiting ----------------------------------------------------------------------------------------------------------

template <typename Condition>
void ShmCommunicator::wait_until(Condition condition, double timeout_seconds) {
  std::optional<Stopwatch> stopwatch;
  Patience patience({timeout_seconds, limits_.warning_seconds});
  for (;;) {
    advance();
    if (condition()) return;
    raise_recorded_failure();
    if (peers_.spin(blocker_)) continue;
    if (!stopwatch) stopwatch.emplace();
    peers_.show_life();
    const double left = timeout_seconds - stopwatch->seconds();
    const double slice = messages_.help() ? helping_seconds : slice_seconds;
    if (peers_.sleep(blocker_, std::min(slice, std::max(left, 1e-6)))) continue;
    turn_.apart(hooks_.check_signals);  // it may run a signal handler that closes this communicator
    require_open();
    advance();
    if (condition()) return;
    check_peers(stopwatch->seconds(), patience);
  }
}

// The order matters: a peer that left after its last counter is read as absent only if the counter, read again, is
// still short.
void ShmCommunicator::check_peers(double waited, Patience& patience) {
  raise_recorded_failure();
  for (int q : peers_.absent(blocker_)) {
    const Peers::Presence presence = peers_.presence(q);
    if (presence != Peers::Presence::here && !peers_.reached({blocker_.signal, blocker_.target, q}))
      throw peers_.lost(q, presence, waiting_for({q}));
  }
  const std::vector<int> absent = peers_.absent(blocker_);
  if (absent.empty()) return;
  patience.check(
      waited,
      [&] {
        const std::vector<int> late = peers_.silent(absent, waited);
        return Waiting{waiting_for(late), peers_.processes(late)};
      },
      [this](const std::string& text) { turn_.apart([&] { hooks_.warn(text); }); },
      [this](const ErrorFields& failure) { fail(failure); });
}

// "rank 0 (...) waited in all_reduce #412 of 50,000 float32 for rank 1 (...): the last operation it started is ..."
std::string ShmCommunicator::waiting_for(const std::vector<int>& ranks) const {
  const ShmCollective& front = *queue_.front();
  std::string text = peers_.me().name() + " waits ";
  if (posted_ != 0) text += "in " + describe(front.arguments(), front.sequence()) + " ";
  text += "for ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i ? "; " : "") + peers_.name(ranks[i]) + ": " + last_collective(peers_, ranks[i]);
  return text;
}

// -- collectives ------------------------------------------------------------------------------------------------------

bool ShmCommunicator::start(std::shared_ptr<ShmCollective> collective) {
  const auto turn = take_turn();
  enqueue(std::move(collective));
  if (!only_brief()) return false;
  advance();
  return true;
}

void ShmCommunicator::enqueue(std::shared_ptr<ShmCollective> collective) {
  raise_recorded_failure();
  if (collective->arguments().parts.size() * sizeof(std::uint64_t) > inline_bytes)
    throw CommunicatorError(ErrorKind::usage, "all_to_all_ragged in shared memory serves at most " +
                                                  std::to_string(inline_bytes / sizeof(std::uint64_t)) +
                                                  " ranks on one host; choose transport mpi");
  collective->begin(++started_);
  queue_.push_back(std::move(collective));
}

bool ShmCommunicator::may_post(const ShmCollective& collective) {
  // The ring entry is free when every rank, this one too, has finished the collective that used it before.
  if (collective.sequence() - queue_.front()->sequence() >= ring_size) return false;
  if (collective.sequence() > ring_size && !peers_.all_finished(collective.sequence() - ring_size)) return false;
  // Posting tells peers that they may read the arguments and write the result. They may not while an earlier collective
  // still writes to the arguments, or reads the old data of the result.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &collective) break;
    if (conflict(earlier->arguments(), collective.arguments(), peers_.size())) return false;
  }
  return true;
}

void ShmCommunicator::post_ready() {
  for (; posted_ < queue_.size() && may_post(*queue_[posted_]); ++posted_) queue_[posted_]->post(peers_);
}

void ShmCommunicator::advance(bool helps) {
  if (!helps) ended_.clear();
  if (has_failed_) raise_recorded_failure();
  post_ready();
  while (!queue_.empty()) {
    ShmCollective& front = *queue_.front();
    if (posted_ == 0) {
      peers_.all_reached(Signal::finished, front.sequence() - ring_size, blocker_);
      return;
    }
    try {
      if (!front.advance(peers_, blocker_)) return;
    } catch (const CommunicatorError& error) {
      fail(error.failure());
    } catch (const std::bad_alloc&) {
      fail({ErrorKind::memory,
            peers_.me().name() + " cannot allocate the result of " + describe(front.arguments(), front.sequence()),
            "send smaller parts",
            {peers_.me()}});
    }
    front.finish();
    flight_.note_end(front.sequence());
    // To release its arrays takes Python's lock, which a thread that waits for its turn may hold.
    if (helps) ended_.push_back(queue_.front());
    queue_.pop_front();
    --posted_;
    peers_.publish(Signal::finished);
    post_ready();
  }
}

// Moves collectives for a rank that waits for a message, or polls one.
void ShmCommunicator::help() {
  if (const auto turn = turn_.of_helper()) advance(true);
}

bool ShmCommunicator::test(const ShmCollective& collective) {
  if (collective.finished()) return true;
  const auto turn = take_turn();
  advance();
  if (collective.finished()) return true;
  messages_.help();
  peers_.show_life();
  raise_recorded_failure();
  return collective.finished();
}

void ShmCommunicator::progress() {
  const auto turn = take_turn();
  advance();
  messages_.help();
}

void ShmCommunicator::wait(const ShmCollective& collective, double timeout_seconds) {
  if (collective.finished()) return;
  const auto turn = take_turn();
  wait_until([&] { return collective.finished(); }, timeout_seconds);
}

bool ShmCommunicator::wait_briefly(const ShmCollective& collective) {
  if (collective.finished()) return true;
  const auto turn = take_turn();
  for (int polls = brief_polls; only_brief() && peers_.glance(blocker_, polls);) {
    advance();
    if (collective.finished()) return true;
  }
  return false;
}

std::shared_ptr<char> ShmCommunicator::empty(std::uint64_t count, DType dtype, std::uint64_t bytes_available) {
  const auto turn = take_turn();
  std::size_t bytes = 0;
  std::size_t total = 0;
  const bool overflows = __builtin_mul_overflow(count, item_bytes(dtype), &bytes) ||
                         __builtin_mul_overflow(bytes, static_cast<std::size_t>(peers_.size()), &total);
  Arguments arguments;
  arguments.kind = OpKind::empty;
  arguments.dtype = dtype;
  arguments.count = count;
  arguments.refused = peers_.rank() == 0 && (overflows || total > bytes_available);
  try {
    auto collective = std::make_shared<ShmCollective>(std::move(arguments));
    enqueue(collective);
    wait_until([&] { return collective->finished(); }, limits_.timeout_seconds);
    const std::string what =
        std::to_string(bytes >> 20) + " MiB of wire memory for each of " + std::to_string(peers_.size()) + " ranks";
    if (collective->arguments().refused)
      fail({ErrorKind::memory, what + " do not fit in the memory that " + peers_.name(0) + " finds available",
            "use fewer ranks or a smaller model"});
    for (int q = 0; q < peers_.size(); ++q)
      if (const auto error = segment_.slot(q).allocation_errno.load(std::memory_order_relaxed))
        fail({ErrorKind::memory,
              peers_.name(q) + " cannot allocate its share of " + what + " (" + std::strerror(static_cast<int>(error)) +
                  ")",
              memory_cure(static_cast<int>(error)),
              {peers_.process(q)}});
    if (bytes == 0) return {};
    WireBlock block;
    try {
      block = segment_.map_block(bytes);
    } catch (const CommunicatorError& error) {
      ErrorFields failure = error.failure();
      failure.fact = peers_.me().name() + ": " + failure.fact;
      fail(failure);
    }
    char* own = block.memory.get() + block.stride * static_cast<std::size_t>(peers_.rank());
    return {block.memory, own};
  } catch (const CommunicatorError&) {
    throw;         // recorded already
  } catch (...) {  // a collective that needs both sides at every step cannot be left half done
    static_cast<void>(peers_.fail({ErrorKind::closed,
                                   peers_.me().name() + " left empty() because of an exception",
                                   "restart the job",
                                   {peers_.me()}}));
    throw;  // the exception itself is more precise for this rank
  }
}

}  // namespace distopt
