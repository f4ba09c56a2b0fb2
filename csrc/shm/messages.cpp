#include "shm/messages.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "base/stopwatch.h"
#include "cpu/reduce.h"

// How accesses to shared memory are ordered, as in host/peers.cpp. GenMC checks all rows, see instruments/model/genmc:
//
// word      written                       read                        why that is enough
// --------  ----------------------------  --------------------------  ---------------------------------------------
// written   by the sender, in push:       by the receiver, in pull:   Who sees the count sees the bytes before it.
//           store release                 load acquire
// taken     by the receiver, in pull:     by the sender, in push:     A release keeps the reads before it: no byte is
//           store release                 load acquire                overwritten that has not been read.
// rings     by others, in ring:           by its rank, in wait:       Read before looking around: a rank that changes
//           add seq_cst                   load acquire; in listen:    something later makes it another one. With
//                                         load seq_cst                `sleepers` store buffering, as there: all four
// sleepers  by its rank, in listen:       by others, in ring:         accesses are seq_cst, so not both sides miss the
//           add seq_cst                   load seq_cst                other's write.
namespace distopt {
namespace {

// Copies from or to a ring, at a count of bytes.
void write_ring(char* ring, std::size_t size, std::uint64_t at, const char* from, std::size_t bytes) {
  const std::size_t begin = at % size, first = std::min(bytes, size - begin);
  reduce_kernels().copy(ring + begin, from, first);
  reduce_kernels().copy(ring, from + first, bytes - first);
}

void read_ring(const char* ring, std::size_t size, std::uint64_t at, char* to, std::size_t bytes) {
  const std::size_t begin = at % size, first = std::min(bytes, size - begin);
  reduce_kernels().copy(to, ring + begin, first);
  reduce_kernels().copy(to + first, ring, bytes - first);
}

}  // namespace

// Lists a wait by its thread. Made and ended in a turn.
class Messages::Wait {
 public:
  explicit Wait(std::vector<std::thread::id>& threads) : threads_(threads) {
    threads_.push_back(std::this_thread::get_id());
  }
  ~Wait() { threads_.erase(std::find(threads_.begin(), threads_.end(), std::this_thread::get_id())); }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  std::vector<std::thread::id>& threads_;
};

Messages::Messages(Segment& segment, Peers& peers, const Limits& limits, const Hooks& hooks,
                   std::function<void()> require_open, std::function<void()> help_collectives)
    : segment_(segment),
      peers_(peers),
      limits_(limits),
      hooks_(hooks),
      require_open_(std::move(require_open)),
      help_collectives_(std::move(help_collectives)),
      outgoing_(static_cast<std::size_t>(segment.world_size())),
      incoming_(static_cast<std::size_t>(segment.world_size())) {}

Turn::Held Messages::close() {
  auto turn = turn_.awaited();
  // This thread may be in a wait: hooks run signal handlers.
  const std::thread::id me = std::this_thread::get_id();
  if (std::any_of(waiting_.begin(), waiting_.end(), [&](std::thread::id thread) { return thread != me; }))
    throw CommunicatorError(ErrorKind::usage,
                            "another thread sends or receives; close the communicator when it has ended");
  for (Outgoing& stream : outgoing_) stream.queue.clear();
  for (Incoming& stream : incoming_) stream = {};
  aside_.clear();
  awaiting_.clear();
  return turn;
}

// No thread holds it for longer than it takes to copy the available data.
Turn::Held Messages::take_turn() {
  require_open_();
  auto turn = turn_.awaited();
  require_open_();  // another thread may have closed the communicator
  return turn;
}

void Messages::start(std::shared_ptr<Message> message) {
  const auto turn = take_turn();
  if (peers_.failed()) return;
  try {
    if (message->sends())
      outgoing_[message->peer()].queue.push_back(std::move(message));
    else
      await(message);
    advance();
  } catch (const CommunicatorError&) {  // recorded
  }
}

bool Messages::help() {
  if (!under_way_.load(std::memory_order_relaxed)) return false;
  if (const auto turn = turn_.of_helper()) advance();
  return true;
}

bool Messages::test(const Message& message) {
  if (message.finished()) return true;
  const auto turn = take_turn();
  advance();
  help_collectives_();
  peers_.show_life();
  if (!message.finished() && peers_.failed()) throw peers_.failure();
  return message.finished();
}

void Messages::wait(const Message& message, double timeout_seconds) {
  if (message.finished()) return;
  const auto turn = take_turn();
  const Wait wait(waiting_);
  std::optional<Stopwatch> stopwatch;
  Patience patience({timeout_seconds, limits_.warning_seconds});
  for (;;) {
    // Read before looking: a rank that changes something after the look rings after this count.
    const std::uint64_t heard = segment_.bell(peers_.rank()).rings.load(std::memory_order_acquire);
    advance();
    if (message.finished()) return;
    if (peers_.failed()) throw peers_.failure();
    help_collectives_();
    if (!stopwatch) stopwatch.emplace();
    peers_.show_life();
    const double left = std::max(timeout_seconds - stopwatch->seconds(), 1e-6);
    if (turn_.apart([&] { return listen(heard, std::min(slice_seconds, left)); })) continue;
    turn_.apart(hooks_.check_signals);
    require_open_();
    check_peers(message, stopwatch->seconds(), patience);
    if (message.finished()) return;
  }
}

// -- moving bytes -----------------------------------------------------------------------------------------------------

// Records a failure that it meets. After one, of whichever rank and thread, nothing moves any more.
void Messages::advance() {
  if (peers_.failed()) return;
  try {
    for (int q = 0; q < peers_.size(); ++q) {
      while (push(q)) continue;
      while (pull(q)) continue;
    }
  } catch (const CommunicatorError&) {  // recorded
  } catch (const std::bad_alloc&) {
    static_cast<void>(
        peers_.fail({ErrorKind::memory,
                     peers_.me().name() + " cannot allocate memory for a message that has come before its receive",
                     "receive it earlier, or send smaller parts",
                     {peers_.me()}}));
  }
  const bool sends =
      std::any_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& o) { return !o.queue.empty(); });
  const bool receives = !awaiting_.empty() || std::any_of(incoming_.begin(), incoming_.end(),
                                                          [](const Incoming& i) { return i.into != nullptr; });
  under_way_.store(sends || receives, std::memory_order_relaxed);
}

