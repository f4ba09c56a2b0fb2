#include "net/hierarchy.h"

#include <algorithm>
#include <utility>

#include "net/plans.h"

namespace distopt::net {
namespace {

// Larger arrays go in sections of this size.
constexpr std::size_t part_bytes = 8 << 20;

}  // namespace

HierarchicalCollective::HierarchicalCollective(Arguments arguments, std::shared_ptr<Hierarchy> hierarchy)
    : NetCollective(std::move(arguments)), hierarchy_(std::move(hierarchy)) {
  const Arguments& mine = this->arguments();
  const std::size_t item = item_bytes(mine.dtype);
  const auto ranks = static_cast<std::uint64_t>(hierarchy_->scatter->size());
  const std::uint64_t even = mine.count / ranks * ranks, most = part_bytes / item / ranks * ranks;
  for (std::uint64_t begin = 0; begin < even; begin += most)
    sections_.push_back({mine.output + begin * item, std::min(most, even - begin) / ranks});
  rest_ = mine.output + even * item;
  rest_count_ = mine.count - even;
  divides_once_ = mine.op == RedOp::mean && (mine.dtype == DType::float32 || mine.dtype == DType::float64);
  stage_op_ = divides_once_ ? RedOp::sum : mine.op;
}

// Numbers are given out here and not earlier: later collectives would wait for the number of one that was refused.
void HierarchicalCollective::enqueue(Context& context, std::uint64_t sequence, std::uint64_t first_tag) {
  NetCollective::enqueue(context, sequence, first_tag);
  stage_label_ = "part of " + named(arguments().kind, sequence);
  for (Section& section : sections_) section.number = hierarchy_->sections++;
}

void HierarchicalCollective::begin() {
  for (std::size_t i = 0; i < sections_.size(); ++i)
    sections_[i].tag = tag() + 1 + static_cast<int>(tags_of_section * i);
  // The rest travels inline.
  announce(rest_, rest_count_ * item_bytes(arguments().dtype));
}

bool HierarchicalCollective::advance() {
  if (finished()) return true;
  bool ended = agree();
  if (mismatch_) {
    if (agreed()) throw *mismatch_;
    return false;
  }
  try {
    for (Section& section : sections_) ended = advance(section) && ended;
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

bool HierarchicalCollective::advance(Section& section) {
  while (section.stage < 3) {
    if (!section.running) {
      if (!may_start(section)) return false;
      section.running = make_stage(section);
    }
    if (!section.running(agreed())) return false;
    section.running = nullptr;
    ++section.stage;
  }
  return true;
}

bool HierarchicalCollective::may_start(const Section& section) {
  if (section.stage == 1) return true;
  std::uint64_t& started = section.stage == 0 ? hierarchy_->scattered : hierarchy_->collected;
  if (started != section.number) return false;
  ++started;
  return true;
}

HierarchicalCollective::Stage HierarchicalCollective::make_stage(const Section& section) const {
  const Hierarchy& levels = *hierarchy_;
  char* const slice = section.data + levels.local * section.share * item_bytes(arguments().dtype);
  Arguments stage = arguments();
  stage.op = stage_op_;
  stage.label = stage_label_;
  stage.count = section.share;
  if (section.stage == 1) {
    stage.output = slice;
    FlowPlan plan = plan_all_reduce(stage, levels.between, context());
    if (divides_once_) plan.reduction->divisor = context().size();
    const auto flow = std::make_shared<Flow>(context(), levels.between, section.tag);
    flow->begin(std::move(plan));
    return [flow](bool agreed) { return agreed && flow->advance(); };
  }
  const bool first = section.stage == 0;
  stage.kind = first ? OpKind::reduce_scatter : OpKind::all_gather;
  stage.input = first ? section.data : slice;
  stage.output = first ? slice : section.data;
  ShmCommunicator& communicator = first ? *levels.scatter : *levels.collect;
  const auto collective = std::make_shared<ShmCollective>(std::move(stage));
  communicator.start(collective);
  return [this, &communicator, collective](bool) { return communicator.test(*collective); };
}

}  // namespace distopt::net
