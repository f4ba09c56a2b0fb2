#include "mpi/plans.h"

#include <algorithm>
#include <cstring>

namespace distopt::mpi {
namespace {

// Of two ranks, both send all that they have up to this size: one message time instead of two, for as many bytes.
constexpr std::size_t whole_bytes = 256 << 10;

// Slice `place` of `size` about equal slices of the array.
Piece slice_of(const Request& request, std::size_t size, std::size_t place) {
  const std::size_t item = item_bytes(request.dtype);
  const std::size_t begin = request.count * place / size, end = request.count * (place + 1) / size;
  return {request.output + begin * item, (end - begin) * item};
}

}  // namespace

Plan plan_all_reduce(const Request& request, const Group& group, std::size_t chunk_bytes) {
  const std::size_t size = group.size(), place = group.place;
  const Piece all{request.output, request.count * item_bytes(request.dtype)};
  Plan plan(group);
  const bool whole = size == 2 && all.bytes <= std::min(whole_bytes, chunk_bytes);
  plan.result = whole ? all : slice_of(request, size, place);
  plan.reduction = Reduction{request.dtype, request.op, plan.result.data, 1, whole};
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.from[i] = {nullptr, plan.result.bytes};
    plan.to[i] = whole ? all : slice_of(request, size, i);
    if (whole) continue;
    plan.shared_with[i] = true;
    plan.collected[i] = plan.to[i];
  }
  return plan;
}

Plan plan_reduce_scatter(const Request& request, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  Plan plan(group);
  const std::size_t part = request.count * item_bytes(request.dtype);
  char* const input = const_cast<char*>(request.input);  // nothing is written through it
  plan.result = {request.output, part};
  plan.reduction = Reduction{request.dtype, request.op, input + place * part};
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.to[i] = {input + i * part, part};
    plan.from[i] = {nullptr, part};
  }
  return plan;
}

Plan plan_all_gather(const Request& request, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  Plan plan(group);
  const std::size_t part = request.count * item_bytes(request.dtype);
  plan.result = {request.output + place * part, part};
  if (request.input != plan.result.data) std::memmove(plan.result.data, request.input, part);
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    plan.shared_with[i] = true;
    plan.collected[i] = {request.output + i * part, part};
  }
  return plan;
}

// The root deals out slices, which all but the root gather (Barnett et al., "Interprocessor Collective Communication
// Library (InterCom)", Scalable High Performance Computing Conference 1994).
Plan plan_broadcast(const Request& request, const Group& group) {
  const std::size_t size = group.size(), place = group.place;
  Plan plan(group);
  const auto root = static_cast<std::size_t>(request.root);
  plan.result = slice_of(request, size, place);
  if (place != root) plan.from[root] = plan.result;
  for (std::size_t i = 0; i < size; ++i) {
    if (i == place) continue;
    const Piece slice = slice_of(request, size, i);
    if (place == root) plan.to[i] = slice;
    if (place != root) plan.collected[i] = slice;
    plan.shared_with[i] = i != root;
  }
  return plan;
}

}  // namespace distopt::mpi
