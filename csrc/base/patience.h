// Waits for other ranks: their limits and messages, the same over every transport. Transports name the ranks that have
// not arrived.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace distopt {

// -- polling ----------------------------------------------------------------------------------------------------------

// Spins on a word in shared memory. A patient spin takes longer than waking a sleeper. With shorter spins, two ranks
// that have slept once wake each other too late for the next spin, and sleep at every operation from then on. But where
// the peer waits for this rank's own core, every spin is lost. So after some lost spins most are short, until one
// succeeds. The patient spins come in a row that is long enough (13 ms) for the scheduler to notice two busy ranks on
// one core.
constexpr std::chrono::microseconds patient_spin{200};
constexpr std::chrono::microseconds short_spin{5};
constexpr unsigned spin_cycle = 1024;
constexpr unsigned patient_spins = 64;
// The spin on the bell that announces messages.
constexpr std::chrono::microseconds message_spin{50};
// Polls before a waiting thread gives up Python's lock: some microseconds, longer than ranks that work in step wait for
// each other in a small collective.
constexpr int brief_polls = 128;

// -- sleeping ---------------------------------------------------------------------------------------------------------

// The longest sleep of a rank that a change wakes; also the delay in noticing a dead, closed or failed peer.
constexpr double slice_seconds = 0.05;
// Its longest sleep in a collective while its own messages are in progress.
constexpr double helping_seconds = 1e-3;
// Time between two checks of its peers, by a rank that nothing wakes.
constexpr std::chrono::milliseconds check_period{20};
// At first, a rank that nothing wakes yields its core after each look: a sleep in the middle of a transfer would leave
// the network idle. Then sleeps grow while nothing moves: a late peer costs no processor time.
constexpr double yield_seconds = 0.01;
constexpr double longest_sleep_seconds = 1e-3;

inline double sleep_seconds(double quiet_seconds) { return std::min(longest_sleep_seconds, quiet_seconds / 100); }

inline void pause(double quiet_seconds) {
  if (quiet_seconds < yield_seconds)
    ::sched_yield();
  else
    std::this_thread::sleep_for(std::chrono::duration<double>(sleep_seconds(quiet_seconds)));
}

// -- speaking ---------------------------------------------------------------------------------------------------------

struct Limits {
  double timeout_seconds;
  double warning_seconds;
};

// Functions that the caller supplies for the time while a rank waits.
struct Hooks {
  std::function<void()> check_signals;           // may throw, which ends the wait
  std::function<void(const std::string&)> warn;  // a peer is late
};

// "12.3 s"
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

// A wait as text, "rank 0 (...) waits in ... for rank 1 (...)", and the ranks that have not arrived.
struct Waiting {
  std::string text;
  std::vector<Process> late{};
};

// The limits of one wait, and what it has said so far.
class Patience {
 public:
  // `lacking` names in messages what is missing.
  explicit Patience(const Limits& limits, const char* lacking = "answer") : limits_(limits), lacking_(lacking) {}

  // To be called while a rank is missing, after `seconds` of a Stopwatch. `describe` gives the Waiting; `warn`
  // is called with a text, once, and `fail` with ErrorFields at the end.
  template <typename Describe, typename Warn, typename Fail>
  void check(double waited, Describe describe, Warn warn, Fail fail) {
    if (waited >= limits_.timeout_seconds)
      fail(stalled(describe()));
    else if (waited >= limits_.warning_seconds && !std::exchange(warned_, true))
      warn("for " + seconds_text(waited) + " now " + describe().text);
  }
  ErrorFields stalled(const Waiting& waiting) const {
    return {ErrorKind::stalled,
            std::string("no ") + lacking_ + " within " + seconds_text(limits_.timeout_seconds) + ": " + waiting.text,
            "find out what it is busy with, or raise DISTOPT_TIMEOUT", waiting.late};
  }

 private:
  Limits limits_;
  const char* lacking_;
  bool warned_ = false;
};

}  // namespace distopt
