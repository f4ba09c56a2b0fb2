#include "shm/collective.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "cpu/reduce.h"

namespace distopt {
namespace {

void copy_if_apart(char* to, const char* from, std::size_t bytes) {
  if (to != from) reduce_kernels().copy(to, from, bytes);
}

}  // namespace

void ShmCollective::post(Peers& peers) {
  RingEntry& entry = peers.entry(peers.rank(), sequence_);
  Descriptor& mine = entry.descriptor;
  const std::size_t bytes = arguments_.input_bytes(peers.size());
  const bool with_input = sends(peers.rank()) && bytes != 0;
  fill(mine, entry.label, arguments_);
  mine.refused = arguments_.refused;
  if (with_input && bytes > inline_bytes)
    mine.location = peers.segment().locate(arguments_.input, bytes);
  else if (with_input)
    std::memcpy(entry.payload, arguments_.input, bytes);
  if (exchanges()) post_parts(entry);
  posted_ = true;
  peers.publish_post(sequence_);
}

// Their counts, and their contents if there is room for them.
void ShmCollective::post_parts(RingEntry& entry) const {
  unsigned char* at = entry.payload;
  for (const ByteSpan& part : arguments_.parts) {
    const std::uint64_t count = part.bytes / item_bytes(arguments_.dtype);
    std::memcpy(at, &count, sizeof count);
    at += sizeof count;
  }
  if (part_bytes() > static_cast<std::size_t>(entry.payload + inline_bytes - at)) return;
  for (const ByteSpan& part : arguments_.parts) {
    if (part.bytes != 0) std::memcpy(at, part.data, part.bytes);
    at += part.bytes;
  }
}

const std::uint64_t* ShmCollective::part_counts(const Peers& peers, int rank) const {
  return reinterpret_cast<const std::uint64_t*>(peers.entry(rank, sequence_).payload);
}

void ShmCollective::read_counts(const Peers& peers) {
  const int n = peers.size();
  std::uint64_t longest = 0;
  for (int q = 0; q < n; ++q) {
    const Descriptor& said = peers.entry(q, sequence_).descriptor;
    counts_.push_back(exchanges() ? part_counts(peers, q)[peers.rank()] : said.count);
    longest = std::max(longest,
                       exchanges() ? *std::max_element(part_counts(peers, q), part_counts(peers, q) + n) : said.count);
    if (exchanges())
      parts_fit_ = parts_fit_ &&
                   static_cast<std::size_t>(n) * sizeof(std::uint64_t) + said.count * item_bytes(arguments_.dtype) <=
                       inline_bytes;
  }
  longest_bytes_ = longest * item_bytes(arguments_.dtype);
}

bool ShmCollective::advance(Peers& peers, Blocker& blocker) {
  if (mode_ == Mode::undecided) {
    for (; checked_ < peers.size(); ++checked_) {
      const Blocker next{Signal::posted, sequence_, checked_};
      if (checked_ == peers.rank()) continue;
      if (!peers.reached(next)) {
        blocker = next;
        return false;
      }
      check_peer(peers, checked_);
    }
    if (ragged()) {
      read_counts(peers);
      outputs_ = allocate(counts_);
    }
    // The entry of rank 0, kept for the caller: after the end it may be used again.
    if (arguments_.kind == OpKind::empty) arguments_.refused = peers.entry(0, sequence_).descriptor.refused;
    mode_ = choose_mode(peers);
    if (mode_ == Mode::staged) prepare_staging(peers);
  }
  if (mode_ == Mode::inlined) {
    run_inline(peers);
    return true;
  }
  if (!(mode_ == Mode::direct ? advance_direct(peers, blocker) : advance_staged(peers, blocker))) return false;
  // All have reduced all of their shares, and no entry is used again before all have finished.
  if (arguments_.looks)
    for (int q = 0; q < peers.size(); ++q) keep_first(peers.entry(q, sequence_).nonfinite, 0);
  return true;
}

Nonfinite ShmCollective::reduce(void* const* outs, int n_outs, const std::vector<const void*>& ins,
                                std::uint64_t count) const {
  return reduce_kernels().reduce(outs, n_outs, ins.data(), static_cast<int>(ins.size()), count, arguments_.dtype,
                                 arguments_.op, arguments_.looks);
}

void ShmCollective::keep_first(const Nonfinite& found, std::uint64_t offset) {
  if (found.index != Nonfinite::nowhere && found.index + offset < nonfinite_.index)
    nonfinite_ = {found.index + offset, found.rank};
}

void ShmCollective::publish_reduced(Peers& peers) {
  if (arguments_.looks) peers.entry(peers.rank(), sequence_).nonfinite = nonfinite_;
  peers.publish(Signal::reduced);
}

void ShmCollective::check_peer(const Peers& peers, int peer) const {
  const RingEntry& own = peers.entry(peers.rank(), sequence_);
  const RingEntry& other = peers.entry(peer, sequence_);
  if (alike(own.descriptor, other.descriptor)) return;
  const Process &me = peers.me(), &them = peers.process(peer);
  throw mismatch_between(them, call_of(them.rank, other.descriptor, sequence_, other.label), me,
                         call_of(me.rank, own.descriptor, sequence_, own.label));
}

ShmCollective::Mode ShmCollective::choose_mode(Peers& peers) const {
  if (arguments_.kind == OpKind::empty) return Mode::direct;
  if (exchanges()) return parts_fit_ ? Mode::inlined : Mode::staged;
  bool all_small = true;
  bool all_located = true;
  for (int q = 0; q < peers.size(); ++q) {
    const Descriptor& descriptor = peers.entry(q, sequence_).descriptor;
    const std::size_t parts = arguments_.kind == OpKind::reduce_scatter ? static_cast<std::size_t>(peers.size()) : 1;
    const std::size_t bytes = descriptor.count * parts * item_bytes(arguments_.dtype);
    all_small = all_small && bytes <= inline_bytes;
    all_located = all_located && (descriptor.location != 0 || descriptor.count == 0 || !sends(q));
  }
  // A ragged part that is small went inline and has no location, though another part is large.
  return all_small ? Mode::inlined : all_located ? Mode::direct : Mode::staged;
}

ShmCollective::Taken ShmCollective::taken_from(const Peers& peers, int peer) const {
  const std::size_t item = item_bytes(arguments_.dtype);
  const auto place = static_cast<std::size_t>(peer);
  if (arguments_.kind == OpKind::all_gather) return {0, part_bytes(), arguments_.output + place * part_bytes()};
  if (arguments_.kind == OpKind::all_gather_ragged) return {0, counts_[place] * item, outputs_[place]};
  if (arguments_.kind == OpKind::broadcast && peer == arguments_.root && peer != peers.rank())
    return {0, part_bytes(), arguments_.output};
  if (!exchanges()) return {0, 0, nullptr};
  // Behind the counts, in its ring entry.
  const std::uint64_t* counts = part_counts(peers, peer);
  const std::uint64_t before = std::accumulate(counts, counts + peers.rank(), std::uint64_t{0});
  return {peers.size() * sizeof(std::uint64_t) + before * item, counts_[place] * item, outputs_[place]};
}

void ShmCollective::run_inline(Peers& peers) {
  if (reduces()) {
    const std::size_t first =
        arguments_.kind == OpKind::reduce_scatter ? part_bytes() * static_cast<std::size_t>(peers.rank()) : 0;
    std::vector<const void*>& inputs = peers.scratch();
    for (int q = 0; q < peers.size(); ++q) inputs[q] = peers.entry(q, sequence_).payload + first;
    void* out = arguments_.output;
    nonfinite_ = reduce(&out, 1, inputs, arguments_.count);
    return;
  }
  for (int q = 0; q < peers.size(); ++q) {
    const Taken taken = taken_from(peers, q);
    if (taken.bytes != 0) std::memcpy(taken.into, peers.entry(q, sequence_).payload + taken.offset, taken.bytes);
  }
}

// -- direct: on the wire memory itself ----------------------------------------------------------------------------

bool ShmCollective::advance_direct(Peers& peers, Blocker& blocker) {
  if (!direct_work_done_) {
    run_direct(peers);
    direct_work_done_ = true;
    publish_reduced(peers);
    direct_target_ = peers.count(Signal::reduced);
  }
  // Until all have done their share, peers still read or write this rank's memory, except that of the receivers of a
  // broadcast.
  if (!sends(peers.rank())) return true;
  return peers.all_reached(Signal::reduced, direct_target_, blocker);
}

void ShmCollective::run_direct(Peers& peers) {
  const int n = peers.size(), rank = peers.rank();
  if (arguments_.kind == OpKind::empty) {
    if (!arguments_.refused)
      peers.segment().slot(rank).allocation_errno.store(
          static_cast<std::uint32_t>(peers.segment().allocate_region(part_bytes())), std::memory_order_relaxed);
  } else if (arguments_.kind == OpKind::all_reduce) {
    const std::uint64_t line = 64 / item_bytes(arguments_.dtype);
    const std::uint64_t share = round_up((arguments_.count + n - 1) / n, line);
    const std::uint64_t begin = std::min(arguments_.count, share * static_cast<std::uint64_t>(rank));
    keep_first(reduce_direct(peers, begin, std::min(arguments_.count - begin, share)), begin);
  } else if (arguments_.kind == OpKind::reduce_scatter) {
    reduce_direct(peers, arguments_.count * static_cast<std::uint64_t>(rank), arguments_.count);
  } else {
    for (int i = 0; i < n; ++i) {
      // Each rank starts at its own part, so that they do not all read the same memory at once.
      const int q = (rank + i) % n;
      const Taken taken = taken_from(peers, q);
      if (taken.bytes != 0)
        copy_if_apart(taken.into, peers.segment().address(peers.entry(q, sequence_).descriptor.location), taken.bytes);
    }
  }
}

// Reduces `count` elements from the `first` on. all_reduce writes them in place, in the arrays of all ranks.
Nonfinite ShmCollective::reduce_direct(Peers& peers, std::uint64_t first, std::uint64_t count) {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int q = 0; q < peers.size(); ++q) {
    char* array = peers.segment().address(peers.entry(q, sequence_).descriptor.location);
    outputs.push_back(array + first * item_bytes(arguments_.dtype));
    inputs.push_back(outputs.back());
  }
  if (arguments_.kind == OpKind::reduce_scatter) outputs.assign(1, arguments_.output);
  return reduce(outputs.data(), static_cast<int>(outputs.size()), inputs, count);
}

