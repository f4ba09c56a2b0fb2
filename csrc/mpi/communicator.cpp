#include "mpi/communicator.h"

#include <sched.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>

#include "base/tick.h"

namespace distopt::mpi {

namespace {

using Clock = std::chrono::steady_clock;

// Between two turns of the network while a kernel computes: 10 Gbit/s carry 125 kB in this time, far less than a
// socket's buffer holds.
constexpr double tick_seconds = 1e-4;
// So that Python sees signals.
constexpr double longest_wait_seconds = 0.1;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

Group everyone(int rank, std::size_t size) {
  Group group{std::vector<int>(size), static_cast<std::size_t>(rank)};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

// The communicators that tick() moves.
struct Listening {
  std::mutex mutex;
  std::vector<Communicator*> communicators;
};

Listening& listening() {
  static Listening all;
  return all;
}

}  // namespace

Communicator::Communicator(const Library& library, int rank, std::vector<Process> processes, std::size_t inline_bytes,
                           std::size_t chunk_bytes)
    : processes_(std::move(processes)),
      transport_(make_transport(library)),
      world_{*transport_, pool_, rank, processes_, inline_bytes, chunk_bytes, everyone(rank, processes_.size())} {
  Listening& all = listening();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.communicators.push_back(this);
  __atomic_store_n(&tick_listener, &Communicator::move_all, __ATOMIC_RELEASE);
}

Communicator::~Communicator() { stop_listening(); }

void Communicator::stop_listening() {
  Listening& all = listening();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& open = all.communicators;
  open.erase(std::remove(open.begin(), open.end(), this), open.end());
  if (open.empty()) __atomic_store_n(&tick_listener, nullptr, __ATOMIC_RELEASE);
}

void Communicator::move_all() {
  thread_local Clock::time_point last{};
  const Clock::time_point now = Clock::now();
  if (seconds_between(last, now) < tick_seconds) return;
  last = now;
  Listening& all = listening();
  const std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (Communicator* communicator : all.communicators) communicator->move_if_idle();
}

void Communicator::move_if_idle() {
  const auto turn = turn_.of_helper();
  if (!turn) return;
  try {
    // Ended operations stay in the queue: to release their arrays takes Python's lock.
    if (!queue_.empty() && !failure_ && !origin_.forked()) move();
  } catch (const CommunicatorError&) {  // recorded; the next call throws it
  }
}

std::shared_ptr<Hierarchy> Communicator::hierarchy_for(const Request& request) const {
  const bool large = request.part_bytes() > world_.inline_bytes;
  return request.kind == OpKind::all_reduce && large ? hierarchy_ : nullptr;
}

void Communicator::start(std::shared_ptr<Operation> operation) {
  const auto turn = turn_.of_caller();
  require_usable();
  const std::uint64_t tags = operation->tags();
  if (next_tag_ % tag_count + tags > tag_count) next_tag_ += tag_count - next_tag_ % tag_count;
  operation->enqueue(world_, started_++, next_tag_);
  next_tag_ += tags;
  queue_.push_back(std::move(operation));
  advance();
}

void Communicator::progress() {
  const auto turn = turn_.of_caller();
  require_usable();
  advance();
}

bool Communicator::test(const Operation& operation) {
  if (operation.finished()) return true;
  progress();
  return operation.finished();
}

bool Communicator::wait(const Operation& operation, double quiet_seconds) {
  if (operation.finished()) return true;
  moved_ = Clock::now();
  return wait_on(operation, quiet_seconds);
}

bool Communicator::wait_on(const Operation& operation, double quiet_seconds) {
  if (operation.finished()) return true;
  const auto turn = turn_.of_caller();
  require_usable();
  const Clock::time_point began = Clock::now();
  for (;;) {
    advance();
    if (operation.finished()) return true;
    const Clock::time_point now = Clock::now();
    if (seconds_between(moved_, now) > quiet_seconds || seconds_between(began, now) > longest_wait_seconds)
      return false;
    // Where ranks outnumber cores, this gives the core to one that has work.
    ::sched_yield();
  }
}

double Communicator::quiet_seconds() const { return seconds_between(moved_, Clock::now()); }

void Communicator::advance() {
  move();
  while (!queue_.empty() && queue_.front()->finished()) queue_.pop_front();
}

void Communicator::move() {
  try {
    if (transport_->poll()) moved_ = Clock::now();
    for (const auto& operation : queue_) advance(*operation);
  } catch (const CommunicatorError& error) {
    if (!failure_) failure_ = error;
    throw;
  }
}

void Communicator::advance(Operation& operation) {
  if (operation.finished()) return;
  try {
    if (!operation.has_begun()) {
      if (!may_begin(operation)) return;
      operation.begin();
    }
    if (operation.advance()) last_finished_ = {operation.request(), operation.sequence()};
  } catch (const std::bad_alloc&) {
    const Process& me = processes_[world_.rank];
    throw CommunicatorError({ErrorKind::memory,
                             me.name() + " cannot allocate the result of " + operation.description(),
                             "send smaller parts",
                             {me}});
  }
}

bool Communicator::may_begin(const Operation& operation) const {
  // Half of the tags: those of an operation must not come round to one that is under way.
  if (operation.first_tag() - queue_.front()->first_tag() > tag_count / 2) return false;
  // A later operation is to see the result of an earlier one.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &operation) break;
    if (!earlier->finished() && conflict(earlier->request(), operation.request(), world_.size())) return false;
  }
  return true;
}

std::shared_ptr<Operation> Communicator::oldest() const {
  const auto found = std::find_if(queue_.begin(), queue_.end(), [](const auto& one) { return !one->finished(); });
  return found == queue_.end() ? nullptr : *found;
}

std::string Communicator::last_agreed() const {
  for (auto operation = queue_.rbegin(); operation != queue_.rend(); ++operation)
    if ((*operation)->finished() || (*operation)->agreed()) return (*operation)->description();
  return last_finished_ ? describe(last_finished_->first, last_finished_->second) : "";
}

void Communicator::require_usable() const {
  origin_.require(processes_[world_.rank]);
  if (failure_) throw *failure_;
  if (closed_)
    throw CommunicatorError({ErrorKind::closed,
                             processes_[world_.rank].name() + " used its communicator after close()",
                             "create a new one",
                             {processes_[world_.rank]}});
}

void Communicator::fail(Failure failure) {
  if (!failure_) failure_ = CommunicatorError(std::move(failure));
}

bool Communicator::close() {
  if (closed_) return false;
  stop_listening();
  closed_ = true;
  const bool idle = !oldest() && !failure_;
  static auto& kept = *new std::vector<std::shared_ptr<Communicator>>;  // MPI may still write to their memory
  if (!idle) kept.push_back(shared_from_this());
  return idle;
}

}  // namespace distopt::mpi
