#include "base/watchdog.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/stopwatch.h"

namespace distopt {
namespace {

// The watchdog acts this time after a sign: the supervisor of the processes may act on the same sign first, with a
// better message.
constexpr double patience_seconds = 0.5;
constexpr double slice_seconds = 0.1;  // the longest poll: `Stopwatch` must be read this often

void watch(int stop, double seconds, std::string text, int exit_code, const std::vector<Watchdog::Sign>& signs) {
  Stopwatch stopwatch;
  std::vector<pollfd> fds{{stop, POLLIN, 0}};
  for (const auto& sign : signs) fds.push_back({sign.first, POLLIN, 0});
  for (;;) {
    const double slice = std::clamp(seconds - stopwatch.seconds(), 0.0, slice_seconds);
    const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(std::ceil(1e3 * slice)));
    if (ready > 0 && fds[0].revents != 0) return;
    for (std::size_t i = 1; ready > 0 && i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      text = signs[i - 1].second;
      seconds = std::min(seconds, stopwatch.seconds() + patience_seconds);
      fds.resize(1);  // the first is enough
    }
    if (stopwatch.seconds() < seconds) continue;
    const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    (void)written;  // no further way to report a failure
    remove_mpich_files();
    ::_exit(exit_code);
  }
}

}  // namespace

void remove_mpich_files(int pid) {
  const std::string process = "/proc/" + (pid != 0 ? std::to_string(pid) : "self");
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);)
    if (const auto at = line.find("/dev/shm/mpich_shm_"); at != std::string::npos)
      ::unlink((process + "/root" + line.substr(at)).c_str());
}

Watchdog::Watchdog(double seconds, std::string text, int exit_code, std::vector<Sign> signs)
    : stop_(::eventfd(0, EFD_CLOEXEC)) {
  static const int registered = std::atexit([] { remove_mpich_files(); });
  (void)registered;
  if (stop_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  // A new thread inherits the mask: signals stay with the threads that expect them.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(watch, stop_, seconds, std::move(text), exit_code, std::move(signs));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() { stop(); }

void Watchdog::stop() {
  if (stop_ < 0) return;
  const std::uint64_t one = 1;
  const auto written = ::write(stop_, &one, sizeof one);
  (void)written;  // an eventfd takes 2^64 - 2 of them
  thread_.join();
  ::close(std::exchange(stop_, -1));
}

}  // namespace distopt