// -- staged: ordinary arrays, through chunks that stay in the cache ---------------------------------------------------

void ShmCollective::prepare_staging(Peers& peers) {
  const std::size_t chunk_bytes = peers.segment().chunk_bytes();
  const std::size_t n = static_cast<std::size_t>(peers.size());
  lane_bytes_ = has_lanes() ? chunk_bytes / n / 64 * 64 : chunk_bytes;
  const std::size_t bytes = ragged() ? longest_bytes_ : part_bytes();
  const std::size_t step = arguments_.kind == OpKind::all_reduce ? lane_bytes_ * n : lane_bytes_;
  chunks_ = (bytes + step - 1) / step;
  for (Signal signal : {Signal::copied_in, Signal::reduced, Signal::copied_out})
    first_[static_cast<int>(signal)] = peers.count(signal);
}

// Iteration i copies chunk i in, reduces chunk i - 1 and copies chunk i - 2 out. So a rank waits only for the previous
// iteration of its peers, and data that it touches three times is still in its cache.
bool ShmCollective::advance_staged(Peers& peers, Blocker& blocker) {
  constexpr std::uint64_t stages = 3;
  for (; step_ < stages * (chunks_ + stages - 1); ++step_) {
    const std::uint64_t iteration = step_ / stages;
    const std::uint64_t stage = step_ % stages;
    if (iteration < stage || iteration - stage >= chunks_) continue;
    const std::uint64_t chunk = iteration - stage;
    auto all_at_chunk = [&](Signal signal) {
      return peers.all_reached(signal, first_[static_cast<int>(signal)] + chunk + 1, blocker);
    };
    if (stage == 0) {
      const std::uint64_t number = peers.count(Signal::copied_in) + 1;
      if (number > staging_buffers && !peers.all_reached(Signal::copied_out, number - staging_buffers, blocker))
        return false;
      copy_in(peers, chunk);
      peers.publish(Signal::copied_in);
    } else if (stage == 1 && reduces()) {
      if (!all_at_chunk(Signal::copied_in)) return false;
      reduce_chunk(peers, chunk);
      publish_reduced(peers);
    } else if (stage == 2) {
      if (arguments_.kind != OpKind::reduce_scatter &&
          !all_at_chunk(arguments_.kind == OpKind::all_reduce ? Signal::reduced : Signal::copied_in))
        return false;
      copy_out(peers, chunk);
      peers.publish(Signal::copied_out);
    }
  }
  return true;
}

