// Collectives over a network, for ranks on several hosts. The network moves bytes only: sums are computed here, in rank
// order, because MPI_Allreduce may choose any order.
//
// Starting a collective only posts messages. Bytes move when the network is called: later calls (another start,
// progress, a wait) move all outstanding collectives forward, in any order. UCX also has a thread for this.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/flight.h"
#include "base/fork.h"
#include "base/turn.h"
#include "net/collective.h"
#include "net/hierarchy.h"

namespace distopt::net {

class NetCommunicator : public std::enable_shared_from_this<NetCommunicator> {
 public:
  static constexpr bool finds_nonfinite = false;

  // `inline_bytes`, `chunk_bytes`, and `is_far`: see Context. All three are equal on all ranks.
  NetCommunicator(std::shared_ptr<Transport> transport, int rank, std::vector<Process> processes,
                  std::size_t inline_bytes, std::size_t chunk_bytes, bool is_far);
  ~NetCommunicator();
  NetCommunicator(const NetCommunicator&) = delete;
  NetCommunicator& operator=(const NetCommunicator&) = delete;

  // All ranks of the job, before their first collective: an all_reduce that does not travel inline goes in two levels.
  void use_hierarchy(std::shared_ptr<Hierarchy> hierarchy) { hierarchy_ = std::move(hierarchy); }
  // The hierarchy for the arguments, if it runs in two levels.
  std::shared_ptr<Hierarchy> hierarchy_for(const Arguments& arguments) const;

  // Starts a collective. All of these throw CommunicatorError, the recorded one after the first failure.
  void start(std::shared_ptr<NetCollective> collective);
  void progress();
  // The same for a thread that moves messages: nothing, if another thread is in the communicator.
  void assist();
  // Throws the recorded failure, or that the communicator is closed.
  void require_usable() const;
  bool test(const NetCollective& collective);
  // Waits until the collective has ended, nothing has moved for `quiet_seconds`, or Python should look for signals;
  // returns whether it has ended. Gives way to other processes.
  bool wait(const NetCollective& collective, double quiet_seconds);
  // Continues such a wait.
  bool wait_on(const NetCollective& collective, double quiet_seconds);
  // For any thread: sleeps between two turns of a wait.
  void pause(double quiet_seconds);
  // The time since something moved last.
  double quiet_seconds() const;

  // Records the failure of this rank. All later calls throw it.
  void fail(ErrorFields failure);
  // Local. Later calls fail. Returns whether this was the first call, nothing is outstanding and nothing has failed;
  // otherwise the communicator lives as long as the network may write to it.
  bool close();

  std::size_t inline_bytes() const { return context_.inline_bytes; }
  // The oldest collective that has not ended.
  std::shared_ptr<NetCollective> oldest() const;
  // The number of the collective that is started next.
  std::uint64_t next_number() const { return started_; }
  Flight& flight() { return flight_; }
  // The last collective that all ranks have begun, as text.
  std::string last_agreed() const;
  std::size_t scratch_count() const { return pool_.size(); }

 private:
  void stop_listening();
  // Called by tick().
  static void move_all();
  void move_if_idle();

  // Whether all that is under way waits for nothing but the network.
  bool awaits_network() const;
  void advance();
  void move();
  void advance(NetCollective& collective);
  bool may_begin(const NetCollective& collective) const;

  const std::vector<Process> processes_;
  std::shared_ptr<Transport> transport_;
  ScratchPool pool_;
  Context context_;
  std::deque<std::shared_ptr<NetCollective>> queue_;
  std::shared_ptr<Hierarchy> hierarchy_;
  std::uint64_t started_ = 0;
  Flight flight_;
  std::uint64_t next_tag_ = 0;
  std::chrono::steady_clock::time_point moved_{};  // when something did, or a wait began
  std::optional<std::pair<Arguments, std::uint64_t>> last_finished_;
  std::optional<CommunicatorError> failure_;
  bool closed_ = false;
  const ForkGuard fork_guard_;
  Turn turn_;
};

}  // namespace distopt::net
