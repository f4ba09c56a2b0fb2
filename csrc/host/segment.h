// The memory that the ranks of one host share: one unnamed file, so that not even SIGKILL leaves anything behind.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/layout.h"
#include "host/mapping.h"

namespace distopt {

// Makes the file of a job of `world_size` ranks and returns its descriptor. `named_fallback` takes an unlinked file in
// /dev/shm instead of a memfd, as if memfd_create were forbidden. Throws CommunicatorError.
int create_segment(int world_size, std::size_t chunk_bytes, bool named_fallback);

// A block of wire memory: one region of equal size for every rank.
struct WireBlock {
  std::shared_ptr<char> memory;  // unmaps when the last array on it is gone
  std::uint64_t offset;          // in the file
  std::size_t stride;            // from one rank's region to the next
};

// The cure for a file in memory that cannot be enlarged.
const char* memory_cure(int error);

class Segment {
 public:
  // Takes over `fd`. Throws CommunicatorError if the file was not made by this version for this world size.
  Segment(int fd, int rank, int world_size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(control_.get()); }
  Slot& slot(int rank) const { return slots_[rank]; }
  char* staging(int rank, std::uint64_t chunk) const {
    return staging_ + (rank * staging_buffers + chunk % staging_buffers) * chunk_bytes_;
  }

  // Messages from rank `from` to rank `to`: its counts, and its ring of `channel_bytes`.
  Bell& bell(int rank) const { return *reinterpret_cast<Bell*>(inbox(rank)); }
  Channel& channel(int from, int to) const;
  char* ring(int from, int to) const { return reinterpret_cast<char*>(&channel(from, to) + 1); }
  std::size_t channel_bytes() const;

  // Whether the process of that rank lives and has not left. The kernel releases the lock at the end of
  // the process, even before the parent has reaped it, and across process namespaces.
  bool holds_lock(int rank) const;
  // Gives up the wire memory that no array uses any more, and the lock, so that peers see this rank as gone.
  void close();

  // Backs this rank's region of the next block with memory; an errno, 0 for success. All ranks must have done so
  // before any of them calls map_block().
  int allocate_region(std::size_t bytes);
  WireBlock map_block(std::size_t bytes);
  // From now on locate() and address() mean the blocks of `owner`, which has the same ranks and outlives this.
  void use_blocks_of(const Segment& owner) { located_ = &owner.blocks_; }

  // Offset in the file of an array that lies in this rank's wire memory, else 0.
  std::uint64_t locate(const void* array, std::size_t bytes) const;
  // The address here of a peer's location.
  char* address(std::uint64_t location) const;

 private:
  char* inbox(int rank) const;
  std::uint64_t next_block() const;

  std::shared_ptr<File> file_;
  int rank_;
  int world_size_;
  std::size_t chunk_bytes_ = 0;
  std::shared_ptr<char> control_;
  Slot* slots_ = nullptr;
  char* staging_ = nullptr;
  std::uint64_t end_ = 0;  // of the part of the file that is in use
  std::vector<WireBlock> blocks_;
  const std::vector<WireBlock>* located_ = &blocks_;
};

}  // namespace distopt
