// Pieces of arrays on their way between ranks, in chunks, so that the network never waits for a reduction.
//
// Phase one sends every rank of a group its piece, which it reduces with those that it gets; phase two sends what came
// of it to all (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, with direct exchanges in
// place of his trees). A chunk enters phase two when it has left phase one. Either phase may be empty.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/types.h"
#include "mpi/agreement.h"

namespace distopt::mpi {

struct Piece {
  char* data = nullptr;
  std::size_t bytes = 0;
};

struct Reduction {
  DType dtype;
  RedOp op;
  const char* own;       // this rank's part
  int divisor = 1;       // of what comes of it, for float32 and float64
  bool is_sent = false;  // the result takes the place of what phase one sends
};

// What a rank has to do; by place in the group, with nothing in its own place.
struct Plan {
  Plan(std::size_t size, std::size_t place)
      : place(place), to(size), from(size), shared_with(size, false), collected(size) {}

  std::size_t place;  // of this rank

  // Phase one. Without a reduction, pieces arrive where `from` says; with one, only their size counts.
  std::vector<Piece> to, from;
  std::optional<Reduction> reduction;
  // Phase two. `result` may be sent, chunk by chunk, when all of `from` has arrived and is reduced.
  Piece result;
  std::vector<bool> shared_with;
  std::vector<Piece> collected;
};

class Flow {
 public:
  // `ranks` are those of the group in the order of the sum; `tag` and the next are the flow's own.
  Flow(World& world, std::vector<int> ranks, int tag);
  ~Flow();
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  // Begins to send. Nothing is received before admit().
  void begin(Plan plan);
  // All ranks are known to take part. What others send may only now be told how much room it has.
  void admit();
  // Does what can be done without waiting; whether all has been sent and received.
  bool advance();

 private:
  // A piece on its way to or from one rank.
  struct Lane {
    Piece piece;
    std::size_t chunks = 0, started = 0, ended = 0;
    std::unique_ptr<bool[]> done;

    bool complete() const { return ended == chunks; }
    void look() {
      while (ended < started && done[ended]) ++ended;
    }
  };

  static std::vector<Lane> lanes_of(const std::vector<Piece>& pieces);
  void send(Lane& lane, std::size_t place, int tag);
  void receive(Lane& lane, std::size_t place, int tag, char* into);
  void receive_first();
  void work_off();
  bool has_arrived(std::size_t chunk) const;
  void reduce(std::size_t chunk);
  void receive_second();
  char* scratch_of(std::size_t place, std::size_t chunk) const;

  World& world_;
  std::vector<int> ranks_;
  int tag_;
  bool admitted_ = false;
  std::vector<Lane> to_, from_, shared_, collected_;
  Plan plan_;
  Memory scratch_;  // for chunks in flight that are to be reduced: so many slots of so many bytes for every rank
  std::size_t slots_ = 0, slot_bytes_ = 0;
  std::size_t ready_ = 0;         // chunks of the result that phase two may send
  std::size_t ready_chunks_ = 0;  // all of them
};

}  // namespace distopt::mpi
