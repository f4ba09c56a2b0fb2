// Ends the process when a call into another library, which may hold Python's lock, does not come back in time.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace distopt {

class Watchdog {
 public:
  // Writes `text` to stderr and ends the process by _exit(exit_code) after `seconds`, unless stopped before.
  Watchdog(double seconds, std::string text, int exit_code);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Idempotent.
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace distopt
