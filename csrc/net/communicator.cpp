#include "net/communicator.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>

#include "base/patience.h"
#include "base/tick.h"

namespace distopt::net {

namespace {

using Clock = std::chrono::steady_clock;

// Time between two turns of the network while a kernel computes: 10 Gbit/s carry 125 kB in it, far less than a socket's
// buffer holds.
constexpr double tick_seconds = 1e-4;
// With nothing to move for so long, as between hosts far apart, a wait sleeps where the transport can: a busy wait
// would take the core from other processes, and a system that shares cores fairly would then keep it from this one when
// data arrive. Nearby, data arrive sooner, and to wake up takes longer than to wait for them.
constexpr double spin_seconds = 1e-4;
// The longest wait before Python can look for signals.
constexpr double longest_wait_seconds = 0.1;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

Group everyone(int rank, std::size_t size) {
  Group group{std::vector<int>(size), static_cast<std::size_t>(rank)};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

// See Context.
Group two_hosts(int rank, const std::vector<Process>& processes) {
  const auto half = static_cast<int>(processes.size() / 2);
  Group group;
  if (half < 2 || processes.size() % 2 != 0 || processes.front().host == processes.back().host) return group;
  for (int i = 0; i < 2 * half; ++i) {
    if (processes[i].host != processes[i < half ? 0 : half].host) return {};
    const bool is_near = (i < half) == (rank < half);
    if (i == rank) group.place = group.size();
    if (is_near || i % half == rank % half) group.ranks.push_back(i);
  }
  return group;
}

// The communicators that tick() moves.
struct Listening {
  std::mutex mutex;
  std::vector<NetCommunicator*> communicators;
};

Listening& listening() {
  static Listening all;
  // No other thread has the mutex at a fork, since none would give it back in the child.
  static const int registered = ::pthread_atfork([] { listening().mutex.lock(); }, [] { listening().mutex.unlock(); },
                                                 [] { listening().mutex.unlock(); });
  (void)registered;
  return all;
}

}  // namespace

NetCommunicator::NetCommunicator(std::shared_ptr<Transport> transport, int rank, std::vector<Process> processes,
                                 std::size_t inline_bytes, std::size_t chunk_bytes, bool is_far)
    : processes_(std::move(processes)),
      transport_(std::move(transport)),
      context_{*transport_,
               pool_,
               rank,
               processes_,
               inline_bytes,
               chunk_bytes,
               is_far,
               everyone(rank, processes_.size()),
               two_hosts(rank, processes_)} {
  Listening& all = listening();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.communicators.push_back(this);
  __atomic_store_n(&tick_listener, &NetCommunicator::move_all, __ATOMIC_RELEASE);
}

NetCommunicator::~NetCommunicator() { stop_listening(); }

void NetCommunicator::stop_listening() {
  Listening& all = listening();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& open = all.communicators;
  open.erase(std::remove(open.begin(), open.end(), this), open.end());
  if (open.empty()) __atomic_store_n(&tick_listener, nullptr, __ATOMIC_RELEASE);
}

void NetCommunicator::move_all() {
  thread_local Clock::time_point last{};
  const Clock::time_point now = Clock::now();
  if (seconds_between(last, now) < tick_seconds) return;
  last = now;
  Listening& all = listening();
  const std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (NetCommunicator* communicator : all.communicators) communicator->move_if_idle();
}

void NetCommunicator::move_if_idle() {
  const auto turn = turn_.of_helper();
  if (!turn) return;
  try {
    // Ended collectives stay in the queue: to release their arrays takes Python's lock.
    if (!queue_.empty() && !failure_ && !fork_guard_.forked()) move();
  } catch (const CommunicatorError&) {  // recorded; the next call throws it
  }
}

std::shared_ptr<Hierarchy> NetCommunicator::hierarchy_for(const Arguments& arguments) const {
  const bool large = arguments.part_bytes() > context_.inline_bytes;
  return arguments.kind == OpKind::all_reduce && large ? hierarchy_ : nullptr;
}

void NetCommunicator::start(std::shared_ptr<NetCollective> collective) {
  const auto turn = turn_.of_caller();
  require_usable();
  const std::uint64_t tags = collective->tags();
  if (next_tag_ % tag_count + tags > tag_count) next_tag_ += tag_count - next_tag_ % tag_count;
  collective->enqueue(context_, started_++, next_tag_);
  next_tag_ += tags;
  queue_.push_back(std::move(collective));
  advance();
}

void NetCommunicator::progress() {
  const auto turn = turn_.of_caller();
  require_usable();
  advance();
}

void NetCommunicator::assist() {
  const auto turn = turn_.of_helper();
  if (!turn) return;
  require_usable();
  advance();
}

bool NetCommunicator::test(const NetCollective& collective) {
  if (collective.finished()) return true;
  progress();
  return collective.finished();
}

bool NetCommunicator::wait(const NetCollective& collective, double quiet_seconds) {
  if (collective.finished()) return true;
  moved_ = Clock::now();
  return wait_on(collective, quiet_seconds);
}

bool NetCommunicator::wait_on(const NetCollective& collective, double quiet_seconds) {
  if (collective.finished()) return true;
  const auto turn = turn_.of_caller();
  require_usable();
  const Clock::time_point began = Clock::now();
  for (;;) {
    advance();
    if (collective.finished()) return true;
    const Clock::time_point now = Clock::now();
    const double quiet = seconds_between(moved_, now);
    if (quiet > quiet_seconds || seconds_between(began, now) > longest_wait_seconds) return false;
    // Where ranks outnumber cores, this gives the core to one that has work.
    if (quiet < spin_seconds || !awaits_network() || !transport_->rest(quiet_seconds - quiet)) ::sched_yield();
  }
}

void NetCommunicator::pause(double quiet_seconds) {
  bool rests = false;
  if (quiet_seconds >= yield_seconds) {
    const auto turn = turn_.of_helper();
    rests = turn && awaits_network();
  }
  if (!rests || !transport_->rest(sleep_seconds(quiet_seconds))) distopt::pause(quiet_seconds);
}

bool NetCommunicator::awaits_network() const {
  return std::all_of(queue_.begin(), queue_.end(),
                     [](const auto& one) { return one->finished() || one->awaits_network(); });
}

double NetCommunicator::quiet_seconds() const { return seconds_between(moved_, Clock::now()); }

void NetCommunicator::advance() {
  move();
  while (!queue_.empty() && queue_.front()->finished()) queue_.pop_front();
}

void NetCommunicator::move() {
  try {
    if (transport_->poll()) moved_ = Clock::now();
    for (const auto& collective : queue_) advance(*collective);
  } catch (const CommunicatorError& error) {
    if (!failure_) failure_ = error;
    throw;
  }
}

void NetCommunicator::advance(NetCollective& collective) {
  if (collective.finished()) return;
  try {
    if (!collective.has_begun()) {
      if (!may_begin(collective)) return;
      collective.begin();
    }
    if (!collective.advance()) return;
    flight_.note_end(collective.sequence());
    last_finished_ = {collective.arguments(), collective.sequence()};
  } catch (const std::bad_alloc&) {
    const Process& me = processes_[context_.rank];
    throw CommunicatorError({ErrorKind::memory,
                             me.name() + " cannot allocate the result of " + collective.description(),
                             "send smaller parts",
                             {me}});
  }
}

bool NetCommunicator::may_begin(const NetCollective& collective) const {
  // Half of the tags: a new collective must not use the tags of one that is under way.
  if (collective.first_tag() - queue_.front()->first_tag() > tag_count / 2) return false;
  // A later collective is to see the result of an earlier one.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &collective) break;
    if (!earlier->finished() && conflict(earlier->arguments(), collective.arguments(), context_.size())) return false;
  }
  return true;
}

std::shared_ptr<NetCollective> NetCommunicator::oldest() const {
  const auto found = std::find_if(queue_.begin(), queue_.end(), [](const auto& one) { return !one->finished(); });
  return found == queue_.end() ? nullptr : *found;
}

std::string NetCommunicator::last_agreed() const {
  for (auto collective = queue_.rbegin(); collective != queue_.rend(); ++collective)
    if ((*collective)->finished() || (*collective)->agreed()) return (*collective)->description();
  return last_finished_ ? describe(last_finished_->first, last_finished_->second) : "";
}

void NetCommunicator::require_usable() const {
  fork_guard_.require(processes_[context_.rank]);
  if (failure_) throw *failure_;
  if (closed_)
    throw CommunicatorError({ErrorKind::closed,
                             processes_[context_.rank].name() + " used its communicator after close()",
                             "create a new one",
                             {processes_[context_.rank]}});
}

void NetCommunicator::fail(ErrorFields failure) {
  if (!failure_) failure_ = CommunicatorError(std::move(failure));
}

bool NetCommunicator::close() {
  if (closed_) return false;
  stop_listening();
  closed_ = true;
  if (!fork_guard_.forked()) transport_->flush();
  const bool idle = !oldest() && !failure_;
  if (!idle) transport_->keep(shared_from_this());  // the network may write there
  return idle;
}

}  // namespace distopt::net
