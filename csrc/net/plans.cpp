#include "net/plans.h"

#include <algorithm>
#include <cstring>

namespace distopt::net {
namespace {

// Up to this size two ranks send each other the whole array: one message time instead of two, for as many bytes. Far
// from each other they do it at any size, because the delay costs more than to reduce twice as much.
constexpr std::size_t whole_bytes = 256 << 10;

// Messages where chunks pass through several ranks in turn: an eighth of a slice, within limits. If there are few,
// ranks wait for each other; each one costs processor time.
constexpr std::size_t fewest_relayed_bytes = 256 << 10, most_relayed_bytes = 1 << 20;

std::size_t relayed_bytes(std::size_t slice_bytes) {
  return std::clamp(slice_bytes / 8 / sizeof(double) * sizeof(double), fewest_relayed_bytes, most_relayed_bytes);
}

// Slice `place` of `size` about equal slices of the array.
ByteSpan slice_of(const Arguments& arguments, std::size_t size, std::size_t place) {
  const std::size_t item = item_bytes(arguments.dtype);
  const std::size_t begin = arguments.count * place / size, end = arguments.count * (place + 1) / size;
  return {arguments.output + begin * item, (end - begin) * item};
}

}  // namespace

FlowPlan plan_all_reduce(const Arguments& arguments, const Group& group, const Context& context) {
  const std::size_t size = group.size(), place = group.place;
  const ByteSpan all{arguments.output, arguments.count * item_bytes(arguments.dtype)};
  FlowPlan plan(group);
  const bool whole = size == 2 && (context.is_far || all.bytes <= std::min(whole_bytes, context.chunk_bytes));
  plan.result = whole ? all : slice_of(arguments, size, place);
  plan.reduction = ChunkReduction{arguments.dtype, arguments.op, plan.result.data, 1, whole};
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.from[i] = {nullptr, plan.result.bytes};
    plan.to[i] = whole ? all : slice_of(arguments, size, i);
    if (whole) continue;
    plan.shared_with[i] = true;
    plan.collected[i] = plan.to[i];
  }
  return plan;
}

FlowPlan plan_over_two_hosts(const Arguments& arguments, const Context& context) {
  const Group& group = context.two_hosts;
  const std::size_t ranks = group.size() - 1;
  const bool is_second = 2 * context.rank >= context.size();
  const std::size_t partner = is_second ? 0 : ranks, first = is_second ? 1 : 0;
  const bool divides = arguments.op == RedOp::mean;
  FlowPlan plan(group);
  // As on all ranks, whose slices may differ by an element.
  plan.chunk_bytes = std::min(context.chunk_bytes, relayed_bytes(arguments.part_bytes() / ranks));
  plan.result = slice_of(arguments, ranks, group.place - first);
  plan.reduction = ChunkReduction{arguments.dtype, divides ? RedOp::sum : arguments.op, plan.result.data,
                                  divides && is_second ? context.size() : 1};
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (i == group.place) continue;
    if (i != partner) plan.to[i] = plan.collected[i] = slice_of(arguments, ranks, i - first);
    if (i != partner || is_second) {
      plan.from[i] = {nullptr, plan.result.bytes};
      plan.shared_with[i] = true;
    }
  }
  if (is_second) return plan;
  plan.to[partner] = plan.collected[partner] = plan.result;
  plan.continued_by = partner;
  return plan;
}

FlowPlan plan_reduce_scatter(const Arguments& arguments, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  FlowPlan plan(group);
  const std::size_t part = arguments.count * item_bytes(arguments.dtype);
  char* const input = const_cast<char*>(arguments.input);  // nothing is written through it
  plan.result = {arguments.output, part};
  plan.reduction = ChunkReduction{arguments.dtype, arguments.op, input + place * part};
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.to[i] = {input + i * part, part};
    plan.from[i] = {nullptr, part};
  }
  return plan;
}

FlowPlan plan_all_gather(const Arguments& arguments, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  FlowPlan plan(group);
  const std::size_t part = arguments.count * item_bytes(arguments.dtype);
  plan.result = {arguments.output + place * part, part};
  if (arguments.input != plan.result.data) std::memmove(plan.result.data, arguments.input, part);
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.shared_with[i] = true;
    plan.collected[i] = {arguments.output + i * part, part};
  }
  return plan;
}

// The root deals out slices, which all but the root gather (Barnett et al., "Interprocessor Collective Communication
// Library (InterCom)", Scalable High Performance Computing Conference 1994).
FlowPlan plan_broadcast(const Arguments& arguments, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  FlowPlan plan(group);
  const auto root = static_cast<std::size_t>(arguments.root);
  plan.result = slice_of(arguments, size, place);
  if (place != root) plan.from[root] = plan.result;
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    const ByteSpan slice = slice_of(arguments, size, i);
    if (place == root) plan.to[i] = slice;
    if (place != root) plan.collected[i] = slice;
    plan.shared_with[i] = i != root;
  }
  return plan;
}

}  // namespace distopt::net
