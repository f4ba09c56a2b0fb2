// Lets several ranks live in one process, for ThreadSanitizer: it knows memory by its address, so all ranks must have
// the shared file at the same one; and a lock of a file that belongs to the process would not tell ranks apart.
// Linked with --wrap, these stand in for the functions of that name that csrc/host calls.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdarg>
#include <map>
#include <mutex>
#include <tuple>

namespace {

struct Mapping {
  void* memory;
  int users;
};

std::mutex mutex;
std::map<std::tuple<ino_t, off_t, std::size_t>, Mapping> mappings;

}  // namespace

extern "C" {

void* __real_mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, std::size_t bytes);
int __real_fcntl(int fd, int command, ...);

void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return MAP_FAILED;
  const std::lock_guard<std::mutex> lock(mutex);
  Mapping& mapping = mappings[{status.st_ino, offset, bytes}];
  if (mapping.users == 0) mapping.memory = __real_mmap(address, bytes, protection, flags, fd, offset);
  ++mapping.users;
  return mapping.memory;
}

int __wrap_munmap(void* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto at = mappings.begin(); at != mappings.end(); ++at) {
    if (at->second.memory != address) continue;
    if (--at->second.users != 0) return 0;
    mappings.erase(at);
    break;
  }
  return __real_munmap(address, bytes);
}

// A lock belongs to the open file description; each rank has its own.
int __wrap_fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  auto* lock = va_arg(arguments, struct flock*);
  va_end(arguments);
  return __real_fcntl(fd, command == F_SETLK ? F_OFD_SETLK : F_OFD_GETLK, lock);
}
}
