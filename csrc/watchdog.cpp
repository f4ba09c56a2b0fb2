#include "watchdog.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <utility>

namespace distopt {

Watchdog::Watchdog(double seconds, std::string text, int exit_code) {
  // A new thread inherits the mask: signals stay with the threads that expect them.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, seconds, text = std::move(text), exit_code] {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopped_; })) return;
    const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    (void)written;  // nobody is left to be told
    ::_exit(exit_code);
  });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() { stop(); }

void Watchdog::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace distopt
