// Where the time of a communicator's calls goes, for `python -m benchmarks never-slower --profile`.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <utility>

namespace distopt {

enum class Phase : std::size_t { outside, steps, describe, host, send, receive, poll, reduce, yield };
constexpr const char* phase_names[] = {"outside", "steps", "describe", "host", "send",
                                       "receive", "poll",  "reduce",   "yield"};

// Counts nothing until the first take(). For one thread at a time.
class Phases {
 public:
  using Seconds = std::array<double, std::size(phase_names)>;

  // A phase until the end of its scope, in place of the one around it.
  class Scope {
   public:
    Scope(Phases& phases, Phase phase) : phases_(phases), around_(phases.phase_) { phases.enter(phase); }
    ~Scope() { phases_.enter(around_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Phases& phases_;
    Phase around_;
  };

  // The seconds in each phase since the last call.
  Seconds take() {
    enter(phase_);
    counts_ = true;
    last_ = Clock::now();
    return std::exchange(seconds_, Seconds{});
  }

 private:
  using Clock = std::chrono::steady_clock;

  void enter(Phase phase) {
    if (counts_) {
      const Clock::time_point now = Clock::now();
      seconds_[static_cast<std::size_t>(phase_)] += std::chrono::duration<double>(now - last_).count();
      last_ = now;
    }
    phase_ = phase;
  }

  bool counts_ = false;
  Phase phase_ = Phase::outside;
  Clock::time_point last_{};
  Seconds seconds_{};
};

}  // namespace distopt
