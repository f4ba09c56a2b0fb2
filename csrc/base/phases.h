// Where the time of a communicator's calls goes, for `python -m benchmarks never-slower --profile`.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <thread>
#include <utility>

namespace distopt {

enum class Phase : std::size_t {
  outside,
  steps,
  describe,
  host,
  send,
  receive,
  poll,
  copy,
  reduce,
  wait,
  sleep,
  wake,
  yield
};
constexpr const char* phase_names[] = {"outside", "steps",  "describe", "host",  "send", "receive", "poll",
                                       "copy",    "reduce", "wait",     "sleep", "wake", "yield"};

// Counts nothing until the first take(), and then the time of the thread that called it last.
class Phases {
 public:
  using Seconds = std::array<double, std::size(phase_names)>;

  // A phase until the end of its scope, in place of the one around it.
  class Scope {
   public:
    Scope(Phases& phases, Phase phase) : phases_(phases), around_(phases.enter(phase)) {}
    ~Scope() { phases_.enter(around_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Phases& phases_;
    Phase around_;
  };

  // The seconds in each phase since the last call. To be called outside all scopes.
  Seconds take() {
    thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    enter(Phase::outside);
    return std::exchange(seconds_, Seconds{});
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Returns the phase that ends.
  Phase enter(Phase phase) {
    if (std::this_thread::get_id() != thread_.load(std::memory_order_relaxed)) return phase;
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<std::size_t>(phase_)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return std::exchange(phase_, phase);
  }

  std::atomic<std::thread::id> thread_{};
  Phase phase_ = Phase::outside;
  Clock::time_point last_ = Clock::now();
  Seconds seconds_{};
};

}  // namespace distopt
