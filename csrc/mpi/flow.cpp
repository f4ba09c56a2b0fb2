#include "mpi/flow.h"

#include <algorithm>
#include <utility>

#include "shm/reduce.h"

namespace distopt::mpi {
namespace {

// Small enough for a chunk to be reduced while it is in the cache and the next is on its way.
constexpr std::size_t chunk_bytes = 256 << 10;
// Chunks from one rank that may have arrived before the first of them is reduced.
constexpr std::size_t window = 4;

std::size_t chunks_of(std::size_t bytes) { return (bytes + chunk_bytes - 1) / chunk_bytes; }

Piece chunk_of(const Piece& piece, std::size_t chunk) {
  const std::size_t begin = chunk * chunk_bytes;
  return {piece.data + begin, std::min(chunk_bytes, piece.bytes - begin)};
}

template <typename T>
void divide(void* data, std::size_t count, int divisor) {
  T* values = static_cast<T*>(data);
  for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<T>(divisor);
}

}  // namespace

Flow::Flow(World& world, std::vector<int> ranks, int tag)
    : world_(world), ranks_(std::move(ranks)), tag_(tag), plan_(ranks_.size(), 0) {}

Flow::~Flow() { world_.pool.give(std::move(scratch_)); }

std::vector<Flow::Lane> Flow::lanes_of(const std::vector<Piece>& pieces) {
  std::vector<Lane> lanes(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    lanes[i].piece = pieces[i];
    lanes[i].chunks = chunks_of(pieces[i].bytes);
    lanes[i].done = std::make_unique<bool[]>(lanes[i].chunks);
  }
  return lanes;
}

void Flow::begin(Plan plan) {
  plan_ = std::move(plan);
  to_ = lanes_of(plan_.to);
  from_ = lanes_of(plan_.from);
  collected_ = lanes_of(plan_.collected);
  std::vector<Piece> shared(ranks_.size());
  for (std::size_t i = 0; i < shared.size(); ++i)
    if (plan_.shared_with[i]) shared[i] = plan_.result;
  shared_ = lanes_of(shared);
  ready_chunks_ = chunks_of(plan_.result.bytes);
  // Chunk by chunk, and to the next rank first, so that no rank gets all at once.
  bool more = true;
  for (std::size_t chunk = 0; more; ++chunk) {
    more = false;
    for (std::size_t step = 1; step < ranks_.size(); ++step) {
      const std::size_t i = (plan_.place + step) % ranks_.size();
      if (to_[i].started == to_[i].chunks) continue;
      send(to_[i], i, tag_);
      more = true;
    }
  }
  work_off();
}

void Flow::admit() {
  admitted_ = true;
  if (!plan_.reduction) return;
  slots_ = std::min(window, ready_chunks_);
  slot_bytes_ = std::min(chunk_bytes, plan_.result.bytes);
  scratch_ = world_.pool.take(ranks_.size() * slots_ * slot_bytes_);
}

void Flow::send(Lane& lane, std::size_t place, int tag) {
  const Piece chunk = chunk_of(lane.piece, lane.started);
  world_.transport.send(chunk.data, chunk.bytes, ranks_[place], tag, lane.done[lane.started]);
  ++lane.started;
}

void Flow::receive(Lane& lane, std::size_t place, int tag, char* into) {
  const std::size_t bytes = chunk_of(lane.piece, lane.started).bytes;
  world_.transport.receive(into, bytes, ranks_[place], tag, lane.done[lane.started]);
  ++lane.started;
}

bool Flow::advance() {
  for (std::vector<Lane>* lanes : {&to_, &from_, &shared_, &collected_})
    for (Lane& lane : *lanes) lane.look();
  if (admitted_) {
    work_off();
    receive_first();
    receive_second();
  }
  if (!admitted_ || ready_ < ready_chunks_) return false;
  for (const std::vector<Lane>* lanes : {&to_, &from_, &shared_, &collected_})
    for (const Lane& lane : *lanes)
      if (!lane.complete()) return false;
  return true;
}

char* Flow::scratch_of(std::size_t place, std::size_t chunk) const {
  return scratch_.data() + (place * slots_ + chunk % slots_) * slot_bytes_;
}

void Flow::receive_first() {
  for (std::size_t i = 0; i < from_.size(); ++i) {
    Lane& lane = from_[i];
    while (lane.started < lane.chunks && (!plan_.reduction || lane.started < ready_ + slots_)) {
      char* into = plan_.reduction ? scratch_of(i, lane.started) : chunk_of(lane.piece, lane.started).data;
      receive(lane, i, tag_, into);
    }
  }
}

// Reduces what has arrived, and hands it on.
void Flow::work_off() {
  for (; ready_ < ready_chunks_ && has_arrived(ready_); ++ready_) {
    if (plan_.reduction) reduce(ready_);
    for (std::size_t step = 1; step < ranks_.size(); ++step) {
      const std::size_t i = (plan_.place + step) % ranks_.size();
      if (plan_.shared_with[i]) send(shared_[i], i, tag_ + 1);
    }
  }
}

bool Flow::has_arrived(std::size_t chunk) const {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (from_[i].chunks != 0 && from_[i].ended <= chunk) return false;
    if (plan_.reduction && plan_.reduction->is_sent && to_[i].chunks != 0 && to_[i].ended <= chunk) return false;
  }
  return true;
}

void Flow::reduce(std::size_t chunk) {
  const Reduction& reduction = *plan_.reduction;
  const Piece out = chunk_of(plan_.result, chunk);
  std::vector<const void*> ins(ranks_.size());
  for (std::size_t i = 0; i < ins.size(); ++i)
    ins[i] = i == plan_.place ? reduction.own + chunk * chunk_bytes : scratch_of(i, chunk);
  const std::size_t count = out.bytes / item_bytes(reduction.dtype);
  void* const outs[] = {out.data};
  reduce_kernels().reduce(outs, 1, ins.data(), static_cast<int>(ins.size()), count, reduction.dtype, reduction.op);
  if (reduction.divisor == 1) return;
  if (reduction.dtype == DType::float64)
    divide<double>(out.data, count, reduction.divisor);
  else
    divide<float>(out.data, count, reduction.divisor);
}

void Flow::receive_second() {
  for (std::size_t i = 0; i < collected_.size(); ++i) {
    Lane& lane = collected_[i];
    // What phase one sends may lie where this is to arrive.
    while (lane.started < lane.chunks && (to_[i].chunks == 0 || lane.started < to_[i].ended))
      receive(lane, i, tag_ + 1, chunk_of(lane.piece, lane.started).data);
  }
}

}  // namespace distopt::mpi
