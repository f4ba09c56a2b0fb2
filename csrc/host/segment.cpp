#include "host/segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "base/errors.h"

namespace distopt {
namespace {

constexpr std::size_t page_bytes = 4096;
// Linux's largest page, on ARM: a mapping must begin at a multiple of the page of the machine.
constexpr std::size_t largest_page_bytes = 65536;

std::size_t slots_offset() { return sizeof(SegmentHeader); }
std::size_t inboxes_offset(int world_size) {
  return round_up(slots_offset() + sizeof(Slot) * static_cast<std::size_t>(world_size), page_bytes);
}
std::size_t ring_bytes(int world_size) {
  const std::size_t share = inbox_bytes / static_cast<std::size_t>(world_size) / page_bytes * page_bytes;
  return std::max(share, page_bytes);
}
std::size_t inbox_stride(int world_size) {
  const std::size_t channels = (sizeof(Channel) + ring_bytes(world_size)) * static_cast<std::size_t>(world_size);
  return round_up(sizeof(Bell) + channels, page_bytes);
}
std::size_t staging_offset(int world_size) {
  return inboxes_offset(world_size) + inbox_stride(world_size) * static_cast<std::size_t>(world_size);
}
std::size_t control_bytes(int world_size, std::size_t chunk_bytes) {
  return staging_offset(world_size) +
         round_up(static_cast<std::size_t>(world_size) * staging_buffers * chunk_bytes, page_bytes);
}

// The lock that a living rank holds, on a byte of the file.
struct flock lock_of(int rank, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

int allocate(int fd, std::uint64_t offset, std::size_t bytes) {
  // Not posix_fallocate: where the file system cannot allocate, it would write to every page instead.
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

}  // namespace

const char* memory_cure(int error) {
  return error == EFBIG ? "raise the limit of file sizes (ulimit -f)" : "free memory or enlarge /dev/shm";
}

int create_segment(int world_size, std::size_t chunk_bytes, bool named_fallback) {
  if (chunk_bytes == 0 || chunk_bytes % page_bytes != 0 || chunk_bytes / 64 < static_cast<std::size_t>(world_size))
    throw CommunicatorError(ErrorKind::usage, "staging chunks of " + std::to_string(chunk_bytes) +
                                                  " bytes do not suit " + std::to_string(world_size) +
                                                  " ranks; use a multiple of 4096");
  int fd = -1;
  if (!named_fallback) fd = ::memfd_create("distopt", MFD_CLOEXEC);
  if (fd < 0) fd = ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0)
    throw CommunicatorError(
        ErrorKind::memory,
        std::string("neither memfd_create nor /dev/shm gives shared memory (") + std::strerror(errno) + ")",
        "allow one of them, or choose transport mpi");
  File file(fd);
  ::fchmod(fd, 0600);  // a memfd is open to all who can reach it through /proc
  const std::size_t bytes = control_bytes(world_size, chunk_bytes);
  if (int error = allocate(fd, 0, bytes))
    throw CommunicatorError(
        ErrorKind::memory,
        std::to_string(bytes) + " bytes of shared memory for the ranks of this host: " + std::strerror(error),
        memory_cure(error));
  std::shared_ptr<char> memory = map_shared(fd, 0, sizeof(SegmentHeader));
  auto* header = reinterpret_cast<SegmentHeader*>(memory.get());
  header->magic = segment_magic;
  header->version = segment_version;
  header->world_size = static_cast<std::uint32_t>(world_size);
  header->chunk_bytes = chunk_bytes;
  header->total_bytes = bytes;
  return file.release();
}

Segment::Segment(int fd, int rank, int world_size)
    : file_(std::make_shared<File>(fd)), rank_(rank), world_size_(world_size) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(SegmentHeader)))
    throw CommunicatorError(ErrorKind::launch, "the shared file is too small to be a segment of distopt");
  std::shared_ptr<char> first = map_shared(fd, 0, sizeof(SegmentHeader));
  const auto* header = reinterpret_cast<const SegmentHeader*>(first.get());
  if (header->magic != segment_magic || header->version != segment_version)
    throw CommunicatorError(
        ErrorKind::launch,
        "rank 0 runs another version of distopt; install the same one in every environment of the job");
  if (header->world_size != static_cast<std::uint32_t>(world_size) || rank < 0 || rank >= world_size)
    throw CommunicatorError(ErrorKind::launch, "rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                                                   " does not fit a segment of " + std::to_string(header->world_size) +
                                                   " ranks; check the rank variables that the launcher set");
  chunk_bytes_ = header->chunk_bytes;
  end_ = control_bytes(world_size, chunk_bytes_);
  if (header->total_bytes != end_ || static_cast<std::uint64_t>(status.st_size) < end_)
    throw CommunicatorError(ErrorKind::launch, "the shared file is truncated; restart the job");
  control_ = map_shared(fd, 0, end_);
  slots_ = reinterpret_cast<Slot*>(control_.get() + slots_offset());
  staging_ = control_.get() + staging_offset(world_size);

  cpu_set_t cores;
  CPU_ZERO(&cores);
  static_assert(sizeof(cores) == sizeof(slots_->cores), "one bit per core");
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) std::memcpy(slots_[rank].cores, &cores, sizeof(cores));

  struct flock lock = lock_of(rank, F_WRLCK);
  if (::fcntl(fd, F_SETLK, &lock) != 0)
    throw CommunicatorError(ErrorKind::launch, "another process is rank " + std::to_string(rank) +
                                                   " of this job already; give every process its own rank");
}

