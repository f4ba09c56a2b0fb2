// The duration of a wait, without suspensions of the whole job. distopt/launch/stopwatch.py is the
// same.
#pragma once

#include <chrono>

namespace distopt {

// Seconds since it was made, without suspensions of this process. Read it at least every 100 ms or so. If far more time
// has passed between two reads, the process was suspended with the job, by Ctrl-Z or with its container, for example.
// That time does not count, nor does the next second, while the other processes resume one after the other.
class Stopwatch {
 public:
  double seconds() {
    const auto now = Clock::now();
    const double passed = std::chrono::duration<double>(now - last_look_).count();
    last_look_ = now;
    if (passed > suspended_seconds)
      excused_until_ = now + excused;
    else if (now > excused_until_)
      seconds_ += passed;
    return seconds_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double suspended_seconds = 1;
  static constexpr std::chrono::seconds excused{1};
  Clock::time_point last_look_ = Clock::now();
  Clock::time_point excused_until_{};
  double seconds_ = 0;
};

}  // namespace distopt
