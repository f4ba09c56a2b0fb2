#include "nccl_board.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace distopt {
namespace {

// FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

bool ragged(OpKind kind) { return kind == OpKind::all_gather_ragged || kind == OpKind::all_to_all_ragged; }

void fill(Descriptor& descriptor, const Request& request) {
  descriptor.count = request.count;
  descriptor.location = 0;
  descriptor.label = hash_of(request.label);
  descriptor.root = request.root;
  descriptor.kind = request.kind;
  descriptor.dtype = static_cast<std::uint8_t>(request.dtype);
  descriptor.op = static_cast<std::uint8_t>(request.op);
}

void copy(Descriptor& to, const Descriptor& from) {
  to.count = from.count;
  to.label = from.label;
  to.root = from.root;
  to.kind = from.kind;
  to.dtype = from.dtype;
  to.op = from.op;
}

bool alike(const Descriptor& a, const Descriptor& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.label == b.label &&
         (a.count == b.count || ragged(a.kind));
}

}  // namespace

std::string describe(const Request& request, std::uint64_t sequence) {
  Descriptor descriptor{};
  fill(descriptor, request);
  char label[label_bytes] = {};
  std::memcpy(label, request.label.data(), std::min(request.label.size(), label_bytes - 1));
  return describe(descriptor, sequence, label);
}

std::string Board::post(std::uint64_t sequence, const Request& request) {
  RingEntry& entry = peers_.entry(peers_.rank(), sequence);
  // Unlike in the shared-memory communicator, peers may still read the entry: it is invalid while it is written.
  entry.descriptor.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  fill(entry.descriptor, request);
  const std::size_t length = std::min(request.label.size(), label_bytes - 1);
  std::memcpy(entry.label, request.label.data(), length);
  entry.label[length] = '\0';
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
    return peers_.name(q) + " is in " + describe(other, sequence, other_label.c_str()) + ", " + me() + " in " +
           describe(mine, sequence, my_label.c_str()) +
           "; all ranks must call the same collectives in the same order with equal types and counts";
  }
  return "";
}

Board::Presence Board::presence(int rank) const {
  const auto closed = [&] { return segment_.slot(rank).closed.load(std::memory_order_acquire) != 0; };
  if (closed()) return Presence::closed;
  if (segment_.holds_lock(rank)) return Presence::here;
  return closed() ? Presence::closed : Presence::ended;  // it may have closed and ended between the two questions
}

ShmError Board::fail(ErrorKind kind, const std::string& text) {
  FailureRecord& record = segment_.header().failure;
  std::uint32_t none = 0;
  if (record.state.compare_exchange_strong(none, 1)) {
    record.kind = static_cast<std::int32_t>(kind);
    const std::size_t length = std::min(text.size(), sizeof(record.text) - 1);
    std::memcpy(record.text, text.data(), length);
    record.text[length] = '\0';
    record.state.store(2, std::memory_order_release);
  }
  return failure();
}

ShmError Board::failure() const {
  const FailureRecord& record = segment_.header().failure;
  // The writer may have been killed half way.
  for (int i = 0; i < 1000 && record.state.load(std::memory_order_acquire) == 1; ++i) ::sched_yield();
  if (record.state.load(std::memory_order_acquire) != 2)
    return ShmError(ErrorKind::peer_lost, "a rank failed and ended before it could say why; see the ranks' output");
  return ShmError(static_cast<ErrorKind>(record.kind), record.text);
}

void Board::close() {
  segment_.slot(peers_.rank()).closed.store(1, std::memory_order_release);
  segment_.close();
}

}  // namespace distopt
