// Ends the process if a call into another library does not return. That library may hold Python's lock.
#pragma once

#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace distopt {

// Removes the files that MPICH would leave in /dev/shm if this process, or the one named, were killed or aborted.
// MPICH keeps the names of its shared memory until MPI_Finalize. They are not needed after MPI_Init, which ends with a
// barrier of the host's ranks: by then all of them have mapped the memory.
void remove_mpich_files(int pid = 0);

// MPICH's files are removed, too, if the process ends by exit() or by a watchdog from now on.
class Watchdog {
 public:
  // A descriptor, which the caller keeps, and the text to print once it can be read.
  using Sign = std::pair<int, std::string>;

  // Writes a text to stderr and ends the process by _exit(exit_code) unless stop() comes first: `text` after `seconds`,
  // or the text of the first of `signs` half a second after the watchdog noticed it.
  Watchdog(double seconds, std::string text, int exit_code, std::vector<Sign> signs);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Idempotent.
  void stop();

 private:
  int stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace distopt
