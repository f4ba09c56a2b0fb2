#include "nccl/board.h"

namespace distopt {
namespace {

void copy(Descriptor& to, const Descriptor& from) {
  to.count = from.count;
  to.label = from.label;
  to.root = from.root;
  to.kind = from.kind;
  to.dtype = from.dtype;
  to.op = from.op;
}

}  // namespace

std::optional<CommunicatorError> Board::post(std::uint64_t sequence, const Arguments& arguments) {
  RingEntry& entry = peers_.entry(peers_.rank(), sequence);
  // Unlike in the shared-memory communicator, peers may still read the entry: it is invalid while it is written.
  entry.descriptor.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  fill(entry.descriptor, entry.label, arguments);
  peers_.publish_post(sequence);
  return mismatch(sequence);
}

bool Board::read(int rank, std::uint64_t sequence, Descriptor& descriptor, Call& call) const {
  const RingEntry& entry = peers_.entry(rank, sequence);
  if (entry.descriptor.sequence.load(std::memory_order_acquire) != sequence) return false;
  copy(descriptor, entry.descriptor);
  call = call_of(peers_.process(rank).rank, descriptor, sequence, entry.label);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return entry.descriptor.sequence.load(std::memory_order_relaxed) == sequence;
}

std::optional<CommunicatorError> Board::mismatch(std::uint64_t sequence) const {
  Descriptor mine{}, other{};
  Call my_call{}, their_call{};
  if (!read(peers_.rank(), sequence, mine, my_call)) return {};
  for (int q = 0; q < peers_.size(); ++q)
    if (q != peers_.rank() && read(q, sequence, other, their_call) && !alike(mine, other))
      return mismatch_between(peers_.process(q), their_call, peers_.me(), my_call);
  return {};
}

void Board::close() {
  segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

}  // namespace distopt