// Writes as much as there is room for; returns whether to try again, because a message has ended.
bool Messages::push(int to) {
  Outgoing& stream = outgoing_[to];
  if (stream.queue.empty()) return false;
  Message& message = *stream.queue.front();
  const Envelope envelope{message.tag(), message.count(), static_cast<std::uint32_t>(message.dtype())};
  Channel& channel = segment_.channel(peers_.rank(), to);
  const std::size_t size = segment_.channel_bytes();
  const std::uint64_t written = channel.written.load(std::memory_order_relaxed);
  std::size_t room = size - (written - channel.taken.load(std::memory_order_acquire));
  std::size_t now = 0;
  char* const ring_to = segment_.ring(peers_.rank(), to);
  if (stream.done == 0) {
    if (room < sizeof(Envelope)) return false;
    write_ring(ring_to, size, written, reinterpret_cast<const char*>(&envelope), sizeof(Envelope));
    now = sizeof(Envelope);
    room -= now;
  }
  const std::size_t sent = stream.done + now - sizeof(Envelope);  // of the data
  const std::size_t bytes = std::min(room, message.bytes() - sent);
  if (now + bytes == 0 && sent != message.bytes()) return false;
  write_ring(ring_to, size, written + now, message.data() + sent, bytes);
  stream.done += now + bytes;
  channel.written.store(written + now + bytes, std::memory_order_release);
  ring(to);
  if (sent + bytes != message.bytes()) return false;
  message.finish(to);
  stream.queue.pop_front();
  stream.done = 0;
  return true;
}

// Where a message goes that begins to arrive. Throws before it has changed anything.
Messages::Incoming Messages::begin(int from, const Envelope& envelope) {
  Incoming stream;
  stream.begun = true;
  stream.envelope = envelope;
  const auto found = std::find_if(awaiting_.begin(), awaiting_.end(),
                                  [&](const auto& message) { return message->takes(from, envelope.tag); });
  if (found == awaiting_.end()) {
    stream.aside.reset(new char[stream.bytes() + 1]);
    return stream;
  }
  check(envelope, from, **found);
  stream.into = *found;
  awaiting_.erase(found);
  return stream;
}

// Takes all available data; returns whether to try again, because a message has ended.
bool Messages::pull(int from) {
  Channel& channel = segment_.channel(from, peers_.rank());
  const std::size_t size = segment_.channel_bytes();
  std::uint64_t taken = channel.taken.load(std::memory_order_relaxed);
  std::size_t there = channel.written.load(std::memory_order_acquire) - taken;
  Incoming& stream = incoming_[from];
  const char* const ring_from = segment_.ring(from, peers_.rank());
  if (!stream.begun) {
    if (there < sizeof(Envelope)) return false;
    Envelope envelope;
    read_ring(ring_from, size, taken, reinterpret_cast<char*>(&envelope), sizeof(Envelope));
    stream = begin(from, envelope);
    taken += sizeof(Envelope);
    there -= sizeof(Envelope);
  } else if (there == 0) {
    return false;
  }
  const std::size_t bytes = std::min(there, stream.bytes() - stream.done);
  read_ring(ring_from, size, taken, (stream.into ? stream.into->data() : stream.aside.get()) + stream.done, bytes);
  stream.done += bytes;
  channel.taken.store(taken + bytes, std::memory_order_release);
  ring(from);
  if (stream.done != stream.bytes()) return false;
  if (stream.into)
    stream.into->finish(from);
  else
    aside_.push_back({from, stream.envelope, std::move(stream.aside)});
  stream = {};
  return true;
}

