// Pieces of arrays on their way between ranks, in chunks, so that the network never waits for a reduction.
//
// In phase one every rank of a group receives its piece from the others and reduces it; in phase two it sends the
// result to all (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, with direct exchanges in
// place of his trees). A chunk enters phase two when it has left phase one. Either phase may be empty.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/types.h"
#include "net/announcement.h"

namespace distopt::net {

struct ChunkReduction {
  DType dtype;
  RedOp op;
  const char* own;       // this rank's part
  int divisor = 1;       // of the result, for float32 and float64
  bool is_sent = false;  // the result replaces the data that phase one sends
};

// The transfers of a rank, by place in the group; its own place is empty.
struct FlowPlan {
  explicit FlowPlan(const Group& group)
      : to(group.size()), from(group.size()), shared_with(group.size(), false), collected(group.size()) {}

  // Phase one. Without a reduction, pieces arrive where `from` says; with one, only their size counts.
  std::vector<ByteSpan> to, from;
  std::optional<ChunkReduction> reduction;
  // Phase two. `result` may be sent, chunk by chunk, when all of `from` has arrived and is reduced.
  ByteSpan result;
  std::vector<bool> shared_with;
  std::vector<ByteSpan> collected;
  // A place that gets the result of phase one, continues the reduction, and sends back what this rank shares in phase
  // two.
  std::optional<std::size_t> continued_by{};
  // The largest message, if Context's is too large.
  std::optional<std::size_t> chunk_bytes{};
};

// Divides elements of float32 or float64.
void divide(void* data, std::size_t count, DType dtype, int divisor);

class Flow {
 public:
  // `tag` and the next are the flow's own. The group outlives it.
  Flow(Context& context, const Group& group, int tag) : context_(context), group_(group), tag_(tag), plan_(group) {}
  ~Flow() { context_.pool.give(std::move(scratch_)); }
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  // Begins to send.
  void begin(FlowPlan plan);
  // Does all that can be done without waiting; returns whether all has been sent and received. To be called once all
  // ranks are known to take part: only then may receives of a known size be posted.
  bool advance();

 private:
  // A piece on its way to or from one rank.
  struct PieceTransfer {
    ByteSpan piece;
    std::size_t chunks = 0, started = 0, ended = 0;
    std::unique_ptr<bool[]> done;

    std::size_t most_under_way = 0;

    bool may_start(std::size_t limit) const { return started < std::min({limit, chunks, ended + most_under_way}); }
    // Notes which requests have ended; returns whether all have.
    bool poll() {
      while (ended < started && done[ended]) ++ended;
      return ended == chunks;
    }
  };

  void admit();
  std::size_t chunks_of(std::size_t bytes) const;
  int stream_of(std::size_t chunk) const;
  ByteSpan chunk_of(const ByteSpan& piece, std::size_t chunk) const;
  std::vector<PieceTransfer> transfers_of(const std::vector<ByteSpan>& pieces) const;
  void send_what_may_go();
  bool send(PieceTransfer& transfer, std::size_t place, int tag, std::size_t limit);
  void receive_what_may_come();
  void receive(PieceTransfer& transfer, std::size_t place, int tag, char* into);
  // Chunks of the result that phase two may send.
  std::size_t final_chunks() const { return plan_.continued_by ? collected_[*plan_.continued_by].ended : ready_; }
  bool has_arrived(std::size_t chunk) const;
  void reduce(std::size_t chunk);
  char* scratch_of(std::size_t place, std::size_t chunk) const;

  Context& context_;
  const Group& group_;
  int tag_;
  std::size_t chunk_bytes_ = 0;
  bool admitted_ = false;
  std::vector<PieceTransfer> to_, from_, shared_, collected_;
  FlowPlan plan_;
  Scratch scratch_;  // for chunks in flight that are to be reduced: `slots_` of `slot_bytes_` bytes for every rank
  std::size_t slots_ = 0, slot_bytes_ = 0;
  std::size_t ready_ = 0;         // chunks of the result that have left phase one
  std::size_t ready_chunks_ = 0;  // all of them
};

}  // namespace distopt::net
