#include "net/riding_sum.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/reduce.h"

namespace distopt::net {
namespace {

constexpr int ranks_of_host = 2, slice_tag = 3;

}  // namespace

bool RidingSum::serves(const Arguments& arguments, const Context& context) {
  const std::size_t longest = (arguments.count + 1) / ranks_of_host * item_bytes(arguments.dtype);
  return arguments.kind == OpKind::all_reduce && rounds_each_operation(arguments.dtype) &&
         arguments.part_bytes() > context.inline_bytes && longest <= std::min(context.data_room(), context.chunk_bytes);
}

ByteSpan RidingSum::half(int rank) const {
  const std::size_t item = item_bytes(arguments().dtype), lower = arguments().count / ranks_of_host * item;
  if (rank % ranks_of_host == 0) return {arguments().output, lower};
  return {arguments().output + lower, arguments().count * item - lower};
}

void RidingSum::begin() {
  Announcement& announced = prepare(nullptr, 0);
  const ByteSpan own = announced.own();
  block_bytes_ = own.bytes;
  const std::size_t most_bytes = context().data_room();
  const std::size_t far_room = announced.room_for(1) + most_bytes, near_room = announced.room_for(2) + most_bytes;
  memory_ = context().pool.take(2 * block_bytes_ + far_room + near_room + 2 * most_bytes);
  near_ = memory_.data();
  to_far_ = near_ + block_bytes_ + far_room;
  from_near_ = to_far_ + block_bytes_ + most_bytes;
  slice_ = from_near_ + near_room;
  std::memcpy(near_, own.data, own.bytes);
  std::memcpy(to_far_, own.data, own.bytes);
  Transport& transport = context().transport;
  transport.receive(slice_, most_bytes, neighbour(), {tag() + slice_tag}, slice_came_);
  transport.receive(near_ + block_bytes_, far_room, partner(), {tag()}, far_came_);
  transport.receive(from_near_, near_room, neighbour(), {tag()}, near_came_);
  const ByteSpan theirs = half(neighbour());
  transport.send(theirs.data, theirs.bytes, neighbour(), {tag() + slice_tag}, slice_sent_);
}

bool RidingSum::advance() {
  if (finished()) return true;
  take_in();
  if (!far_began_) send_far();
  if (!near_began_) send_near();
  if (!far_sent_ || !near_sent_ || !agree() || !slice_sent_) return false;
  const ByteSpan mine = half(context().rank), theirs = half(neighbour());
  std::memcpy(mine.data, own_result_, mine.bytes);
  std::memcpy(theirs.data, far_half_, theirs.bytes);
  context().pool.give(std::move(memory_));
  finish();
  return true;
}

void RidingSum::take_in() {
  if (far_came_ && own_result_ == nullptr) {
    char* const block = near_ + block_bytes_;
    partner_has_data_ = Announcement::has_data(block);
    own_result_ = block + (announcement().note(block) - block);
  }
  if (near_came_ && far_half_ == nullptr) far_half_ = announcement().note(announcement().note(from_near_));
}

// Without data if it is known that not all ranks are in this collective: the neighbour may never send its slice then.
void RidingSum::send_far() {
  if (!is_first() && own_result_ == nullptr) return;
  const bool fails = announcement().differs() || (!is_first() && !partner_has_data_);
  if (!fails && !slice_came_) return;
  has_data_ = !fails;
  if (has_data_) reduce();
  Announcement::note_data(to_far_, has_data_);
  const std::size_t bytes = block_bytes_ + (has_data_ ? half(context().rank).bytes : 0);
  context().transport.send(to_far_, bytes, partner(), {tag()}, far_sent_);
  far_began_ = true;
}

void RidingSum::send_near() {
  if (own_result_ == nullptr || (!is_first() && !far_began_)) return;
  const bool has_result = is_first() ? partner_has_data_ : has_data_;
  const std::size_t bytes =
      static_cast<std::size_t>(own_result_ - near_) + (has_result ? half(context().rank).bytes : 0);
  context().transport.send(near_, bytes, neighbour(), {tag()}, near_sent_);
  near_began_ = true;
}

// Makes the data for the partner: a partial result of the first host's ranks, or the result in place of that.
void RidingSum::reduce() {
  const bool divides = arguments().op == RedOp::mean;
  const ByteSpan mine = half(context().rank);
  std::vector<const void*> ins{mine.data, slice_};
  if (context().rank % ranks_of_host != 0) std::swap(ins[0], ins[1]);
  if (!is_first()) ins.insert(ins.begin(), own_result_);
  void* const outs[] = {to_far_ + block_bytes_, own_result_};
  const int n_outs = is_first() ? 1 : 2;
  const std::size_t count = mine.bytes / item_bytes(arguments().dtype);
  reduce_kernels().reduce(outs, n_outs, ins.data(), static_cast<int>(ins.size()), count, arguments().dtype,
                          divides ? RedOp::sum : arguments().op, false);
  if (divides && !is_first())
    for (void* out : outs) divide(out, count, arguments().dtype, context().size());
}

}  // namespace distopt::net