ShmCollective::Range ShmCollective::slice(int world_size, std::uint64_t chunk, int q) const {
  const std::size_t n = static_cast<std::size_t>(world_size);
  const std::size_t begin = chunk * lane_bytes_ * n;
  const std::size_t bytes = std::min(lane_bytes_ * n, part_bytes() - begin);
  const std::size_t lane = round_up((bytes + n - 1) / n, 64);  // equal shares of the last chunk, too
  const std::size_t from = std::min(bytes, lane * static_cast<std::size_t>(q));
  return {begin + from, std::min(bytes - from, lane)};
}

ShmCollective::Range ShmCollective::part(std::uint64_t chunk, std::size_t bytes) const {
  const std::size_t begin = std::min(bytes, chunk * lane_bytes_);
  return {begin, std::min(bytes - begin, lane_bytes_)};
}

void ShmCollective::copy_in(Peers& peers, std::uint64_t chunk) {
  const int rank = peers.rank();
  char* staging = peers.segment().staging(rank, first_[static_cast<int>(Signal::copied_in)] + chunk);
  if (!has_lanes()) {
    if (!sends(rank)) return;
    const Range range = part(chunk, part_bytes());
    copy_if_apart(staging, arguments_.input + range.begin, range.bytes);
    return;
  }
  for (int q = 0; q < peers.size(); ++q) {
    if (q == rank) continue;  // its own share it reads from its own array
    Range range = part(chunk, exchanges() ? arguments_.parts[q].bytes : part_bytes());
    if (arguments_.kind == OpKind::all_reduce) range = slice(peers.size(), chunk, q);
    const char* from = exchanges() ? arguments_.parts[q].data : arguments_.input;
    if (arguments_.kind == OpKind::reduce_scatter) from += q * part_bytes();
    copy_if_apart(staging + q * lane_bytes_, from + range.begin, range.bytes);
  }
}

