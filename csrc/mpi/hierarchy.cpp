#include "mpi/hierarchy.h"

#include <algorithm>
#include <utility>

#include "mpi/plans.h"

namespace distopt::mpi {
namespace {

// Larger arrays go in parts of this size.
constexpr std::size_t part_bytes = 8 << 20;

}  // namespace

HierarchicalOperation::HierarchicalOperation(Request request, std::shared_ptr<Hierarchy> hierarchy)
    : Operation(std::move(request)), hierarchy_(std::move(hierarchy)) {
  const Request& mine = this->request();
  const std::size_t item = item_bytes(mine.dtype);
  const auto ranks = static_cast<std::uint64_t>(hierarchy_->scatter->size());
  const std::uint64_t even = mine.count / ranks * ranks, most = part_bytes / item / ranks * ranks;
  for (std::uint64_t begin = 0; begin < even; begin += most)
    parts_.push_back({mine.output + begin * item, std::min(most, even - begin) / ranks});
  rest_ = mine.output + even * item;
  rest_count_ = mine.count - even;
  divides_once_ = mine.op == RedOp::mean && (mine.dtype == DType::float32 || mine.dtype == DType::float64);
  stage_op_ = divides_once_ ? RedOp::sum : mine.op;
}

// Not before: an operation that is refused takes no number, for which later ones would wait.
void HierarchicalOperation::enqueue(World& world, std::uint64_t sequence, std::uint64_t first_tag) {
  Operation::enqueue(world, sequence, first_tag);
  for (Part& part : parts_) part.number = hierarchy_->parts++;
}

void HierarchicalOperation::begin() {
  for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i].tag = tag() + 1 + static_cast<int>(tags_of_part * i);
  // The rest travels inline.
  announce(rest_, rest_count_ * item_bytes(request().dtype));
}

bool HierarchicalOperation::advance() {
  if (finished()) return true;
  bool ended = agree();
  if (mismatch_) {
    if (agreed()) throw *mismatch_;
    return false;
  }
  try {
    for (Part& part : parts_) ended = advance(part) && ended;
  } catch (const CommunicatorError& error) {
    if (error.kind() != ErrorKind::mismatch || agreed()) throw;
    mismatch_ = error;
    return false;
  }
  if (!ended) return false;
  reduce_payloads(rest_, rest_count_);
  finish();
  return true;
}

bool HierarchicalOperation::advance(Part& part) {
  while (part.stage < 3) {
    if (!part.running) {
      if (!may_start(part)) return false;
      part.running = make_stage(part);
    }
    if (!part.running(agreed())) return false;
    part.running = nullptr;
    ++part.stage;
  }
  return true;
}

bool HierarchicalOperation::may_start(const Part& part) {
  if (part.stage == 1) return true;
  std::uint64_t& started = part.stage == 0 ? hierarchy_->scattered : hierarchy_->collected;
  if (started != part.number) return false;
  ++started;
  return true;
}

HierarchicalOperation::Stage HierarchicalOperation::make_stage(const Part& part) const {
  const Hierarchy& levels = *hierarchy_;
  char* const slice = part.data + levels.local * part.share * item_bytes(request().dtype);
  Request stage = request();
  stage.op = stage_op_;
  stage.count = part.share;
  if (part.stage == 1) {
    stage.output = slice;
    Plan plan = plan_all_reduce(stage, levels.between, world().chunk_bytes);
    if (divides_once_) plan.reduction->divisor = world().size();
    const auto flow = std::make_shared<Flow>(world(), levels.between, part.tag);
    flow->begin(std::move(plan));
    return [flow](bool agreed) { return agreed && flow->advance(); };
  }
  const bool first = part.stage == 0;
  stage.kind = first ? OpKind::reduce_scatter : OpKind::all_gather;
  stage.input = first ? part.data : slice;
  stage.output = first ? slice : part.data;
  ShmCommunicator& communicator = first ? *levels.scatter : *levels.collect;
  const auto operation = std::make_shared<distopt::Operation>(std::move(stage));
  communicator.start(operation);
  return [&communicator, operation](bool) { return communicator.test(*operation); };
}

}  // namespace distopt::mpi