// Takes a message that has been put aside, even if only a part has arrived; or waits for one to arrive.
void Messages::await(const std::shared_ptr<Message>& message) {
  for (auto found = aside_.begin(); found != aside_.end(); ++found) {
    if (!message->takes(found->from, found->envelope.tag)) continue;
    check(found->envelope, found->from, *message);
    if (message->bytes() != 0) std::memcpy(message->data(), found->data.get(), message->bytes());
    message->finish(found->from);
    aside_.erase(found);
    return;
  }
  for (int q = 0; q < peers_.size(); ++q) {
    Incoming& stream = incoming_[q];
    if (!stream.begun || stream.into || !message->takes(q, stream.envelope.tag)) continue;
    check(stream.envelope, q, *message);
    std::memcpy(message->data(), stream.aside.get(), stream.done);
    stream.aside.reset();
    stream.into = message;
    return;
  }
  awaiting_.push_back(message);
}

void Messages::check(const Envelope& envelope, int from, const Message& message) {
  if (envelope.count == message.count() && envelope.dtype == static_cast<std::uint32_t>(message.dtype())) return;
  throw peers_.fail({ErrorKind::mismatch,
                     peers_.name(from) + " sent " + amount(envelope.count, static_cast<DType>(envelope.dtype)) +
                         " with tag " + std::to_string(envelope.tag) + ", where " + peers_.me().name() + " receives " +
                         amount(message.count(), message.dtype()),
                     "both sides of a message must agree on type and count",
                     {peers_.process(from), peers_.me()}});
}

// -- waiting ----------------------------------------------------------------------------------------------------------

// As in Peers: the change is written before `sleepers` is read here, and `sleepers` before `rings` in listen().
void Messages::ring(int rank) const {
  Bell& bell = segment_.bell(rank);
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(bell.rings);
}

// Waits until this rank's bell has rung more often than was heard; returns whether it has.
bool Messages::listen(std::uint64_t heard, double seconds) const {
  Bell& bell = segment_.bell(peers_.rank());
  if (!peers_.cores_shared()) {
    const auto end = std::chrono::steady_clock::now() + message_spin;
    do {
      if (bell.rings.load(std::memory_order_acquire) != heard) return true;
    } while (std::chrono::steady_clock::now() < end);
  }
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool rung = bell.rings.load(std::memory_order_seq_cst) != heard || futex_wait(bell.rings, heard, seconds);
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return rung;
}

// Ranks that may end the wait for a message.
std::vector<int> Messages::awaited(const Message& message) const {
  if (message.peer() != Message::anyone) return {message.peer()};
  std::vector<int> ranks;
  for (int q = 0; q < peers_.size(); ++q)
    if (q != peers_.rank()) ranks.push_back(q);
  return ranks;
}

void Messages::check_peers(const Message& message, double waited, Patience& patience) {
  const std::vector<int> ranks = awaited(message);
  std::vector<std::pair<int, Peers::Presence>> gone;
  for (int q : ranks)
    if (const Peers::Presence presence = peers_.presence(q); presence != Peers::Presence::here)
      gone.emplace_back(q, presence);
  if (!gone.empty()) {
    advance();  // data that a rank has sent before it left still arrives
    if (message.finished()) return;
    const auto died =
        std::find_if(gone.begin(), gone.end(), [](const auto& one) { return one.second == Peers::Presence::ended; });
    if (died != gone.end()) throw peers_.lost(died->first, died->second, describe(message));
    if (gone.size() == ranks.size()) throw peers_.lost(gone[0].first, gone[0].second, describe(message));
  }
  patience.check(
      waited, [&] { return Waiting{describe(message), peers_.processes(peers_.silent(ranks, waited))}; },
      [this](const std::string& text) { turn_.apart([&] { hooks_.warn(text); }); },
      [this](const ErrorFields& failure) { throw peers_.fail(failure); });
}

// "rank 0 (...) waits to receive 5 float32 with tag 3 from rank 1 (...): the last operation it started is ..."
std::string Messages::describe(const Message& message) const {
  std::string text = peers_.me().name() + " waits to " + (message.sends() ? "send " : "receive ") +
                     amount(message.count(), message.dtype()) + " with tag " + std::to_string(message.tag()) +
                     (message.sends() ? " to " : " from ");
  const std::vector<int> ranks = awaited(message);
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i ? "; or " : "") + peers_.name(ranks[i]) + ": " + last_collective(peers_, ranks[i]);
  return text;
}

}  // namespace distopt