void ShmCollective::reduce_chunk(Peers& peers, std::uint64_t chunk) {
  const int rank = peers.rank();
  const std::uint64_t number = first_[static_cast<int>(Signal::copied_in)] + chunk;
  const bool scatter = arguments_.kind == OpKind::reduce_scatter;
  const Range range = scatter ? part(chunk, part_bytes()) : slice(peers.size(), chunk, rank);
  const std::size_t lane = lane_bytes_ * static_cast<std::size_t>(rank);
  std::vector<const void*> inputs;
  for (int q = 0; q < peers.size(); ++q) inputs.push_back(peers.segment().staging(q, number) + lane);
  inputs[rank] = arguments_.input + range.begin + (scatter ? part_bytes() * static_cast<std::size_t>(rank) : 0);
  void* outputs[] = {arguments_.output + range.begin, peers.segment().staging(rank, number) + lane};
  const std::size_t item = item_bytes(arguments_.dtype);
  keep_first(reduce(outputs, scatter ? 1 : 2, inputs, range.bytes / item), range.begin / item);
}

void ShmCollective::copy_out(Peers& peers, std::uint64_t chunk) {
  const int rank = peers.rank();
  const std::uint64_t number = first_[static_cast<int>(Signal::copied_in)] + chunk;
  for (int i = 0; i < peers.size(); ++i) {
    const int q = (rank + i) % peers.size();
    const char* staging = peers.segment().staging(q, number);
    if (arguments_.kind == OpKind::all_reduce) {
      const Range range = slice(peers.size(), chunk, q);
      if (q != rank) copy_if_apart(arguments_.output + range.begin, staging + q * lane_bytes_, range.bytes);
      continue;
    }
    const Taken taken = taken_from(peers, q);
    const Range range = part(chunk, taken.bytes);
    const char* from = exchanges() ? staging + lane_bytes_ * rank : staging;
    if (q == rank) from = (exchanges() ? arguments_.parts[q].data : arguments_.input) + range.begin;
    if (range.bytes != 0) copy_if_apart(taken.into + range.begin, from, range.bytes);
  }
}

}  // namespace distopt
