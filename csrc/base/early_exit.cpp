#include "base/early_exit.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace distopt {
namespace {

struct Refusal {
  std::string text;
  ::pid_t pid = 0;
};

Refusal& refusal() {
  static Refusal* const made = new Refusal;  // outlives static destructors, among which the handler runs
  return *made;
}

[[maybe_unused]] void at_exit(int status, void*) {
  const Refusal& refused = refusal();
  if (refused.text.empty() || refused.pid != ::getpid() || (status & 0xff) != 0) return;
  std::fflush(nullptr);
  const auto written = ::write(STDERR_FILENO, refused.text.data(), refused.text.size());
  (void)written;  // no further way to report a failure
  ::_exit(1);
}

int awaited_child = 0;
int awaiting_socket = -1;

void await_child() {
  // Forked children have no such child: waitpid fails, and the socket, which they may share, stays as it is.
  if (::waitpid(awaited_child, nullptr, WNOHANG) != 0) return;
  ::shutdown(awaiting_socket, SHUT_WR);
  while (::waitpid(awaited_child, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace

void refuse_early_exit(std::string text) {
#if defined(__GLIBC__)  // others have no on_exit, and atexit() does not give the status
  static const int registered = ::on_exit(at_exit, nullptr);
  (void)registered;
#endif
  refusal() = {std::move(text), ::getpid()};
}

void exit_after(int pid, int fd) {
  awaited_child = pid;
  awaiting_socket = fd;
  static const int registered = std::atexit(await_child);
  (void)registered;
}

}  // namespace distopt
