// Parts of the file that the ranks of one host share, in the memory of this process.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace distopt {

// Owns a descriptor.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }
  int release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

// Maps a part of a file. Throws CommunicatorError.
std::shared_ptr<char> map_shared(int fd, std::uint64_t offset, std::size_t bytes);

// Maps a part of a file that arrays of the script lie in. A forked child has it as private memory instead, copied page
// by page when it writes: a backward pass there would add to the gradients of its parent. Throws CommunicatorError.
std::shared_ptr<char> map_arrays(const std::shared_ptr<File>& file, std::uint64_t offset, std::size_t bytes);

}  // namespace distopt
