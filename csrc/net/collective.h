// One collective over a network as a state machine that each rank moves forward when it has the time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/arguments.h"
#include "net/announcement.h"
#include "net/flow.h"

namespace distopt::net {

class NetCollective {
 public:
  // Derived classes may keep the arrays alive.
  explicit NetCollective(Arguments arguments) : arguments_(std::move(arguments)) {}
  virtual ~NetCollective() = default;
  NetCollective(const NetCollective&) = delete;
  NetCollective& operator=(const NetCollective&) = delete;

  // Gives the collective its place in the order of collectives, and the first of its tags.
  virtual void enqueue(Context& context, std::uint64_t sequence, std::uint64_t first_tag);
  // To be called when no earlier collective uses its arrays.
  virtual void begin();
  // Whether it waits for nothing but the network.
  virtual bool awaits_network() const { return true; }
  // Does all that can be done without waiting; returns whether the collective has ended. Throws CommunicatorError.
  virtual bool advance();
  // How many tags it uses: one for the announcement, two for each flow.
  virtual std::uint64_t tags() const { return 3; }
  // Counts from the communicator's first collective.
  std::uint64_t first_tag() const { return first_tag_; }

  const Arguments& arguments() const { return arguments_; }
  std::uint64_t sequence() const { return sequence_; }
  bool has_begun() const { return begun_; }
  // Whether all ranks are known to have begun it.
  bool agreed() const { return announcement_ && announcement_->complete(); }
  // Ranks that are not known to have begun it.
  std::vector<int> unheard() const { return announcement_ ? announcement_->unheard() : std::vector<int>(); }
  bool finished() const { return finished_; }
  std::string description() const { return describe(arguments_, sequence_); }

  // all_gather_ragged and all_to_all_ragged, when finished: elements that came from each rank.
  const std::vector<std::uint64_t>& counts() const { return counts_; }

 protected:
  // Ragged: where each rank's elements are to go. Called once, when their counts are known.
  virtual std::vector<char*> allocate(const std::vector<std::uint64_t>&) { return {}; }

  Context& context() const { return *context_; }
  int tag() const { return static_cast<int>(first_tag_ % tag_count); }
  void announce(const char* payload, std::size_t bytes);
  Announcement& announcement() const { return *announcement_; }
  bool agree() { return announcement_->advance(); }
  // `out` = the reduction, in rank order, of the ranks' inline data, from this offset on.
  void reduce_payloads(char* out, std::uint64_t count, std::size_t offset = 0) const;
  void finish();

 private:
  bool travels_inline() const { return arguments_.input_bytes(context_->size()) <= context_->inline_bytes; }
  void start_flow(const Group& group, FlowPlan plan);
  FlowPlan plan() const;
  void take_inline();
  void make_room();

  Arguments arguments_;
  Context* context_ = nullptr;
  std::uint64_t sequence_ = 0;
  std::uint64_t first_tag_ = 0;
  bool begun_ = false, admitted_ = false;
  std::atomic<bool> finished_{false};  // a thread may look while a kernel in another one moves the collective
  std::unique_ptr<Announcement> announcement_;
  std::unique_ptr<Flow> flow_;
  std::vector<std::uint64_t> counts_;
};

}  // namespace distopt::net
