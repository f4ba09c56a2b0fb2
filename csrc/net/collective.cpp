#include "net/collective.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/reduce.h"
#include "net/plans.h"

namespace distopt::net {
void NetCollective::enqueue(Context& context, std::uint64_t sequence, std::uint64_t first_tag) {
  context_ = &context;
  sequence_ = sequence;
  first_tag_ = first_tag;
}

void NetCollective::begin() {
  const auto size = static_cast<std::size_t>(context_->size());
  const char* payload = nullptr;
  std::size_t bytes = 0;
  if (arguments_.kind == OpKind::all_to_all_ragged) {
    for (const ByteSpan& part : arguments_.parts) counts_.push_back(part.bytes / item_bytes(arguments_.dtype));
    payload = reinterpret_cast<const char*>(counts_.data());
    bytes = size * sizeof(std::uint64_t);
  } else if (travels_inline() && (arguments_.kind != OpKind::broadcast || arguments_.root == context_->rank)) {
    payload = arguments_.input;
    bytes = arguments_.input_bytes(context_->size());
  }
  announce(payload, bytes);
  const bool ragged = arguments_.kind == OpKind::all_gather_ragged || arguments_.kind == OpKind::all_to_all_ragged;
  if (ragged || travels_inline()) return;
  const bool has_partner = !context_->two_hosts.ranks.empty();
  if (has_partner && arguments_.kind == OpKind::all_reduce && rounds_each_operation(arguments_.dtype))
    start_flow(context_->two_hosts, plan_over_two_hosts(arguments_, *context_));
  else
    start_flow(context_->everyone, plan());
}

void NetCollective::announce(const char* payload, std::size_t bytes) {
  begun_ = true;
  announcement_ = std::make_unique<Announcement>(*context_, tag());
  announcement_->describe(arguments_, sequence_, payload, bytes);
  announcement_->begin();
}

void NetCollective::start_flow(const Group& group, FlowPlan plan) {
  flow_ = std::make_unique<Flow>(*context_, group, tag() + 1);
  flow_->begin(std::move(plan));
}

bool NetCollective::advance() {
  if (finished_) return true;
  if (!agree()) return false;
  if (!admitted_) {
    admitted_ = true;
    if (arguments_.kind == OpKind::all_gather_ragged || arguments_.kind == OpKind::all_to_all_ragged) make_room();
    if (!flow_) take_inline();
  }
  if (flow_ && !flow_->advance()) return false;
  finish();
  return true;
}

void NetCollective::finish() {
  finished_ = true;
  announcement_.reset();
  flow_.reset();
}

FlowPlan NetCollective::plan() const {
  const Group& everyone = context_->everyone;
  switch (arguments_.kind) {
    case OpKind::all_reduce:
      return plan_all_reduce(arguments_, everyone, *context_);
    case OpKind::reduce_scatter:
      return plan_reduce_scatter(arguments_, everyone);
    case OpKind::all_gather:
      return plan_all_gather(arguments_, everyone);
    case OpKind::broadcast:
      return plan_broadcast(arguments_, everyone);
    default:
      return FlowPlan(everyone);
  }
}

void NetCollective::take_inline() {
  const auto size = static_cast<std::size_t>(context_->size());
  const std::size_t part = arguments_.part_bytes();
  switch (arguments_.kind) {
    case OpKind::all_reduce:
      reduce_payloads(arguments_.output, arguments_.count);
      break;
    case OpKind::reduce_scatter:
      reduce_payloads(arguments_.output, arguments_.count, part * static_cast<std::size_t>(context_->rank));
      break;
    case OpKind::all_gather:
      for (std::size_t i = 0; i < size; ++i)
        std::memcpy(arguments_.output + i * part, announcement_->payload_of(static_cast<int>(i)), part);
      break;
    case OpKind::broadcast:
      if (arguments_.root != context_->rank)
        std::memcpy(arguments_.output, announcement_->payload_of(arguments_.root), part);
      break;
    default:
      break;
  }
}

void NetCollective::reduce_payloads(char* out, std::uint64_t count, std::size_t offset) const {
  std::vector<const void*> ins;
  for (int rank = 0; rank < context_->size(); ++rank) ins.push_back(announcement_->payload_of(rank) + offset);
  void* const outs[] = {out};
  reduce_kernels().reduce(outs, 1, ins.data(), context_->size(), count, arguments_.dtype, arguments_.op, false);
}

// Ragged collectives: the counts are known now.
void NetCollective::make_room() {
  const auto size = static_cast<std::size_t>(context_->size()), rank = static_cast<std::size_t>(context_->rank);
  const std::size_t item = item_bytes(arguments_.dtype);
  const bool gathers = arguments_.kind == OpKind::all_gather_ragged;
  counts_.clear();
  for (int q = 0; q < context_->size(); ++q) {
    std::uint64_t count = announcement_->count_of(q);
    if (!gathers) std::memcpy(&count, announcement_->payload_of(q) + rank * sizeof count, sizeof count);
    counts_.push_back(count);
  }
  const std::vector<char*> outputs = allocate(counts_);
  const auto bytes_from = [&](std::size_t q) { return counts_[q] * item; };
  const std::size_t longest = *std::max_element(counts_.begin(), counts_.end()) * item;
  if (gathers && longest <= context_->inline_bytes) {
    for (std::size_t q = 0; q < size; ++q)
      std::memcpy(outputs[q], announcement_->payload_of(static_cast<int>(q)), bytes_from(q));
    return;
  }
  FlowPlan plan(context_->everyone);
  for (std::size_t q = 0; q < size; ++q) {
    const ByteSpan own =
        gathers ? ByteSpan{const_cast<char*>(arguments_.input), arguments_.part_bytes()} : arguments_.parts[q];
    if (q == rank) {
      if (own.bytes != 0) std::memcpy(outputs[q], own.data, own.bytes);
      continue;
    }
    plan.to[q] = own;
    plan.from[q] = {outputs[q], bytes_from(q)};
  }
  start_flow(context_->everyone, std::move(plan));
}

}  // namespace distopt::net
