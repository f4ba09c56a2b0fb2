#include "nccl/board.h"

#include <cstring>

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

std::string Board::post(std::uint64_t sequence, const Request& request) {
  RingEntry& entry = peers_.entry(peers_.rank(), sequence);
  // Unlike in the shared-memory communicator, peers may still read the entry: it is invalid while it is written.
  entry.descriptor.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  fill(entry.descriptor, entry.label, request);
  peers_.publish_post(sequence);
  return mismatch(sequence);
}

bool Board::read(int rank, std::uint64_t sequence, Descriptor& descriptor, std::string& label) const {
  const RingEntry& entry = peers_.entry(rank, sequence);
  if (entry.descriptor.sequence.load(std::memory_order_acquire) != sequence) return false;
  copy(descriptor, entry.descriptor);
  label.assign(entry.label, ::strnlen(entry.label, label_bytes - 1));
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return entry.descriptor.sequence.load(std::memory_order_relaxed) == sequence;
}

std::string Board::mismatch(std::uint64_t sequence) const {
  Descriptor mine{}, other{};
  std::string my_label, other_label;
  if (!read(peers_.rank(), sequence, mine, my_label)) return "";
  for (int q = 0; q < peers_.size(); ++q) {
    if (q == peers_.rank() || !read(q, sequence, other, other_label) || alike(mine, other)) continue;
    return mismatch_between(peers_.name(q), describe(other, sequence, other_label.c_str()), me(),
                            describe(mine, sequence, my_label.c_str()));
  }
  return "";
}

Board::Presence Board::presence(int rank) const {
  const auto closed = [&] { return segment_.slot(rank).closed.load(std::memory_order_acquire) != 0; };
  if (closed()) return Presence::closed;
  if (segment_.holds_lock(rank)) return Presence::here;
  return closed() ? Presence::closed : Presence::ended;  // it may have closed and ended between the two questions
}

void Board::close() {
  segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

}  // namespace distopt
