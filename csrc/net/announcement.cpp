#include "net/announcement.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"

namespace distopt::net {

std::size_t Announcement::block_bytes(std::size_t payload_bytes) {
  return (sizeof(Said) + payload_bytes + alignof(Said) - 1) / alignof(Said) * alignof(Said);
}

std::size_t Announcement::room_for(int blocks) const {
  // all_to_all_ragged sends the counts of all its parts.
  const std::size_t counts = static_cast<std::size_t>(context_.size()) * sizeof(std::uint64_t);
  return static_cast<std::size_t>(blocks) * block_bytes(std::max(context_.inline_bytes, counts));
}

void Announcement::describe(const Arguments& arguments, std::uint64_t sequence, const char* payload,
                            std::size_t payload_bytes) {
  const int size = context_.size();
  memory_ = context_.pool.take(room_for(size));
  said_.assign(static_cast<std::size_t>(size), nullptr);
  auto* mine = new (memory_.data()) Said{};
  fill(mine->descriptor, mine->label, arguments);
  mine->descriptor.sequence.store(sequence, std::memory_order_relaxed);
  mine->descriptor.location = static_cast<std::uint64_t>(context_.rank);
  mine->payload_bytes = payload_bytes;
  if (payload_bytes != 0) std::memcpy(memory_.data() + sizeof(Said), payload, payload_bytes);
  said_[context_.rank] = mine;
  n_said_ = 1;
  ends_.push_back(block_bytes(payload_bytes));
}

void Announcement::begin() {
  if (context_.announces_to_all()) return send_to_all();
  exchanges_ = context_.size() > 1;
  if (exchanges_) exchange();
}

void Announcement::send_to_all() {
  const int size = context_.size(), rank = context_.rank;
  direct_ = std::make_unique<bool[]>(2 * static_cast<std::size_t>(size));
  bool* const sent = direct_.get();
  bool* const received = sent + size;
  sent[rank] = received[rank] = true;
  const std::size_t room = room_for(1);
  for (int step = 1; step < size; ++step) {
    const int from = (rank + size - step) % size;
    char* const block = memory_.data() + static_cast<std::size_t>(step) * room;
    context_.transport.receive(block, room, from, {tag_}, received[from]);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    context_.transport.send(memory_.data(), ends_.front(), to, {tag_}, sent[to]);
  }
}

bool Announcement::advance_to_all() {
  const int size = context_.size(), rank = context_.rank;
  const bool* const sent = direct_.get();
  const bool* const received = sent + size;
  for (int step = 1; step < size; ++step) {
    const int from = (rank + size - step) % size;
    if (received[from] && said_[from] == nullptr) note(memory_.data() + static_cast<std::size_t>(step) * room_for(1));
  }
  if (n_said_ < said_.size() || !std::all_of(sent, sent + size, [](bool done) { return done; })) return false;
  compare();
  complete_ = true;
  return true;
}

// Starts a round: sends the blocks that the partner lacks, and receives as many.
void Announcement::exchange() {
  const int size = context_.size(), rank = context_.rank, blocks = blocks_of_round();
  const bool doubling = (size & (size - 1)) == 0;
  // The first round, whose messages are the shortest, is between ranks that are the furthest apart: most often on two
  // hosts.
  const int to = doubling ? rank ^ (size / 2 / distance_) : (rank + size - distance_) % size;
  const int from = doubling ? to : (rank + distance_) % size;
  context_.transport.receive(memory_.data() + ends_.back(), room_for(blocks), from, {tag_}, received_);
  context_.transport.send(memory_.data(), ends_[static_cast<std::size_t>(blocks - 1)], to, {tag_}, sent_);
}

bool Announcement::advance() {
  if (direct_ && !complete_) return advance_to_all();
  while (!complete_) {
    if (!sent_ || !received_) return false;
    if (exchanges_ && distance_ < context_.size()) take_in();
    if (exchanges_ && distance_ < context_.size()) {
      exchange();
    } else if (n_said_ < said_.size()) {
      return false;
    } else {
      compare();
      complete_ = true;
    }
  }
  return true;
}

void Announcement::take_in() {
  for (int blocks = blocks_of_round(); blocks > 0; --blocks) {
    const char* const block = memory_.data() + ends_.back();
    ends_.push_back(static_cast<std::size_t>(note(block) - memory_.data()));
  }
  distance_ *= 2;
}

const char* Announcement::note(const char* block) {
  const auto* said = reinterpret_cast<const Said*>(block);
  n_said_ += said_[said->descriptor.location] == nullptr;
  said_[said->descriptor.location] = said;
  return block + block_bytes(said->payload_bytes);
}

bool Announcement::differs() const {
  const Said& mine = *said_[context_.rank];
  return std::any_of(said_.begin(), said_.end(), [&mine](const Said* said) {
    return said != nullptr && !alike(mine.descriptor, said->descriptor);
  });
}

std::vector<int> Announcement::unheard() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < context_.size(); ++rank)
    if (said_[rank] == nullptr) ranks.push_back(rank);
  return ranks;
}

void Announcement::compare() const {
  const auto call = [this](int rank) {
    const Said& said = *said_[rank];
    const std::uint64_t number = said.descriptor.sequence.load(std::memory_order_relaxed);
    return call_of(context_.processes[rank].rank, said.descriptor, number, said.label);
  };
  for (int rank = 0; rank < context_.size(); ++rank)
    if (!alike(said_[context_.rank]->descriptor, said_[rank]->descriptor))
      throw mismatch_between(context_.processes[rank], call(rank), context_.processes[context_.rank],
                             call(context_.rank));
}

}  // namespace distopt::net
