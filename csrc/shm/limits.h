// What waits in shared memory go by.
#pragma once

#include <functional>
#include <string>

namespace distopt {

// What only the caller's side can do. Both are called while waiting, without any lock held.
struct Hooks {
  std::function<void()> check_signals;           // may throw, which ends the wait
  std::function<void(const std::string&)> warn;  // a peer is late
};

struct Limits {
  double timeout_seconds;
  double warning_seconds;
};

// How long a dead, closed or failed peer can go unnoticed by a rank that sleeps.
constexpr double slice_seconds = 0.05;

// "12.3 s"
std::string seconds_text(double seconds);

}  // namespace distopt
