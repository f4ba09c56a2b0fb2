#include "host/mapping.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/errors.h"

namespace distopt {
namespace {

struct Mapping {
  char* memory;
  std::size_t bytes;
  int fd;
  off_t offset;
};

// The mappings that a forked child gets as private memory.
class Inherited {
 public:
  static Inherited& of_process() {
    static Inherited& all = *new Inherited;  // outlives arrays that the interpreter never frees
    return all;
  }

  void add(const Mapping& mapping) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mappings_.push_back(mapping);
  }

  // Before the memory is unmapped: the address may be reused at once.
  void remove(const char* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mappings_.erase(std::remove_if(mappings_.begin(), mappings_.end(),
                                   [memory](const Mapping& mapping) { return mapping.memory == memory; }),
                    mappings_.end());
  }

 private:
  // The mutex is held across the fork, since a thread that holds it would not exist in the child.
  Inherited() {
    ::pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] { of_process().make_private(); });
  }

  void make_private() {
    for (const Mapping& mapping : mappings_) {
      void* memory = ::mmap(mapping.memory, mapping.bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, mapping.fd, mapping.offset);
      // A child that is killed when it touches the array does less harm than one that writes to its parent's.
      if (memory == MAP_FAILED) ::munmap(mapping.memory, mapping.bytes);
    }
    mappings_.clear();  // a child of this child copies what this one has written
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<Mapping> mappings_;
};

}  // namespace

std::shared_ptr<char> map_shared(int fd, std::uint64_t offset, std::size_t bytes) {
  // Populated now: page faults in the first all-reduce of a training run would look like a slow peer.
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED)
    throw CommunicatorError(
        ErrorKind::memory,
        "mapping " + std::to_string(bytes) + " bytes of shared memory failed (" + std::strerror(errno) + ")",
        "free memory or raise the limit (ulimit -v)");
  return {static_cast<char*>(memory), [bytes](char* p) { ::munmap(p, bytes); }};
}

std::shared_ptr<char> map_arrays(const std::shared_ptr<File>& file, std::uint64_t offset, std::size_t bytes) {
  std::shared_ptr<char> memory = map_shared(file->get(), offset, bytes);
  Inherited::of_process().add({memory.get(), bytes, file->get(), static_cast<off_t>(offset)});
  return {memory.get(), [file, memory](char* p) { Inherited::of_process().remove(p); }};
}

}  // namespace distopt
