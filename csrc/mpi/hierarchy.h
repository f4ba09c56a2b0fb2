// all_reduce over several hosts with several ranks each: every rank reduces its slice over the ranks of its host, then
// over those that carry the same slice on the other hosts; then the slices are gathered inside the host. What crosses
// the network is what one rank per host would send, and all ranks of a host send it together.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "mpi/operation.h"
#include "shm/communicator.h"

namespace distopt::mpi {

// The two levels, as one rank sees them.
struct Hierarchy {
  // Shared memory, for the first and for the last stage: of two operations in different stages either may come first.
  std::shared_ptr<ShmCommunicator> scatter, collect;
  int local_rank = 0, local_size = 1;
  std::vector<int> between;  // this rank and those of the same local rank on other hosts, host by host
  std::size_t host = 0;      // its place among them

  // Stages started so far: all ranks of a host must start them in the same order.
  std::uint64_t scatters = 0, collects = 0;
  // Parts given out so far.
  std::uint64_t parts = 0;
};

class HierarchicalOperation : public Operation {
 public:
  // An all_reduce of more elements than a host has ranks.
  HierarchicalOperation(Request request, std::shared_ptr<Hierarchy> hierarchy);

  void begin() override;
  bool advance() override;
  std::uint64_t tags() const override { return 1 + 2 * parts_.size(); }

 private:
  // One that is on the network while another is in shared memory.
  struct Part {
    char* data;
    std::uint64_t share;   // elements of each rank's slice
    std::uint64_t number;  // in the order of the communicator's parts
    std::shared_ptr<distopt::Operation> scatter, collect;
    std::unique_ptr<Flow> flow;
    bool admitted = false;
  };

  char* slice_of(const Part& part) const;
  bool advance(Part& part, int tag);
  bool scatter(Part& part);
  void begin_flow(Part& part, int tag) const;
  bool collect(Part& part);

  std::shared_ptr<Hierarchy> hierarchy_;
  std::vector<Part> parts_;
  char* rest_;  // elements that cannot be cut into equal slices: fewer than a host has ranks
  std::uint64_t rest_count_;
  // Means of float32 and float64 are divided once, at the end; those of 16-bit floats in both places, in float32, so
  // that no sum of a host overflows.
  bool divides_once_;
  RedOp stage_op_;
};

}  // namespace distopt::mpi
