#include "nccl/board.h"

namespace distopt {

std::optional<CommunicatorError> Board::post(std::uint64_t sequence, const Arguments& arguments) {
  RingEntry& entry = peers_.entry(peers_.rank(), sequence);
  // Unlike in the shared-memory communicator, peers may still read the entry: it is invalid while it is written.
  entry.descriptor.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  fill(entry.descriptor, entry.label, arguments);
  peers_.publish_post(sequence);
  return mismatch(sequence);
}

std::optional<CommunicatorError> Board::mismatch(std::uint64_t sequence) const {
  const RingEntry& mine = peers_.entry(peers_.rank(), sequence);
  for (int q = 0; q < peers_.size(); ++q) {
    const RingEntry& other = peers_.entry(q, sequence);
    if (other.descriptor.sequence.load(std::memory_order_acquire) != sequence) continue;
    const bool differs = !alike(mine.descriptor, other.descriptor);
    const Call theirs = call_of(peers_.process(q).rank, other.descriptor, sequence, other.label);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!differs || other.descriptor.sequence.load(std::memory_order_relaxed) != sequence) continue;  // written anew
    return mismatch_between(peers_.process(q), theirs, peers_.me(),
                            call_of(peers_.me().rank, mine.descriptor, sequence, mine.label));
  }
  return {};
}

void Board::close() {
  segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

}  // namespace distopt
