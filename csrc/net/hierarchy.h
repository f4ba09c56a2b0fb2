// all_reduce over several hosts with several ranks each: every rank reduces its slice over the ranks of its host, then
// over the ranks that carry the same slice on the other hosts; then the slices are gathered inside the host. The
// network carries the data that one rank per host would send, divided among the host's ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "net/collective.h"
#include "shm/communicator.h"

namespace distopt::net {

// The two levels, as one rank sees them.
struct Hierarchy {
  std::size_t local;  // index of this rank among the ranks of its host
  Group between;      // the ranks with the same local index on all hosts, host by host
  // Communicators of this host's ranks for the first and for the last stage. They are two because either of two
  // collectives in different stages may come first.
  std::shared_ptr<ShmCommunicator> scatter, collect;
  // Sections numbered so far, and sections started in the first and in the last stage. All ranks must start them in the
  // same order.
  std::uint64_t sections = 0, scattered = 0, collected = 0;
};

class HierarchicalCollective : public NetCollective {
 public:
  HierarchicalCollective(Arguments arguments, std::shared_ptr<Hierarchy> hierarchy);

  void enqueue(Context& context, std::uint64_t sequence, std::uint64_t first_tag) override;
  void begin() override;
  bool awaits_network() const override;
  bool advance() override;
  std::uint64_t tags() const override { return 2 + tags_of_section * sections_.size(); }

 private:
  // Does all that can be done without waiting; returns whether the stage has ended. `agreed`: all ranks are known to
  // take part.
  using Stage = std::function<bool(bool agreed)>;

  // A section of the array: one is on the network while another is inside the host.
  struct Section {
    char* data;
    std::uint64_t share;       // elements of each rank's slice
    std::uint64_t number = 0;  // in the order of the communicator's sections
    int tag = 0;               // the first of its tags
    int stage = 0;             // 0, 1, 2, or 3 at the end
    Stage running{};
  };

  static constexpr std::uint64_t tags_of_section = 2;  // one flow

  bool advance(Section& section);
  bool may_start(const Section& section);
  Stage make_stage(const Section& section) const;

  std::shared_ptr<Hierarchy> hierarchy_;
  std::vector<Section> sections_;
  char* rest_;  // elements that cannot be cut into equal slices: fewer than a host has ranks
  std::uint64_t rest_count_;
  // Means of float32 and float64 are divided once, at the end. Means of 16-bit floats are divided in both places, in
  // float32, so that no sum of a host overflows.
  bool divides_once_;
  RedOp stage_op_;
  std::string stage_label_;  // for errors of a host's ranks
  // A mismatch that a stage has found. The announcement will throw it in the caller's terms.
  std::optional<CommunicatorError> mismatch_;
};

}  // namespace distopt::net
