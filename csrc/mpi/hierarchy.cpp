#include "mpi/hierarchy.h"

#include <algorithm>
#include <utility>

namespace distopt::mpi {
namespace {

// Larger arrays go in parts of this size.
constexpr std::size_t part_bytes = 8 << 20;

}  // namespace

HierarchicalOperation::HierarchicalOperation(Request request, std::shared_ptr<Hierarchy> hierarchy)
    : Operation(std::move(request)), hierarchy_(std::move(hierarchy)) {
  const Request& mine = this->request();
  const std::size_t item = item_bytes(mine.dtype);
  const auto ranks = static_cast<std::uint64_t>(hierarchy_->local_size);
  const std::uint64_t even = mine.count / ranks * ranks, most = part_bytes / item / ranks * ranks;
  for (std::uint64_t begin = 0; begin < even; begin += most)
    parts_.push_back({mine.output + begin * item, std::min(most, even - begin) / ranks, hierarchy_->parts++, {}, {}, {}});
  rest_ = mine.output + even * item;
  rest_count_ = mine.count - even;
  divides_once_ = mine.op == RedOp::mean && (mine.dtype == DType::float32 || mine.dtype == DType::float64);
  stage_op_ = divides_once_ ? RedOp::sum : mine.op;
}

// Inline goes what cannot be cut into equal slices.
void HierarchicalOperation::begin() { announce(rest_, rest_count_ * item_bytes(request().dtype)); }

bool HierarchicalOperation::advance() {
  if (finished()) return true;
  const bool agreed = agree();
  bool ended = agreed;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    ended = advance(parts_[i], tag() + 1 + 2 * static_cast<int>(i)) && ended;
  if (!ended) return false;
  reduce_payloads(rest_, rest_count_);
  finish();
  return true;
}

bool HierarchicalOperation::advance(Part& part, int tag) {
  if (!part.collect) {
    if (!part.flow) {
      if (!scatter(part)) return false;
      begin_flow(part, tag);
    }
    if (!part.admitted) {
      if (!agreed()) return false;
      part.admitted = true;
      part.flow->admit();
    }
    if (!part.flow->advance()) return false;
  }
  return collect(part);
}

char* HierarchicalOperation::slice_of(const Part& part) const {
  return part.data + static_cast<std::uint64_t>(hierarchy_->local_rank) * part.share * item_bytes(request().dtype);
}

bool HierarchicalOperation::scatter(Part& part) {
  if (!part.scatter) {
    if (part.number != hierarchy_->scatters) return false;
    ++hierarchy_->scatters;
    Request stage = request();
    stage.kind = OpKind::reduce_scatter;
    stage.op = stage_op_;
    stage.count = part.share;
    stage.input = part.data;
    stage.output = slice_of(part);
    part.scatter = std::make_shared<distopt::Operation>(std::move(stage));
    hierarchy_->scatter->start(part.scatter);
  }
  return hierarchy_->scatter->test(*part.scatter);
}

void HierarchicalOperation::begin_flow(Part& part, int tag) const {
  const Hierarchy& levels = *hierarchy_;
  Plan plan =
      plan_all_reduce(slice_of(part), part.share, request().dtype, stage_op_, levels.between.size(), levels.host);
  if (divides_once_) plan.reduction->divisor = world().size();
  part.flow = std::make_unique<Flow>(world(), levels.between, tag);
  part.flow->begin(std::move(plan));
}

bool HierarchicalOperation::collect(Part& part) {
  if (!part.collect) {
    if (part.number != hierarchy_->collects) return false;
    ++hierarchy_->collects;
    Request stage = request();
    stage.kind = OpKind::all_gather;
    stage.count = part.share;
    stage.input = slice_of(part);
    stage.output = part.data;
    part.collect = std::make_shared<distopt::Operation>(std::move(stage));
    hierarchy_->collect->start(part.collect);
  }
  return hierarchy_->collect->test(*part.collect);
}

}  // namespace distopt::mpi
