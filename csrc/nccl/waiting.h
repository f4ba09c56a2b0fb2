// The times of waits on the host.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

namespace distopt {

using Seconds = std::chrono::duration<double>;

// Of the watching thread, and of whoever waits long. In this time a dead peer is noticed.
constexpr std::chrono::milliseconds look_period{20};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return Seconds(std::chrono::steady_clock::now() - begin).count();
}

inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

// Waits that grow with the time waited: a late peer costs no processor, a short wait no latency.
inline void pause(double waited) {
  if (waited < 2e-4)
    ::sched_yield();
  else
    std::this_thread::sleep_for(Seconds(std::min(1e-3, waited / 8)));
}

}  // namespace distopt
