// The layout of the start of the segment, byte for byte: every rank maps it, and every field has one writer.
//
//   SegmentHeader | Slot of rank 0 | ... | Inbox of rank 0 | ... | staging of rank 0 | ... | wire blocks ...
//
// Pages come zeroed from the kernel, and zero is the valid initial value of everything but the header.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "host/arguments.h"

namespace distopt {

constexpr std::uint64_t segment_magic = 0x74706f7473696400;
constexpr std::uint32_t segment_version = 7;
// Two lines, because x86 prefetches lines in pairs.
constexpr std::size_t line_bytes = 128;
// Collectives that a rank may have posted before its slowest peer has finished the first of them.
constexpr std::uint64_t ring_size = 32;
// Arguments up to this size travel in the descriptor's own ring entry: one synchronisation instead of two.
constexpr std::size_t inline_bytes = 4096;
// Chunks in flight per rank. The pipeline copies chunk k in, reduces k-1 and copies k-2 out; the fourth lets a rank
// run one chunk ahead of the slowest peer.
constexpr std::uint64_t staging_buffers = 4;
static_assert(staging_buffers >= 3, "with two, each rank waits to copy in until the others have copied out");

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// A rank's description of a collective that it starts. `sequence` is written last and makes the rest valid.
struct alignas(64) Descriptor {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t count;     // elements; those of one part where the whole is world_size parts
  std::uint64_t location;  // offset in the segment where peers can read the argument; 0: not in wire memory
  std::uint64_t label;     // its hash: two buckets of one size are not the same collective
  std::int32_t root;
  OpKind kind;
  std::uint8_t dtype;
  std::uint8_t op;
  bool looks;            // for NaN and infinity
  std::uint8_t refused;  // rank 0 found too little memory for `empty`
};
static_assert(sizeof(Descriptor) == 64, "peers poll one line");

struct alignas(64) RingEntry {
  Descriptor descriptor;
  unsigned char payload[inline_bytes];
  char label[label_bytes];
  Nonfinite nonfinite;  // of one that looks: the result of this rank so far
};

// Counts of a rank's actions since the start. All ranks run the same collectives, so equal counts mean equal places.
enum class Signal : int { copied_in, reduced, copied_out, finished, posted };
constexpr int counter_count = 4;  // `posted` is the sequence number in the ring instead

struct alignas(line_bytes) Slot {
  std::atomic<std::uint64_t> counters[counter_count];
  alignas(line_bytes) std::atomic<std::uint32_t> sleepers;  // peers that sleep on a word of this slot
  alignas(line_bytes) std::atomic<std::uint32_t> closed;
  std::atomic<std::uint32_t> allocation_errno;
  std::atomic<std::int64_t> asked;  // when it last waited or polled, in nanoseconds of the host's steady clock
  std::uint64_t cores[16];          // bit set of the cores that this rank may run on
  alignas(line_bytes) RingEntry ring[ring_size];
};

// Where messages for a rank arrive: for every sender, a ring of bytes. Counts of bytes only grow.
struct alignas(line_bytes) Channel {
  std::atomic<std::uint64_t> written;                    // by the sender
  alignas(line_bytes) std::atomic<std::uint64_t> taken;  // by the receiver
};
// One for each rank, which it rings wherever something has changed that this rank may wait for.
struct alignas(line_bytes) Bell {
  std::atomic<std::uint64_t> rings;
  alignas(line_bytes) std::atomic<std::uint32_t> sleepers;
};
// Size of all rings of an inbox together: half of a core's second-level cache, so that data is read from there.
constexpr std::size_t inbox_bytes = 256 << 10;

// The first failure of the job. `state` goes 0 -> 1 + rank (which writes it) -> record_valid.
constexpr std::uint32_t record_valid = UINT32_MAX;
struct FailureRecord {
  std::atomic<std::uint32_t> state;
  std::int32_t kind;
  std::uint32_t call_count;
  Call calls[2];
  std::uint64_t ranks[16];  // bit set of those at fault, by their numbers in the segment
  char fact[2048], cure[256];
};

struct alignas(4096) SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t world_size;
  std::uint64_t chunk_bytes;
  std::uint64_t total_bytes;
  alignas(line_bytes) FailureRecord failure;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "atomics with a lock do not work between processes");

}  // namespace distopt
