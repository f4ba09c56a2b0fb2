#include "net/flow.h"

#include <algorithm>
#include <utility>

#include "cpu/reduce.h"

namespace distopt::net {
namespace {

// Chunks on their way between two ranks, for each stream, so that the network has little to look through.
constexpr std::size_t in_flight = 8;
// Chunks from one rank, for each stream, that may have arrived before the first of them is reduced: so many, or of so
// many bytes together.
constexpr std::size_t window = 2, window_bytes = 2 << 20;

template <typename T>
void divide_as(void* data, std::size_t count, int divisor) {
  T* values = static_cast<T*>(data);
  for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<T>(divisor);
}

}  // namespace

void divide(void* data, std::size_t count, DType dtype, int divisor) {
  if (dtype == DType::float64)
    divide_as<double>(data, count, divisor);
  else
    divide_as<float>(data, count, divisor);
}

std::size_t Flow::chunks_of(std::size_t bytes) const { return (bytes + chunk_bytes_ - 1) / chunk_bytes_; }

int Flow::stream_of(std::size_t chunk) const {
  return static_cast<int>(chunk % static_cast<std::size_t>(context_.transport.streams()));
}

ByteSpan Flow::chunk_of(const ByteSpan& piece, std::size_t chunk) const {
  const std::size_t begin = chunk * chunk_bytes_;
  return {piece.data + begin, std::min(chunk_bytes_, piece.bytes - begin)};
}

std::vector<Flow::PieceTransfer> Flow::transfers_of(const std::vector<ByteSpan>& pieces) const {
  std::vector<PieceTransfer> transfers(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    transfers[i].piece = pieces[i];
    transfers[i].chunks = chunks_of(pieces[i].bytes);
    transfers[i].most_under_way = in_flight * static_cast<std::size_t>(context_.transport.streams());
    transfers[i].done = std::make_unique<bool[]>(transfers[i].chunks);
  }
  return transfers;
}

void Flow::begin(FlowPlan plan) {
  plan_ = std::move(plan);
  chunk_bytes_ = plan_.chunk_bytes.value_or(context_.chunk_bytes);
  to_ = transfers_of(plan_.to);
  from_ = transfers_of(plan_.from);
  collected_ = transfers_of(plan_.collected);
  std::vector<ByteSpan> shared(group_.size());
  for (std::size_t i = 0; i < shared.size(); ++i)
    if (plan_.shared_with[i]) shared[i] = plan_.result;
  shared_ = transfers_of(shared);
  ready_chunks_ = chunks_of(plan_.result.bytes);
  send_what_may_go();
}

// Allocates what receiving needs.
void Flow::admit() {
  if (!plan_.reduction) return;
  const std::size_t streams = static_cast<std::size_t>(context_.transport.streams());
  slots_ = std::min(std::max(window * streams, window_bytes / chunk_bytes_), ready_chunks_);
  slot_bytes_ = std::min(chunk_bytes_, plan_.result.bytes);
  scratch_ = context_.pool.take(group_.size() * slots_ * slot_bytes_);
}

bool Flow::advance() {
  if (!std::exchange(admitted_, true)) admit();
  bool complete = true;
  for (std::vector<PieceTransfer>* transfers : {&to_, &from_, &shared_, &collected_})
    for (PieceTransfer& transfer : *transfers) complete = transfer.poll() && complete;
  while (ready_ < ready_chunks_ && has_arrived(ready_)) {
    if (plan_.reduction) reduce(ready_);
    ++ready_;
  }
  send_what_may_go();
  receive_what_may_come();
  return complete && ready_ == ready_chunks_;
}

// Chunk by chunk, and to the next rank first, so that no rank gets all at once.
void Flow::send_what_may_go() {
  for (bool more = true; more;) {
    more = false;
    for (std::size_t step = 1; step < group_.size(); ++step) {
      const std::size_t i = (group_.place + step) % group_.size();
      more = send(to_[i], i, tag_, plan_.continued_by == i ? ready_ : to_[i].chunks) || more;
      more = send(shared_[i], i, tag_ + 1, final_chunks()) || more;
    }
  }
}

// The next chunk, if it is below `limit`.
bool Flow::send(PieceTransfer& transfer, std::size_t place, int tag, std::size_t limit) {
  if (!transfer.may_start(limit)) return false;
  const ByteSpan chunk = chunk_of(transfer.piece, transfer.started);
  context_.transport.send(chunk.data, chunk.bytes, group_.ranks[place], {tag, stream_of(transfer.started)},
                          transfer.done[transfer.started]);
  ++transfer.started;
  return true;
}

void Flow::receive_what_may_come() {
  for (std::size_t i = 0; i < group_.size(); ++i) {
    PieceTransfer &first = from_[i], &second = collected_[i];
    while (first.may_start(plan_.reduction ? ready_ + slots_ : first.chunks))
      receive(first, i, tag_,
              plan_.reduction ? scratch_of(i, first.started) : chunk_of(first.piece, first.started).data);
    // Data that phase one sends may lie where this is to arrive.
    while (second.may_start(to_[i].chunks == 0 ? second.chunks : to_[i].ended))
      receive(second, i, tag_ + 1, chunk_of(second.piece, second.started).data);
  }
}

void Flow::receive(PieceTransfer& transfer, std::size_t place, int tag, char* into) {
  const std::size_t bytes = chunk_of(transfer.piece, transfer.started).bytes;
  context_.transport.receive(into, bytes, group_.ranks[place], {tag, stream_of(transfer.started)},
                             transfer.done[transfer.started]);
  ++transfer.started;
}

char* Flow::scratch_of(std::size_t place, std::size_t chunk) const {
  return scratch_.data() + (place * slots_ + chunk % slots_) * slot_bytes_;
}

bool Flow::has_arrived(std::size_t chunk) const {
  for (std::size_t i = 0; i < group_.size(); ++i) {
    if (from_[i].chunks != 0 && from_[i].ended <= chunk) return false;
    if (plan_.reduction && plan_.reduction->is_sent && to_[i].chunks != 0 && to_[i].ended <= chunk) return false;
  }
  return true;
}

void Flow::reduce(std::size_t chunk) {
  const ChunkReduction& reduction = *plan_.reduction;
  const ByteSpan out = chunk_of(plan_.result, chunk);
  std::vector<const void*> ins;
  for (std::size_t i = 0; i < group_.size(); ++i) {
    if (i == group_.place) ins.push_back(reduction.own + chunk * chunk_bytes_);
    if (from_[i].chunks != 0) ins.push_back(scratch_of(i, chunk));
  }
  const std::size_t count = out.bytes / item_bytes(reduction.dtype);
  void* const outs[] = {out.data};
  reduce_kernels().reduce(outs, 1, ins.data(), static_cast<int>(ins.size()), count, reduction.dtype, reduction.op,
                          false);
  if (reduction.divisor != 1) divide(out.data, count, reduction.dtype, reduction.divisor);
}

}  // namespace distopt::net
