#include "host/peers.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

// How accesses to shared memory are ordered, also on processors that reorder them as ARM does. GenMC checks the rows
// marked *, see instruments/model/genmc; a release keeps in place the reads before it as well as the writes.
//
// word              written                        read                           why that is enough
// ----------------  -----------------------------  -----------------------------  ------------------------------------
// counters *        by its rank, in publish:       by peers, in reached and       Who sees a count sees all data that
//                   store release                  all_finished: load acquire     was written before it, and comes
//                                                                                 after all reads of what it frees:
//                                                                                 staging, wire memory, ring entries.
// counters          -                              by its rank: relaxed           A rank sees its own stores.
// sequence *        by its rank, in publish_post:  by peers, in reached: load     As above, for descriptor, label and
//                   store release                  acquire                        payload. They are written again only
//                                                                                 once all have been seen to finish.
// sequence, NCCL *  Board::post: 0 relaxed, fence  Board::mismatch: load acquire, A sequence lock: the fences keep the
//                   seq_cst, fields, release       fields, fence seq_cst, load    0 before the new fields, and the
//                                                  relaxed                        second look behind the old ones.
// nonfinite *,      by its rank, before it         by peers, once all have        Through `reduced`. They are written
// allocation_errno  publishes `reduced`: plain,    published `reduced`: plain,    again only once all have posted a
//                   relaxed                        relaxed                        later collective.
// sleepers *        by peers, in sleep: add        by its rank, in wake: load     Store buffering: each side writes,
//                   relaxed, then fence seq_cst,   relaxed, after the store of    then reads the other's word. Two full
//                   then the load of the word      the word and a fence seq_cst   fences (DMB ISH); release and acquire
//                                                                                 would let both read the old value.
// the futex         -                              by the kernel, in FUTEX_WAIT   Compares under the lock that
//                                                                                 FUTEX_WAKE takes. The count goes down
//                                                                                 only after its answer.
// asked             by its rank: relaxed           by peers: relaxed              A number for messages, and no more.
// closed *          by its rank, in close: store   by peers: load acquire         Who sees it sees the last counters.
//                   release
// lock of the file  by the kernel, when the rank   by the kernel, in F_GETLK      Both hold a lock of the kernel. Who
//                   ends or closes                                                finds it free sees all that the rank
//                                                                                 stored, and so reads counter, closed
//                                                                                 and state again after it.
// failure.state *   fail: exchange seq_cst, store  failed, failure: load acquire  The exchange chooses one writer and
//                   release                                                       needs no order; `record_valid` makes
//                                                                                 kind and text visible.
// header, cores     before the ranks meet: plain   after: plain                   The sockets of the meeting.
//
// Copies need no fence of their own: our kernels have no non-temporal stores, and glibc's memcpy, which has them on
// x86, ends with SFENCE. One read is kept apart by nothing: last_collective, for a message, may read the entry of a
// peer that advances at that moment by almost a whole ring. Its text is bounded, and then wrong.
namespace distopt {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex is the low half of a counter, at its address");

// A rank is silent after this time without a sign of life. A waiting rank sleeps for less: see slice_seconds.
constexpr double life_seconds = 0.5;

std::int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The longest wait, in milliseconds, for another rank that is writing down its failure.
constexpr int most_naps = 1000;

std::uint32_t* futex_of(std::atomic<std::uint64_t>& word) { return reinterpret_cast<std::uint32_t*>(&word); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

template <std::size_t size>
void copy(char (&to)[size], const std::string& from) {
  const std::size_t length = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

}  // namespace

Peers::Peers(Segment& segment, std::vector<Process> processes)
    : segment_(segment),
      rank_(segment.rank()),
      size_(segment.world_size()),
      processes_(std::move(processes)),
      scratch_(size_) {}

std::vector<Process> Peers::processes(const std::vector<int>& ranks) const {
  std::vector<Process> found;
  for (int rank : ranks) found.push_back(processes_[rank]);
  return found;
}

Peers::Presence Peers::presence(int rank) const {
  const auto closed = [&] { return segment_.slot(rank).closed.load(std::memory_order_acquire) != 0; };
  if (closed()) return Presence::closed;
  if (segment_.holds_lock(rank)) return Presence::here;
  return closed() ? Presence::closed : Presence::ended;  // it may have closed and ended between the two questions
}

CommunicatorError Peers::lost(int rank, Presence presence, const std::string& waiting) {
  const bool closed = presence == Presence::closed;
  return fail({closed ? ErrorKind::closed : ErrorKind::peer_lost,
               name(rank) + (closed ? " closed its communicator" : " ended") + " while " + waiting,
               "see that rank's output for the cause, then restart the job",
               {process(rank)}});
}

bool futex_wait(std::atomic<std::uint64_t>& word, std::uint64_t seen, double seconds) {
  timespec limit{};
  limit.tv_sec = static_cast<std::time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  const long status =
      ::syscall(SYS_futex, futex_of(word), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
  return status == 0 || errno == EAGAIN;
}

void futex_wake(std::atomic<std::uint64_t>& word) {
  ::syscall(SYS_futex, futex_of(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Peers::count_cores() {
  int cores = 0;
  for (std::size_t i = 0; i < sizeof(Slot::cores) / sizeof(std::uint64_t); ++i) {
    std::uint64_t any = 0;
    for (int q = 0; q < size_; ++q) any |= segment_.slot(q).cores[i];
    cores += __builtin_popcountll(any);
  }
  cores_shared_ = cores < size_;
}

std::uint64_t Peers::count(Signal signal) const {
  return segment_.slot(rank_).counters[static_cast<int>(signal)].load(std::memory_order_relaxed);
}

void Peers::publish(Signal signal) {
  auto& counter = segment_.slot(rank_).counters[static_cast<int>(signal)];
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  wake(counter);
}

void Peers::publish_post(std::uint64_t sequence) {
  auto& word = entry(rank_, sequence).descriptor.sequence;
  word.store(sequence, std::memory_order_release);
  wake(word);
}

// The counter is written before `sleepers` is read here, and `sleepers` before the counter in sleep(). Only two full
// fences rule out that each side misses the other's write.
void Peers::wake(std::atomic<std::uint64_t>& word) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (segment_.slot(rank_).sleepers.load(std::memory_order_relaxed) == 0) return;
  futex_wake(word);
}

std::atomic<std::uint64_t>& Peers::word(const Blocker& blocker) const {
  if (blocker.signal == Signal::posted) return entry(blocker.peer, blocker.target).descriptor.sequence;
  return segment_.slot(blocker.peer).counters[static_cast<int>(blocker.signal)];
}

bool Peers::reached(const Blocker& blocker) const {
  return word(blocker).load(std::memory_order_acquire) >= blocker.target;
}

bool Peers::all_reached(Signal signal, std::uint64_t target, Blocker& blocker) const {
  for (int q = 0; q < size_; ++q) {
    const Blocker candidate{signal, target, q};
    if (q != rank_ && !reached(candidate)) {
      blocker = candidate;
      return false;
    }
  }
  return true;
}

std::vector<int> Peers::absent(const Blocker& blocker) const {
  std::vector<int> ranks;
  for (int q = 0; q < size_; ++q)
    if (q != rank_ && !reached({blocker.signal, blocker.target, q})) ranks.push_back(q);
  return ranks;
}

// The peers write these counters at each collective: every look takes the cache line from them. Counters only
// grow, so one look in `ring_size` collectives is enough.
bool Peers::all_finished(std::uint64_t sequence) {
  if (sequence <= finished_seen_) return true;
  std::uint64_t least = UINT64_MAX;
  for (int q = 0; q < size_; ++q)
    if (q != rank_)
      least = std::min(least,
                       segment_.slot(q).counters[static_cast<int>(Signal::finished)].load(std::memory_order_acquire));
  finished_seen_ = least;
  return sequence <= finished_seen_;
}

void Peers::show_life() const { segment_.slot(rank_).asked.store(now(), std::memory_order_relaxed); }

std::vector<int> Peers::silent(const std::vector<int>& ranks, double waited) const {
  const auto since = now() - static_cast<std::int64_t>(1e9 * std::min(life_seconds, waited / 2));
  std::vector<int> found;
  for (int q : ranks)
    if (segment_.slot(q).asked.load(std::memory_order_relaxed) < since) found.push_back(q);
  return found.empty() ? ranks : found;
}

CommunicatorError Peers::fail(const ErrorFields& failure) {
  FailureRecord& record = segment_.header().failure;
  std::uint32_t none = 0;
  if (record.state.compare_exchange_strong(none, 1 + static_cast<std::uint32_t>(rank_))) {
    record.kind = static_cast<std::int32_t>(failure.kind);
    copy(record.fact, failure.fact);
    copy(record.cure, failure.cure);
    for (std::size_t q = 0; q < std::min(processes_.size(), 8 * sizeof(record.ranks)); ++q)
      for (const Process& one : failure.ranks)
        if (one.rank == processes_[q].rank) record.ranks[q / 64] |= std::uint64_t{1} << q % 64;
    for (const Call& call : failure.calls) record.calls[record.call_count++] = call;
    record.state.store(record_valid, std::memory_order_release);
  }
  return this->failure();
}

CommunicatorError Peers::failure() const {
  const FailureRecord& record = segment_.header().failure;
  const auto state = [&record] { return record.state.load(std::memory_order_acquire); };
  const std::uint32_t first_seen = state();
  if (first_seen != record_valid) {
    // The writer takes less than a microsecond, unless it loses its core; but it may have been killed or stopped.
    const int writer = static_cast<int>(first_seen) - 1;
    for (int naps = 0; naps < most_naps && state() != record_valid && segment_.holds_lock(writer); ++naps)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Asked once more: it may have written all of it and ended between the two questions.
    if (state() != record_valid)
      return CommunicatorError({ErrorKind::peer_lost,
                                name(writer) + " failed, but ended or was stopped before it could say why",
                                "see that rank's output for the cause, then restart the job",
                                {process(writer)}});
  }
  ErrorFields failure{static_cast<ErrorKind>(record.kind), record.fact, record.cure};
  for (std::size_t q = 0; q < std::min(processes_.size(), 8 * sizeof(record.ranks)); ++q)
    if (record.ranks[q / 64] >> q % 64 & 1) failure.ranks.push_back(processes_[q]);
  failure.calls.assign(record.calls, record.calls + record.call_count);
  return CommunicatorError(std::move(failure));
}

bool Peers::glance(const Blocker& blocker, int& polls) {
  if (cores_shared_) return false;
  while (polls-- > 0) {
    if (reached(blocker)) {
      failed_spins_ = 0;
      return true;
    }
    relax();
  }
  return false;
}

bool Peers::spin(const Blocker& blocker) {
  const bool patient = !cores_shared_ && failed_spins_ % spin_cycle < patient_spins;
  const auto end = std::chrono::steady_clock::now() + (patient ? patient_spin : short_spin);
  do {
    for (int i = 0; i < 32; ++i) {
      if (reached(blocker)) {
        failed_spins_ = 0;
        return true;
      }
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  ++failed_spins_;
  return false;
}

bool Peers::sleep(const Blocker& blocker, double seconds) const {
  auto& awaited = word(blocker);
  auto& sleepers = segment_.slot(blocker.peer).sleepers;
  sleepers.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::uint64_t seen = awaited.load(std::memory_order_acquire);
  const bool changed = seen >= blocker.target || futex_wait(awaited, seen, seconds);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return changed;
}

}  // namespace distopt
