// all_reduce on two hosts with two ranks each, in rank order, whose data travel with the announcements: without a
// message more than the data need.
//
// Each rank sends its neighbour on the host that rank's half of the array. The first host's ranks reduce theirs, and
// send them to their partners on the second host, which reduce them with their own and send the results back. All pass
// the results on to their neighbours. The last three are the messages of recursive doubling, first between the hosts,
// and the announcements are in them, as a rank in another collective expects. A rank whose data cannot come, because a
// rank is in another collective, sends its announcement without them. This rank finds that out: the second host's ranks
// wait for the first host's, which wait for their neighbours only, and a neighbour in another collective announces it
// without waiting for this host's data.
#pragma once

#include <cstddef>

#include "net/collective.h"

namespace distopt::net {

class RidingSum : public NetCollective {
 public:
  using NetCollective::NetCollective;

  // Whether the arguments, and with them all that are alike, belong here.
  static bool serves(const Arguments& arguments, const Context& context);

  void begin() override;
  bool advance() override;

 private:
  bool is_first() const { return context().rank < 2; }
  int neighbour() const { return context().rank ^ 1; }
  int partner() const { return context().rank ^ 2; }
  ByteSpan half(int rank) const;
  void take_in();
  void send_far();
  void send_near();
  void reduce();

  Scratch memory_;
  std::size_t block_bytes_ = 0;  // of an announcement
  char* slice_ = nullptr;        // from the neighbour
  char* to_far_ = nullptr;       // the own announcement and what follows it
  char* near_ = nullptr;         // the own announcement, and what the partner sends: sent to the neighbour as a whole
  char* from_near_ = nullptr;    // two announcements, and the result of the neighbour's half
  char* own_result_ = nullptr;   // within near_
  const char* far_half_ = nullptr;  // within from_near_
  bool partner_has_data_ = false, has_data_ = false;
  bool far_began_ = false, near_began_ = false;
  bool slice_sent_ = false, far_sent_ = false, near_sent_ = false;
  bool slice_came_ = false, far_came_ = false, near_came_ = false;
};

}  // namespace distopt::net
