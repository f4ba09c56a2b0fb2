#include "mpi/operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/reduce.h"
#include "mpi/plans.h"

namespace distopt::mpi {
void Operation::enqueue(World& world, std::uint64_t sequence, std::uint64_t first_tag) {
  world_ = &world;
  sequence_ = sequence;
  first_tag_ = first_tag;
}

void Operation::begin() {
  const auto size = static_cast<std::size_t>(world_->size());
  const char* payload = nullptr;
  std::size_t bytes = 0;
  if (request_.kind == OpKind::all_to_all_ragged) {
    for (const Piece& part : request_.parts) counts_.push_back(part.bytes / item_bytes(request_.dtype));
    payload = reinterpret_cast<const char*>(counts_.data());
    bytes = size * sizeof(std::uint64_t);
  } else if (travels_inline() && (request_.kind != OpKind::broadcast || request_.root == world_->rank)) {
    payload = request_.input;
    bytes = request_.input_bytes(world_->size());
  }
  announce(payload, bytes);
  const bool ragged = request_.kind == OpKind::all_gather_ragged || request_.kind == OpKind::all_to_all_ragged;
  if (ragged || travels_inline()) return;
  start_flow(plan());
}

void Operation::announce(const char* payload, std::size_t bytes) {
  begun_ = true;
  agreement_ = std::make_unique<Agreement>(*world_, tag());
  agreement_->begin(request_, sequence_, payload, bytes);
}

void Operation::start_flow(Plan plan) {
  flow_ = std::make_unique<Flow>(*world_, world_->everyone, tag() + 1);
  flow_->begin(std::move(plan));
}

bool Operation::advance() {
  if (finished_) return true;
  if (!agree()) return false;
  if (!admitted_) {
    admitted_ = true;
    if (request_.kind == OpKind::all_gather_ragged || request_.kind == OpKind::all_to_all_ragged) make_room();
    if (!flow_) take_inline();
  }
  if (flow_ && !flow_->advance()) return false;
  finish();
  return true;
}

void Operation::finish() {
  finished_ = true;
  agreement_.reset();
  flow_.reset();
}

Plan Operation::plan() const {
  const Group& everyone = world_->everyone;
  switch (request_.kind) {
    case OpKind::all_reduce:
      return plan_all_reduce(request_, everyone, world_->chunk_bytes);
    case OpKind::reduce_scatter:
      return plan_reduce_scatter(request_, everyone);
    case OpKind::all_gather:
      return plan_all_gather(request_, everyone);
    case OpKind::broadcast:
      return plan_broadcast(request_, everyone);
    default:
      return Plan(everyone);
  }
}

void Operation::take_inline() {
  const auto size = static_cast<std::size_t>(world_->size());
  const std::size_t part = request_.part_bytes();
  switch (request_.kind) {
    case OpKind::all_reduce:
      reduce_payloads(request_.output, request_.count);
      break;
    case OpKind::reduce_scatter:
      reduce_payloads(request_.output, request_.count, part * static_cast<std::size_t>(world_->rank));
      break;
    case OpKind::all_gather:
      for (std::size_t i = 0; i < size; ++i)
        std::memcpy(request_.output + i * part, agreement_->payload_of(static_cast<int>(i)), part);
      break;
    case OpKind::broadcast:
      if (request_.root != world_->rank) std::memcpy(request_.output, agreement_->payload_of(request_.root), part);
      break;
    default:
      break;
  }
}

void Operation::reduce_payloads(char* out, std::uint64_t count, std::size_t offset) const {
  std::vector<const void*> ins;
  for (int rank = 0; rank < world_->size(); ++rank) ins.push_back(agreement_->payload_of(rank) + offset);
  void* const outs[] = {out};
  reduce_kernels().reduce(outs, 1, ins.data(), world_->size(), count, request_.dtype, request_.op, false);
}

// Ragged operations: the counts are known now.
void Operation::make_room() {
  const auto size = static_cast<std::size_t>(world_->size()), rank = static_cast<std::size_t>(world_->rank);
  const std::size_t item = item_bytes(request_.dtype);
  const bool gathers = request_.kind == OpKind::all_gather_ragged;
  counts_.clear();
  for (int q = 0; q < world_->size(); ++q) {
    std::uint64_t count = agreement_->count_of(q);
    if (!gathers) std::memcpy(&count, agreement_->payload_of(q) + rank * sizeof count, sizeof count);
    counts_.push_back(count);
  }
  const std::vector<char*> outputs = allocate(counts_);
  const auto bytes_from = [&](std::size_t q) { return counts_[q] * item; };
  const std::size_t longest = *std::max_element(counts_.begin(), counts_.end()) * item;
  if (gathers && longest <= world_->inline_bytes) {
    for (std::size_t q = 0; q < size; ++q)
      std::memcpy(outputs[q], agreement_->payload_of(static_cast<int>(q)), bytes_from(q));
    return;
  }
  Plan plan(world_->everyone);
  for (std::size_t q = 0; q < size; ++q) {
    const Piece own = gathers ? Piece{const_cast<char*>(request_.input), request_.part_bytes()} : request_.parts[q];
    if (q == rank) {
      if (own.bytes != 0) std::memcpy(outputs[q], own.data, own.bytes);
      continue;
    }
    plan.to[q] = own;
    plan.from[q] = {outputs[q], bytes_from(q)};
  }
  start_flow(std::move(plan));
}

}  // namespace distopt::mpi