Segment::~Segment() { close(); }

// Closing any descriptor of the file drops the lock of this process (POSIX), so there is only one. Arrays that are
// still in use keep it open.
void Segment::close() {
  if (file_) {
    struct flock lock = lock_of(rank_, F_UNLCK);
    ::fcntl(file_->get(), F_SETLK, &lock);
    file_.reset();
  }
  blocks_.clear();
}

char* Segment::inbox(int rank) const {
  return control_.get() + inboxes_offset(world_size_) + inbox_stride(world_size_) * static_cast<std::size_t>(rank);
}

Channel& Segment::channel(int from, int to) const {
  const std::size_t before = (sizeof(Channel) + ring_bytes(world_size_)) * static_cast<std::size_t>(from);
  return *reinterpret_cast<Channel*>(inbox(to) + sizeof(Bell) + before);
}

std::size_t Segment::channel_bytes() const { return ring_bytes(world_size_); }

bool Segment::holds_lock(int rank) const {
  struct flock lock = lock_of(rank, F_WRLCK);
  // A failing question is no evidence of death; the time-out still bounds the wait.
  return !file_ || ::fcntl(file_->get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::uint64_t Segment::next_block() const { return round_up(end_, largest_page_bytes); }

int Segment::allocate_region(std::size_t bytes) {
  const std::size_t stride = round_up(bytes, page_bytes);
  if (stride == 0) return 0;
  return allocate(file_->get(), next_block() + static_cast<std::uint64_t>(rank_) * stride, stride);
}

WireBlock Segment::map_block(std::size_t bytes) {
  const std::size_t stride = round_up(bytes, page_bytes);
  const std::size_t total = stride * static_cast<std::size_t>(world_size_);
  const std::uint64_t offset = next_block();
  WireBlock block{map_arrays(file_, offset, total), offset, stride};
  blocks_.push_back(block);
  end_ = offset + total;
  return block;
}

std::uint64_t Segment::locate(const void* array, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(array);
  for (const WireBlock& block : *located_) {
    const auto region = reinterpret_cast<std::uintptr_t>(block.memory.get()) + rank_ * block.stride;
    if (at >= region && at + bytes <= region + block.stride)
      return block.offset + (at - reinterpret_cast<std::uintptr_t>(block.memory.get()));
  }
  return 0;
}

char* Segment::address(std::uint64_t location) const {
  for (const WireBlock& block : *located_)
    if (location >= block.offset && location - block.offset < block.stride * static_cast<std::size_t>(world_size_))
      return block.memory.get() + (location - block.offset);
  throw CommunicatorError(ErrorKind::launch,
                          "a peer refers to wire memory that this rank does not have; restart the job");
}

}  // namespace distopt
