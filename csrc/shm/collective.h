// One collective as a state machine that each rank moves forward when it has the time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/describe.h"

namespace distopt {

class ShmCollective {
 public:
  // Derived classes may keep the arrays alive: the object lives until the collective has ended, even if the caller has
  // dropped it.
  explicit ShmCollective(Arguments arguments) : arguments_(std::move(arguments)) {}
  virtual ~ShmCollective() = default;

  // Gives the collective its place in the order of collectives.
  void begin(std::uint64_t sequence) { sequence_ = sequence; }
  // Signals to the peers that this rank has reached the collective and its arguments are ready.
  void post(Peers& peers);
  // Does everything that can be done without waiting; returns whether the collective has ended. If not, `blocker` says
  // why.
  // Throws CommunicatorError (mismatch) when a peer has posted something else under the same number.
  bool advance(Peers& peers, Blocker& blocker);

  const Arguments& arguments() const { return arguments_; }
  std::uint64_t sequence() const { return sequence_; }
  bool posted() const { return posted_; }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  void finish() { finished_.store(true, std::memory_order_release); }

  // The finding of a finished collective that looks; the same on all ranks.
  const Nonfinite& nonfinite() const { return nonfinite_; }

  // all_gather_ragged and all_to_all_ragged, once it has finished: elements that came from each rank.
  const std::vector<std::uint64_t>& counts() const { return counts_; }

  // Whether this rank only copies and reduces data that fit into a ring entry. The parts of others may be large.
  bool brief(int world_size) const { return !ragged() && arguments_.input_bytes(world_size) <= inline_bytes; }

 protected:
  // Ragged: where each rank's elements are to go. Called once, when all ranks have reported their counts.
  virtual std::vector<char*> allocate(const std::vector<std::uint64_t>&) { return {}; }

 private:
  // Inline: through the ring entries. Direct: peers work on the wire memory itself. Staged: through chunks.
  enum class Mode { undecided, inlined, direct, staged };

  void check_peer(const Peers& peers, int peer) const;
  void post_parts(RingEntry& entry) const;
  void read_counts(const Peers& peers);
  const std::uint64_t* part_counts(const Peers& peers, int rank) const;

  // Without a reduction: the part that this rank takes from `peer`, at that offset of the peer's data, and where to.
  struct Taken {
    std::size_t offset, bytes;
    char* into;
  };
  Taken taken_from(const Peers& peers, int peer) const;
  Mode choose_mode(Peers& peers) const;
  void prepare_staging(Peers& peers);
  bool advance_direct(Peers& peers, Blocker& blocker);
  bool advance_staged(Peers& peers, Blocker& blocker);

  void run_inline(Peers& peers);
  void run_direct(Peers& peers);
  Nonfinite reduce_direct(Peers& peers, std::uint64_t first, std::uint64_t count);
  void copy_in(Peers& peers, std::uint64_t chunk);
  void reduce_chunk(Peers& peers, std::uint64_t chunk);
  void copy_out(Peers& peers, std::uint64_t chunk);

  Nonfinite reduce(void* const* outs, int n_outs, const std::vector<const void*>& ins, std::uint64_t count) const;
  // Keeps the first finding. `found` is the finding in a part of the array that begins at `offset`.
  void keep_first(const Nonfinite& found, std::uint64_t offset);
  // Signals to the peers that this rank has reduced a part, with its findings so far.
  void publish_reduced(Peers& peers);

  struct Range {
    std::size_t begin, bytes;
  };
  // Rank q's share of a chunk of all_reduce, as a range of the array.
  Range slice(int world_size, std::uint64_t chunk, int q) const;
  // The chunk's range within one part (or the whole) of `bytes`.
  Range part(std::uint64_t chunk, std::size_t bytes) const;
  std::size_t part_bytes() const { return arguments_.part_bytes(); }
  bool reduces() const { return distopt::reduces(arguments_.kind); }
  bool exchanges() const { return arguments_.kind == OpKind::all_to_all_ragged; }
  bool ragged() const { return is_ragged(arguments_.kind); }
  // Whether a rank's input matters: a broadcast takes that of its root alone.
  bool sends(int rank) const { return arguments_.kind != OpKind::broadcast || arguments_.root == rank; }
  // Whether each part that a rank copies in is for one peer.
  bool has_lanes() const { return reduces() || exchanges(); }

  Arguments arguments_;
  std::uint64_t sequence_ = 0;
  bool posted_ = false;
  // Read by one thread while another, which waits for a message, moves the collective.
  std::atomic<bool> finished_{false};
  int checked_ = 0;  // peers whose descriptor has been compared
  Mode mode_ = Mode::undecided;
  std::vector<std::uint64_t> counts_;
  std::size_t longest_bytes_ = 0;  // ragged: of all that any rank sends to another
  bool parts_fit_ = true;          // all_to_all_ragged: those of every rank travel in its ring entry
  std::vector<char*> outputs_;
  Nonfinite nonfinite_;

  bool direct_work_done_ = false;
  std::uint64_t direct_target_ = 0;

  std::size_t lane_bytes_ = 0;  // of a staging chunk that belong to one slice or part
  std::uint64_t chunks_ = 0;
  std::uint64_t step_ = 0;    // 3 * iteration + stage, see advance_staged
  std::uint64_t first_[3]{};  // this rank's counters when the collective began
};

}  // namespace distopt
